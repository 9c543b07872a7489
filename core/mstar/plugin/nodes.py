"""The contract of a node: an `nn.Module` with batched methods over port tensors, and what a method sees.

A method is called as `method(ctx, **inputs)` and returns a dict of its output ports. Inputs of layout `rows` arrive
as (B, *shape), `tokens` as (T, *shape) ragged over B rows, `item` as a list of B values. A batch of one is a batch.

A method only reads its inputs and what `ctx` holds, slots aside: the engine shares them between steps and requests. It
keeps nothing on the module, for compiled code would not, and gives a row what it would give it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from mstar.errors import RequestError
from mstar.types import Path

if TYPE_CHECKING:
    from mstar.layers.attention import KVBatch
    from mstar.plugin.spec import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The paged KV cache a module needs: per layer and token, keys and values of (num_kv_heads, head_dim)."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Per-request device state: a pool of rows (R, *shape), zeroed when a request (or `Each` child) first runs."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """A named sampler over a vocabulary; its parameters come from `Encoded.samplers[name]`."""

    name: str
    vocab_size: int


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """What a stream's policy handed to a task: `items` stacked (n, *shape); `num_new` of them unseen so far.

    Args:
        start: index in the stream of the first item.
    """

    items: Tensor | None
    num_new: int
    first: bool
    final: bool
    start: int = 0


@dataclass(slots=True, eq=False)
class Task:
    """One request's (or child's) turn at a method: what `prepare_<method>` and `finish_<method>` see.

    Args:
        request_id: the request.
        path: the `Each` item.
        inputs: port -> value of this task alone; of `tokens` ports, all the task's tokens.
        iteration: of the innermost loop.
        length: tokens in its sequence before this step (0 without KV).
        position: the sequence's next position.
        num_tokens: tokens this step adds (one chunk of a chunked prefill).
        is_first, is_last: first and last chunk of a chunked prefill; both true otherwise. Outputs of layout
            `rows` are used from the last chunk only, and `finish` is called for it only.
        chunks: port -> the stream chunk it received.
        fields: the request's fields.
        params: the request's params struct.
        state: the node's host state of this request and path (`Node.host_state`).
        draw_key: 63-bit key for counter-based noise, unique per (seed, path).
        stop_reason: set by `stop`.
    """

    request_id: str
    path: Path
    inputs: dict[str, Any]
    iteration: int = 0
    length: int = 0
    position: float = 0.0
    num_tokens: int = 0
    is_first: bool = True
    is_last: bool = True
    chunks: dict[str, StreamChunk] = field(default_factory=dict)
    fields: dict[str, int] = field(default_factory=dict)
    params: Any = None
    state: Any = None
    draw_key: int = 0
    token_start: int = 0  # of this chunk, within the task's tokens
    stop_reason: str | None = None
    error: RequestError | None = None
    counts: dict[str, int] = field(default_factory=dict)

    def stop(self, reason: str = "stop") -> None:
        """End the innermost dynamic loop after this iteration."""
        self.stop_reason = reason

    def fail(self, error: RequestError) -> None:
        """Fail this request, and no other, with `error`."""
        self.error = error

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter of the request, reported in its result ("skipped_codes")."""
        self.counts[name] = self.counts.get(name, 0) + amount


@dataclass(slots=True, kw_only=True)
class Plan:
    """What `prepare_<method>` may decide for a batch; every field has a default.

    Args:
        positions: (T,) or (T, k), instead of consecutive positions from each sequence's next one.
        advance: per task, how far the sequence's next position moves (default: by the tokens written).
        tensors: further tensors for the method, found in `ctx.plan` on the device; those with one row per task or
            per token are padded as the ports are.
    """

    positions: Tensor | None = None
    advance: list[float] | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)


NO_PLAN = Plan()


class SampleFunction(Protocol):
    def __call__(self, name: str, logits: Tensor) -> Tensor: ...


@dataclass(slots=True, kw_only=True)
class Context:
    """What a method sees besides its ports. All tensors are on the model's device.

    Args:
        num_rows: B, padding rows included.
        query_starts: (B + 1,) int32; row b's tokens are [query_starts[b], query_starts[b + 1]).
        last_tokens: (B,) int64, index of each row's last token.
        positions: (T,) int64 (or what `Plan.positions` gave).
        rows: (B,) int64, each task's row in the slot pools; 0 is the scratch row of padding.
        slots: slot name -> pool (R, *shape). Write with `pool[ctx.rows] = ...`.
        present: port -> (B,) bool, for ports that may be absent.
        iteration: (B,) int64, of the innermost loop.
        draw_keys: (B,) int64, see `layers.sampling.uniform` and `normal`.
        plan: tensors from `prepare_<method>`.
        row_multiple: what a method computes for rows it gathers itself must have a multiple of it (--batch-invariant).
        kv: the batch's view of the KV pool: `ctx.kv.attend(layer, q, k, v)`.
        sample: `ctx.sample("main", logits)` with (B, vocab) float logits -> (B,) int64 ids.
    """

    num_rows: int
    query_starts: Tensor
    last_tokens: Tensor
    positions: Tensor
    rows: Tensor
    iteration: Tensor
    draw_keys: Tensor
    sample: SampleFunction
    slots: dict[str, Tensor] = field(default_factory=dict)
    present: dict[str, Tensor] = field(default_factory=dict)
    plan: dict[str, Tensor] = field(default_factory=dict)
    row_multiple: int = 1
    kv: KVBatch = None  # type: ignore[assignment]  # set by the runner for methods that use KV


class Node(nn.Module):
    """A component's code.

    Optional hooks, by method name:
        prepare_<method>(tasks: Sequence[Task]) -> Plan | None: host-side, before the step.
        finish_<method>(tasks: Sequence[Task], outputs: dict[str, Tensor]) -> dict[str, list] | None: host-side,
            after it. `outputs` are CPU tensors with one row per task. May call `task.stop()`, `task.fail(error)`,
            `task.count(name)`, and return, for some output ports, one value per task instead of the port's rows
            (None: nothing was produced; a tensor (k, ...) on a stream: k items).

    Attributes:
        kv_layout: set in `__init__` by nodes that use paged KV.
        slots, samplers: pools the engine keeps for this module.
        tensor_parallel: patterns of submodules' whole names -> how each is split among the processes of a worker
            (`layers.parallel.Kind`), for nodes that can be. Set in `__init__`; what is split is known from parameters'
            shapes, so forwards take sizes from them. Such a node has no slots.
        host_state: makes the node's host-side state of one request and path; found in `task.state`.
    """

    kv_layout: KVLayout | None = None
    slots: Sequence[Slot] = ()
    samplers: Sequence[Sampler] = ()
    host_state: Callable[[], Any] | None = None
    tensor_parallel: Mapping[str, str] = MappingProxyType({})

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def load_weights(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        """Fill the parameters (strictly: missing or unexpected names are errors). Default: nothing to load."""
