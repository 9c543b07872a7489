"""Attention whose bits do not depend on the batch: the arithmetic of a query is fixed by its own position.

Every row is cut at absolute positions into tiles of 16 queries by 128 keys, padded, and computed in float32 with
online softmax in order of the keys. A query thus always sits at the same row of the same shapes, whatever its batch
mates, the chunking of its prefill, its row or its pages; what it does not see adds exact zeros. Runs on any device.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

_QUERIES = 16
_KEYS = 128
_FLOOR = torch.finfo(torch.float32).min  # finite, so that a row which has seen nothing yet gives no nan


def attend_in_tiles(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    first: int,
    visible_end: NDArray[np.integer],
    window: int,
    scale: float,
    out: Tensor,
) -> None:
    """Attention of one row's queries, written to `out`.

    Args:
        q: (n, H, D), n > 0.
        keys, values: (Hkv, S, D), the row's whole KV from its position 0.
        first: position of q[0].
        visible_end: (n,) exclusive end of what each query sees.
        window: keys at or before position - window are hidden; 0: none.
        out: (n, H, D).
    """
    num, heads, dim = q.shape
    kv_heads, length, _ = keys.shape
    group = heads // kv_heads
    keys, values = _in_tiles(keys, length), _in_tiles(values, length)
    first_tile, last_tile = first // _QUERIES, (first + num - 1) // _QUERIES
    padded = (last_tile - first_tile + 1) * _QUERIES
    skip = first - first_tile * _QUERIES
    folded = q.new_zeros((padded, heads, dim), dtype=torch.float32)
    folded[skip : skip + num] = q
    folded *= scale
    # (tiles, Hkv, 16 * group, D): the group is folded into the queries
    folded = folded.view(-1, _QUERIES, kv_heads, group, dim).transpose(1, 2).reshape(-1, kv_heads, _QUERIES * group, dim)
    ends = np.zeros(padded, dtype=np.int64)
    ends[skip : skip + num] = visible_end
    begins = np.maximum(np.arange(first_tile * _QUERIES, (last_tile + 1) * _QUERIES) - window + 1, 0) if window else None
    results = []
    for tile in range(len(folded)):
        rows = slice(tile * _QUERIES, (tile + 1) * _QUERIES)
        results.append(
            _query_tile(folded[tile], keys, values, ends=ends[rows], begins=None if begins is None else begins[rows])
        )
    whole = torch.stack(results).view(-1, kv_heads, _QUERIES, group, dim).transpose(1, 2).reshape(padded, heads, dim)
    out.copy_(whole[skip : skip + num])


def _in_tiles(tensor: Tensor, length: int) -> Tensor:
    """(Hkv, S, D) -> float32 (tiles, Hkv, 128, D), zero beyond S."""
    padded = functional.pad(tensor.float(), (0, 0, 0, -length % _KEYS)).contiguous()
    return padded.view(tensor.shape[0], -1, _KEYS, tensor.shape[2]).transpose(0, 1).contiguous()


def _query_tile(
    q: Tensor, keys: Tensor, values: Tensor, *, ends: NDArray[np.int64], begins: NDArray[np.int64] | None
) -> Tensor:
    """q (Hkv, 16 * group, D), keys and values in tiles -> (Hkv, 16 * group, D)."""
    kv_heads, rows, dim = q.shape
    group = rows // _QUERIES
    real = ends > 0
    low = 0 if begins is None else int(begins[real].min())
    best = q.new_full((kv_heads, rows, 1), _FLOOR)
    total = q.new_zeros((kv_heads, rows, 1))
    result = q.new_zeros((kv_heads, rows, dim))
    for tile in range(low // _KEYS, -(-int(ends.max()) // _KEYS)):
        scores = torch.bmm(q, keys[tile].transpose(1, 2))
        column = np.arange(tile * _KEYS, (tile + 1) * _KEYS)
        hidden = column[None] >= ends[:, None]
        if begins is not None:
            hidden |= column[None] < begins[:, None]
        if hidden.any():
            mask = torch.from_numpy(hidden).to(q.device)[None, :, None]
            scores.view(kv_heads, _QUERIES, group, _KEYS).masked_fill_(mask, -torch.inf)
        new_best = torch.maximum(best, scores.amax(-1, keepdim=True))
        weights = scores.sub_(new_best).exp_()
        decay = best.sub_(new_best).exp_()
        total = total.mul_(decay).add_(weights.sum(-1, keepdim=True))
        result = result.mul_(decay).add_(torch.bmm(weights, values[tile]))
        best = new_best
    return result.div_(total)
