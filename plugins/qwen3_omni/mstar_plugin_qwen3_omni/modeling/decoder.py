"""The decoder of thinker and talker: qk-norm, grouped-query attention, interleaved M-RoPE, dense or sparse MLPs.

M-RoPE is Qwen2-VL's (arXiv:2409.12191); what is added after the first layers is deepstack (arXiv:2406.04334).

Over (T, H) tokens of any number of sequences: which tokens see which is the business of `attend`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from mstar.layers.linear import Linear, MergedLinear
from mstar.layers.norm import RMSNorm
from mstar.layers.rotary import inverse_frequencies, rotate
from mstar_plugin_qwen3_omni.config.decoder import DecoderConfig
from mstar_plugin_qwen3_omni.modeling.moe import GatedMLP, SparseMLP

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""layer, q (T, H, D), k and v (T, Hkv, D) -> (T, H, D): `ctx.kv.attend`."""


class MultimodalRotary(nn.Module):
    """cos and sin of positions with one axis (text) or three (time, height, width), interleaved by frequency."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.frequencies: Tensor
        self.register_buffer("frequencies", torch.empty(0), persistent=False)
        self.axes: Tensor
        self.register_buffer("axes", torch.empty(0), persistent=False)
        self.reset_buffers()

    def reset_buffers(self, device: torch.device | str | None = None) -> None:
        """Frequencies (D / 2,) float32, always, and which axis turns each."""
        device = device or self.frequencies.device
        self.frequencies = inverse_frequencies(self.config.head_dim, theta=self.config.rope_theta).to(device)
        index = torch.arange(len(self.frequencies), device="cpu")
        _, height, width = self.config.sections
        axes = (index % 3 == 1) & (index < 3 * height), (index % 3 == 2) & (index < 3 * width)
        self.axes = (axes[0] * 1 + axes[1] * 2).to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MultimodalRotary:
        super()._apply(fn, recurse)  # casting and `to_empty` would round or lose them
        self.reset_buffers()
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(T,) or (T, 3) positions, integer or float -> cos and sin, (T, 1, D) float32, to broadcast over heads."""
        at = positions.float()
        at = at[:, None] if at.dim() == 1 else at.index_select(1, self.axes)
        angles = at * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos(), angles.sin()


class DecoderLayer(nn.Module):
    """Attention and MLP, each added to its input."""

    def __init__(self, config: DecoderConfig, *, layer: int) -> None:
        super().__init__()
        size, dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        self.layer = layer
        self.head_dim = dim
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.attention_norm = RMSNorm(size, eps=eps)
        self.qkv = MergedLinear(size, [count * dim for count in heads], bias=config.attention_bias)
        self.q_norm = RMSNorm(dim, eps=eps)
        self.k_norm = RMSNorm(dim, eps=eps)
        self.output = Linear(config.num_heads * dim, size, bias=config.attention_bias)
        self.mlp_norm = RMSNorm(size, eps=eps)
        self.mlp: SparseMLP | GatedMLP
        if config.moe is not None and config.is_sparse(layer):
            self.mlp = SparseMLP(config.moe)
        else:
            self.mlp = GatedMLP(size, config.intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, *, invariant: bool) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split(self.qkv.heads(self.head_dim), dim=1)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        x = x + self.output(attend(self.layer, q, k, v).flatten(1))
        inner = self.mlp_norm(x)
        return x + (self.mlp(inner, invariant=invariant) if isinstance(self.mlp, SparseMLP) else self.mlp(inner))


class Decoder(nn.Module):
    """Layers and final norm; embeddings and heads are its owners'."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.rotary = MultimodalRotary(config)
        self.layers = nn.ModuleList(DecoderLayer(config, layer=layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        deepstack: Sequence[Callable[[Tensor], Tensor]] = (),
        tap: int | None = None,
        invariant: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states after the final norm.

        Args:
            x: (T, H) embeddings of any number of sequences, one after the other.
            positions: (T,) or (T, 3); text has the same on all axes.
            deepstack: what to do to the hidden states (T, H) after the first layers, one for each.
            tap: hidden states that enter this layer are wanted too (0: x itself).
            invariant: give a row the same bits in any batch.

        Returns: (T, H), and the tap (T, H) or None.
        """
        cos, sin = (part.to(x.dtype) for part in self.rotary(positions))
        tapped = x if tap == 0 else None
        for number, layer in enumerate(self.layers):
            x = layer(x, cos, sin, attend, invariant=invariant)
            if number < len(deepstack):
                x = deepstack[number](x)
            if tap == number + 1:
                tapped = x
        return self.norm(x), tapped


def tensor_parallel(config: DecoderConfig, *, to: str) -> dict[str, str]:
    """How a `Decoder` is split among ranks, for `Node.tensor_parallel`; `to`: where it sits, with a dot at the end.

    Routed experts are shared out, the shared expert is cut; a sparse MLP adds up both at once.
    """
    layer = re.escape(to) + r"layers\.\d+\."
    kinds = {layer + "qkv": "heads", layer + "output": "row"}
    sparse = {"": "sum", ".gate_up": "experts", ".down": "experts"}
    if config.moe is not None and config.moe.shared_size:
        sparse |= {".shared.gate_up": "column", ".shared.down": "partial"}
    for number in range(config.num_layers):
        parts = sparse if config.is_sparse(number) else {".gate_up": "column", ".down": "row"}
        kinds |= {re.escape(f"{to}layers.{number}.mlp{part}"): kind for part, kind in parts.items()}
    return kinds
