"""What one step's attention does: ragged rows, pages, and how far each query sees.

Built by the worker on the host with numpy, before the step; the tensors go to the device, the numpy twins stay so
that backends plan without waiting for it. Knows nothing of layers, heads or kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IntArray = NDArray[np.int32]
Spans = Sequence[NDArray[np.integer[Any]] | None]
Pool = tuple[Tensor, Tensor]
"""One layer's keys and values, each (num_pages, Hkv, page_size, D), contiguous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Varlen:
    """How ragged sequences without a cache attend; `window` 0 is none."""

    max_len: int
    causal: bool
    window: int
    scale: float
    batch_invariant: bool


@dataclass(frozen=True, slots=True, eq=False)
class HostPlan:
    """Numpy twins of `AttentionPlan`'s tensors, and what follows from them.

    Args:
        query_lens: (B,) int32, new tokens of each row.
        row_of: (T,) the row of each new token.
        positions: (T,) int32, where each new token stands in its row's KV.
    """

    query_starts: IntArray
    context_lens: IntArray
    page_table: IntArray
    visible_end: IntArray
    query_lens: IntArray
    row_of: NDArray[np.integer[Any]]
    positions: IntArray

    @property
    def causal(self) -> bool:
        """No query sees past itself."""
        return bool((self.visible_end == self.positions + 1).all())

    @property
    def max_query_len(self) -> int:
        """Most new tokens of a row."""
        return int(self.query_lens.max(initial=0))

    @property
    def max_kv_len(self) -> int:
        """Most tokens, context and new, of a row."""
        return int((self.context_lens + self.query_lens).max(initial=0))


@dataclass(slots=True, eq=False, weakref_slot=True)
class AttentionPlan:
    """One step's rows. Row b's KV is its cached context, then its own new tokens.

    Args:
        query_starts: (B + 1,) int32, ragged starts of each row's new tokens.
        context_lens: (B,) int32, tokens in the cache before this step.
        page_table: (B, max_pages) int32, page ids in order; unused entries 0 (the scratch page).
        slot_mapping: (T,) int64, page * page_size + offset where each new token's K and V go (0 without `write`).
        visible_end: (T,) int32, exclusive end of what each query sees, counted in its row's KV.
        write: False: new K and V are not cached, yet visible to the row's queries.
        decode: every row has exactly one new token.
        derived: what backends computed from this plan, reused by all layers.
        held: what a backend keeps between replays of a graph that was captured with this plan; None: not captured.
    """

    query_starts: Tensor
    context_lens: Tensor
    page_table: Tensor
    slot_mapping: Tensor
    visible_end: Tensor
    write: bool
    decode: bool
    page_size: int
    batch_invariant: bool
    host: HostPlan
    derived: dict[Any, Any] = field(default_factory=dict)
    held: dict[Any, Any] | None = None


