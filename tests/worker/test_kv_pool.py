"""The KV pool: pages, copy-on-write forks, rollback, and a random walk against a model of plain lists."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from mstar.plugin.nodes import KVLayout
from mstar.worker.kv_pool import KVPool, Sequence
from mstar.worker.pages import page_bytes
from mstar.worker.prefix_cache import Span
from mstar.worker.swap import SwapSpace

SIZE = 4
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=3)


def make_pool(num_pages: int = 32, *, prefix_cache: bool = True) -> KVPool:
    return KVPool(
        LAYOUT, num_pages=num_pages, page_size=SIZE, dtype=torch.float32, device="cpu", prefix_cache=prefix_cache
    )


def put(pool: KVPool, sequence: Sequence, values: list[int]) -> None:
    """Write values as a step does: through the page table, at reserved places."""
    table = pool.page_table([sequence])[0]
    for index, value in enumerate(values, start=sequence.length):
        page, offset = table[index // SIZE], index % SIZE
        assert page != 0
        for layer in range(LAYOUT.num_layers):
            pool.keys[layer][page, :, offset] = value + layer / 4
            pool.values[layer][page, :, offset] = -value - layer / 4


def read(pool: KVPool, sequence: Sequence) -> list[int]:
    """The values behind a sequence, which all layers, heads, keys and values must agree about."""
    table = pool.page_table([sequence])[0]
    layers = np.arange(LAYOUT.num_layers)[:, None, None, None] / 4
    keys, values = (
        np.stack([tensor.numpy()[table].swapaxes(1, 2).reshape(-1, 2, 3) for tensor in tensors])[:, : sequence.length]
        for tensors in (pool.keys, pool.values)
    )
    first = keys[0, :, 0, 0]
    assert (keys - layers == first[:, None, None]).all()
    assert (-values - layers == first[:, None, None]).all()
    return [int(value) for value in first]


def write(pool: KVPool, sequence: Sequence, ids: list[int]) -> None:
    assert pool.reserve(sequence, len(ids))
    put(pool, sequence, ids)
    pool.commit(sequence, len(ids), ids=ids)


def test_tensors_have_the_layouts_shape_and_a_page_its_bytes() -> None:
    pool = make_pool(8)
    assert len(pool.keys) == len(pool.values) == 2
    assert pool.keys[1].shape == (8, 2, SIZE, 3)
    assert pool.keys[1].is_contiguous()
    assert pool.page_bytes == page_bytes(LAYOUT, page_size=SIZE, dtype=torch.float32) == 2 * 2 * 2 * SIZE * 3 * 4
    assert (pool.num_pages, pool.num_usable, pool.num_free, pool.num_used) == (8, 7, 7, 0)


def test_a_sequence_grows_over_pages_and_reads_back() -> None:
    pool = make_pool()
    sequence = pool.create()
    for value in range(1, 11):
        write(pool, sequence, [value])
    assert read(pool, sequence) == list(range(1, 11))
    assert (sequence.length, sequence.position, sequence.history) == (10, 10.0, list(range(1, 11)))
    assert pool.num_used == 3
    pool.check_integrity([sequence])


def test_the_scratch_page_is_never_given() -> None:
    pool = make_pool(4)
    sequence = pool.create()
    assert pool.reserve(sequence, 3 * SIZE)
    assert sorted(sequence.pages) == [1, 2, 3]
    assert not pool.reserve(sequence, 3 * SIZE + 1)
    assert sorted(sequence.pages) == [1, 2, 3]


def test_freed_pages_are_reused_before_new_ones() -> None:
    pool = make_pool()
    first = pool.create()
    assert pool.reserve(first, 2 * SIZE)
    pages = set(first.pages)
    pool.free(first)
    second = pool.create()
    assert pool.reserve(second, 3 * SIZE)
    assert pages < set(second.pages)


def test_new_pages_are_taken_before_cached_ones() -> None:
    pool = make_pool(5)
    first = pool.create()
    write(pool, first, list(range(1, 9)))
    pool.free(first)
    second = pool.create()
    assert pool.num_free == 4
    assert pool.reserve(second, 2 * SIZE)
    third = pool.create()
    assert pool.match_prefix(third, list(range(1, 10))) == 8
    assert pool.num_free == 0


def test_reserve_that_fails_changes_nothing() -> None:
    pool = make_pool(4)
    source = pool.create()
    write(pool, source, [1, 2, 3, 4, 5])
    fork = pool.fork(source)
    assert pool.pages_needed(fork, 1) == 1
    assert pool.pages_needed(fork, 4) == 2
    assert not pool.reserve(fork, 4)
    assert fork.pages == source.pages
    assert pool.num_free == 1
    pool.check_integrity([source, fork])
    assert pool.reserve(fork, 3)


def test_commit_without_reserve_is_refused() -> None:
    pool = make_pool()
    sequence = pool.create()
    with pytest.raises(AssertionError, match="without reserving"):
        pool.commit(sequence, 1)
    write(pool, sequence, [1, 2])
    pool.fork(sequence)
    with pytest.raises(AssertionError, match="without reserving"):
        pool.commit(sequence, 1)


def test_freeing_twice_is_refused() -> None:
    pool = make_pool()
    sequence = pool.create()
    pool.free(sequence)
    with pytest.raises(AssertionError, match="freed before"):
        pool.free(sequence)


def test_forks_share_pages_until_one_writes() -> None:
    pool = make_pool()
    source = pool.create()
    write(pool, source, [1, 2, 3, 4, 5])
    fork = pool.fork(source)
    assert pool.num_used == 2
    write(pool, fork, [60])
    assert pool.num_used == 3
    assert fork.pages[0] == source.pages[0]
    write(pool, source, [6, 7])
    assert read(pool, source) == [1, 2, 3, 4, 5, 6, 7]
    assert read(pool, fork) == [1, 2, 3, 4, 5, 60]
    pool.check_integrity([source, fork])
    pool.free(source)
    assert read(pool, fork) == [1, 2, 3, 4, 5, 60]
    pool.check_integrity([fork])


def test_the_source_of_a_fork_copies_too_when_it_writes_first() -> None:
    pool = make_pool()
    source = pool.create()
    write(pool, source, [1, 2])
    fork = pool.fork(source)
    write(pool, source, [3])
    assert read(pool, fork) == [1, 2]
    assert read(pool, source) == [1, 2, 3]


def test_a_fork_cut_inside_a_full_page_leaves_that_page_alone() -> None:
    pool = make_pool()
    source = pool.create()
    write(pool, source, list(range(1, 9)))
    fork = pool.fork(source, at=6)
    assert (fork.length, fork.position, fork.history) == (6, 6.0, [1, 2, 3, 4, 5, 6])
    write(pool, fork, [70])
    assert read(pool, source) == list(range(1, 9))
    assert read(pool, fork) == [1, 2, 3, 4, 5, 6, 70]
    lone = pool.fork(source, at=7)
    pool.free(source)
    write(pool, lone, [80])  # the only one left, and the page was findable
    again = pool.create()
    assert pool.match_prefix(again, list(range(1, 10))) == 4
    pool.check_integrity([fork, lone, again])


def test_reserved_pages_are_not_shared_with_forks() -> None:
    pool = make_pool()
    source = pool.create()
    write(pool, source, [1, 2, 3, 4])
    assert pool.reserve(source, 5)
    fork = pool.fork(source)
    assert len(source.pages) == 3
    assert len(fork.pages) == 1
    write(pool, source, [5])
    pool.check_integrity([source, fork])


def test_positions_follow_commits_forks_and_rollbacks() -> None:
    pool = make_pool()
    sequence = pool.create()
    assert pool.reserve(sequence, 20)
    pool.commit(sequence, 3, ids=[1, 2, 3])
    pool.commit(sequence, 6, ids=[0] * 6, spans=[(4, 8, b"image")], advance=3.0)
    pool.commit(sequence, 2, ids=[4, 5])
    assert sequence.position == 8.0
    assert [sequence.position_at(n) for n in (0, 3, 4, 6, 8, 9, 10)] == [0.0, 3.0, 4.0, None, 5.0, 6.0, 7.0]
    fork = pool.fork(sequence, at=8)
    assert fork.position == 5.0
    assert fork.position_at(8) == 5.0
    with pytest.raises(AssertionError, match="not known"):
        pool.fork(sequence, at=6)
    assert pool.fork(sequence, at=6, position=4.0).position == 4.0
    pool.rollback(sequence, 2)
    assert sequence.position == 6.0
    pool.rollback(sequence, 6)
    assert (sequence.position, sequence.length, sequence.history) == (3.0, 3, [1, 2, 3])
    elsewhere = pool.fork(sequence, position=50.0)
    assert (elsewhere.position, elsewhere.position_at(3), elsewhere.position_at(2)) == (50.0, 50.0, 2.0)


def test_rollback_gives_surplus_pages_back_and_restores_known_ids() -> None:
    pool = make_pool()
    sequence = pool.create()
    write(pool, sequence, [1, 2, 3, 4])
    assert pool.reserve(sequence, 1)
    pool.commit(sequence, 1)  # not from ids
    assert sequence.history is None
    pool.rollback(sequence, 1, advance=1.0)
    assert sequence.history == [1, 2, 3, 4]
    assert pool.num_used == 1
    write(pool, sequence, [5])
    assert read(pool, sequence) == [1, 2, 3, 4, 5]
    pool.check_integrity([sequence])


def test_rollback_leaves_a_forks_tokens_alone() -> None:
    pool = make_pool()
    sequence = pool.create()
    write(pool, sequence, [1, 2, 3, 4, 5])
    fork = pool.fork(sequence)
    pool.rollback(sequence, 3)
    write(pool, sequence, [9, 9, 9])
    assert read(pool, fork) == [1, 2, 3, 4, 5]
    assert read(pool, sequence) == [1, 2, 9, 9, 9]
    pool.check_integrity([sequence, fork])


def test_a_forgotten_sequence_is_rewritten_from_its_history() -> None:
    pool = make_pool(8)
    sequence = pool.create()
    write(pool, sequence, list(range(1, 11)))
    other = pool.create()
    pool.forget(sequence)
    assert pool.num_used == 0
    assert sequence.num_pending == 10
    write(pool, other, list(range(50, 50 + 6 * SIZE)))  # evicts all but the beginning
    assert pool.match_prefix(sequence, sequence.history or [], []) == 4
    pool.free(other)
    write(pool, sequence, [5, 6, 7])
    assert sequence.num_pending == 3
    pool.forget(sequence)
    assert sequence.history == list(range(1, 11))
    write(pool, sequence, list(range(1, 11)))
    assert sequence.num_pending == 0
    write(pool, sequence, [11])
    assert read(pool, sequence) == sequence.history == list(range(1, 12))
    pool.check_integrity([sequence])


def test_rolling_back_a_rewritten_chunk_keeps_the_history_to_rewrite() -> None:
    pool = make_pool()
    sequence = pool.create(position=3.0)
    write(pool, sequence, [1, 2, 3, 4, 5])
    pool.forget(sequence)
    assert sequence.position == 3.0
    write(pool, sequence, [1, 2])
    pool.rollback(sequence, 1)
    assert (sequence.num_pending, sequence.position, sequence.history) == (4, 4.0, [1, 2, 3, 4, 5])
    with pytest.raises(AssertionError, match="differs"):
        write(pool, sequence, [7])


def test_spans_that_are_still_to_come_do_not_count() -> None:
    pool = make_pool()
    sequence = pool.create()
    assert pool.reserve(sequence, 4)
    spans: list[Span] = [(2, 4, b"image")]
    pool.commit(sequence, 2, ids=[1, 2], spans=spans)
    assert sequence.history == [1, 2]
    pool.commit(sequence, 2, ids=[0, 0], spans=spans)
    assert sequence.history is None


def test_only_sequences_written_from_ids_can_be_forgotten() -> None:
    pool = make_pool()
    spanned, unknown = pool.create(), pool.create()
    assert pool.reserve(spanned, 4)
    assert pool.reserve(unknown, 4)
    pool.commit(spanned, 4, ids=[0, 0, 0, 0], spans=[(0, 3, b"image")])
    pool.commit(unknown, 4)
    for sequence in (spanned, unknown):
        with pytest.raises(AssertionError, match="cannot be rewritten"):
            pool.forget(sequence)


def test_page_tables_are_padded_with_the_scratch_page() -> None:
    pool = make_pool(512)
    sequences = [pool.create() for _ in range(40)]
    for n, sequence in enumerate(sequences):
        assert pool.reserve(sequence, n)
    table = pool.page_table(sequences[::-1])
    assert table.shape == (40, 10)
    assert table.dtype == "int32"
    for row, sequence in zip(table, sequences[::-1], strict=True):
        assert row.tolist() == sequence.pages + [0] * (10 - len(sequence.pages))
    long = pool.create()
    assert pool.reserve(long, 100 * SIZE)
    assert pool.page_table([sequences[0], long]).shape == (2, 100)
    assert pool.page_table([sequences[0]]).tolist() == [[0]]
    pool.check_integrity([*sequences, long])


def test_page_tables_show_every_change_of_a_page() -> None:
    pool = make_pool(64)
    one, two = pool.create(), pool.create()
    assert pool.reserve(one, SIZE)
    assert pool.reserve(two, 3)
    tables = [pool.page_table([one, two], num_rows=3, width=2)]
    assert tables[0].tolist() == [[one.pages[0], 0], [two.pages[0], 0], [0, 0]]
    pool.commit(one, SIZE)
    assert pool.page_table([one, two], num_rows=3, width=2) is tables[0], "no page has changed"
    assert pool.reserve(one, 1)  # a page more
    tables.append(pool.page_table([one, two]))
    pool.commit(two, 2)
    fork = pool.fork(two)
    assert pool.reserve(two, 1)  # a copy of the shared page
    tables.append(pool.page_table([one, two]))
    pool.free(fork)
    pool.rollback(one, 1)
    tables.append(pool.page_table([one, two]))
    pool.free(one)
    again = pool.create()  # in the row that became free
    assert pool.reserve(again, 1)
    assert pool.page_table([again, two]).tolist() == [again.pages, two.pages]
    assert len({table.tobytes() for table in tables}) == 4
    pool.check_integrity([again, two])


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_rows_are_committed_and_learned_as_tokens_are_one_by_one(prefix_cache: bool) -> None:
    pools = [make_pool(64, prefix_cache=prefix_cache) for _ in range(2)]
    pairs = [[pool.create() for _ in range(3)] for pool in pools]
    for pool, sequences in zip(pools, pairs, strict=True):
        for sequence, prompt in zip(sequences, ([1, 2], [3], []), strict=True):
            assert pool.reserve(sequence, len(prompt))
            pool.commit(sequence, len(prompt), ids=prompt or None)
        assert pool.reserve(sequences[2], 1)
        pool.commit(sequences[2], 1)  # not from ids: those of later tokens are of no use
    for turn in range(2 * SIZE + 1):
        for pool, sequences in zip(pools, pairs, strict=True):
            assert all(pool.reserve(sequence, 1) for sequence in sequences)
        rows, plain = pairs
        slots = pools[0].next_slots(rows)
        assert slots == [s.pages[s.length // SIZE] * SIZE + s.length % SIZE for s in rows]
        pools[0].commit_rows(rows)
        pools[0].learn([(sequence, sequence.length - 1, turn) for sequence in rows])
        for sequence in plain:
            is_known = len(sequence.ids) == sequence.length
            pools[1].commit(sequence, 1, ids=[turn] if is_known else None)
        for one, other in zip(rows, plain, strict=True):
            known = ("length", "position", "ids", "page_hashes", "history")
            assert [getattr(one, name) for name in known] == [getattr(other, name) for name in known]
    assert [len(sequence.page_hashes) for sequence in pairs[0]] == ([2, 2, 0] if prefix_cache else [0, 0, 0])
    for pool, sequences in zip(pools, pairs, strict=True):
        pool.check_integrity(sequences)


class Walk:
    """A random walk over a pool, with a plain list of values, positions and spans per sequence as oracle."""

    def __init__(self, seed: int, *, prefix_cache: bool) -> None:
        self.random = random.Random(seed)
        self.pool = make_pool(24, prefix_cache=prefix_cache)
        self.space = SwapSpace(12 * self.pool.page_bytes)
        self.expected: dict[Sequence, list[int]] = {}
        self.positions: dict[Sequence, float] = {}
        self.groups: list[list[Sequence]] = []  # swapped out together
        self.done: dict[str, int] = {}

    def resident(self) -> list[Sequence]:
        return [sequence for sequence in self.expected if not sequence.swapped]

    def ids(self, count: int) -> list[int]:
        return [self.random.randint(1, 2) for _ in range(count)]  # few values, so that prefixes repeat

    def create(self) -> bool:
        if len(self.expected) >= 10:
            return False
        sequence = self.pool.create()
        prompt = self.ids(self.random.randint(1, 20))
        num_hits = self.pool.match_prefix(sequence, prompt, [])
        self.expected[sequence] = prompt[:num_hits]
        self.positions[sequence] = num_hits
        self.append(sequence, prompt[num_hits:])
        return True

    def append(self, sequence: Sequence, ids: list[int]) -> bool:
        before, free = list(sequence.pages), self.pool.num_free
        needed = self.pool.pages_needed(sequence, len(ids))
        if not self.pool.reserve(sequence, len(ids)):
            assert needed > free
            assert sequence.pages == before
            assert self.pool.num_free == free
            return False
        assert needed <= free
        start, kind = sequence.length, self.random.random()
        spans: list[Span] = []
        advance: float | None = None
        values, known = list(ids), True
        if kind < 0.05:
            values, known = [value + 20 for value in ids], False
        elif kind < 0.2 and len(ids) > 1:
            values[:-1] = [value + 10 for value in ids[:-1]]  # content that ids do not tell
            spans = [(start, start + len(ids) - 1, bytes(values[:-1]))]
            advance = self.random.choice([None, 2.0])
        put(self.pool, sequence, values)
        self.pool.commit(sequence, len(ids), ids=ids if known else None, spans=spans, advance=advance)
        self.expected[sequence] = self.expected[sequence] + values
        self.positions[sequence] += len(ids) if advance is None else advance
        return True

    def grow(self) -> bool:
        sequences = self.resident()
        if not sequences:
            return False
        return self.append(self.random.choice(sequences), self.ids(self.random.choice([1, 1, 1, 2, 7])))

    def fork(self) -> bool:
        sequences = self.resident()
        if not sequences or len(self.expected) >= 10:
            return False
        source = self.random.choice(sequences)
        at = self.random.randint(0, source.length)
        if source.position_at(at) is None:
            return False
        fork = self.pool.fork(source, at=at)
        self.expected[fork] = self.expected[source][:at]
        self.positions[fork] = fork.position
        return True

    def free(self) -> bool:
        sequences = self.resident()
        if not sequences:
            return False
        sequence = self.random.choice(sequences)
        self.pool.free(sequence)
        del self.expected[sequence], self.positions[sequence]
        return True

    def commit_and_roll_back(self) -> bool:
        sequences = self.resident()
        if not sequences:
            return False
        sequence = self.random.choice(sequences)
        values, position, history = self.expected[sequence], self.positions[sequence], sequence.history
        ids = self.ids(self.random.choice([1, 2, 6]))
        history = None if history is None else list(history)
        if not self.append(sequence, ids):
            return False
        self.pool.rollback(sequence, len(ids))
        self.expected[sequence], self.positions[sequence] = values, position
        assert sequence.history == history
        return True

    def forget(self) -> bool:
        sequences = [s for s in self.resident() if s.history is not None and not s.jumps]
        if not sequences:
            return False
        sequence = self.random.choice(sequences)
        history = list(sequence.history or [])
        self.pool.forget(sequence)
        num_hits = self.pool.match_prefix(sequence, history, [])
        rest = history[num_hits:]
        if rest and not self.pool.reserve(sequence, len(rest)):
            self.pool.free(sequence)
            del self.expected[sequence], self.positions[sequence]
            return False
        put(self.pool, sequence, rest)
        self.pool.commit(sequence, len(rest), ids=rest)
        assert sequence.num_pending == 0
        assert sequence.history == history
        return True

    def swap_out(self) -> bool:
        sequences = self.resident()
        if not sequences:
            return False
        group = self.random.sample(sequences, self.random.randint(1, min(3, len(sequences))))
        if not self.space.swap_out(self.pool, group):
            return False
        self.groups.append(group)
        return True

    def swap_in(self) -> bool:
        if not self.groups:
            return False
        group = self.random.choice(self.groups)
        distinct = self.space.pages_needed(group)
        free = self.pool.num_free
        if not self.space.swap_in(self.pool, group):
            assert distinct > free == self.pool.num_free
            if self.random.random() < 0.5:
                return False
            self.space.drop(self.pool, group)
            for sequence in group:
                del self.expected[sequence], self.positions[sequence]
        self.groups.remove(group)
        return True

    def check(self) -> None:
        live = list(self.expected)
        self.pool.check_integrity(live)
        self.space.check_integrity(live)
        for sequence in live:
            assert sequence.length == len(self.expected[sequence])
            assert sequence.position == self.positions[sequence]
            if not sequence.swapped:
                assert read(self.pool, sequence) == self.expected[sequence]

    def run(self, steps: int) -> None:
        actions = [self.create, self.grow, self.grow, self.grow, self.fork, self.free, self.commit_and_roll_back]
        actions += [self.forget, self.swap_out, self.swap_in, self.swap_in]
        for _ in range(steps):
            action = self.random.choice(actions)
            self.done[action.__name__] = self.done.get(action.__name__, 0) + action()
            self.check()


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_random_walk_agrees_with_a_model_of_lists(seed: int, prefix_cache: bool) -> None:
    walk = Walk(seed, prefix_cache=prefix_cache)
    walk.run(700)
    assert len(walk.done) == 8
    assert min(walk.done.values()) > 5, walk.done
    assert (walk.pool.hit_tokens > 0) == prefix_cache
    for group in walk.groups:
        walk.space.drop(walk.pool, group)
    for sequence in walk.resident():
        if sequence.row >= 0:
            walk.pool.free(sequence)
    assert walk.pool.num_used == 0
    assert walk.space.used_bytes == 0
    walk.pool.check_integrity([])
