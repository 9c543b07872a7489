"""The code predictor: a small decoder that draws a frame's further codes, each from those before it.

A frame is a sequence of its own, over a dense cache: the talker's hidden state, the first code, the second...
B: rows, n: tokens of a row in this call, P: codes of a frame, which is how many tokens its sequence has.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mstar.layers.decoder import DecoderConfig, DecoderLayer
from mstar.layers.norm import RMSNorm
from mstar.layers.rotary import RotaryEmbedding
from mstar_plugin_qwen3_omni.config.speech import PredictorConfig
from mstar_plugin_qwen3_omni.modeling.moe import Experts


class FrameCache:
    """Keys and values of frames, in rows of a pool.

    Args:
        pool: (R, layers, 2, P, Hkv, D).
        rows: (B,) int64.
        places: (B, n) int64, where this call's tokens are in their frames.
    """

    def __init__(self, pool: Tensor, rows: Tensor, places: Tensor) -> None:
        self.pool, self.rows, self.places = pool, rows, places

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B n, H, D), k and v (B n, Hkv, D) -> (B n, H, D): each token sees its frame up to itself."""
        at = self.rows[:, None].expand_as(self.places)
        for part, new in enumerate((k, v)):
            self.pool[at, layer, part, self.places] = new.unflatten(0, self.places.shape).to(self.pool.dtype)
        keys, values = self.pool[self.rows, layer].to(q.dtype).unbind(1)  # (B, P, Hkv, D)
        queries = q.unflatten(0, self.places.shape).unflatten(2, (k.shape[1], -1))  # (B, n, Hkv, G, D)
        keys, values = (x.transpose(1, 2)[:, None, :, None] for x in (keys, values))  # (B, 1, Hkv, 1, P, D)
        scores = (queries[..., None, :] * keys).sum(-1) * q.shape[-1] ** -0.5
        hidden = torch.arange(keys.shape[4], device=q.device) > self.places[..., None]
        weights = scores.masked_fill(hidden[:, :, None, None], float("-inf")).float().softmax(-1).to(q.dtype)
        return (weights[..., None] * values).sum(-2).reshape(q.shape)


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
        return self.norm(hidden.unflatten(0, x.shape[:2])[:, -1])

    def logits(self, hidden: Tensor, *, number: Tensor, invariant: bool = False) -> Tensor:
        """(B, H), each by the head of its number (B,) -> (B, vocab)."""
        return self.heads.product(hidden, number, invariant=invariant)
