"""Attention in plain torch: the CPU backend, and the fallback where another backend has no kernel.

The group of query heads that share a KV head is folded into the query length, so that a row is two batched matrix
products. Without native bfloat16 products the arithmetic is float32. No row reads a slot it does not own, not even
behind a mask: a neighbour's NaN must stay its own.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from mstar.layers.attention.plan import AttentionPlan, Pool, Varlen
from mstar.layers.attention.tiles import attend_in_tiles

_BLOCK = 64  # queries whose scores are held at once
_ENCODER_TILE = 64  # queries; sequences without a cache are never cut, so larger tiles than a decode step's pay
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
        self, q: Tensor, k: Tensor, v: Tensor, pool: Pool, plan: AttentionPlan, *, scale: float, window: int
    ) -> Tensor:
        if plan.write:
            write_kv(plan, k=k, v=v, pool=pool)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        elements = k.shape[1] * k.shape[2]
        if plan.batch_invariant or not plan.decode or not plan.write:
            self._rows_apart(q, (k, v), pool, plan, scale=scale, window=window, out=out)
        elif not window and plan.host.max_kv_len * q.shape[0] * elements <= _GATHER_TOGETHER:
            self._decode_together(q, pool, plan, scale=scale, out=out)
        else:
            self._decode_rows(q, pool, plan, scale=scale, window=window, out=out)
        return out

    def varlen(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *, how: Varlen) -> Tensor:
        sequences = len(starts) - 1
        alike = q.shape[0] == how.max_len * sequences
        fused = not how.window and not how.batch_invariant and q.shape[1] == k.shape[1]
        dtype = q.dtype if how.batch_invariant else self._compute_dtype(q.dtype)
        queries, keys, values = (x.to(dtype) for x in (q, k, v))
        if alike and fused and q.shape[0]:
            shape = (sequences, how.max_len, *q.shape[1:])
            whole = _fused(*(x.reshape(shape) for x in (queries, keys, values)), causal=how.causal, scale=how.scale)
            return whole.reshape(q.shape).to(q.dtype)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        # All of one length: no need to wait for `starts` to arrive from a device.
        edges = list(range(0, q.shape[0] + 1, how.max_len)) if alike and how.max_len else starts.tolist()
        for begin, end in zip(edges[:-1], edges[1:], strict=True):
            if begin == end:
                continue
            some, length = slice(begin, end), end - begin
            if fused:
                alone = (x[None, some] for x in (queries, keys, values))
                out[some] = _fused(*alone, causal=how.causal, scale=how.scale)[0]
                continue
            attend = partial(attend_in_tiles, tile=_ENCODER_TILE) if how.batch_invariant else _attend
            attend(
                queries[some],
                keys[some].transpose(0, 1),
                values[some].transpose(0, 1),
                first=0,
                visible_end=np.arange(1, length + 1) if how.causal else np.full(length, length),
                window=how.window,
                scale=how.scale,
                out=out[some],
            )
        return out

    def _compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype == torch.bfloat16 and self._native_bfloat16:
            return dtype
        return torch.float32 if dtype.itemsize < 4 else dtype

    def _rows_apart(
        self, q: Tensor, new: Pool, pool: Pool, plan: AttentionPlan, *, scale: float, window: int, out: Tensor
    ) -> None:
        dtype = q.dtype if plan.batch_invariant else self._compute_dtype(q.dtype)
        # Tiles are laid from position 0 on, so there a window gathers nothing less.
        for row in _rows(plan, kv_heads=pool[0].shape[1], window=0 if plan.batch_invariant else window):
            some = slice(row.begin, row.end)
            keys, values = (
                _row_kv(row, cache, x, write=plan.write).to(dtype) for cache, x in zip(pool, new, strict=True)
            )
            attend = attend_in_tiles if plan.batch_invariant else _attend
            attend(
                q[some],
                keys,
                values,
                first=row.context - row.first_key,
                visible_end=plan.host.visible_end[some] - row.first_key,
                window=window,
                scale=scale,
                out=out[some],
            )

    def _decode_together(self, q: Tensor, pool: Pool, plan: AttentionPlan, *, scale: float, out: Tensor) -> None:
        """One product for the whole batch, padded to its longest row."""
        keys, values = pool
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
        mixed = torch.bmm(weights.view(rows * kv_heads, heads // kv_heads, -1), gathered)
        out.view(rows * kv_heads, -1, dim).copy_(mixed)

    def _decode_rows(
        self, q: Tensor, pool: Pool, plan: AttentionPlan, *, scale: float, window: int, out: Tensor
    ) -> None:
        """Row after row, so that a row's keys stay in cache between gathering and use."""
        keys, values = pool
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


def write_kv(plan: AttentionPlan, *, k: Tensor, v: Tensor, pool: Pool) -> None:
    """Put each new token's K and V, (T, Hkv, D), at its slot in the pool."""
    kv_heads, dim = k.shape[1:]
    index = plan.derived.get(("slots", kv_heads))
    if index is None:
        size, slots = plan.page_size, plan.slot_mapping
        heads = torch.arange(kv_heads, device=slots.device)
        index = (((slots // size)[:, None] * kv_heads + heads) * size + (slots % size)[:, None]).view(-1)
        plan.derived["slots", kv_heads] = index
    for cache, new in zip(pool, (k, v), strict=True):
        cache.view(-1, dim).index_copy_(0, index, new.reshape(-1, dim).to(cache.dtype))


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


def _fused(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """q, k and v (B, L, H, D) -> (B, L, H, D); without holding the scores."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale).transpose(1, 2)


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
