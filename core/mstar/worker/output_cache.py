"""Outputs of methods whose inputs are known by content: what was computed once is not computed again.

Runs in the worker. Knows methods and values, not what they mean.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mstar.plugin.program import Run
from mstar.worker.state import plain

Key = tuple[str, str, tuple[int, ...]]


class OutputCache:
    """Keeps outputs by `Method.cached_by`, the least recently used leave first.

    Args:
        limit: most bytes of all outputs together; 0: nothing is kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[Key, dict[str, Tensor]] = OrderedDict()
        self.num_bytes = 0

    def find(self, op: Run, inputs: Mapping[str, Any]) -> Mapping[str, Tensor] | None:
        """The outputs of a call by port, if they are here."""
        key = self._key(op, inputs)
        if key is None or key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key]

    def keep(self, op: Run, inputs: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """What a call gave, as copies: a view would keep the whole batch."""
        key = self._key(op, inputs)
        if key is None or key in self._kept or not all(isinstance(value, Tensor) for value in values.values()):
            return
        size = _size(values)
        if size > self._limit:
            return
        self._kept[key] = {port: value.clone() for port, value in values.items()}
        self.num_bytes += size
        while self.num_bytes > self._limit:
            self.num_bytes -= _size(self._kept.popitem(last=False)[1])

    def _key(self, op: Run, inputs: Mapping[str, Any]) -> Key | None:
        port = op.method.cached_by
        value = None if port is None or not self._limit else plain(inputs.get(port))
        return None if value is None else (*op.key, tuple(value.flatten().tolist()))


def _size(values: Mapping[str, Tensor]) -> int:
    return sum(value.nbytes for value in values.values())
