"""A small pre-norm transformer over paged KV: rotary positions, grouped-query attention, gated MLP.

Knows nothing of tokens: it maps embeddings to hidden states. T: tokens of the whole batch, H: hidden size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from mstar_plugin_echo.config import EchoConfig


class PagedKV(Protocol):
    """What a layer needs of the batch's KV: write the new keys and values if the method writes, then attend."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Norm(nn.Module):
    """Root-mean-square norm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def rotate(x: Tensor, positions: Tensor, *, theta: float) -> Tensor:
    """Turn the two halves of each head (T, heads, dim) by angles that grow with the position (T,)."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions.float()[:, None, None] * frequencies  # (T, 1, half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Layer(nn.Module):
    """Attention, then MLP, each added to its input."""

    def __init__(self, config: EchoConfig, *, index: int) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.index, self.head_dim, self.theta = index, dim, config.rope_theta
        self.input_norm, self.mlp_norm = Norm(hidden), Norm(hidden)
        self.q = nn.Linear(hidden, config.num_heads * dim, bias=False)
        self.k = nn.Linear(hidden, config.num_kv_heads * dim, bias=False)
        self.v = nn.Linear(hidden, config.num_kv_heads * dim, bias=False)
        self.out = nn.Linear(config.num_heads * dim, hidden, bias=False)
        self.gate = nn.Linear(hidden, config.intermediate_size, bias=False)
        self.up = nn.Linear(hidden, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, hidden, bias=False)

    def forward(self, x: Tensor, *, positions: Tensor, kv: PagedKV) -> Tensor:  # (T, H) -> (T, H)
        y: Tensor = self.input_norm(x)
        q, k, v = (project(y).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        q, k = (rotate(part, positions, theta=self.theta) for part in (q, k))
        x = x + self.out(kv.attend(self.index, q, k, v).flatten(1))
        y = self.mlp_norm(x)
        y = self.down(functional.silu(self.gate(y)) * self.up(y))
        return x + y


class Decoder(nn.Module):
    """The stack of layers and its last norm."""

    def __init__(self, config: EchoConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, index=index) for index in range(config.num_layers))
        self.norm = Norm(config.hidden_size)

    def forward(self, x: Tensor, *, positions: Tensor, kv: PagedKV) -> Tensor:  # (T, H) -> (T, H)
        for layer in self.layers:
            x = layer(x, positions=positions, kv=kv)
        normed: Tensor = self.norm(x)
        return normed
