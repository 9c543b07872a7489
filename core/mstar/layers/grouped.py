"""Products whose rows have one of several weights each: routed experts, heads by step. Knows tensors, not requests."""

from __future__ import annotations

import torch
from torch import Tensor

from mstar.layers.linear import invariant_linear, linear


def grouped_linear(x: Tensor, weight: Tensor, group: Tensor, *, invariant: bool = False) -> Tensor:
    """x (P, K), row p by weight (G, N, K)[group[p]]^T -> (P, N).

    Args:
        group: (P,) int64.
        invariant: the bits of a row do not depend on the others.
    """
    product = invariant_linear if invariant else linear
    order = group.argsort(stable=True)
    counts = torch.bincount(group, minlength=len(weight)).tolist()
    parts = [product(rows, weight[i]) for i, rows in enumerate(x[order].split(counts)) if len(rows)]
    out = x.new_empty(len(x), weight.shape[1])
    return out.index_copy(0, order, torch.cat(parts)) if parts else out
