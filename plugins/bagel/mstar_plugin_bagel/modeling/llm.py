"""The language model: a decoder in which every token has one of two experts, and attention is over all of them.

The understanding expert has text, markers and seen patches; the generation expert has latent tokens. The tokens of an
expert are gathered once and stay together through all layers: its norms, projections and MLP run on its own rows and
no other. Only queries, keys and values go back into the order of the sequence, for attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mstar.layers.activation import activation
from mstar.layers.linear import Embedding, Head, Linear, MergedLinear
from mstar.layers.norm import RMSNorm
from mstar.layers.rotary import RotaryEmbedding, apply_rotary
from mstar_plugin_bagel.config import LanguageConfig

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""layer, q (T, H, D), k and v (T, Hkv, D) -> (T, H, D), in the order of the sequence: `ctx.kv.attend`."""


class Expert(nn.Module):
    """One expert's share of a layer: all of it but attention itself."""

    def __init__(self, config: LanguageConfig, *, wide_heads: bool) -> None:
        super().__init__()
        size, dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        self.head_dim = dim
        self.wide_heads = wide_heads
        self.attention_norm = RMSNorm(size, eps=eps)
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.qkv = MergedLinear(size, [count * dim for count in heads], bias=True)
        self.q_norm = RMSNorm(dim, eps=eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(dim, eps=eps) if config.qk_norm else nn.Identity()
        self.output = Linear(config.num_heads * dim, size, bias=False)
        self.mlp_norm = RMSNorm(size, eps=eps)
        self.gate_up = MergedLinear(size, (config.intermediate_size,) * 2)
        self.down = Linear(config.intermediate_size, size, bias=False)
        self.activation = activation(config.activation)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (N, hidden), cos and sin (N, 1, D) -> q (N, H, D), k and v (N, Hkv, D), in x's dtype.

        With `wide_heads` queries and keys are normalised and turned in float32, as the model was trained.
        """
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split(self.qkv.heads(self.head_dim), dim=1)
        if self.wide_heads:
            q, k = apply_rotary(self.q_norm(q.float()), self.k_norm(k.float()), cos, sin)
            return q.to(x.dtype), k.to(x.dtype), v
        return *apply_rotary(self.q_norm(q), self.k_norm(k), cos, sin), v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """x (N, hidden) and what its queries saw (N, H, D) -> (N, hidden), the layer's output.

        In place where that is invisible: memory for thousands of wide rows takes longer to get than to fill.
        """
        x = self.output(attended.flatten(1)).add_(x)
        gate, up = self.gate_up.split(self.gate_up(self.mlp_norm(x)))
        return self.down(self.activation(gate).mul_(up)).add_(x)


class Layer(nn.Module):
    """A layer's two experts."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.und = Expert(config, wide_heads=False)
        self.gen = Expert(config, wide_heads=True)


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of one expert: `rows` (N,) of the sequence, or None for all of them."""

    expert: str
    rows: Tensor | None

    def of(self, x: Tensor) -> Tensor:
        """Its rows of x (T, ...)."""
        return x if self.rows is None else x.index_select(0, self.rows)


@dataclass(frozen=True, slots=True)
class Routing:
    """Which tokens each expert has.

    Args:
        groups: the experts that have any.
        place: (T,), where each token of the sequence is among the groups' rows; None where there is one group.
    """

    groups: tuple[Group, ...] = (Group("und", None),)
    place: Tensor | None = None

    def restored(self, parts: Sequence[Tensor]) -> Tensor:
        """The groups' rows in the order of the sequence."""
        return parts[0] if self.place is None else torch.cat(list(parts)).index_select(0, self.place)


def route(is_gen: Tensor, *, multiple: int = 1) -> Routing:
    """By the kind of each token: is_gen (T,) bool. See `grouped`."""
    und, gen = (mask.nonzero().squeeze(1) for mask in (~is_gen, is_gen))
    return grouped(und, gen, multiple=multiple)


def grouped(und: Tensor, gen: Tensor, *, multiple: int = 1) -> Routing:
    """By the rows of each expert, int64, every row of the sequence in one of them.

    Rows are repeated until each of two groups has a multiple of `multiple`; nothing is read from such a repetition.
    """
    if not len(und) or not len(gen):
        return Routing((Group("gen" if len(gen) else "und", None),))
    place, start = und.new_empty(len(und) + len(gen)), 0
    groups = []
    for expert, rows in (("und", und), ("gen", gen)):
        place[rows] = torch.arange(start, start + len(rows), device=rows.device)
        padded = torch.cat((rows, rows[-1:].expand(-len(rows) % multiple)))
        groups.append(Group(expert, padded))
        start += len(padded)
    return Routing(tuple(groups), place)


class MoT(nn.Module):
    """The whole decoder; build it on the meta device and fill it with `weights.load_llm`."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(config.head_dim, theta=config.rope_theta, scaling=config.rope_scaling)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.ModuleDict(
            {expert: RMSNorm(config.hidden_size, eps=config.rms_norm_eps) for expert in ("und", "gen")}
        )
        self.head = Head(config.hidden_size, config.vocab_size)
        if config.tied:
            self.head.tie(self.embedding)

    def embed(self, ids: Tensor) -> Tensor:
        """(T,) int64 -> (T, hidden)."""
        return self.embedding(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, hidden) -> (B, vocab)."""
        return self.head(hidden)

    def forward(self, x: Tensor, positions: Tensor, is_gen: Tensor | Routing | None, attend: Attend) -> Tensor:
        """Hidden states after the final norm.

        Args:
            x: (T, hidden) embeddings of any number of sequences, one after the other.
            positions: (T,) int64; tokens of an image share one.
            is_gen: (T,) bool, whose expert is that of generation, or what `route` made of it; None: nobody's. Only
                in the first case do shapes inside depend on data.
            attend: which tokens see which is its business.

        Returns: (T, hidden).
        """
        routing = route(is_gen) if isinstance(is_gen, Tensor) else is_gen or Routing()
        cos, sin = (part.to(x.dtype) for part in self.rotary(positions))
        turns = [(group.of(cos), group.of(sin)) for group in routing.groups]
        hidden = [group.of(x) for group in routing.groups]
        for number, layer in enumerate(self.layers):
            experts: list[Expert] = [getattr(layer, group.expert) for group in routing.groups]
            projected = [expert.project(rows, *turn) for expert, rows, turn in zip(experts, hidden, turns, strict=True)]
            q, k, v = (routing.restored(heads) for heads in zip(*projected, strict=True))
            seen = attend(number, q, k, v)
            steps = zip(experts, hidden, routing.groups, strict=True)
            hidden = [expert.finish(rows, group.of(seen)) for expert, rows, group in steps]
        return routing.restored(
            [self.norm[group.expert](rows) for group, rows in zip(routing.groups, hidden, strict=True)]
        )
