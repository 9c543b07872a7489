"""Attention in plain torch: where another backend has no kernel, on any device.

A step is cut into blocks of queries, each two batched products with the keys and values gathered for it, in float32 or
wider. No row's result depends on a slot it does not own, not even behind a mask: a neighbour's NaN must stay its own.

Batch invariance: a product of a multiple of 16 rows that sums few numbers gives a row the same bits in any place and
company. So queries are padded to such a multiple, and values are summed 128 keys at a time, in order of the keys; what
a query does not see adds exact zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mstar.layers.attention.plan import AttentionPlan, Pool, Varlen

_BLOCK = 128  # queries whose scores are held at once
_TOGETHER = 1 << 17  # elements of K up to which a decode batch is one block: launches cost more than padding
_INVARIANT_ROWS, _INVARIANT_KEYS = 16, 128


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries computed together: some of one row's, or the only ones of R rows.

    Args:
        queries: tokens, equally many of each row.
        num_rows: R.
        pages: (Hkv * R, P) int64, in the pool seen as (num_pages * Hkv, page_size * D).
        cached: keys of each row that are read from the pages.
        uncached: new tokens, not in the cache, that follow them.
        num_keys: S, those and padding.
        hidden: (R, queries per row, S) bool, the keys each query does not see; None: it sees all.
    """

    queries: slice
    num_rows: int
    pages: Tensor
    cached: int
    uncached: slice | None
    num_keys: int
    hidden: Tensor | None


