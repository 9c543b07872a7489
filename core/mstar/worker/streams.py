"""Stream buffers: items from a producer, chunks for one consumer, by the consumer's policy.

`ChunkCursor` decides which items make the next chunk, from counts alone: what a chunk holds never depends on when it
is taken, only on the stream. `StreamBuffer` keeps the items. Owned by the worker's thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from mstar.errors import RequestError
from mstar.plugin.graph import Fixed, LeftContext, Policy, Port, Size, SlidingWindow, Stream, Whole
from mstar.plugin.nodes import StreamChunk


class Span(NamedTuple):
    """Items [start, end) of the stream make a chunk; `num_new` of them were in no chunk before."""

    start: int
    end: int
    num_new: int
    first: bool
    final: bool


def size_at(size: Size, index: int, fields: Mapping[str, int]) -> int:
    """The size of chunk `index`: a constant, a request field, or the entry of a schedule (its last one repeats)."""
    if isinstance(size, tuple):
        size = size[min(index, len(size) - 1)]
    if isinstance(size, str):
        value = fields.get(size)
        if value is None or value < 1:
            raise RequestError(f"stream size {size!r} is {value}; it must be at least 1", param=size)
        return value
    return size


@dataclass(slots=True)
class ChunkCursor:
    """How far one consumer has read: `seen` items in `index` chunks."""

    policy: Policy
    fields: Mapping[str, int]
    index: int = 0
    seen: int = 0
    start: int = 0  # where the next window begins
    finished: bool = False

    def next(self, count: int, *, closed: bool) -> Span | None:
        """The next chunk of a stream that holds `count` items so far, or None if it is not complete yet.

        A full chunk is never final: the final one follows when the stream has closed, and may hold nothing new. Only
        a stream shorter than its first chunk is one chunk, first and final.
        """
        if self.finished:
            return None
        span = self._full(count)
        if span is None and closed:
            start, end = self._last(count)
            span = Span(start, end, count - self.seen, self.index == 0, True)
        if span is not None:
            self.index += 1
            self.seen = span.end
            self.finished = span.final
        return span

    def keep_from(self) -> int:
        """First item a later chunk can still hold."""
        policy = self.policy
        if isinstance(policy, SlidingWindow):
            return max(0, self.seen - size_at(policy.window, self.index, self.fields)) if self.index else 0
        if isinstance(policy, LeftContext):
            return max(0, self.seen - size_at(policy.context, self.index, self.fields))
        return self.seen

    def _full(self, count: int) -> Span | None:
        policy, first = self.policy, self.index == 0
        if isinstance(policy, Whole):
            return None
        if isinstance(policy, SlidingWindow):
            end = self.start + size_at(policy.window, self.index, self.fields)
            if count < end:
                return None
            span = Span(self.start, end, end - self.seen, first, False)
            self.start += size_at(policy.stride, self.index, self.fields)
            return span
        end = self.seen + size_at(policy.size, self.index, self.fields)
        if count < end:
            return None
        return Span(self.keep_from(), end, end - self.seen, first, False)

    def _last(self, count: int) -> tuple[int, int]:
        policy = self.policy
        if isinstance(policy, SlidingWindow):
            return max(0, count - size_at(policy.window, self.index, self.fields)), count
        if isinstance(policy, Fixed | LeftContext):
            return self.keep_from(), count
        return 0, count


@dataclass(slots=True, eq=False)
class StreamBuffer:
    """The items of one stream and path that its consumer can still need."""

    stream: Stream
    cursor: ChunkCursor
    empty: Tensor  # (0, *shape): what a chunk without items holds
    pieces: list[Tensor] = field(default_factory=list)
    base: int = 0  # index of the first kept item
    count: int = 0
    closed: bool = False

    @classmethod
    def open(cls, stream: Stream, *, fields: Mapping[str, int], item: Port) -> StreamBuffer:
        """A buffer for items as the producer's port `item` declares them."""
        dtype = torch.float32 if item.dtype == "float" else getattr(torch, item.dtype)
        return cls(stream, ChunkCursor(stream.policy, fields), torch.empty((0, *(item.shape or ())), dtype=dtype))

    @property
    def ended(self) -> bool:
        """The consumer has had the final chunk."""
        return self.cursor.finished

    def put(self, items: Tensor) -> None:
        """Append items (k, *shape)."""
        assert not self.closed, f"stream {self.stream.name} got items after its end"
        if items.shape[0] and not self.cursor.finished:
            self.pieces.append(items)
            self.count += items.shape[0]

    def close(self) -> None:
        self.closed = True

    def take(self) -> StreamChunk | None:
        """The next chunk, or None if the producer must go on first."""
        span = self.cursor.next(self.count, closed=self.closed)
        if span is None:
            return None
        if len(self.pieces) > 1:
            self.pieces = [torch.cat(self.pieces)]
        items = self.pieces[0][span.start - self.base : span.end - self.base] if self.pieces else self.empty
        self._forget(self.count if span.final else self.cursor.keep_from())
        return StreamChunk(items, span.num_new, span.first, span.final, span.start)

    def _forget(self, index: int) -> None:
        if self.pieces and index > self.base:
            self.pieces[0] = self.pieces[0][index - self.base :]
            self.base = index
