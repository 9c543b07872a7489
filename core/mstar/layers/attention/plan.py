"""What one step's attention does: ragged rows, pages, and how far each query sees.

Built by the worker on the host with numpy, before the step; the tensors go to the device, the numpy twins stay so
that backends plan without waiting for it. Knows nothing of layers, heads or kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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


@dataclass(slots=True, eq=False)
class HostPlan:
    """Numpy twins of `AttentionPlan`'s tensors.

    Args:
        query_lens: (B,) int32, new tokens of each row.
        causal: no query sees past itself.
        max_query_len: most new tokens of a row.
        max_kv_len: most tokens, context and new, of a row.
    """

    query_starts: IntArray
    context_lens: IntArray
    page_table: IntArray
    visible_end: IntArray
    query_lens: IntArray
    causal: bool
    max_query_len: int
    max_kv_len: int


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
    # Python's max over a list of batch size is several times faster than numpy's.
    lens = query_lens.tolist()
    rows, tokens, max_query_len = len(lens), sum(lens), max(lens, default=0)
    decode = max_query_len == 1 and tokens == rows
    max_kv_len = max((context_lens + query_lens).tolist(), default=0)
    stored = max_kv_len if write else max(context_lens.tolist(), default=0)
    width = max(-(-stored // page_size), 1)
    assert page_table.shape[1] * page_size >= stored, f"{page_table.shape[1]} pages cannot hold {stored} tokens"

    # One buffer, hence one copy to a device; the int64 slots come first so that they are aligned.
    ends = _running(2 * tokens, tokens, rows + 1, rows, rows * width)
    buffer = np.empty(ends[-1], dtype=np.int32)
    slots = buffer[: ends[0]].view(np.int64)
    visible_end, starts = buffer[ends[0] : ends[1]], buffer[ends[1] : ends[2]]
    contexts, pages = buffer[ends[2] : ends[3]], buffer[ends[3] :].reshape(rows, width)
    contexts[:] = context_lens
    pages[:] = page_table[:, :width]
    causal = True
    if decode:
        starts[:] = _arange(rows + 1)
        positions, row_of = contexts, _arange(rows)
        np.add(contexts, 1, out=visible_end)
    else:
        starts[0] = 0
        np.cumsum(query_lens, out=starts[1:])
        row_of = np.repeat(_arange(rows), query_lens)
        positions = contexts[row_of] + (_arange(tokens) - starts[row_of])
        np.add(positions, 1, out=visible_end)
        causal = not _open_blocks(visible_end, starts, contexts, full=full, spans=spans)
    if write:
        page, offset = np.divmod(positions, page_size)
        np.multiply(pages[row_of, page], page_size, out=slots)
        slots += offset
    else:
        slots[:] = 0

    parts = _to_device(buffer, [slots, visible_end, starts, contexts, pages], device=torch.device(device))
    host = HostPlan(starts, contexts, pages, visible_end, query_lens, causal, max_query_len, max_kv_len)
    tensors = parts[2], parts[3], parts[4], parts[0], parts[1]
    return AttentionPlan(*tensors, write, decode, page_size, batch_invariant, host)


def plan_from_tensors(
    rows: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    *,
    write: bool,
    decode: bool,
    page_size: int,
    batch_invariant: bool,
) -> AttentionPlan:
    """The plan whose five tensors these are, in order. Waits for the device: only for an op called without its plan."""
    starts, contexts, pages, _, visible_end = (tensor.cpu().numpy() for tensor in rows)
    query_lens = np.diff(starts)
    row_of = np.repeat(np.arange(len(query_lens)), query_lens)
    own_end = contexts[row_of] + np.arange(len(row_of)) - starts[row_of] + 1
    host = HostPlan(
        starts,
        contexts,
        pages,
        visible_end,
        query_lens,
        causal=bool((visible_end == own_end).all()),
        max_query_len=int(query_lens.max(initial=0)),
        max_kv_len=int((contexts + query_lens).max(initial=0)),
    )
    return AttentionPlan(*rows, write, decode, page_size, batch_invariant, host)


_RANGE = np.arange(4096, dtype=np.int32)


def _arange(length: int) -> IntArray:
    return _RANGE[:length] if length <= len(_RANGE) else np.arange(length, dtype=np.int32)


def _running(*sizes: int) -> list[int]:
    ends: list[int] = []
    for size in sizes:
        ends.append(size + (ends[-1] if ends else 0))
    return ends


def _open_blocks(
    visible_end: IntArray,
    starts: IntArray,
    contexts: IntArray,
    *,
    full: NDArray[np.bool_] | None,
    spans: Spans | None,
) -> bool:
    """Let the tokens of each block see to its end, in place; whether there was any block."""
    blocks: list[tuple[int, int, int]] = []
    if full is not None:
        blocks += [(row, 0, int(starts[row + 1] - starts[row])) for row in np.flatnonzero(full).tolist()]
    for row, row_spans in enumerate(spans or ()):
        if row_spans is not None:
            blocks += [(row, start, end) for start, end in row_spans.tolist()]
    for row, start, end in blocks:
        first = starts[row]
        assert 0 <= start <= end <= starts[row + 1] - first, f"row {row} has no span [{start}, {end})"
        visible_end[first + start : first + end] = contexts[row] + end
    return bool(blocks)


def _to_device(buffer: IntArray, parts: list[NDArray[Any]], *, device: torch.device) -> list[Tensor]:
    """The parts, consecutive in the buffer, as device tensors; on a CPU they share its memory."""
    if device.type == "cpu":
        return [torch.from_numpy(part) for part in parts]  # a fifth of the cost of slicing one tensor
    whole = torch.from_numpy(buffer)
    whole = whole.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else whole.to(device)
    slots, *others = whole.split([part.nbytes // buffer.itemsize for part in parts])
    return [slots.view(torch.int64)] + [o.view(p.shape) for o, p in zip(others, parts[1:], strict=True)]
