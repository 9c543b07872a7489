"""Linear layers: plain, fused (one weight for several projections) and the output head.

`set_batch_invariant` makes a built model compute every row by the same kernel whatever rows stand beside it, and
`self_check` proves at start-up that this machine keeps the promise. Knows tensors, not requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from mstar.errors import ConfigError

ROWS = 16  # batch-invariant batches hold a multiple of it

Embedding = nn.Embedding


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tile: int = 0) -> Tensor:
    """x (..., K) @ weight (N, K)^T + bias -> (..., N).

    With `tile`, every call of the matrix kernel sees exactly `tile` rows, the last ones padded with zeros: the bits of
    a row then do not depend on how many others there are, on any machine.
    """
    if not tile:
        return functional.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    padded = functional.pad(flat, (0, 0, 0, -flat.shape[0] % tile))
    parts = [functional.linear(part, weight, bias) for part in padded.split(tile)]
    if not parts:
        return functional.linear(x, weight, bias)
    result = parts[0] if len(parts) == 1 else torch.cat(parts)
    return result[: flat.shape[0]].reshape(*x.shape[:-1], -1)


class Linear(nn.Linear):
    """`nn.Linear` that can be made batch-invariant."""

    tile = 0

    def forward(self, x: Tensor) -> Tensor:  # (..., K) -> (..., N)
        return linear(x, self.weight, self.bias, tile=self.tile)


class MergedLinear(Linear):
    """Several projections of one input as one matrix product; checkpoints load into slices of it.

    Args:
        out_features: widths of the projections, in order.
    """

    def __init__(self, in_features: int, out_features: Sequence[int], *, bias: bool = False) -> None:
        super().__init__(in_features, sum(out_features), bias=bias)
        self.widths = tuple(out_features)

    def bounds(self, index: int) -> tuple[int, int]:
        """Rows of the weight that belong to projection `index`."""
        start = sum(self.widths[:index])
        return start, start + self.widths[index]

    def split(self, merged: Tensor) -> tuple[Tensor, ...]:
        """Views of the projections in a result of `forward`."""
        return merged.split(self.widths, dim=-1)


class Head(nn.Module):
    """Logits over a vocabulary; `tie` shares the embedding's weight."""

    tile = 0

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def tie(self, embedding: nn.Embedding) -> None:
        self.weight = embedding.weight

    def forward(self, hidden: Tensor) -> Tensor:  # (B, hidden) -> (B, vocab)
        return linear(hidden, self.weight, tile=self.tile)
