"""Swapping: contents and sharing come back exactly, others keep shared pages, and bytes are accounted for."""

from __future__ import annotations

import pytest
import torch

from mstar.plugin.nodes import KVLayout
from mstar.worker.kv_pool import KVPool, Sequence
from mstar.worker.swap import SwapSpace

SIZE = 4


def make_pool(num_pages: int = 16) -> KVPool:
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=2)
    return KVPool(layout, num_pages=num_pages, page_size=SIZE, dtype=torch.bfloat16, device="cpu")


def fill(pool: KVPool, sequence: Sequence, ids: list[int]) -> None:
    assert pool.reserve(sequence, len(ids))
    for index in range(sequence.length, sequence.length + len(ids)):
        for tensor in (*pool.keys, *pool.values):
            tensor[sequence.pages[index // SIZE], :, index % SIZE] = torch.randn(1, 2).bfloat16()
    pool.commit(sequence, len(ids), ids=ids)


def contents(pool: KVPool, sequence: Sequence) -> torch.Tensor:
    pages = sequence.pages[: -(-sequence.length // SIZE)]
    gathered = torch.stack([tensor[pages] for tensor in (*pool.keys, *pool.values)])
    return gathered.transpose(2, 3).reshape(4, -1, 2)[:, : sequence.length]


def test_contents_and_sharing_come_back_exactly() -> None:
    pool, space = make_pool(), SwapSpace(1 << 20)
    main = pool.create()
    fill(pool, main, list(range(1, 11)))
    fork = pool.fork(main, at=6)
    fill(pool, fork, [70, 71, 72])
    before = [contents(pool, s) for s in (main, fork)]
    assert pool.num_used == 5
    assert space.bytes_needed(pool, [main, fork]) == 5 * pool.page_bytes
    assert space.swap_out(pool, [main, fork])
    assert main.swapped
    assert fork.swapped
    assert pool.num_used == 0
    assert space.used_bytes == 5 * pool.page_bytes
    assert space.pages_needed([main, fork]) == 5
    pool.check_integrity([main, fork])
    space.check_integrity([main, fork])
    other = pool.create()
    fill(pool, other, [5] * 15 * SIZE)  # overwrites every page
    pool.free(other)
    assert space.swap_in(pool, [main, fork])
    assert pool.num_used == 5
    assert main.pages[0] == fork.pages[0]
    assert space.used_bytes == 0
    assert all(torch.equal(a, contents(pool, s)) for a, s in zip(before, (main, fork), strict=True))
    fill(pool, main, [11])
    assert main.history == list(range(1, 12))
    assert main.position == 11.0
    pool.check_integrity([main, fork])
    space.check_integrity([main, fork])


def test_others_keep_the_pages_they_share() -> None:
    pool, space = make_pool(), SwapSpace(1 << 20)
    kept = pool.create()
    fill(pool, kept, list(range(1, 7)))
    swapped = pool.fork(kept)
    before = contents(pool, kept)
    assert space.swap_out(pool, [swapped])
    assert pool.num_used == 2
    assert torch.equal(contents(pool, kept), before)
    assert space.swap_in(pool, [swapped])
    assert not set(kept.pages) & set(swapped.pages)
    assert torch.equal(contents(pool, swapped), before)
    pool.check_integrity([kept, swapped])


def test_a_full_space_refuses_and_changes_nothing() -> None:
    pool = make_pool()
    space = SwapSpace(2 * pool.page_bytes)
    small, large = pool.create(), pool.create()
    fill(pool, small, [1])
    fill(pool, large, [1] * 5)
    assert space.swap_out(pool, [small])
    assert not space.swap_out(pool, [large])
    assert not large.swapped
    assert len(large.pages) == 2
    assert space.used_bytes == pool.page_bytes
    space.check_integrity([small, large])
    pool.check_integrity([small, large])


def test_a_full_pool_refuses_and_changes_nothing() -> None:
    pool, space = make_pool(4), SwapSpace(1 << 20)
    first, second = pool.create(), pool.create()
    fill(pool, first, [1] * 8)
    assert space.swap_out(pool, [first])
    assert pool.reserve(second, 8)
    assert not space.swap_in(pool, [first])
    assert first.swapped
    assert pool.num_free == 1
    pool.free(second)
    assert space.swap_in(pool, [first])


def test_pages_that_came_back_hit_again() -> None:
    pool, space = make_pool(4), SwapSpace(1 << 20)
    sequence = pool.create()
    fill(pool, sequence, list(range(1, 10)))
    assert space.swap_out(pool, [sequence])
    other = pool.create()
    assert pool.reserve(other, 3 * SIZE)
    pool.free(other)
    assert space.swap_in(pool, [sequence])
    hit = pool.create()
    assert pool.match_prefix(hit, list(range(1, 10))) == 8
    pool.check_integrity([sequence, hit])


def test_reserved_pages_and_empty_sequences_take_no_space() -> None:
    pool, space = make_pool(), SwapSpace(0)
    empty = pool.create()
    assert pool.reserve(empty, 20)
    assert space.swap_out(pool, [empty])
    assert pool.num_used == 0
    assert space.swap_in(pool, [empty])
    assert empty.length == 0
    fill(pool, empty, [1])
    assert space.swap_out(pool, [])
    assert space.swap_in(pool, [])
    pool.check_integrity([empty])


def test_dropping_ends_swapped_sequences() -> None:
    pool, space = make_pool(), SwapSpace(1 << 20)
    sequences = [pool.create(), pool.create()]
    for sequence in sequences:
        fill(pool, sequence, [1, 2])
    assert space.swap_out(pool, sequences)
    with pytest.raises(AssertionError, match="swap space"):
        pool.free(sequences[0])
    with pytest.raises(AssertionError, match="together"):
        space.swap_in(pool, sequences[:1])
    space.drop(pool, sequences)
    assert space.used_bytes == 0
    pool.check_integrity([])
    space.check_integrity([])
