"""Mixture-of-experts MLPs: a router, routed experts of one shape, and optionally a shared expert behind a gate.

Routed experts lie stacked in two weights. Only what is routed is computed: rows go to their experts, nothing is padded.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mstar.layers.grouped import Experts
from mstar.layers.linear import Head, Linear, MergedLinear
from mstar_plugin_qwen3_omni.config.decoder import MoEConfig


class GatedMLP(nn.Module):
    """silu(gate) * up, then down."""

    def __init__(self, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        self.gate_up = MergedLinear(hidden_size, (inner_size,) * 2)
        self.down = Linear(inner_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (T, H) -> (T, H)
        gate, up = self.gate_up.split(self.gate_up(x))
        return self.down(functional.silu(gate) * up)


class SparseMLP(nn.Module):
    """The experts that the router chose for a token, weighted by it; plus what all tokens share.

    Router and gate are heads, which are never quantised: what they choose is discrete, and they are small.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.config = config
        self.router = Head(size, config.num_experts)
        self.gate_up = Experts(size, (config.expert_size,) * 2, num_experts=config.num_experts)
        self.down = Experts(config.expert_size, (size,), num_experts=config.num_experts)
        self.shared = GatedMLP(size, config.shared_size) if config.shared_size else None
        self.shared_gate = Head(size, 1) if config.shared_size else None

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (T, H) -> weights (T, k) in x's dtype and experts (T, k) int64. Probabilities are float32."""
        probabilities = self.router(x).float().softmax(dim=-1)
        weights, chosen = probabilities.topk(self.config.num_chosen, dim=-1)
        if self.config.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), chosen

    def forward(self, x: Tensor, *, invariant: bool = False) -> Tensor:
        """x (T, H) -> (T, H). `invariant`: the bits of a row do not depend on the others."""
        weights, chosen = self.route(x)
        pairs, experts = x.repeat_interleave(self.config.num_chosen, dim=0), chosen.flatten()
        gate, up = self.gate_up.product(pairs, experts, invariant=invariant).chunk(2, dim=-1)
        found = self.down.product(functional.silu(gate) * up, experts, invariant=invariant)
        routed = (found.unflatten(0, (-1, self.config.num_chosen)) * weights[..., None]).sum(dim=1)
        if self.shared is None or self.shared_gate is None:
            return routed
        return routed + torch.sigmoid(self.shared_gate(x)) * self.shared(x)
