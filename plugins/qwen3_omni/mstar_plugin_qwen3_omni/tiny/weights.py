"""Random parameters under the names of a checkpoint, scaled so that activations keep their size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mstar_plugin_qwen3_omni.tiny import Sizes

SEED = 41
Named = Iterator[tuple[str, Tensor]]
RATES, RATIOS = (8, 5, 4, 3), (2, 2)


class Random:
    """Where they come from."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def layer(self, name: str, *shape: int, bias: bool = False) -> Named:
        weight = self.normal(*shape)
        yield f"{name}.weight", weight / weight[0].numel() ** 0.5
        if bias:
            yield f"{name}.bias", 0.1 * self.normal(shape[0])

    def norm(self, name: str, size: int, *, bias: bool = False) -> Named:
        yield f"{name}.weight", 1 + 0.2 * self.normal(size)
        if bias:
            yield f"{name}.bias", 0.2 * self.normal(size)

    def mlp(self, name: str, size: int, inner: int) -> Named:
        yield from self.layer(f"{name}.gate_proj", inner, size)
        yield from self.layer(f"{name}.up_proj", inner, size)
        yield from self.layer(f"{name}.down_proj", size, inner)

    def attention(self, name: str, size: int, heads: int, kv_heads: int, dim: int, *, qk_norm: bool = True) -> Named:
        for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield from self.layer(f"{name}.{part}_proj", count * dim, size)
        yield from self.layer(f"{name}.o_proj", size, heads * dim)
        for part in ("q_norm", "k_norm") if qk_norm else ():
            yield from self.norm(f"{name}.{part}", dim)

    def norms(self, layer: str, size: int) -> Named:
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield from self.norm(f"{layer}.{name}", size)


def tensors(sizes: Sizes, *, vocab_size: int) -> Named:
    """All of a checkpoint."""
    random = Random(SEED)
    yield "thinker.model.embed_tokens.weight", random.normal(vocab_size, sizes.hidden)
    yield from random.layer("thinker.lm_head", vocab_size, sizes.hidden)
    yield from random.norm("thinker.model.norm", sizes.hidden)
    heads = sizes.heads, sizes.kv_heads, sizes.head_dim
    for number in range(sizes.layers):
        layer = f"thinker.model.layers.{number}"
        yield from random.norms(layer, sizes.hidden)
        yield from random.attention(f"{layer}.self_attn", sizes.hidden, *heads)
        yield from _experts(random, f"{layer}.mlp", sizes.hidden, sizes.experts, sizes.expert_mlp)
    yield from _audio(random, sizes)
    yield from _vision(random, sizes)
    yield from _talker(random, sizes)
    yield from _predictor(random, sizes)
    yield from _codec(random, sizes)


def _experts(random: Random, name: str, size: int, count: int, inner: int) -> Named:
    yield from random.layer(f"{name}.gate", count, size)
    for expert in range(count):
        yield from random.mlp(f"{name}.experts.{expert}", size, inner)


def _audio(random: Random, sizes: Sizes) -> Named:
    tower, size = "thinker.audio_tower", sizes.audio_hidden
    for number, entry in enumerate((1, sizes.channels, sizes.channels), start=1):
        yield from random.layer(f"{tower}.conv2d{number}", sizes.channels, entry, 3, 3, bias=True)
    yield from random.layer(f"{tower}.conv_out", size, sizes.channels * 16)
    for number in range(sizes.audio_layers):
        layer = f"{tower}.layers.{number}"
        for name in ("self_attn_layer_norm", "final_layer_norm"):
            yield from random.norm(f"{layer}.{name}", size, bias=True)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from random.layer(f"{layer}.self_attn.{name}", size, size, bias=True)
        yield from random.layer(f"{layer}.fc1", sizes.audio_mlp, size, bias=True)
        yield from random.layer(f"{layer}.fc2", size, sizes.audio_mlp, bias=True)
    yield from random.norm(f"{tower}.ln_post", size, bias=True)
    yield from random.layer(f"{tower}.proj1", size, size, bias=True)
    yield from random.layer(f"{tower}.proj2", sizes.hidden, size, bias=True)


def _vision(random: Random, sizes: Sizes) -> Named:
    tower, size = "thinker.visual", sizes.vision_hidden
    yield from random.layer(f"{tower}.patch_embed.proj", size, 3, 2, 16, 16, bias=True)
    yield f"{tower}.pos_embed.weight", random.normal(sizes.side**2, size)
    for number in range(sizes.vision_layers):
        block = f"{tower}.blocks.{number}"
        for name in ("norm1", "norm2"):
            yield from random.norm(f"{block}.{name}", size, bias=True)
        yield from random.layer(f"{block}.attn.qkv", 3 * size, size, bias=True)
        yield from random.layer(f"{block}.attn.proj", size, size, bias=True)
        yield from random.layer(f"{block}.mlp.linear_fc1", sizes.vision_mlp, size, bias=True)
        yield from random.layer(f"{block}.mlp.linear_fc2", size, sizes.vision_mlp, bias=True)
    for name, width in (("merger", size), *((f"merger_list.{n}", 4 * size) for n in range(len(sizes.taps)))):
        yield from random.norm(f"{tower}.{name}.ln_q", width, bias=True)
        yield from random.layer(f"{tower}.{name}.mlp.0", 4 * size, 4 * size, bias=True)
        yield from random.layer(f"{tower}.{name}.mlp.2", sizes.hidden, 4 * size, bias=True)


