"""Attention of encoders: within stretches of packed tokens, in both directions, without a cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def within(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """q, k, v (T, heads, D) -> what each query sees of its own stretch, (T, heads * D).

    Args:
        lengths: of the stretches, in order; together T. Neighbours of one length are computed as one batch.
    """
    packed, seen, start = torch.stack((q, k, v)).transpose(1, 2), [], 0  # (3, heads, T, D)
    for length, count in ((length, len(list(run))) for length, run in itertools.groupby(lengths)):
        stretches = packed[:, :, start : start + count * length].unflatten(2, (count, length)).transpose(1, 2)
        seen.append(functional.scaled_dot_product_attention(*stretches).transpose(1, 2).flatten(0, 1))
        start += count * length
    return torch.cat(seen).flatten(1)
