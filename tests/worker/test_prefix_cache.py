"""The prefix cache: what its hashes tell apart, which page goes first, and which tokens of a sequence hit."""

from __future__ import annotations

import torch

from mstar.plugin.nodes import KVLayout
from mstar.worker.kv_pool import KVPool, Sequence
from mstar.worker.prefix_cache import PrefixCache, Span, page_hash, root_hash

SIZE = 4
IDS = list(range(10, 30))


def make_pool(num_pages: int = 32, *, prefix_cache: bool = True) -> KVPool:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1)
    return KVPool(
        layout, num_pages=num_pages, page_size=SIZE, dtype=torch.float32, device="cpu", prefix_cache=prefix_cache
    )


def write(
    pool: KVPool,
    ids: list[int],
    *,
    spans: list[Span] | None = None,
    advance: float | None = None,
    sequence: Sequence | None = None,
) -> Sequence:
    sequence = sequence or pool.create()
    assert pool.reserve(sequence, len(ids))
    pool.commit(sequence, len(ids), ids=ids, spans=spans or [], advance=advance)
    return sequence


def hits(pool: KVPool, ids: list[int], spans: list[Span] | None = None, *, position: float = 0.0) -> int:
    sequence = pool.create(position=position)
    found = pool.match_prefix(sequence, ids, spans or [])
    assert found == sequence.length
    pool.free(sequence)
    return found


def test_a_hash_tells_apart_ids_place_spans_and_what_came_before() -> None:
    root = root_hash(0.0)
    hashes = [
        page_hash(root, ids=[1, 2], start=0, spans=[]),
        page_hash(root, ids=[2, 1], start=0, spans=[]),
        page_hash(root_hash(7.0), ids=[1, 2], start=0, spans=[]),
        page_hash(page_hash(root, ids=[1, 2], start=0, spans=[]), ids=[1, 2], start=2, spans=[]),
        page_hash(root, ids=[1, 2], start=0, spans=[(0, 2, b"a")]),
        page_hash(root, ids=[1, 2], start=0, spans=[(0, 2, b"b")]),
        page_hash(root, ids=[1, 2], start=0, spans=[(0, 3, b"a")]),
        page_hash(root, ids=[1, 2], start=0, spans=[(0, 1, b"a"), (1, 2, b"")]),
    ]
    assert len(set(hashes)) == len(hashes)
    elsewhere: list[Span] = [(2, 9, b"a")]
    assert page_hash(root, ids=[1, 2], start=0, spans=elsewhere) == hashes[0]


def test_the_page_used_longest_ago_is_evicted_first() -> None:
    cache = PrefixCache()
    for page in (1, 2, 3):
        cache.insert(page, content=bytes([page]), end_position=0.0)
        assert cache.retire(page)
    cache.revive(1)
    assert cache.retire(1)
    assert [cache.evict(), cache.evict(), cache.evict()] == [2, 3, 1]
    assert cache.find(bytes([1])) is None
    assert 1 not in cache
    assert not cache.retire(1)


def test_the_first_page_with_some_content_is_kept() -> None:
    cache = PrefixCache()
    cache.insert(1, content=b"x", end_position=0.0)
    cache.insert(2, content=b"x", end_position=0.0)
    assert cache.find(b"x") == 1
    assert 2 not in cache


def test_full_pages_hit_while_in_use_and_after_they_were_freed() -> None:
    pool = make_pool()
    first = write(pool, IDS[:10])
    assert hits(pool, IDS) == 8
    pool.free(first)
    assert pool.num_used == 0
    assert hits(pool, IDS) == 8
    assert pool.hit_tokens == 16
    pool.check_integrity([])


def test_the_last_token_is_always_computed() -> None:
    pool = make_pool()
    write(pool, IDS[:8])
    assert hits(pool, IDS[:8]) == 4
    assert hits(pool, IDS[:9]) == 8
    assert hits(pool, IDS[:4]) == 0


def test_another_id_or_first_position_does_not_hit() -> None:
    pool = make_pool()
    write(pool, IDS[:12])
    assert hits(pool, [*IDS[:6], 99, *IDS[7:]]) == 4
    assert hits(pool, IDS[4:]) == 0
    assert hits(pool, IDS, position=1.0) == 0


def test_a_span_with_another_key_or_extent_does_not_hit() -> None:
    pool = make_pool()
    write(pool, IDS[:12], spans=[(4, 8, b"6x4")])
    assert hits(pool, IDS, [(4, 8, b"6x4")]) == 12
    assert hits(pool, IDS, [(4, 8, b"4x6")]) == 4
    assert hits(pool, IDS, [(4, 7, b"6x4")]) == 4
    assert hits(pool, IDS) == 4


def test_a_hit_never_ends_inside_a_span() -> None:
    pool = make_pool()
    write(pool, IDS[:16], spans=[(2, 10, b"image")])
    spans: list[Span] = [(2, 10, b"image")]
    assert hits(pool, IDS[:12], spans) == 0
    assert hits(pool, IDS[:13], spans) == 12
    changed = [*IDS[:9], 99, *IDS[10:]]
    assert hits(pool, changed, spans) == 0


