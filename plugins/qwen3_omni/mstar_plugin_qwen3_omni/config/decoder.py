"""Sizes and settings of decoders, as config.json spells them. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from mstar.plugin.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Sizes and settings of a sparse MLP.

    Args:
        shared_size: inner width of the shared expert; 0: there is none.
        normalised: whether the weights of the chosen experts are made to add up to 1.
    """

    hidden_size: int
    num_experts: int
    num_chosen: int
    expert_size: int
    shared_size: int = 0
    normalised: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and settings.

    Args:
        moe: of the layers that have experts; None: there are none.
        sections: frequencies (time, height, width) of M-RoPE; height and width take every third from the second and
            third on, time the others.
        dense_layers: those with a plain MLP of `intermediate_size`.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    moe: MoEConfig | None
    sections: tuple[int, int, int]
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    attention_bias: bool = False
    dense_layers: tuple[int, ...] = ()

    def is_sparse(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.dense_layers


def read_decoder(fields: Fields, *, shared_expert: bool = False) -> DecoderConfig:
    """The decoder of a `text_config`. Raises ConfigError for what it cannot do.

    Args:
        shared_expert: whether its sparse layers have one.
    """
    fields.require("use_qk_norm", True, "queries and keys are always normalised here")
    fields.require("use_sliding_window", False, "attention here has no window")
    fields.require("sliding_window", None, "attention here has no window")
    sizes, rope = attention_sizes(fields), _rope(fields)
    for name in ("interleaved", "mrope_interleaved"):
        rope.require(name, True, "axes take turns by frequency here")
    time, height, width = rope.wholes("mrope_section", (24, 20, 20), least=0, count=3)
    moe = _moe(fields, hidden_size=sizes["hidden_size"], shared_expert=shared_expert)
    step, plain = fields.whole("decoder_sparse_step", 1), fields.wholes("mlp_only_layers", (), least=0)
    dense = tuple(layer for layer in range(sizes["num_layers"]) if layer in plain or (layer + 1) % step)
    return DecoderConfig(
        **sizes,
        moe=moe,
        sections=(time, height, width),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta(fields, 1e6),
        attention_bias=fields.flag("attention_bias", False),
        dense_layers=dense if moe is not None else (),
    )


def attention_sizes(fields: Fields) -> dict[str, int]:
    """Sizes of any transformer of this model, by the names of our configurations. Raises ConfigError."""
    fields.require("hidden_act", "silu", "the activation is fixed here")
    heads, hidden = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    kv_heads = fields.whole("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.refuse("num_key_value_heads", f"it must divide num_attention_heads ({heads})")
    return {
        "hidden_size": hidden,
        "intermediate_size": fields.whole("intermediate_size"),
        "num_layers": fields.whole("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": fields.whole("head_dim", hidden // heads),
    }


def rope_theta(fields: Fields, default: float) -> float:
    """Of `fields`, else of their rotary embedding's."""
    return fields.number("rope_theta", _rope(fields).number("rope_theta", default))


def _rope(fields: Fields) -> Fields:
    """Their `rope_scaling`, or `rope_parameters` as newer files say."""
    rope = fields.part("rope_parameters" if fields.has("rope_parameters") else "rope_scaling", {})
    for name in ("rope_type", "type"):
        rope.require(name, "default", "frequencies are not scaled here")
    return rope


def _moe(fields: Fields, *, hidden_size: int, shared_expert: bool) -> MoEConfig | None:
    count = fields.whole("num_experts", 0, least=0)
    if not count:
        return None
    chosen = fields.whole("num_experts_per_tok")
    if chosen > count:
        raise fields.refuse("num_experts_per_tok", f"there are {count} experts (num_experts)")
    return MoEConfig(
        hidden_size=hidden_size,
        num_experts=count,
        num_chosen=chosen,
        expert_size=fields.whole("moe_intermediate_size"),
        shared_size=fields.whole("shared_expert_intermediate_size") if shared_expert else 0,
        normalised=fields.flag("norm_topk_prob", not shared_expert),  # left out, the two kinds differ
    )
