"""Sizes and settings of the decoders of thinker and talker. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from mstar_plugin_qwen3_omni.config.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """A sparse MLP.

    Args:
        num_chosen: experts of a token.
        shared_size: inner width of the shared expert; 0: there is none.
        normalised: whether the weights of the chosen experts are made to add up to 1.
    """

    hidden_size: int
    num_experts: int
    num_chosen: int
    expert_size: int
    shared_size: int
    normalised: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder.

    Args:
        moe: None: all layers are dense.
        dense_layers: those with a plain MLP of `intermediate_size`.
        sections: frequencies (time, height, width) of M-RoPE; height and width take every third from the second and
            third on, time the others.
        max_positions: tokens it was made for.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    moe: MoEConfig | None
    dense_layers: tuple[int, ...]
    sections: tuple[int, int, int]
    rms_norm_eps: float
    rope_theta: float
    attention_bias: bool
    max_positions: int

    def is_sparse(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.dense_layers


def read_decoder(fields: Fields, *, speaks: bool) -> DecoderConfig:
    """From a `text_config`; `speaks`: the talker's, whose layers are all sparse, with a shared expert."""
    fields.require("hidden_act", "silu", "the MLPs here have no other activation")
    fields.require("use_sliding_window", False, "attention here has no window")
    heads, layers = fields.whole("num_attention_heads"), fields.whole("num_hidden_layers")
    kv_heads = fields.whole("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.refuse("num_key_value_heads", f"it must divide num_attention_heads ({heads})")
    head_dim = fields.whole("head_dim", fields.whole("hidden_size") // heads)
    moe = _moe(fields, speaks=speaks)
    step = fields.whole("decoder_sparse_step", 1)
    dense = () if speaks else fields.wholes("mlp_only_layers", ())
    rope = fields.part("rope_parameters", fields.part("rope_scaling", {}).values)
    for name in ("rope_type", "type"):
        rope.require(name, "default", "frequencies are not scaled here")
    sections = rope.wholes("mrope_section", (24, 20, 20), count=3)
    if sum(sections) != head_dim // 2:
        raise rope.refuse("mrope_section", f"it must add up to half of head_dim ({head_dim})")
    return DecoderConfig(
        hidden_size=fields.whole("hidden_size"),
        intermediate_size=fields.whole("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=fields.whole("vocab_size"),
        moe=moe,
        dense_layers=tuple(n for n in range(layers) if n in dense or (not speaks and (n + 1) % step)),
        sections=(sections[0], sections[1], sections[2]),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=fields.number("rope_theta", rope.number("rope_theta", 1e6)),
        attention_bias=fields.flag("attention_bias", False),
        max_positions=fields.whole("max_position_embeddings", 65536),
    )


def _moe(fields: Fields, *, speaks: bool) -> MoEConfig | None:
    experts = fields.whole("num_experts", 128, least=0)
    if not experts:
        if speaks:
            raise fields.refuse("num_experts", "all layers of a talker are sparse")
        return None
    chosen = fields.whole("num_experts_per_tok", 6 if speaks else 8)
    if chosen > experts:
        raise fields.refuse("num_experts_per_tok", f"there are num_experts ({experts}) experts")
    return MoEConfig(
        hidden_size=fields.whole("hidden_size"),
        num_experts=experts,
        num_chosen=chosen,
        expert_size=fields.whole("moe_intermediate_size"),
        shared_size=fields.whole("shared_expert_intermediate_size") if speaks else 0,
        normalised=fields.flag("norm_topk_prob", True),
    )
