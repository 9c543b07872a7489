"""What the runner makes of a batch when it launches it: how its rows lie, what it gave, and how to take it back.

Used for single methods and fused units alike. Knows works and modules; does not know walks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mstar.errors import PluginError
from mstar.layers.sampling import SamplingState, sample, unsample
from mstar.plugin.graph import Method
from mstar.plugin.nodes import Plan
from mstar.plugin.program import Run
from mstar.worker.finish import Running, Step
from mstar.worker.modules import Module
from mstar.worker.slots import SlotPool
from mstar.worker.state import Work

COLUMNS = ("positions", "rows", "iteration", "draw_keys")  # of a context


@dataclass(slots=True)
class Launched:
    """Outputs and inputs by port, the KV method's plan, steps of a unit's methods with a `finish`, and what runs."""

    outputs: dict[str, Any]
    inputs: dict[str, Any]
    plan: Plan
    parts: list[Step] = field(default_factory=list)
    running: Running | None = None


@dataclass(slots=True)
class Traces:
    """What methods change besides their outputs.

    Args:
        fence: waits for what changes slots and samplers meanwhile.
        draws: (sampler, rows, ids) of every `ctx.sample`.
        saved: (slots, rows, what they held before).
    """

    fence: Callable[[], None]
    draws: list[tuple[SamplingState, Tensor, Tensor]] = field(default_factory=list)
    saved: list[tuple[SlotPool, Tensor, dict[str, Tensor]]] = field(default_factory=list)

    def save(self, slots: SlotPool, rows: Tensor) -> None:
        if slots.tensors:
            self.saved.append((slots, rows, slots.save(rows)))

    def undo(self, at: slice = slice(None)) -> None:
        """Nothing that was drawn or written to slots stays, of these tasks."""
        self.fence()
        for state, rows, ids in reversed(self.draws):
            unsample(state, rows[at], ids[at])
        for slots, rows, held in reversed(self.saved):
            slots.restore(rows[at], {name: values[at] for name, values in held.items()})


class BatchLayout:
    """How a batch's tokens lie: rows, padding rows, ragged starts.

    With `align` > 1 rows and tokens are padded to its multiples by rows that write to the scratch page and slot row.
    """

    __slots__ = (
        "_tensors", "is_ragged", "is_single", "num_padding", "num_rows", "num_tokens",
        "query_lens", "query_starts", "starts",
    )  # fmt: skip

    def __init__(self, method: Method, works: list[Work], *, align: int) -> None:
        self.is_ragged = method.has_tokens
        lens = [work.num_tokens for work in works] if method.kv is not None or self.is_ragged else [1] * len(works)
        rows, tokens = len(lens), sum(lens)
        self.starts = [0]
        for n in lens:
            self.starts.append(self.starts[-1] + n)
        self.num_padding = 0
        if align > 1 and any(port.layout != "item" for port in method.inputs):
            if self.is_ragged:
                missing = -tokens % align
                self.num_padding = -rows % align or (align if missing else 0)
                lens += [0] * (self.num_padding - 1) + [missing] if self.num_padding else []
            else:
                self.num_padding = -rows % align
                lens += [lens[0]] * self.num_padding
        self.num_rows = rows + self.num_padding
        self.query_lens = np.array(lens, dtype=np.int32)
        self.query_starts = np.zeros(self.num_rows + 1, dtype=np.int32)
        np.cumsum(self.query_lens, out=self.query_starts[1:])
        self.num_tokens = int(self.query_starts[-1])
        self.is_single = bool((self.query_lens == 1).all())
        self._tensors: tuple[Tensor, Tensor] | None = None

    def on_device(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(query_starts, last_tokens) as tensors, made once."""
        if self._tensors is None:
            last = np.maximum(self.query_starts[1:].astype(np.int64) - 1, 0)
            self._tensors = torch.from_numpy(self.query_starts).to(device), torch.from_numpy(last).to(device)
        return self._tensors


def draw(module: Module, works: list[Work], rows: Tensor, traces: Traces, name: str, logits: Tensor) -> Tensor:
    """`ctx.sample`: remembers what it drew, so that it can be taken back."""
    require_sampler(module, works, name)
    state = module.slots.samplers[name]
    ids = sample(logits, state, rows)
    traces.draws.append((state, rows, ids))
    return ids


def require_sampler(module: Module, works: list[Work], name: str) -> None:
    """Raise PluginError unless the module has this sampler, and each work parameters for it."""
    if name not in module.slots.samplers:
        raise PluginError(f"{module.name} has no sampler {name!r}; its samplers are {', '.join(module.slots.samplers)}")
    if not all(name in work.request.info.samplers for work in works):
        raise PluginError(f"sampler {name!r} has no parameters; Processor.encode gives them in Encoded.samplers")


def task_of(work: Work, run: Run, index: int, number: int | None, inside: dict[str, Any]) -> Work:
    """A work as the hooks of call `index` of its unit know it; `inside`: inputs that the unit has made."""
    has_kv = run.method.kv is not None
    own = {port.name: f"{index}.{port.name}" for port in run.method.inputs}
    return Work(
        request_id=work.request_id,
        path=work.path,
        inputs={port: work.inputs.get(name) for port, name in own.items()} | inside,
        iteration=work.iteration if number is None else number,
        length=work.length if has_kv else 0,
        position=work.position if has_kv else 0.0,
        num_tokens=work.num_tokens if has_kv else 0,
        chunks={port: work.chunks[name] for port, name in own.items() if name in work.chunks},
        fields=work.fields,
        params=work.params,
        state=work.scope.states.get(run.key[0]),
        draw_key=work.draw_key,
        request=work.request,
        cursor=work.cursor,
        op=run,
        key=run.key,
        scope=work.scope,
    )


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host, copied without waiting for what the device still has to do."""
    return numbers if device.type == "cpu" else numbers.pin_memory().to(device, non_blocking=True)


@lru_cache(maxsize=None, typed=True)  # True and 1 are not alike
def everywhere(num_rows: int, value: int, device: torch.device) -> Tensor:
    """(B,) int64, or of a bool (B,) bool, all alike."""
    return torch.full((num_rows,), value, device=device)


def repeat_last(batch: Tensor, times: int) -> Tensor:
    """Padding: the last row again."""
    return torch.cat([batch, batch[-1:].expand(times, *batch.shape[1:])]) if times else batch
