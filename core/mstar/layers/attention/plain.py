"""Attention in plain torch: the CPU backend, and the fallback where another backend has no kernel.

The group of query heads that share a KV head is folded into the query length, so that a row is two batched matrix
products. Without native bfloat16 products the arithmetic is float32. No row reads a slot it does not own, not even
behind a mask: a neighbour's NaN must stay its own.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from mstar.layers.attention.plan import AttentionPlan, HostPlan
from mstar.layers.attention.tiles import attend_in_tiles

_BLOCK = 128  # queries whose scores are held at once
_GATHER_TOGETHER = 1 << 17  # elements of K up to which a decode batch is one product: launches cost more than padding


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of a plan: its tokens, and where in the pool its visible cache lies."""

    begin: int
    end: int
    context: int
    first_key: int  # position of the first key gathered, at a page's start
    num_keys: int  # keys gathered that hold tokens of the row
    index: Tensor  # (Hkv * pages,) int64, pages of all heads in the pool seen as (num_pages * Hkv, page_size * D)


class PlainBackend:
    """Runs on any device; planning reads the host twins only."""

    name = "cpu"

    def __init__(self, *, native_bfloat16: bool | None = None) -> None:
        if native_bfloat16 is None:
            native_bfloat16 = torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "AVX2")
        self._native_bfloat16 = native_bfloat16
        self._buffers = _Buffers()

    def require(self, *, head_dim: int, dtype: torch.dtype) -> None:
        """Every head dimension and floating dtype works."""

    def paged(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        window: int,
    ) -> Tensor:
        if plan.write:
            write_kv(plan, k=k, v=v, keys=keys, values=values)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        kv_heads = keys.shape[1]
        if plan.batch_invariant:
            for row in _rows(plan, kv_heads=kv_heads, window=0):
                row_keys, row_values = (
                    _row_kv(row, pool, new, write=plan.write) for pool, new in ((keys, k), (values, v))
                )
                attend_in_tiles(
                    q[row.begin : row.end],
                    row_keys,
                    row_values,
                    first=row.context,
                    visible_end=plan.host.visible_end[row.begin : row.end],
                    window=window,
                    scale=scale,
                    out=out[row.begin : row.end],
                )
        elif not plan.decode or not plan.write:
            for row in _rows(plan, kv_heads=kv_heads, window=window):
                self._row(row, q=q, k=k, v=v, keys=keys, values=values, plan=plan, scale=scale, window=window, out=out)
        elif not window and _alike(plan.host, elements=keys[0].numel() // plan.page_size):
            self._decode_together(q, keys=keys, values=values, plan=plan, scale=scale, out=out)
        else:
            self._decode_rows(q, keys=keys, values=values, plan=plan, scale=scale, window=window, out=out)
        return out

    def varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor,
        *,
        max_len: int,
        causal: bool,
        window: int,
        scale: float,
        batch_invariant: bool,
    ) -> Tensor:
        sequences = len(starts) - 1
        alike = q.shape[0] == max_len * sequences
        dtype = self._compute_dtype(q.dtype)
        if alike and sequences and not window and not batch_invariant and q.shape[1] == k.shape[1]:
            query, key, value = (x.to(dtype).view(sequences, max_len, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
            whole = functional.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale)
            return whole.transpose(1, 2).reshape(q.shape).to(q.dtype)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        # All of one length: no need to wait for `starts` to arrive from a device.
        edges = list(range(0, q.shape[0] + 1, max_len)) if alike and max_len else starts.tolist()
        for begin, end in zip(edges[:-1], edges[1:], strict=True):
            if begin == end:
                continue
            length = end - begin
            visible_end = np.arange(1, length + 1) if causal else np.full(length, length)
            seq_keys, seq_values = k[begin:end].transpose(0, 1), v[begin:end].transpose(0, 1)
            if batch_invariant:
                attend_in_tiles(
                    q[begin:end],
                    seq_keys,
                    seq_values,
                    first=0,
                    visible_end=visible_end,
                    window=window,
                    scale=scale,
                    out=out[begin:end],
                )
            else:
                _attend(
                    q[begin:end],
                    seq_keys.to(dtype),
                    seq_values.to(dtype),
                    first=0,
                    visible_end=visible_end,
                    window=window,
                    scale=scale,
                    out=out[begin:end],
                )
        return out

    def _compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype == torch.bfloat16 and self._native_bfloat16:
            return dtype
        return torch.float32 if dtype.itemsize < 4 else dtype

    def _row(
        self,
        row: _Row,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: AttentionPlan,
        scale: float,
        window: int,
        out: Tensor,
    ) -> None:
        dtype = self._compute_dtype(q.dtype)
        row_keys = _row_kv(row, keys, k, write=plan.write).to(dtype)
        row_values = _row_kv(row, values, v, write=plan.write).to(dtype)
        _attend(
            q[row.begin : row.end],
            row_keys,
            row_values,
            first=row.context - row.first_key,
            visible_end=plan.host.visible_end[row.begin : row.end] - row.first_key,
            window=window,
            scale=scale,
            out=out[row.begin : row.end],
        )

    def _decode_together(
        self, q: Tensor, *, keys: Tensor, values: Tensor, plan: AttentionPlan, scale: float, out: Tensor
    ) -> None:
        """One product for the whole batch, padded to its longest row."""
        rows, heads, dim = q.shape
        kv_heads = keys.shape[1]
        dtype = self._compute_dtype(q.dtype)
        index = _page_index(plan, kv_heads=kv_heads).view(-1)
        hidden = plan.derived.get("hidden")
        if hidden is None:
            padded_len = plan.page_table.shape[1] * plan.page_size
            columns = torch.arange(padded_len, device=q.device, dtype=torch.int32)
            hidden = plan.derived["hidden"] = (columns[None] >= plan.visible_end[:, None])[:, None, :, None]
        folded = (q.to(dtype) * scale).view(rows * kv_heads, heads // kv_heads, dim)
        gathered = _by_head(keys, index, kv_heads=rows * kv_heads).to(dtype)
        scores = torch.bmm(folded, gathered.transpose(1, 2)).view(rows, kv_heads, heads // kv_heads, -1)
        weights = scores.masked_fill_(hidden.transpose(2, 3), -torch.inf).softmax(-1)
        gathered = _by_head(values, index, kv_heads=rows * kv_heads).to(dtype)
        gathered.view(rows, kv_heads, -1, dim).masked_fill_(hidden, 0)
        out.view(rows * kv_heads, -1, dim).copy_(torch.bmm(weights.view(rows * kv_heads, -1, hidden.shape[2]), gathered))

    def _decode_rows(
        self,
        q: Tensor,
        *,
        keys: Tensor,
        values: Tensor,
        plan: AttentionPlan,
        scale: float,
        window: int,
        out: Tensor,
    ) -> None:
        """Row after row, so that a row's keys stay in cache between gathering and use."""
        rows, heads, dim = q.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        dtype = self._compute_dtype(q.dtype)
        folded = (q.to(dtype) * scale).view(rows, kv_heads, group, dim)
        if group % 4 == 3:  # three rows of a product cost more than four
            folded = functional.pad(folded, (0, 0, 0, 1))
        results = folded.new_empty(folded.shape)
        take = self._buffers.take
        for row in _rows(plan, kv_heads=kv_heads, window=window):
            stored = len(row.index) * plan.page_size * dim
            shape = (kv_heads, stored // (kv_heads * dim), dim)
            pages = take("pages", (len(row.index), plan.page_size * dim), keys)
            wide = pages.view(shape) if keys.dtype == dtype else take("wide", shape, folded)
            first = max(row.context - window + 1, 0) if window else 0
            seen = slice(first - row.first_key, row.num_keys)
            torch.index_select(keys.view(-1, plan.page_size * dim), 0, row.index, out=pages)
            if wide.dtype != pages.dtype:
                wide.copy_(pages.view(shape))
            weights = torch.bmm(folded[row.begin], wide[:, seen].transpose(1, 2)).softmax(-1)
            torch.index_select(values.view(-1, plan.page_size * dim), 0, row.index, out=pages)
            if wide.dtype != pages.dtype:
                wide.copy_(pages.view(shape))
            torch.bmm(weights, wide[:, seen], out=results[row.begin])
        out.view(rows, kv_heads, group, dim).copy_(results[:, :, :group])


class _Buffers(threading.local):
    """Memory kept between calls, per thread: fresh large blocks cost a page fault per 4 KiB."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised contiguous tensor, valid until the next `take` of this name and dtype."""
        size = math.prod(shape)
        block = self._blocks.get((name, like.dtype, like.device))
        if block is None or block.numel() < size:
            block = self._blocks[name, like.dtype, like.device] = like.new_empty(size)
        return block[:size].view(shape)


def write_kv(plan: AttentionPlan, *, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> None:
    """Put each new token's (Hkv, D) of k and v at its slot in the pool (num_pages, Hkv, page_size, D)."""
    kv_heads, dim = k.shape[1:]
    index = plan.derived.get(("slots", kv_heads))
    if index is None:
        size, slots = plan.page_size, plan.slot_mapping
        heads = torch.arange(kv_heads, device=slots.device)
        index = (((slots // size)[:, None] * kv_heads + heads) * size + (slots % size)[:, None]).view(-1)
        plan.derived["slots", kv_heads] = index
    keys.view(-1, dim).index_copy_(0, index, k.reshape(-1, dim).to(keys.dtype))
    values.view(-1, dim).index_copy_(0, index, v.reshape(-1, dim).to(values.dtype))


def _page_index(plan: AttentionPlan, *, kv_heads: int) -> Tensor:
    """(B, Hkv, P) int64, each page of each head in the pool seen as (num_pages * Hkv, page_size * D)."""
    index = plan.derived.get(("index", kv_heads))
    if index is None:
        heads = torch.arange(kv_heads, device=plan.page_table.device)
        index = plan.derived["index", kv_heads] = plan.page_table[:, None].long() * kv_heads + heads[None, :, None]
    return index  # type: ignore[no-any-return]


def _rows(plan: AttentionPlan, *, kv_heads: int, window: int) -> list[_Row]:
    """The rows with new tokens."""
    rows = plan.derived.get(("rows", kv_heads, window))
    if rows is None:
        index = _page_index(plan, kv_heads=kv_heads)
        size, starts = plan.page_size, plan.host.query_starts.tolist()
        rows = plan.derived["rows", kv_heads, window] = []
        for number, context in enumerate(plan.host.context_lens.tolist()):
            begin, end = starts[number], starts[number + 1]
            if begin == end:
                continue
            stored = context + end - begin if plan.write else context
            page = max(context - window + 1, 0) // size if window else 0
            pages = index[number, :, page : -(-stored // size)].reshape(-1)
            rows.append(_Row(begin, end, context, page * size, stored - page * size, pages))
    return rows  # type: ignore[no-any-return]


def _alike(host: HostPlan, *, elements: int) -> bool:
    return host.max_kv_len * len(host.query_lens) * elements <= _GATHER_TOGETHER


def _by_head(pool: Tensor, index: Tensor, *, kv_heads: int) -> Tensor:
    """Pages by number, (num_pages, Hkv, page_size, D) -> (kv_heads, S, D), in one pass without a transpose."""
    _, _, size, dim = pool.shape
    return pool.view(-1, size * dim).index_select(0, index).view(kv_heads, -1, dim)


def _row_kv(row: _Row, pool: Tensor, new: Tensor, *, write: bool) -> Tensor:
    """A row's K or V from `row.first_key` on, (Hkv, S, D), exactly as long as what it holds."""
    kv_heads = pool.shape[1]
    cached = _by_head(pool, row.index, kv_heads=kv_heads)[:, : max(row.num_keys, 0)]
    if write:
        return cached
    return torch.cat((cached, new[row.begin : row.end].transpose(0, 1).to(pool.dtype)), dim=1)


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    first: int,
    visible_end: NDArray[np.integer[Any]],
    window: int,
    scale: float,
    out: Tensor,
) -> None:
    """Attention of one row's queries in blocks, each over what it sees; `first` is q[0]'s position among the keys.

    q and out are (n, H, D); keys and values (Hkv, S, D), of the dtype to compute in.
    """
    num, heads, dim = q.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    for begin in range(0, num, _BLOCK):
        end = min(begin + _BLOCK, num)
        ends = visible_end[begin:end]
        low = max(first + begin - window + 1, 0) if window else 0
        high = int(ends.max())
        folded = (q[begin:end].to(keys.dtype) * scale).view(-1, kv_heads, group, dim).transpose(0, 1)
        scores = torch.bmm(folded.reshape(kv_heads, -1, dim), keys[:, low:high].transpose(1, 2))
        columns = np.arange(low, high)
        hidden = columns[None] >= ends[:, None]
        if window:
            hidden |= columns[None] <= np.arange(first + begin - window, first + end - window)[:, None]
        if hidden.any():
            mask = torch.from_numpy(hidden).to(q.device)[None, :, None]
            scores.view(kv_heads, end - begin, group, -1).masked_fill_(mask, -torch.inf)
        mixed = torch.bmm(scores.softmax(-1), values[:, low:high])
        out[begin:end].view(-1, kv_heads, group, dim).copy_(mixed.view(kv_heads, -1, group, dim).transpose(0, 1))
