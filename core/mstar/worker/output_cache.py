"""Outputs of calls by what they were computed from: what an encoder gave once is not computed again.

A call that names its content key (`Call.cache`) is answered from here if an equal one has run. Owned by the worker's
thread. Holds copies, least recently used first; knows no walks, and nothing of a request but its work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mstar.plugin.program import MethodKey
from mstar.worker.scheduler import Batch
from mstar.worker.state import Batched, Row, Work, plain

HITS = "cached_calls"
"""Among a request's counts: how many of its calls did not run."""


@dataclass(frozen=True, slots=True)
class _Entry:
    values: Mapping[str, Any]  # by port
    counts: Mapping[str, int]
    num_bytes: int


class OutputCache:
    """What calls gave, by method and content key.

    Args:
        max_bytes: of all tensors together; 0: nothing is kept, and every call runs.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_queries = 0
        self.num_hits = 0
        self.has_answered = False  # some work of the last batch
        self._entries: dict[tuple[MethodKey, bytes], _Entry] = {}  # in order of last use

    def rest(self, batch: Batch | None, complete: Callable[[Work, Mapping[str, Any]], None]) -> Batch | None:
        """The works of a batch that have to run; the others are given their outputs at once. None: none has to."""
        self.has_answered = False
        if batch is None or not self.max_bytes or all(work.content_key is None for work in batch.works):
            return batch
        found = [(work, self._find(work)) for work in batch.works]
        for work, entry in found:
            if entry is not None:
                self.has_answered = work.is_cached = True
                work.counts = {**entry.counts, HITS: 1}
                if not work.request.is_dead:  # it may have failed with the work before
                    complete(work, dict(entry.values))
        works = [work for work, entry in found if entry is None and not work.request.is_dead]
        return Batch(batch.key, works) if works else None

    def keep(self, work: Work, values: Mapping[str, Any]) -> None:
        """Remember what a work has given, unless it is more than fits, or no tensor: nothing would bound those."""
        if work.content_key is None or not self.max_bytes or work.error is not None or work.stop_reason is not None:
            return
        key, num_bytes = (work.key, work.content_key), _num_bytes(values)
        if key in self._entries or not 0 < num_bytes <= self.max_bytes:
            return
        self._entries[key] = _Entry(_copied(values), dict(work.counts), num_bytes)
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= self._entries.pop(next(iter(self._entries))).num_bytes

    def _find(self, work: Work) -> _Entry | None:
        if work.content_key is None or work.token_start:
            return None
        self.num_queries += 1
        key = (work.key, work.content_key)
        if (entry := self._entries.pop(key, None)) is not None:
            self._entries[key] = entry  # used last
            self.num_hits += 1
        return entry

    def check_integrity(self) -> None:
        """Assert that the bytes held are those counted, and no more than allowed."""
        assert self.num_bytes == sum(entry.num_bytes for entry in self._entries.values()) <= self.max_bytes


def _num_bytes(value: Any) -> int:
    """Of all tensors in a value."""
    value = plain(value)
    if isinstance(value, Tensor):
        return value.nbytes
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return sum(map(_num_bytes, items))


def _copied(value: Any) -> Any:
    """A value with no batch behind it, whose tensors nobody else holds."""
    if type(value) is Row:  # stays one: a stream takes it for one item
        return Row(Batched(value.tensor[None].clone()), 0)
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {name: _copied(item) for name, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list | tuple) else value