def _talker(random: Random, sizes: Sizes) -> Named:
    size, heads = sizes.talker_hidden, (sizes.talker_heads, sizes.talker_kv_heads, sizes.talker_head_dim)
    for name in ("text_projection", "hidden_projection"):
        yield from random.layer(f"talker.{name}.linear_fc1", sizes.talker_mlp, sizes.hidden, bias=True)
        yield from random.layer(f"talker.{name}.linear_fc2", size, sizes.talker_mlp, bias=True)
    yield "talker.model.codec_embedding.weight", random.normal(sizes.codec_vocab, size)
    yield from random.layer("talker.codec_head", sizes.codec_vocab, size)
    yield from random.norm("talker.model.norm", size)
    for number in range(sizes.talker_layers):
        layer = f"talker.model.layers.{number}"
        yield from random.norms(layer, size)
        yield from random.attention(f"{layer}.self_attn", size, *heads)
        yield from _experts(random, f"{layer}.mlp", size, sizes.talker_experts, sizes.talker_expert_mlp)
        yield from random.mlp(f"{layer}.mlp.shared_expert", size, sizes.shared_mlp)
        yield from random.layer(f"{layer}.mlp.shared_expert_gate", 1, size)


def _predictor(random: Random, sizes: Sizes) -> Named:
    home, size = "talker.code_predictor", sizes.talker_hidden
    heads = sizes.predictor_heads, sizes.predictor_kv_heads, sizes.predictor_head_dim
    for number in range(sizes.groups - 1):
        yield f"{home}.model.codec_embedding.{number}.weight", random.normal(sizes.codes, size)
        yield from random.layer(f"{home}.lm_head.{number}", sizes.codes, size)
    yield from random.norm(f"{home}.model.norm", size)
    for number in range(sizes.predictor_layers):
        layer = f"{home}.model.layers.{number}"
        yield from random.norms(layer, size)
        yield from random.attention(f"{layer}.self_attn", size, *heads)
        yield from random.mlp(f"{layer}.mlp", size, sizes.predictor_mlp)


def _codec(random: Random, sizes: Sizes) -> Named:
    size, heads = sizes.codec_hidden, sizes.codec_heads
    yield "code2wav.code_embedding.weight", random.normal(sizes.groups * sizes.codes, size)
    yield from random.norm("code2wav.pre_transformer.norm", size)
    for number in range(sizes.codec_layers):
        layer = f"code2wav.pre_transformer.layers.{number}"
        yield from random.norms(layer, size)
        yield from random.attention(f"{layer}.self_attn", size, heads, heads, size // heads, qk_norm=False)
        yield from random.mlp(f"{layer}.mlp", size, sizes.codec_mlp)
        for name in ("self_attn_layer_scale", "mlp_layer_scale"):
            yield f"{layer}.{name}.scale", 0.3 + 0.05 * random.normal(size)
    for number, ratio in enumerate(RATIOS):
        stage = f"code2wav.upsample.{number}"
        yield from random.layer(f"{stage}.0.conv", size, size, ratio, bias=True)
        yield from random.layer(f"{stage}.1.dwconv.conv", size, 1, 7, bias=True)
        yield from random.norm(f"{stage}.1.norm", size, bias=True)
        yield from random.layer(f"{stage}.1.pwconv1", 4 * size, size, bias=True)
        yield from random.layer(f"{stage}.1.pwconv2", size, 4 * size, bias=True)
        yield f"{stage}.1.gamma", 0.3 + 0.05 * random.normal(size)
    yield from _waves(random, sizes)


def _waves(random: Random, sizes: Sizes) -> Named:
    width = sizes.codec_width
    yield from random.layer("code2wav.decoder.0.conv", width, sizes.codec_hidden, 7, bias=True)
    for stage, rate in enumerate(RATES, start=1):
        block = f"code2wav.decoder.{stage}.block"
        yield from _snake(random, f"{block}.0", width)
        weight = random.normal(width, width // 2, 2 * rate) / (2 * width) ** 0.5
        yield f"{block}.1.conv.weight", weight
        width //= 2
        yield f"{block}.1.conv.bias", 0.1 * random.normal(width)
        for unit in (2, 3, 4):
            yield from _snake(random, f"{block}.{unit}.act1", width)
            yield from random.layer(f"{block}.{unit}.conv1.conv", width, width, 7, bias=True)
            yield from _snake(random, f"{block}.{unit}.act2", width)
            yield f"{block}.{unit}.conv2.conv.weight", 0.2 * random.normal(width, width, 1) / width**0.5
            yield f"{block}.{unit}.conv2.conv.bias", 0.1 * random.normal(width)
    last = len(RATES) + 1
    yield from _snake(random, f"code2wav.decoder.{last}", width)
    yield f"code2wav.decoder.{last + 1}.conv.weight", 0.1 * random.normal(1, width, 7) / (7 * width) ** 0.5
    yield f"code2wav.decoder.{last + 1}.conv.bias", torch.zeros(1)


def _snake(random: Random, name: str, channels: int) -> Named:
    yield f"{name}.alpha", 0.2 * random.normal(channels)
    yield f"{name}.beta", 0.2 * random.normal(channels)
