"""The transformer block that the encoder and both predictors share, and its rotary positions in three dimensions.

Of a head's dimensions the first third turns with depth, the next with height, the next with width; what is left over
does not turn. Angles are tiled over a third while the pairs that turn are adjacent: so were the checkpoints trained.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from mstar.layers.activation import activation
from mstar.layers.linear import Linear, MergedLinear
from mstar.layers.norm import LayerNorm
from mstar_plugin_vjepa2.config import BlocksConfig

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v (..., heads, head_dim) -> the same shape: attention over whatever tokens the caller lets them see."""


def full_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """(B, N, heads, head_dim) each: every token sees every token of its row, or those that mask (N, N) says."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def normalized(latents: Tensor) -> Tensor:
    """(..., D) -> each token with mean 0 and variance 1, as single frames are encoded and predictions fed back."""
    return functional.layer_norm(latents, latents.shape[-1:])


# ---- positions ------------------------------------------------------------------------------------------


def place(ids: Tensor, *, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Depth, row and column of tokens, numbered row by row and frame by frame on a grid."""
    within = ids % (height * width)
    return ids // (height * width), within // width, within % width


def rotary(depth: Tensor, row: Tensor | None, column: Tensor | None, *, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions (...): (..., head_dim) float32; None does not turn."""
    third = 2 * (head_dim // 3 // 2)
    exponents = torch.arange(third // 2, dtype=torch.float32, device=depth.device) / (third / 2)
    frequencies = 1.0 / 10000.0**exponents
    still = depth.new_zeros((*depth.shape, third), dtype=torch.float32)
    angles = [
        still if place is None else place.float()[..., None] * frequencies.repeat(2) for place in (depth, row, column)
    ]
    rest = depth.new_zeros((*depth.shape, head_dim - 3 * third), dtype=torch.float32)
    turned = torch.cat((*angles, rest), dim=-1)
    return turned.cos(), turned.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the adjacent pairs (2i, 2i + 1) of x (..., D); cos and sin broadcast to it."""
    left, right = x.unflatten(-1, (-1, 2)).unbind(-1)
    return x * cos + torch.stack((-right, left), dim=-1).flatten(-2) * sin


# ---- the block ------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and an MLP, each behind its norm and added to its input."""

    def __init__(self, config: BlocksConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        self.norm1 = LayerNorm(config.dim, eps=config.eps)
        self.qkv = MergedLinear(config.dim, (config.dim,) * 3, bias=config.qkv_bias)
        self.proj = Linear(config.dim, config.dim)
        self.norm2 = LayerNorm(config.dim, eps=config.eps)
        self.fc1 = Linear(config.dim, config.mlp_dim)
        self.activation = activation(config.activation)
        self.fc2 = Linear(config.mlp_dim, config.dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """x (..., dim); cos and sin (..., 1, head_dim) in its dtype."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3 * self.heads, self.head_dim))
        turned = rotate(heads[..., : 2 * self.heads, :], cos, sin)  # queries and keys in one go
        q, k = turned[..., : self.heads, :], turned[..., self.heads :, :]
        x = x + self.proj(attend(q, k, heads[..., 2 * self.heads :, :]).flatten(-2))
        return x + self.fc2(self.activation(self.fc1(self.norm2(x))))