def build_plan(
    *,
    query_lens: IntArray,
    context_lens: IntArray,
    page_table: IntArray,
    page_size: int,
    device: torch.device | str,
    write: bool = True,
    full: NDArray[np.bool_] | None = None,
    spans: Spans | None = None,
    batch_invariant: bool = False,
) -> AttentionPlan:
    """Plan one step over B rows. Host work only; one copy to the device.

    Args:
        query_lens: (B,) int32 new tokens per row; 0 is allowed.
        context_lens: (B,) int32 cached tokens per row.
        page_table: (B, P) int32; row b holds context (and, with `write`, new) tokens in `page_table[b]`'s pages, in
            order. Columns that no row needs are dropped. Copied: the caller may go on changing it.
        full: (B,) the row's new tokens are one bidirectional block.
        spans: per row, None or (n, 2): [start, end) of bidirectional spans within the row's new tokens.
    """
    stored = int((context_lens + query_lens if write else context_lens).max(initial=0))
    assert page_table.shape[1] * page_size >= stored, f"{page_table.shape[1]} pages cannot hold {stored} tokens"
    pages = page_table[:, : max(-(-stored // page_size), 1)].astype(np.int32)
    contexts = context_lens.astype(np.int32)
    starts = np.zeros(len(query_lens) + 1, dtype=np.int32)
    np.cumsum(query_lens, out=starts[1:])
    row_of, positions = _places(starts, contexts)
    visible_end = positions + 1
    if full is not None:
        np.copyto(visible_end, (contexts + query_lens)[row_of], where=full[row_of])
    for row, row_spans in enumerate(spans or ()):
        for start, end in () if row_spans is None else row_spans.tolist():
            assert 0 <= start <= end <= query_lens[row], f"row {row} has no span [{start}, {end})"
            visible_end[starts[row] + start : starts[row] + end] = contexts[row] + end
    slots = _slots(pages, row_of, positions, page_size=page_size, write=write)
    slot_mapping, query_starts, lens, table, seen = _to_device(
        [slots, starts, contexts, pages, visible_end], device=torch.device(device)
    )
    host = HostPlan(starts, contexts, pages, visible_end, query_lens, row_of, positions)
    decode = len(row_of) == len(query_lens) and host.max_query_len == 1
    rows = query_starts, lens, table, slot_mapping, seen
    return AttentionPlan(*rows, write, decode, page_size, batch_invariant, host)


def decode_plan(
    *,
    context_lens: list[int],
    slot_mapping: Tensor,
    page_table: IntArray,
    page_size: int,
    batch_invariant: bool = False,
) -> AttentionPlan:
    """What `build_plan` gives for one new token per row that is written, with fewer array operations.

    Args:
        slot_mapping: as in the plan, on the device.
        page_table: as wide as it is to be; kept, so not to be changed later.
    """
    rows = len(context_lens)
    numbers = np.array([*range(rows + 1), *context_lens, *[n + 1 for n in context_lens]], dtype=np.int32)
    starts, contexts, visible_end = numbers[: rows + 1], numbers[rows + 1 : 2 * rows + 1], numbers[2 * rows + 1 :]
    parts = [starts, contexts, page_table, visible_end]
    query_starts, lens, table, seen = _to_device(parts, device=slot_mapping.device)
    host = HostPlan(starts, contexts, page_table, visible_end, _ones(rows), _count(rows), contexts)
    tensors = query_starts, lens, table, slot_mapping, seen
    return AttentionPlan(*tensors, True, True, page_size, batch_invariant, host)


def plan_from_host(
    host: HostPlan, *, page_size: int, device: torch.device, write: bool, batch_invariant: bool
) -> AttentionPlan:
    """The plan whose host side this is; on the device it is made anew."""
    slots = _slots(host.page_table, host.row_of, host.positions, page_size=page_size, write=write)
    parts: list[NDArray[Any]] = [slots, host.query_starts, host.context_lens, host.page_table, host.visible_end]
    slot_mapping, starts, contexts, pages, visible_end = _to_device(parts, device=device)
    decode = len(host.row_of) == len(host.query_lens) and host.max_query_len == 1
    rows = starts, contexts, pages, slot_mapping, visible_end
    return AttentionPlan(*rows, write, decode, page_size, batch_invariant, host)


def host_plan(starts: IntArray, contexts: IntArray, page_table: IntArray, visible_end: IntArray) -> HostPlan:
    """A plan's host side, of those of its arrays that all follows from."""
    return HostPlan(starts, contexts, page_table, visible_end, np.diff(starts), *_places(starts, contexts))


def plan_from_tensors(rows: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], **flags: Any) -> AttentionPlan:
    """The plan whose five tensors, in order, and flags these are.

    Waits for the device: only for an op called without its plan.
    """
    starts, contexts, pages, _, visible_end = (tensor.cpu().numpy() for tensor in rows)
    return AttentionPlan(*rows, **flags, host=host_plan(starts, contexts, pages, visible_end))


def _slots(
    pages: IntArray, row_of: NDArray[np.integer[Any]], positions: IntArray, *, page_size: int, write: bool
) -> NDArray[np.int64]:
    """Where each new token goes."""
    slots = np.zeros(len(row_of), dtype=np.int64)
    if write:
        page, offset = np.divmod(positions, page_size)
        slots += pages[row_of, page].astype(np.int64) * page_size + offset
    return slots


@cache
def _count(number: int) -> IntArray:
    return np.arange(number, dtype=np.int32)


@cache
def _ones(number: int) -> IntArray:
    return np.ones(number, dtype=np.int32)


def _places(starts: IntArray, contexts: IntArray) -> tuple[IntArray, IntArray]:
    """Of each new token: its row, and its position there."""
    row_of = np.repeat(_count(len(contexts)), np.diff(starts))
    return row_of, np.add((contexts - starts[:-1])[row_of], np.arange(len(row_of)), dtype=np.int32)


def _to_device(parts: Sequence[NDArray[Any]], *, device: torch.device) -> list[Tensor]:
    """The arrays, 64-bit ones first, as tensors: by one copy, or on a CPU by none."""
    tensors = [torch.from_numpy(part) for part in parts]
    if device.type == "cpu":
        return tensors
    buffer = torch.cat([tensor.view(-1).view(torch.int32) for tensor in tensors]).pin_memory()
    pieces = buffer.to(device, non_blocking=True).split([part.nbytes // 4 for part in parts])
    return [piece.view(tensor.dtype).view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
