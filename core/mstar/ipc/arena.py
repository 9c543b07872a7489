"""Memory that two processes share as a ring: one copies blocks in, the other copies them out, in the same order.

The memory has no name: it is inherited as an open file, and is gone with the last process that has it open, however
that one ends. Who tells the other of blocks and of room is not known here.

A block is named by its position, the bytes written before it since the start: that is where it lies (modulo the size)
and in which round. It begins with a header that repeats position and size, so a block that has been overwritten, or
was never written, is seen by its reader.
"""

from __future__ import annotations

import mmap
import os
import struct

import torch
from torch import Tensor

ARENA_BYTES = 32 * 2**20

_HEADER = struct.Struct("<QQ")  # position, elements
_ALIGNMENT = 64


def create_arena(num_bytes: int = ARENA_BYTES) -> int:
    """An open file of `num_bytes` that are allocated already. Raises OSError if there is no memory for them."""
    file = os.memfd_create("mstar-arena", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except OSError:
        os.close(file)
        raise
    return file


class ArenaError(Exception):
    """A block does not hold what its reader was told."""


class _Arena:
    def __init__(self, file: int) -> None:
        self.num_bytes = os.fstat(file).st_size
        self.most = self.num_bytes // 4 - _ALIGNMENT
        """Bytes of the largest block: any block fits once all others have been read."""
        self._memory = mmap.mmap(file, self.num_bytes)
        self._elements = torch.frombuffer(self._memory, dtype=torch.uint8)

    def close(self) -> None:
        """Free this process's share of the memory; nothing may be read or written from now on."""
        del self._elements
        self._memory.close()

    def _block(self, position: int, num_bytes: int) -> Tensor:
        start = position % self.num_bytes + _HEADER.size
        return self._elements[start : start + num_bytes]


class ArenaWriter(_Arena):
    """The end that copies in.

    Attributes:
        released: up to which position the reader is known to have read.
    """

    def __init__(self, file: int) -> None:
        super().__init__(file)
        self.released = 0
        self._position = 0

    def write(self, data: Tensor) -> int | None:
        """Copy a block in, uint8 (B,) with B at most `most`: its position, or None while there is no room."""
        assert data.numel() <= self.most, data.numel()
        position, end = _placed(self._position, data.numel(), of=self.num_bytes)
        if end - self.released > self.num_bytes:
            return None
        _HEADER.pack_into(self._memory, position % self.num_bytes, position, data.numel())
        self._block(position, data.numel()).copy_(data)
        self._position = end
        return position


class ArenaReader(_Arena):
    """The end that copies out.

    Attributes:
        position: up to where it has read; blocks before it may be overwritten.
    """

    def __init__(self, file: int) -> None:
        super().__init__(file)
        self.position = 0

    def read(self, position: int, *, into: Tensor) -> None:
        """Copy a block out. Raises ArenaError if it is not the one that was written at `position`."""
        expected, end = _placed(self.position, into.numel(), of=self.num_bytes)
        header = (position, into.numel())
        if position != expected or _HEADER.unpack_from(self._memory, position % self.num_bytes) != header:
            raise ArenaError(f"block {header} was announced where {expected} comes next: the channel is out of step")
        into.copy_(self._block(*header))
        if _HEADER.unpack_from(self._memory, position % self.num_bytes) != header:
            raise ArenaError(f"block {header} was overwritten while it was read")
        self.position = end


def _placed(position: int, num_bytes: int, *, of: int) -> tuple[int, int]:
    """Where a block begins and ends that comes next: blocks are whole, so it may leave out the ring's last bytes."""
    size = -(-(_HEADER.size + num_bytes) // _ALIGNMENT) * _ALIGNMENT
    rest = of - position % of
    start = position if size <= rest else position + rest
    return start, start + size
