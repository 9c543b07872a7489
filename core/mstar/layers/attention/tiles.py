"""Attention whose bits do not depend on the batch: the arithmetic of a query is fixed by its own position.

Every row is cut at absolute positions into tiles of queries by 128 keys, padded, and computed in float32 with
online softmax in order of the keys. A query thus always sits at the same row of the same shapes, whatever its batch
mates, the chunking of its prefill, its row or its pages; what it does not see adds exact zeros. Runs on any device.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

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
    tile: int = 16,
) -> None:
    """Attention of one row's queries, written to `out`.

    Args:
        q: (n, H, D), n > 0.
        keys, values: (Hkv, S, D), the row's whole KV from its position 0.
        first: position of q[0].
        visible_end: (n,) exclusive end of what each query sees.
        window: keys at or before position - window are hidden; 0: none.
        out: (n, H, D).
        tile: queries computed together; part of what fixes the bits.
    """
    num, heads, dim = q.shape
    kv_heads, length, _ = keys.shape
    group = heads // kv_heads
    keys, values = _in_tiles(keys, length), _in_tiles(values, length)
    offset = first % tile
    padded = -(-(offset + num) // tile) * tile
    folded = q.new_zeros((padded, heads, dim), dtype=torch.float32)
    folded[offset : offset + num] = q
    folded *= scale
    # (tiles, Hkv, tile * group, D): the group is folded into the queries
    folded = folded.view(-1, tile, kv_heads, group, dim).transpose(1, 2).reshape(-1, kv_heads, tile * group, dim)
    ends = np.zeros(padded, dtype=np.int64)
    ends[offset : offset + num] = visible_end
    begins = np.maximum(np.arange(first - offset, first - offset + padded) - window + 1, 0) if window else ends * 0
    results = []
    for number in range(len(folded)):
        rows = slice(number * tile, (number + 1) * tile)
        results.append(_query_tile(folded[number], keys, values, ends=ends[rows], begins=begins[rows]))
    whole = torch.stack(results).view(-1, kv_heads, tile, group, dim).transpose(1, 2).reshape(padded, heads, dim)
    out.copy_(whole[offset : offset + num])


def _in_tiles(tensor: Tensor, length: int) -> Tensor:
    """(Hkv, S, D) -> float32 (tiles, Hkv, 128, D), zero beyond S."""
    padded = functional.pad(tensor.float(), (0, 0, 0, -length % _KEYS)).contiguous()
    return padded.view(tensor.shape[0], -1, _KEYS, tensor.shape[2]).transpose(0, 1).contiguous()


def _query_tile(
    q: Tensor, keys: Tensor, values: Tensor, *, ends: NDArray[np.int64], begins: NDArray[np.int64]
) -> Tensor:
    """q (Hkv, tile * group, D), keys and values in tiles -> (Hkv, tile * group, D); query i sees [begins, ends)."""
    kv_heads, rows, dim = q.shape
    best = q.new_full((kv_heads, rows, 1), _FLOOR)
    total = q.new_zeros((kv_heads, rows, 1))
    result = q.new_zeros((kv_heads, rows, dim))
    low = int(begins[ends > 0].min())
    for number in range(low // _KEYS, -(-int(ends.max()) // _KEYS)):
        scores = torch.bmm(q, keys[number].transpose(1, 2))
        columns = np.arange(number * _KEYS, (number + 1) * _KEYS)
        hidden = (columns >= ends[:, None]) | (columns < begins[:, None])
        mask = torch.from_numpy(hidden).to(q.device)[None, :, None]
        scores.view(kv_heads, len(ends), -1, _KEYS).masked_fill_(mask, -torch.inf)
        new_best = torch.maximum(best, scores.amax(-1, keepdim=True))
        weights = scores.sub_(new_best).exp_()
        decay = best.sub_(new_best).exp_()
        total = total.mul_(decay).add_(weights.sum(-1, keepdim=True))
        result = result.mul_(decay).add_(torch.bmm(weights, values[number]))
        best = new_best
    return result.div_(total)