class PlainBackend:
    """Runs on any device; planning reads the host twins only."""

    name = "plain"

    def require(self, *, head_dim: int, dtype: torch.dtype) -> None:
        """Every head dimension and floating dtype works."""

    def paged(
        self, q: Tensor, k: Tensor, v: Tensor, pool: Pool, plan: AttentionPlan, *, scale: float, window: int
    ) -> Tensor:
        if plan.write:
            write_kv(plan, k=k, v=v, pool=pool)
        (num, heads, dim), kv_heads = q.shape, k.shape[1]
        group, invariant = heads // kv_heads, plan.batch_invariant
        # The group of query heads that share a KV head is folded into the queries.
        scaled = (q.to(_wide(q.dtype)) * scale).view(num, kv_heads, group, dim)
        folded = scaled.transpose(0, 1).reshape(kv_heads, num * group, dim)
        results = torch.empty_like(folded)
        for block in _blocks(plan, kv_heads=kv_heads, dim=dim, window=window):
            some = slice(block.queries.start * group, block.queries.stop * group)
            queries = folded[:, some].reshape(kv_heads * block.num_rows, -1, dim)
            keys = _gather(block, pool[0], k, dtype=folded.dtype)
            weights = _weigh(queries, keys, hidden=block.hidden, group=group, invariant=invariant)
            values = _gather(block, pool[1], v, dtype=folded.dtype)
            if block.num_rows > 1 and block.hidden is not None:  # what follows the end of a row is not its own
                values.view(kv_heads, block.num_rows, -1, dim).masked_fill_(block.hidden.transpose(1, 2), 0)
            mixed = _mix(weights, values, invariant=invariant)
            results[:, some] = mixed[:, : queries.shape[1]].reshape(kv_heads, -1, dim)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        out.view(scaled.shape).copy_(results.view(kv_heads, num, group, dim).transpose(0, 1))
        return out

    def varlen(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *, how: Varlen) -> Tensor:
        if q.shape[0] == 0:
            return torch.empty_like(q)
        num_sequences = len(starts) - 1
        if q.shape[0] == how.max_len * num_sequences:  # no need to wait for `starts` to arrive from a device
            lens = [how.max_len] * num_sequences
            sizes = lens if how.batch_invariant else [q.shape[0]]
        else:
            lens = sizes = [length for length in starts.diff().tolist() if length]
        native = q.is_cuda or (q.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
        dtype = q.dtype if native and not how.batch_invariant else _wide(q.dtype)
        parts = zip(*(x.to(dtype).split(sizes) for x in (q, k, v)), lens, strict=False)
        return torch.cat([_attend_whole(*part, length=length, how=how) for *part, length in parts]).to(q.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype


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


def _blocks(plan: AttentionPlan, *, kv_heads: int, dim: int, window: int) -> list[_Block]:
    """The blocks of a step, the same for all layers of one shape."""
    key = ("blocks", kv_heads, dim, window)
    blocks: list[_Block] | None = plan.derived.get(key)
    if blocks is None:
        heads = torch.arange(kv_heads, device=plan.page_table.device)
        pages = plan.page_table.long() * kv_heads + heads[:, None, None]  # (Hkv, B, P)
        num_rows, elements = pages.shape[1], plan.host.max_kv_len * kv_heads * dim
        if plan.decode and plan.write and num_rows > 1 and num_rows * elements <= _TOGETHER:
            keys = range(pages.shape[2] * plan.page_size)
            blocks = [_block(plan, slice(0, num_rows), pages, keys=keys, window=window)]
        else:
            blocks = [block for row in range(num_rows) for block in _blocks_of_row(plan, row, pages, window=window)]
        plan.derived[key] = blocks
    return blocks


def _blocks_of_row(plan: AttentionPlan, row: int, pages: Tensor, *, window: int) -> Iterator[_Block]:
    start, stop = plan.host.query_starts[row : row + 2].tolist()
    context = int(plan.host.context_lens[row])
    for begin in range(start, stop, _BLOCK):
        queries = slice(begin, min(begin + _BLOCK, stop))
        first, end = 0, int(plan.host.visible_end[queries].max())
        if window and plan.write and not plan.batch_invariant:
            first = max(int(plan.host.positions[begin]) - window + 1, 0) // plan.page_size * plan.page_size
        uncached = None if plan.write else slice(start, start + end - context)
        yield _block(plan, queries, pages[:, row, None], keys=range(first, end), window=window, uncached=uncached)


def _block(
    plan: AttentionPlan, queries: slice, pages: Tensor, *, keys: range, window: int, uncached: slice | None = None
) -> _Block:
    """The queries over `keys` of rows with these `pages`, the last keys being the `uncached` tokens."""
    size, host = plan.page_size, plan.host
    stored = keys.stop - (uncached.stop - uncached.start if uncached else 0)
    padding = -len(keys) % _INVARIANT_KEYS if plan.batch_invariant else 0
    columns = np.arange(keys.start, keys.stop + padding)
    hidden = columns >= host.visible_end[queries, None]
    if window:
        hidden |= columns <= host.positions[queries, None] - window
    mask = torch.from_numpy(hidden).to(pages.device).view(pages.shape[1], -1, len(columns)) if hidden.any() else None
    read = pages[:, :, keys.start // size : -(-stored // size)].flatten(0, 1).contiguous()
    return _Block(queries, pages.shape[1], read, stored - keys.start, uncached, len(columns), mask)


def _gather(block: _Block, pool: Tensor, new: Tensor, *, dtype: torch.dtype) -> Tensor:
    """The keys or values of a block, (Hkv * R, S, D)."""
    (rows, num_pages), (size, dim) = block.pages.shape, pool.shape[2:]
    pages = pool.view(-1, size * dim).index_select(0, block.pages.view(-1)).to(dtype)
    gathered = pages.view(rows, num_pages * size, dim)[:, : block.cached]
    if block.num_keys > block.cached:
        gathered = functional.pad(gathered, (0, 0, 0, block.num_keys - block.cached))
    if block.uncached is not None:
        uncached = new[block.uncached].to(pool.dtype).transpose(0, 1)
        gathered[:, block.cached : block.cached + uncached.shape[1]] = uncached
    return gathered


def _weigh(q: Tensor, keys: Tensor, *, hidden: Tensor | None, group: int, invariant: bool) -> Tensor:
    """Softmax of the scores, (Hkv * R, M, S), M being n * group and padding.

    q is (Hkv * R, n * group, D), scaled; keys are (Hkv * R, S, D); hidden is (R, n, S).
    """
    used, length = q.shape[1], keys.shape[1]
    padded = functional.pad(q, (0, 0, 0, -used % _INVARIANT_ROWS)) if invariant else q
    scores = torch.bmm(padded, keys.transpose(1, 2))
    if hidden is not None:
        own = scores[:, :used].view(-1, *hidden.shape[:2], group, length)
        own.masked_fill_(hidden[:, :, None], -torch.inf)
    return scores.softmax(-1)


def _mix(weights: Tensor, values: Tensor, *, invariant: bool) -> Tensor:
    """weights (N, M, S) by values (N, S, D)."""
    if not invariant:
        return torch.bmm(weights, values)
    mixed = values.new_zeros(*weights.shape[:2], values.shape[2])
    for begin in range(0, values.shape[1], _INVARIANT_KEYS):
        some = slice(begin, begin + _INVARIANT_KEYS)
        mixed.baddbmm_(weights[:, :, some], values[:, some])
    return mixed


def _attend_whole(q: Tensor, k: Tensor, v: Tensor, *, length: int, how: Varlen) -> Tensor:
    """Attention within sequences of one length, (B * length, H, D), without holding the scores."""
    # Copied: a sequence lies in memory alike in every batch.
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2).contiguous() for x in (q, k, v))
    seen = None
    if how.window:
        places = torch.arange(length, device=q.device)
        seen = places > places[:, None] - how.window
        seen = seen.tril() if how.causal else seen
    causal = how.causal and seen is None
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, is_causal=causal, scale=how.scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2).flatten(0, 1)
