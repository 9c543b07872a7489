"""The code predictor: a small decoder that draws a frame's further codes, each from those before it.

A frame is a sequence of its own, over a dense cache: the talker's hidden state, the first code, the second...
B: rows, n: tokens of a row in this call, P: codes of a frame, which is how many tokens its sequence has.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mstar.layers.decoder import DecoderConfig, DecoderLayer
from mstar.layers.grouped import Experts
from mstar.layers.norm import RMSNorm
from mstar.layers.rotary import RotaryEmbedding
from mstar_plugin_qwen3_omni.config.speech import PredictorConfig


class FrameCache:
    """Keys and values of frames, in rows of a pool that is read at once and written at once, by `store`.

    Args:
        pool: (R, layers, 2, P, Hkv, D).
        rows: (B,) int64.
        places: (B, n) int64, where this call's tokens are in their frames, one behind the other.
    """

    def __init__(self, pool: Tensor, rows: Tensor, places: Tensor) -> None:
        self.pool, self.rows, self.places = pool, rows, places
        self.kept = pool[rows]
        self.new: list[Tensor] = []
        every = torch.arange(pool.shape[3], device=pool.device)
        offset = every - places[:, :1]  # (B, P) from the first of this call's tokens
        self.is_new = ((offset >= 0) & (offset < places.shape[1]))[:, None, :, None, None]
        self.which = offset.clamp(0, places.shape[1] - 1)
        self.is_later = (every > places[..., None])[:, :, None, None]  # (B, n, 1, 1, P)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B n, H, D), k and v (B n, Hkv, D) -> (B n, H, D): each token sees its frame up to itself."""
        new = torch.stack((k, v), dim=1).unflatten(0, self.places.shape)  # (B, n, 2, Hkv, D)
        self.new.append(new)
        each = torch.arange(new.shape[0], device=q.device)[:, None]
        placed = new[each, self.which].transpose(1, 2)  # (B, 2, P, Hkv, D)
        keys, values = placed.where(self.is_new, self.kept[:, layer].to(q.dtype)).unbind(1)
        keys, values = (x.transpose(1, 2)[:, None, :, None] for x in (keys, values))  # (B, 1, Hkv, 1, P, D)
        queries = q.unflatten(0, self.places.shape).unflatten(2, (k.shape[1], -1))  # (B, n, Hkv, G, D)
        scores = (queries[..., None, :] * keys).sum(-1).float() * q.shape[-1] ** -0.5
        weights = scores.masked_fill(self.is_later, float("-inf")).softmax(-1).to(q.dtype)
        return (weights[..., None] * values).sum(-2).reshape(q.shape)

    def store(self) -> None:
        """Keep what all layers added."""
        new = torch.stack(self.new, dim=2)  # (B, n, layers, 2, Hkv, D)
        self.pool[self.rows[:, None], :, :, self.places] = new.to(self.pool.dtype)


class Predictor(nn.Module):
    """Layers, and of each code but the first an embedding and a head; number 0 are those of the second code."""

    def __init__(self, config: PredictorConfig) -> None:
        super().__init__()
        self.config = config
        count, size, vocab = config.num_groups - 1, config.hidden_size, config.vocab_size
        shape = DecoderConfig(
            hidden_size=size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=vocab,
            rms_norm_eps=config.rms_norm_eps,
            attention_bias=config.attention_bias,
            qk_norm=True,
        )
        self.rotary = RotaryEmbedding(config.head_dim, theta=config.rope_theta)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(config.num_layers))
        self.norm = RMSNorm(size, eps=config.rms_norm_eps)
        self.embeddings = Experts(size, (vocab,), num_experts=count)
        self.heads = Experts(size, (vocab,), num_experts=count)

    def embed(self, codes: Tensor, *, number: Tensor) -> Tensor:
        """(B,) codes, each by the embedding of its number (B,) -> (B, H)."""
        return functional.embedding(codes + number * self.config.vocab_size, self.embeddings.weight)

    def forward(self, x: Tensor, cache: FrameCache) -> Tensor:
        """x (B, n, H) -> (B, H) after the final norm, of each row's last token."""
        cos, sin = (part.to(x.dtype) for part in self.rotary(cache.places.flatten()))
        hidden = x.flatten(0, 1)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, cos, sin, cache, number)
        cache.store()
        return self.norm(hidden.unflatten(0, x.shape[:2])[:, -1])

    def logits(self, hidden: Tensor, *, number: Tensor, invariant: bool = False) -> Tensor:
        """(B, H), each by the head of its number (B,) -> (B, vocab)."""
        return self.heads.product(hidden, number, invariant=invariant)
