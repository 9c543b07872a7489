"""Normalisation layers. Shared by plugins; knows nothing of models or batching."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LayerNorm = nn.LayerNorm


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; the statistics are float32, the result has x's dtype.

    The normalised value is rounded to x's dtype before the weight multiplies it, as published checkpoints expect.
    """

    def __init__(self, dim: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:  # (..., dim)
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)
