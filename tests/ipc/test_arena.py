from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from mstar.ipc.arena import ArenaError, ArenaReader, ArenaWriter, create_arena

Ends = tuple[ArenaWriter, ArenaReader]


@pytest.fixture
def arena() -> Callable[[int], Ends]:
    def make(num_bytes: int) -> Ends:
        file = create_arena(num_bytes)
        try:
            return ArenaWriter(file), ArenaReader(file)
        finally:
            os.close(file)

    return make


def block(length: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def read(reader: ArenaReader, position: int | None, length: int) -> torch.Tensor:
    assert position is not None
    found = torch.empty(length, dtype=torch.uint8)
    reader.read(position, into=found)
    return found


def test_blocks_come_out_as_they_went_in_for_many_rounds(arena: Callable[[int], Ends]) -> None:
    writer, reader = arena(4096)
    lengths = [1, 63, 64, 100, 960, 500, 7]
    for number in range(200):
        data = block(lengths[number % len(lengths)], seed=number)
        assert torch.equal(read(reader, writer.write(data), len(data)), data)
        writer.released = reader.position


def test_a_full_arena_takes_no_more_until_some_of_it_has_been_read(arena: Callable[[int], Ends]) -> None:
    writer, reader = arena(4096)
    blocks = [block(900, seed=number) for number in range(9)]
    positions = []
    while (position := writer.write(blocks[len(positions)])) is not None:
        positions.append(position)
    assert len(positions) == 4
    assert torch.equal(read(reader, positions[0], 900), blocks[0])
    assert writer.write(blocks[4]) is None, "nobody has told the writer"
    writer.released = reader.position
    positions.append(writer.write(blocks[4]))
    for number in range(1, 5):
        assert torch.equal(read(reader, positions[number], 900), blocks[number])


def test_the_largest_block_fits_when_all_but_a_quarter_has_been_read(arena: Callable[[int], Ends]) -> None:
    """A reader speaks up once a quarter is read: no writer may wait for less."""
    writer, reader = arena(4096)
    for number in range(300):
        data = block(1 + 37 * number % writer.most, seed=number)
        position = writer.write(data)
        assert position is not None
        read(reader, position, len(data))
        if reader.position - writer.released >= writer.num_bytes // 4:
            writer.released = reader.position


def test_a_block_that_was_overwritten_or_never_written_is_seen(arena: Callable[[int], Ends]) -> None:
    writer, reader = arena(4096)
    first = writer.write(block(900))
    writer.released = 1 << 40  # a writer that believes everything was read
    for _ in range(4):
        writer.write(block(900))
    with pytest.raises(ArenaError):
        read(reader, first, 900)
    with pytest.raises(ArenaError):
        read(reader, 64, 900)


def test_an_arena_has_no_name_and_its_memory_is_there() -> None:
    before = set(os.listdir("/dev/shm"))
    file = create_arena(1 << 20)
    try:
        assert os.fstat(file).st_blocks * 512 >= 1 << 20
        assert set(os.listdir("/dev/shm")) == before
    finally:
        os.close(file)
