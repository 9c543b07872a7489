"""A pre-norm decoder transformer with rotary positions, grouped-query attention and a gated MLP; shared by plugins.

Plain modules over (T, H) tokens of any number of sequences: which tokens see which is the KV batch's business.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn import functional

from mstar.errors import ConfigError
from mstar.layers.linear import Embedding, Head, Linear, MergedLinear
from mstar.layers.norm import RMSNorm
from mstar.layers.rotary import RotaryEmbedding, rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and settings, named as in checkpoints' config.json."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def read(cls, config: Mapping[str, Any], *, qk_norm: bool = False) -> DecoderConfig:
        """From a parsed config.json. Raises ConfigError that names a missing key, or an activation this cannot do."""
        if config.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"hidden_act is {config['hidden_act']!r}; this decoder has 'silu' only")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        try:
            num_heads = config["num_attention_heads"]
            return cls(
                hidden_size=config["hidden_size"],
                intermediate_size=config["intermediate_size"],
                num_layers=config["num_hidden_layers"],
                num_heads=num_heads,
                num_kv_heads=config.get("num_key_value_heads") or num_heads,
                head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
                vocab_size=config["vocab_size"],
                rms_norm_eps=config.get("rms_norm_eps", 1e-6),
                rope_theta=config.get("rope_theta") or rope.get("rope_theta") or 10_000.0,
                rope_scaling=rope or None,
                tie_word_embeddings=config.get("tie_word_embeddings", False),
                attention_bias=config.get("attention_bias", False),
                mlp_bias=config.get("mlp_bias", False),
                qk_norm=qk_norm,
            )
        except KeyError as error:
            raise ConfigError(f"the checkpoint's configuration lacks {error}") from error


class Attends(Protocol):
    """What the decoder asks of `ctx.kv`."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class DecoderLayer(nn.Module):
    """Attention and MLP, each added to its input."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        size, dim = config.hidden_size, config.head_dim
        self.head_dim = dim
        widths = (config.num_heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim)
        self.attention_norm = RMSNorm(size, eps=config.rms_norm_eps)
        self.qkv = MergedLinear(size, widths, bias=config.attention_bias)
        self.q_norm = RMSNorm(dim, eps=config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, eps=config.rms_norm_eps) if config.qk_norm else None
        self.output = Linear(widths[0], size, bias=config.attention_bias)
        self.mlp_norm = RMSNorm(size, eps=config.rms_norm_eps)
        self.gate_up = MergedLinear(size, (config.intermediate_size,) * 2, bias=config.mlp_bias)
        self.down = Linear(config.intermediate_size, size, bias=config.mlp_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv: Attends, layer: int) -> Tensor:  # (T, H) -> (T, H)
        x = x + self.output(self._attend(self.attention_norm(x), cos, sin, kv, layer))
        gate, up = self.gate_up.split(self.gate_up(self.mlp_norm(x)))
        return x + self.down(functional.silu(gate) * up)

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor, kv: Attends, layer: int) -> Tensor:
        num_heads, num_kv_heads, _ = self.qkv.heads(self.head_dim)
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # (T, H + 2 Hkv, D)
        if self.q_norm is None or self.k_norm is None:
            turned = rotate(heads[:, :-num_kv_heads], cos, sin)  # queries and keys in one go
            q, k = turned[:, :num_heads], turned[:, num_heads:]
        else:
            q, k, _ = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
            q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        return kv.attend(layer, q, k, heads[:, -num_kv_heads:]).flatten(1)


class Decoder(nn.Module):
    """The whole network; build it on the meta device and fill it with `load_into(..., rename=decoder_rename())`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(config.head_dim, theta=config.rope_theta, scaling=config.rope_scaling)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.head = Head(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.head.tie(self.embedding)

    def embed(self, ids: Tensor) -> Tensor:
        """(T,) int64 -> (T, H)."""
        return self.embedding(ids)

    def forward(self, embeds: Tensor, positions: Tensor, kv: Attends) -> Tensor:
        """(T, H) embeddings at (T,) positions -> (T, H) after the final norm."""
        cos, sin = (part.to(embeds.dtype) for part in self.rotary(positions))
        x = embeds
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, kv, index)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, H) -> (B, vocab)."""
        return self.head(hidden)


def decoder_parallel(*, to: str = "") -> dict[str, str]:
    """How a `Decoder` is split among ranks, for `Node.tensor_parallel`; `to` as of `decoder_rename`."""
    home = re.escape(to)
    return {
        home + r"(embedding|head)": "vocab",
        home + r"layers\.\d+\.qkv": "heads",
        home + r"layers\.\d+\.gate_up": "column",
        home + r"layers\.\d+\.(output|down)": "row",
    }


def decoder_rename(*, prefix: str = "model.", head: str = "lm_head.", to: str = "") -> dict[str, str]:
    """Rules from checkpoint names (`model.layers.0.self_attn.q_proj.weight`, ...) to a `Decoder`'s.

    Args:
        prefix: what the checkpoint puts before the network's names.
        head: the head's name with its dot.
        to: where the `Decoder` sits in the module that is loaded, with a dot at the end.
    """
    layer, kind = prefix.replace(".", r"\.") + r"layers\.(\d+)\.", r"\.(weight|bias)"
    block = to + r"layers.\1."
    rules = {
        prefix.replace(".", r"\.") + r"embed_tokens\.weight": to + "embedding.weight",
        prefix.replace(".", r"\.") + r"norm\.weight": to + "norm.weight",
        head.replace(".", r"\.") + "weight": to + "head.weight",
        layer + r"input_layernorm\.weight": block + "attention_norm.weight",
        layer + r"post_attention_layernorm\.weight": block + "mlp_norm.weight",
        layer + r"self_attn\.([qk]_norm)\.weight": block + r"\2.weight",
        layer + r"self_attn\.o_proj" + kind: block + r"output.\2",
        layer + r"mlp\.down_proj" + kind: block + r"down.\2",
    }
    for part, name in enumerate(("q_proj", "k_proj", "v_proj")):
        rules[layer + rf"self_attn\.{name}" + kind] = block + rf"qkv.\2[{part}]"
    for part, name in enumerate(("gate_proj", "up_proj")):
        rules[layer + rf"mlp\.{name}" + kind] = block + rf"gate_up.\2[{part}]"
    return rules