def test_chunks_of_a_prompt_hash_like_the_whole() -> None:
    pool = make_pool()
    spans: list[Span] = [(3, 9, b"audio")]
    sequence = pool.create()
    for start in range(0, 14, 3):
        write(pool, IDS[:14][start : start + 3], spans=spans, sequence=sequence)
    assert hits(pool, IDS, spans) == 12


def test_what_follows_tokens_without_ids_is_not_cached() -> None:
    pool = make_pool()
    sequence = write(pool, IDS[:4])
    assert pool.reserve(sequence, 8)
    pool.commit(sequence, 4)
    pool.commit(sequence, 4, ids=IDS[8:12])
    assert sequence.history is None
    assert len(sequence.page_hashes) == 1
    pool.check_integrity([sequence])


def test_ids_told_later_are_cached_then() -> None:
    pool = make_pool()
    sequence = write(pool, IDS[:7])
    assert pool.reserve(sequence, 2)
    pool.commit(sequence, 1)
    pool.commit(sequence, 1)
    assert hits(pool, IDS) == 4
    pool.learn([(sequence, 7, IDS[7])])
    assert hits(pool, IDS) == 8
    pool.learn([(sequence, 8, IDS[8])])
    assert sequence.history == IDS[:9]


def test_ids_told_after_a_sequence_ended_are_of_no_use_and_harm_no_other() -> None:
    pool = make_pool()
    ended, other = write(pool, IDS[:7]), write(pool, IDS[:7])
    for sequence in (ended, other):
        assert pool.reserve(sequence, 1)
        pool.commit(sequence, 1)
    pool.free(ended)
    pool.learn([(ended, 7, IDS[7]), (other, 7, IDS[7])])
    assert other.history == IDS[:8]
    pool.check_integrity([other])


def test_a_hit_restores_position_and_history() -> None:
    pool = make_pool()
    spans: list[Span] = [(1, 7, b"image")]
    write(pool, IDS[:10], spans=spans, advance=6.0)  # the image's six tokens count two
    sequence = pool.create()
    assert pool.match_prefix(sequence, IDS, spans) == 8
    assert sequence.position == 4.0
    assert sequence.position_at(1) == 1.0
    assert sequence.position_at(7) == 3.0
    assert sequence.position_at(5) is None
    assert sequence.history is None
    assert sequence.ids == IDS[:8]
    assert sequence.spans == spans
    write(pool, IDS[8:], spans=spans, sequence=sequence)
    assert hits(pool, IDS, spans) == 16


def test_a_hit_does_not_end_where_the_position_is_not_known() -> None:
    pool = make_pool()
    spans: list[Span] = [(5, 7, b"one"), (9, 11, b"two")]
    write(pool, IDS[:12], spans=spans, advance=9.0)
    assert hits(pool, IDS, spans) == 12
    assert hits(pool, IDS, [spans[0], (9, 11, b"other")]) == 4


def test_positions_that_content_does_not_tell_end_caching() -> None:
    pool = make_pool()
    sequence = write(pool, IDS[:4])
    write(pool, IDS[4:8], advance=1.0, sequence=sequence)
    write(pool, IDS[8:12], sequence=sequence)
    assert hits(pool, IDS) == 4
    fork = pool.fork(sequence, at=4, position=9.0)
    write(pool, IDS[4:8], sequence=fork)
    assert hits(pool, IDS) == 4


def test_eviction_takes_the_end_of_a_prefix_before_its_start() -> None:
    pool = make_pool(6)
    pool.free(write(pool, IDS[:16]))
    pool.free(write(pool, [1, 2, 3, 4, 5, 6, 7, 8]))  # one new page, one evicted
    assert hits(pool, IDS) == 12


def test_rolled_back_tokens_do_not_hit() -> None:
    pool = make_pool()
    sequence = write(pool, IDS[:7])
    write(pool, IDS[7:8], sequence=sequence)
    pool.rollback(sequence, 1)
    assert hits(pool, IDS) == 4
    write(pool, [99], sequence=sequence)
    assert hits(pool, IDS) == 4
    assert hits(pool, [*IDS[:7], 99, 0]) == 8
    pool.check_integrity([sequence])


def test_a_page_another_sequence_hit_survives_a_rollback() -> None:
    pool = make_pool()
    sequence = write(pool, IDS[:8])
    other = pool.create()
    assert pool.match_prefix(other, IDS) == 8
    pool.rollback(sequence, 1)
    assert pool.reserve(sequence, 1)
    assert sequence.pages[1] != other.pages[1]
    pool.commit(sequence, 1, ids=[99])
    assert hits(pool, IDS) == 8
    pool.check_integrity([sequence, other])


def test_a_span_cut_by_a_fork_is_not_taken_for_the_whole() -> None:
    pool = make_pool()
    spans: list[Span] = [(2, 6, b"image")]
    source = write(pool, IDS[:7], spans=spans)
    fork = pool.fork(source, at=4)
    write(pool, IDS[4:8], sequence=fork)
    assert hits(pool, IDS, spans) == 0
    write(pool, IDS[7:8], sequence=source)
    assert hits(pool, IDS, spans) == 8
    pool.check_integrity([source, fork])


def test_without_a_prefix_cache_nothing_hits_and_freed_pages_are_free() -> None:
    pool = make_pool(prefix_cache=False)
    pool.free(write(pool, IDS[:12]))
    assert hits(pool, IDS) == 0
    pool.check_integrity([])
