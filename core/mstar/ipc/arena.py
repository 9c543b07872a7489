"""Memory that one process copies large tensors into and others copy them out of: an open file without a name.

The memory is gone with the last process that has it open, however that one ends. Only its owner takes blocks. Who
reads one gives it back by zeroing its first word, and says nothing; the owner looks when it needs room. Until then that
word is the block's generation, by which a reader sees that it holds what was announced. Who is told of blocks is not
known here.

A word is read and written whole, and torch's copies, which let go of Python's lock, keep it in order with the elements.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from bisect import bisect
from collections import deque
from collections.abc import Hashable

import torch
from torch import Tensor

ARENA_BYTES = 256 * 2**20
"""Address space; memory is taken as it is needed, and kept."""

_HEADER = 64
_GROWTH = 1 << 20
_POOLED = 1 << 18
_KEPT_BYTES = 1 << 28


class ArenaError(Exception):
    """A block does not hold what its reader was told."""


def create_arena(owner: int, num_bytes: int = ARENA_BYTES) -> int:
    """An open file for the arena of `owner`, a number above 0 that is used once."""
    file = os.memfd_create("mstar-arena", os.MFD_CLOEXEC)
    os.ftruncate(file, num_bytes)
    Arena(file)._words[0] = owner
    return file


class Arena:
    """One process's view of an arena; only its owner may `write` and `forget`.

    Attributes:
        owner: as it was created for.
    """

    def __init__(self, file: int) -> None:
        """Does not keep `file` for reading. The owner's has to stay open."""
        self.num_bytes = os.fstat(file).st_size
        self._file = file
        memory = mmap.mmap(file, self.num_bytes)
        self._elements = torch.frombuffer(memory, dtype=torch.uint8)
        self._words = memoryview(memory).cast("Q")
        self.owner = self._words[0]
        self._generation = 0
        self._num_allocated = 0
        self._free = [(_HEADER, self.num_bytes)]  # begins and ends, in order, never side by side
        self._taken: dict[Hashable, deque[tuple[int, int]]] = {}  # by reader, in the order in which they come back

    def write(self, data: Tensor, *, reader: Hashable) -> tuple[int, int] | None:
        """Copy a block in, uint8 (B,): its place and generation, or None if there is no room.

        A reader has to read its blocks in the order they were written in.
        """
        for taken in self._taken.values():
            while taken and not self._words[taken[0][0] // 8]:
                self._release(*taken.popleft())
        size = -(-(_HEADER + data.numel()) // _HEADER) * _HEADER
        for index, (start, end) in enumerate(self._free):
            if end - start >= size and self._allocate(start + size):
                self._free[index : index + 1] = [(start + size, end)] if end > start + size else []
                break
        else:
            return None
        self._elements[start + _HEADER : start + _HEADER + data.numel()].copy_(data)
        self._generation += 1
        self._words[start // 8] = self._generation
        self._taken.setdefault(reader, deque()).append((start, start + size))
        return start, self._generation

    def read(self, start: int, generation: int, *, num_bytes: int) -> Tensor:
        """Copy a block out, uint8 (B,), and give it back. Raises ArenaError if it is not the one that was written."""
        if self._words[start // 8] != generation:
            raise ArenaError(f"block {start} was announced as {generation} and is {self._words[start // 8]}")
        found = _memory.empty(num_bytes)
        found.copy_(self._elements[start + _HEADER : start + _HEADER + num_bytes])
        if self._words[start // 8] != generation:
            raise ArenaError(f"block {start} was overwritten while it was read")
        self.give_back(start)
        return found

    def give_back(self, start: int) -> None:
        """Let the owner use a block again."""
        self._words[start // 8] = 0

    def forget(self, reader: Hashable) -> None:
        """A reader has ended: nothing of its blocks will be read."""
        for start, end in self._taken.pop(reader, ()):
            self._release(start, end)

    @property
    def num_taken(self) -> int:
        """Blocks that have not been seen to come back."""
        return sum(map(len, self._taken.values()))

    def _allocate(self, end: int) -> bool:
        """Have memory up to there, now rather than when it is touched, where its lack would end the process."""
        if end > self._num_allocated:
            up_to = min(self.num_bytes, -(-end // _GROWTH) * _GROWTH)
            try:
                os.posix_fallocate(self._file, self._num_allocated, up_to - self._num_allocated)
            except OSError:
                return False
            self._num_allocated = up_to
        return True

    def _release(self, start: int, end: int) -> None:
        index = bisect(self._free, (start, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, end))


class _Memory:
    """Memory of tensors that were read, used again when nobody holds them: to get pages costs more than to copy."""

    def __init__(self) -> None:
        self._buffers: list[mmap.mmap] = []
        self._lock = threading.Lock()
        self._unused = _references_when_unused()

    def empty(self, num_bytes: int) -> Tensor:
        """Uninitialised, uint8 (B,)."""
        if num_bytes < _POOLED:
            return torch.empty(num_bytes, dtype=torch.uint8)
        size = 1 << (num_bytes - 1).bit_length()
        with self._lock:
            for buffer in self._buffers:
                if len(buffer) == size and sys.getrefcount(buffer) == self._unused:
                    break
            else:
                buffer = mmap.mmap(-1, size)
                self._buffers.append(buffer)
                while sum(map(len, self._buffers)) > _KEPT_BYTES:
                    del self._buffers[0]
            return torch.frombuffer(buffer, dtype=torch.uint8)[:num_bytes]


def _references_when_unused() -> int:
    """To a buffer that a list and who looks have, and no tensor; Python 3.14 counts fewer than those before."""
    buffers = [mmap.mmap(-1, mmap.PAGESIZE)]
    return next(sys.getrefcount(buffer) for buffer in buffers)


_memory = _Memory()
