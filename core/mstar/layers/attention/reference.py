"""The plain attention that the others are compared with: one query at a time, in float32. Slow on purpose."""

from __future__ import annotations

import torch
from torch import Tensor

from mstar.layers.attention.plan import AttentionPlan, Pool, Varlen


class ReferenceBackend:
    """Obviously right; for tests and for doubts (`name="reference"`)."""

    name = "reference"

    def require(self, *, head_dim: int, dtype: torch.dtype) -> None:
        """Every head dimension and floating dtype works."""

    def paged(
        self, q: Tensor, k: Tensor, v: Tensor, pool: Pool, plan: AttentionPlan, *, scale: float, window: int
    ) -> Tensor:
        keys, values = pool
        size = plan.page_size
        if plan.write:
            for token, slot in enumerate(plan.slot_mapping.tolist()):
                keys[slot // size, :, slot % size] = k[token].to(keys.dtype)
                values[slot // size, :, slot % size] = v[token].to(values.dtype)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        starts, visible_end = plan.query_starts.tolist(), plan.visible_end.tolist()
        for row, context in enumerate(plan.context_lens.tolist()):
            begin, end = starts[row], starts[row + 1]
            if begin == end:
                continue
            pages = plan.page_table[row].tolist()
            cached = range(context)
            row_keys = [keys[pages[j // size], :, j % size] for j in cached] + list(k[begin:end].to(keys.dtype))
            row_values = [values[pages[j // size], :, j % size] for j in cached] + list(v[begin:end].to(values.dtype))
            all_keys, all_values = torch.stack(row_keys), torch.stack(row_values)
            for token in range(begin, end):
                position = context + token - begin
                first = max(position - window + 1, 0) if window else 0
                seen = slice(first, visible_end[token])
                out[token] = _one_query(q[token], all_keys[seen], all_values[seen], scale=scale)
        return out

    def varlen(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *, how: Varlen) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        edges = starts.tolist()
        for begin, end in zip(edges[:-1], edges[1:], strict=True):
            for token in range(begin, end):
                first = max(token - how.window + 1, begin) if how.window else begin
                seen = slice(first, token + 1 if how.causal else end)
                out[token] = _one_query(q[token], k[seen], v[seen], scale=how.scale)
        return out


def _one_query(q: Tensor, keys: Tensor, values: Tensor, *, scale: float) -> Tensor:
    """q (H, D), keys and values (S, Hkv, D) -> (H, D); query head h reads KV head h // (H / Hkv)."""
    group = q.shape[0] // keys.shape[1]
    keys = keys.float().repeat_interleave(group, dim=1)
    values = values.float().repeat_interleave(group, dim=1)
    scores = (q.float() * keys).sum(-1) * scale  # (S, H)
    return (scores.softmax(0)[:, :, None] * values).sum(0).to(q.dtype)
