"""An arena: what is copied in comes out, blocks come back, and nothing is left."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable, Iterator

import pytest
import torch

from mstar.ipc.arena import Arena, ArenaError, create_arena

Views = tuple[Arena, Arena]


@pytest.fixture
def arena() -> Iterator[Callable[[int], Views]]:
    files = []

    def make(num_bytes: int) -> Views:
        """The owner's view and a reader's."""
        files.append(create_arena(7, num_bytes))
        return Arena(files[-1]), Arena(files[-1])

    yield make
    for file in files:
        os.close(file)


def block(length: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def read(reader: Arena, place: tuple[int, int] | None, length: int) -> torch.Tensor:
    assert place is not None
    return reader.read(*place, num_bytes=length)


def test_blocks_come_out_as_they_went_in_for_many_rounds_in_the_same_memory(arena: Callable[[int], Views]) -> None:
    owner, reader = arena(4096)
    lengths = [1, 63, 64, 100, 960, 3900, 7]
    places = set()
    for number in range(200):
        data = block(lengths[number % len(lengths)], seed=number)
        place = owner.write(data, reader="a")
        assert torch.equal(read(reader, place, len(data)), data)
        places.add(place)
    assert len({start for start, _ in places}) == 1, "what has been read is used first, while caches have it"
    assert len(places) == 200, "generations tell the blocks apart"


def test_a_full_arena_takes_no_more_until_some_of_it_has_been_read(arena: Callable[[int], Views]) -> None:
    owner, reader = arena(4096)
    places = []
    while (place := owner.write(block(850, seed=len(places)), reader="a")) is not None:
        places.append(place)
    assert len(places) == 4
    assert torch.equal(read(reader, places[0], 850), block(850, seed=0))
    places.append(owner.write(block(850, seed=4), reader="b"))
    for number in range(1, 5):
        assert torch.equal(read(reader, places[number], 850), block(850, seed=number))
    assert owner.write(block(3850), reader="a") is not None, "neighbours become one"


def test_blocks_of_several_readers_never_overlap_and_all_come_back(arena: Callable[[int], Views]) -> None:
    owner, reader = arena(1 << 16)
    draw = random.Random(5)
    waiting: dict[int, deque[tuple[tuple[int, int], int, int]]] = {number: deque() for number in range(3)}
    num_full = 0
    for number in range(3000):
        queue = waiting[draw.randrange(3)]
        if draw.random() < 0.55:
            length = draw.choice((10, 1000, 9000))
            place = owner.write(block(length, seed=number), reader=id(queue))
            num_full += place is None
            if place is not None:
                queue.append((place, length, number))
        elif queue:
            place, length, seed = queue.popleft()
            assert torch.equal(read(reader, place, length), block(length, seed=seed))
    for queue in waiting.values():
        for place, length, seed in queue:
            assert torch.equal(read(reader, place, length), block(length, seed=seed))
    assert num_full > 10
    assert owner.write(block((1 << 16) - 128), reader="all") is not None


def test_blocks_of_a_reader_that_has_ended_are_used_again(arena: Callable[[int], Views]) -> None:
    owner, reader = arena(4096)
    kept = owner.write(block(900, seed=1), reader="alive")
    while owner.write(block(900), reader="dead") is not None:
        pass
    owner.forget("dead")
    owner.forget("never heard of")
    assert owner.num_taken == 1
    assert owner.write(block(2900), reader="alive") is not None
    assert torch.equal(read(reader, kept, 900), block(900, seed=1))


def test_a_block_that_was_overwritten_or_never_written_is_seen(arena: Callable[[int], Views]) -> None:
    owner, reader = arena(4096)
    first = owner.write(block(900), reader="a")
    owner.forget("a")  # which lives
    second = owner.write(block(900), reader="b")
    for place in (first, (2048, 3)):
        with pytest.raises(ArenaError):
            read(reader, place, 900)
    assert torch.equal(read(reader, second, 900), block(900))


def test_memory_is_there_before_it_is_touched_and_none_is_no_room(
    arena: Callable[[int], Views], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, _ = arena(8 << 20)

    def num_bytes() -> int:
        return os.fstat(owner._file).st_blocks * 512

    assert owner.owner == 7 and num_bytes() < 1 << 16, "none is taken for what is never sent"
    assert owner.write(block(1 << 20), reader="a") is not None
    assert num_bytes() >= 2 << 20

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    assert owner.write(block(100), reader="a") is not None
    assert owner.write(block(1 << 20), reader="a") is None
    monkeypatch.undo()
    assert owner.write(block(1 << 20), reader="a") is not None


def test_an_arena_has_no_name() -> None:
    before = set(os.listdir("/dev/shm"))
    os.close(create_arena(1, 1 << 20))
    assert set(os.listdir("/dev/shm")) == before


def test_what_is_read_lies_in_memory_that_no_other_tensor_has(arena: Callable[[int], Views]) -> None:
    owner, reader = arena(1 << 21)
    length = 1 << 19

    def again(seed: int) -> torch.Tensor:
        return read(reader, owner.write(block(length, seed=seed), reader="a"), length)

    first, second = again(1), again(2)
    part, place = first[-10:], first.data_ptr()
    del first
    third = again(3)
    assert torch.equal(part, block(length, seed=1)[-10:]) and torch.equal(second, block(length, seed=2))
    assert len({place, second.data_ptr(), third.data_ptr()}) == 3
    del part
    assert again(4).data_ptr() == place, "used again once nobody has it"
