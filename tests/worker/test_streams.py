"""Chunk policies: what a consumer sees depends on the stream alone, never on when it looks."""

import itertools
import random

import pytest
import torch

from mstar.errors import RequestError
from mstar.plugin.graph import Fixed, LeftContext, Policy, Port, SlidingWindow, Stream, Whole
from mstar.worker.streams import StreamBuffer

Seen = tuple[list[int], int, bool, bool]


def read(policy: Policy, count: int, *, fields: dict[str, int] | None = None, seed: int | None = None) -> list[Seen]:
    """All chunks of a stream 0..count-1; with a seed, items come in random pieces and are taken at random times."""
    buffer = StreamBuffer.open(
        Stream(name="s", policy=policy), fields=fields or {}, item=Port("items", dtype="int64", shape=())
    )
    seen: list[Seen] = []

    def drain() -> None:
        while (chunk := buffer.take()) is not None:
            assert chunk.items is not None
            seen.append((chunk.items.tolist(), chunk.num_new, chunk.first, chunk.final))
            assert chunk.items.tolist() == list(range(chunk.start, chunk.start + len(chunk.items)))

    generator = random.Random(seed)
    position = 0
    while position < count:
        size = 1 if seed is None else generator.randint(0, 9)
        buffer.put(torch.arange(position, min(position + size, count)))
        position = min(position + size, count)
        if seed is None or generator.random() < 0.5:
            drain()
    buffer.close()
    drain()
    return seen


def test_fixed_chunks_end_with_the_rest_which_may_be_empty() -> None:
    assert read(Fixed(3), 7) == [([0, 1, 2], 3, True, False), ([3, 4, 5], 3, False, False), ([6], 1, False, True)]
    assert read(Fixed(3), 3) == [([0, 1, 2], 3, True, False), ([], 0, False, True)]


def test_sliding_window_ends_with_the_last_items_seen_or_not() -> None:
    assert read(SlidingWindow(4, 2), 7) == [
        ([0, 1, 2, 3], 4, True, False),
        ([2, 3, 4, 5], 2, False, False),
        ([3, 4, 5, 6], 1, False, True),
    ]
    assert read(SlidingWindow(4, 2), 4) == [([0, 1, 2, 3], 4, True, False), ([0, 1, 2, 3], 0, False, True)]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_stream_shorter_than_its_window_is_one_chunk_first_and_final(count: int) -> None:
    assert read(SlidingWindow(4, 1), count) == [(list(range(count)), count, True, True)]


def test_left_context_follows_a_growing_schedule() -> None:
    assert read(LeftContext((1, 2, 3), 2), 9) == [
        ([0], 1, True, False),
        ([0, 1, 2], 2, False, False),
        ([1, 2, 3, 4, 5], 3, False, False),
        ([4, 5, 6, 7, 8], 3, False, False),
        ([7, 8], 0, False, True),
    ]


def test_whole_is_one_chunk_at_the_end() -> None:
    assert read(Whole(), 5) == [([0, 1, 2, 3, 4], 5, True, True)]
    assert read(Whole(), 0) == [([], 0, True, True)]


def test_sizes_may_be_request_fields() -> None:
    assert read(Fixed("n"), 2, fields={"n": 2})[0] == ([0, 1], 2, True, False)
    with pytest.raises(RequestError, match="'n' is 0"):
        read(Fixed("n"), 2, fields={"n": 0})
    assert read(Fixed(("window", 2)), 6, fields={"window": 3}) == [
        ([0, 1, 2], 3, True, False), ([3, 4], 2, False, False), ([5], 1, False, True),
    ]  # fmt: skip
    with pytest.raises(RequestError, match="stream size 'window' is None"):
        read(Fixed((2, "window")), 6)


POLICIES = [Fixed(3), SlidingWindow(5, 2), SlidingWindow(4, 4), LeftContext((1, 2, 4), 3), LeftContext(2, 7), Whole()]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_chunks_do_not_depend_on_timing_and_miss_nothing(policy: Policy) -> None:
    for count, seed in itertools.product((0, 1, 4, 5, 6, 23), range(5)):
        reference = read(policy, count)
        assert read(policy, count, seed=seed) == reference
        assert sum(num_new for _, num_new, _, _ in reference) == count
        assert [final for *_, final in reference] == [False] * (len(reference) - 1) + [True]
        assert [first for _, _, first, _ in reference] == [True] + [False] * (len(reference) - 1)
