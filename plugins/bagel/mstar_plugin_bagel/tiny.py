"""Writes a tiny random checkpoint in the real on-disk layout: the same files every time, nothing left at its start."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

SEED = 34

MERGES = [
    ("i", "n"), ("r", "e"), ("o", "n"), ("h", "e"), ("a", "t"), ("Ġ", "t"), ("Ġ", "a"), ("e", "r"), ("o", "u"),
    ("Ġt", "he"), ("Ġ", "s"), ("in", "g"), ("Ġ", "b"), ("Ġ", "w"), ("o", "r"), ("Ġ", "i"), ("e", "d"), ("Ġ", "o"),
    ("Ġ", "f"), ("Ġ", "c"),
]  # fmt: skip
SPECIAL_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a random checkpoint. The vision encoder's layers are those that are used.

    Args:
        latent_side: tokens along the side of the largest image; a token is `2 ** len(multipliers)` pixels wide.
        vision_side: patches along the side of the largest image looked at.
    """

    hidden: int = 64
    mlp: int = 96
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    vision_hidden: int = 48
    vision_mlp: int = 80
    vision_layers: int = 2
    vision_heads: int = 3
    vision_patch: int = 14
    vision_side: int = 8
    width: int = 32
    multipliers: tuple[int, ...] = (1, 1, 2)
    blocks: int = 1
    channels: int = 4
    latent_side: int = 16


def make(folder: Path) -> Path:
    """Write the checkpoint below `folder`; returns what `--model` takes."""
    return write(folder / "BAGEL-7B-MoT", Sizes())


def write(home: Path, sizes: Sizes) -> Path:
    """Write a checkpoint of other sizes into `home`, which is returned."""
    home.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    vocab_size = len(tokenizer["model"]["vocab"]) + len(ids) + 6  # as in the release, more rows than tokens
    language, vision = _language(sizes, ids, vocab_size=vocab_size), _vision(sizes)
    _write_json(home / "config.json", _config(sizes, language, vision))
    _write_json(home / "llm_config.json", language)
    _write_json(home / "vit_config.json", vision)
    _write_json(home / "generation_config.json", {name: language[name] for name in ("bos_token_id", "eos_token_id")})
    _write_json(home / "tokenizer.json", tokenizer)
    _write_json(home / "tokenizer_config.json", _tokenizer_config(tokenizer["added_tokens"]))
    _write_json(home / "vocab.json", tokenizer["model"]["vocab"])
    merges = "".join(f"{left} {right}\n" for left, right in MERGES)
    (home / "merges.txt").write_text("#version: 0.2\n" + merges, encoding="utf-8")
    random = _Random(SEED)
    for stem, tensors in (("ema", _ema(random, sizes, vocab_size)), ("ae", _autoencoder(random, sizes))):
        save_file(dict(tensors), home / f"{stem}.safetensors", metadata={"format": "pt"})
    return home


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# ---- configuration --------------------------------------------------------------------------------------


def _config(sizes: Sizes, language: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    stride = 2 ** len(sizes.multipliers)
    patch = sizes.vision_patch
    return {
        "architectures": ["BagelForConditionalGeneration"],
        "model_type": "bagel",
        "visual_gen": True,
        "visual_und": True,
        "llm_config": language,
        "vit_config": vision,
        "vae_config": {
            "in_channels": 3,
            "downsample": stride // 2,
            "ch": sizes.width,
            "out_ch": 3,
            "ch_mult": sizes.multipliers,
            "num_res_blocks": sizes.blocks,
            "z_channels": sizes.channels,
            "scale_factor": 0.3611,
            "shift_factor": 0.1159,
        },
        "latent_patch_size": 2,
        "max_latent_size": sizes.latent_side,
        "vit_max_num_patch_per_side": sizes.vision_side,
        "connector_act": "gelu_pytorch_tanh",
        "interpolate_pos": False,
        "timestep_shift": 1.0,
        "_tiny_transforms": {
            "vae_transform": [sizes.latent_side * stride, 4 * stride, stride],
            "vit_transform": [sizes.vision_side * patch, 2 * patch, patch],
        },
        "torch_dtype": "float32",
    }


def _language(sizes: Sizes, ids: dict[str, int], *, vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "attention_dropout": 0.0,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.mlp,
        "max_position_embeddings": 32768,
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_sliding_window": False,
        "vocab_size": vocab_size,
    }


def _vision(sizes: Sizes) -> dict[str, Any]:
    return {
        "model_type": "siglip_vision_model",
        "hidden_size": sizes.vision_hidden,
        "image_size": sizes.vision_side * sizes.vision_patch,
        "intermediate_size": sizes.vision_mlp,
        "num_attention_heads": sizes.vision_heads,
        "num_hidden_layers": sizes.vision_layers + 1,
        "patch_size": sizes.vision_patch,
    }


# ---- tokenizer ------------------------------------------------------------------------------------------


def _tokenizer() -> dict[str, Any]:
    """Byte-level BPE in the Qwen2 form of tokenizer.json."""
    letters = [*_byte_letters(), *("".join(pair) for pair in MERGES)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": len(letters) + index, "content": content, **flags} for index, content in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False},
                byte_level,
            ],
        },
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {letter: index for index, letter in enumerate(letters)},
            "merges": [list(pair) for pair in MERGES],
        },
    }


def _tokenizer_config(added: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(token["id"]): {name: value for name, value in token.items() if name != "id"} for token in added
        },
        "additional_special_tokens": SPECIAL_TOKENS[1:],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def _byte_letters() -> list[str]:
    """One printable letter per byte, as byte-level BPE writes bytes; bytes that print stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]


# ---- weights --------------------------------------------------------------------------------------------

Named = Iterator[tuple[str, Tensor]]


class _Random:
    """Random parameters under the names of a checkpoint, scaled so that activations keep their size."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def layer(self, name: str, *shape: int, bias: bool = True) -> Named:
        weight = self.normal(*shape)
        yield f"{name}.weight", weight / weight[0].numel() ** 0.5
        if bias:
            yield f"{name}.bias", 0.2 * self.normal(shape[0])

    def norm(self, name: str, size: int, *, bias: bool = True) -> Named:
        yield f"{name}.weight", 1 + 0.2 * self.normal(size)
        if bias:
            yield f"{name}.bias", 0.2 * self.normal(size)


def _ema(random: _Random, sizes: Sizes, vocab_size: int) -> Named:
    latent_dim = 4 * sizes.channels
    yield "language_model.model.embed_tokens.weight", random.normal(vocab_size, sizes.hidden)
    yield from random.layer("language_model.lm_head", vocab_size, sizes.hidden, bias=False)
    for suffix in ("", "_moe_gen"):
        yield from random.norm(f"language_model.model.norm{suffix}", sizes.hidden, bias=False)
        for number in range(sizes.layers):
            yield from _expert(random, f"language_model.model.layers.{number}", suffix, sizes)
    yield from _vit(random, sizes)
    yield from random.layer("connector.fc1", sizes.hidden, sizes.vision_hidden)
    yield from random.layer("connector.fc2", sizes.hidden, sizes.hidden)
    yield from random.layer("time_embedder.mlp.0", sizes.hidden, 256)
    yield from random.layer("time_embedder.mlp.2", sizes.hidden, sizes.hidden)
    yield from random.layer("vae2llm", sizes.hidden, latent_dim)
    yield from random.layer("llm2vae", latent_dim, sizes.hidden)
    for name, side in (("vit_pos_embed", sizes.vision_side), ("latent_pos_embed", sizes.latent_side)):
        yield f"{name}.pos_embed", 0.5 * random.normal(side**2, sizes.hidden)


def _expert(random: _Random, layer: str, suffix: str, sizes: Sizes) -> Named:
    hidden, dim = sizes.hidden, sizes.hidden // sizes.heads
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield from random.norm(f"{layer}.{name}{suffix}", hidden, bias=False)
    for name, heads in (("q", sizes.heads), ("k", sizes.kv_heads), ("v", sizes.kv_heads)):
        yield from random.layer(f"{layer}.self_attn.{name}_proj{suffix}", heads * dim, hidden)
    for name in ("q_norm", "k_norm"):
        yield from random.norm(f"{layer}.self_attn.{name}{suffix}", dim, bias=False)
    yield from random.layer(f"{layer}.self_attn.o_proj{suffix}", hidden, sizes.heads * dim, bias=False)
    for name, shape in (("gate", (sizes.mlp, hidden)), ("up", (sizes.mlp, hidden)), ("down", (hidden, sizes.mlp))):
        yield from random.layer(f"{layer}.mlp{suffix}.{name}_proj", *shape, bias=False)


def _vit(random: _Random, sizes: Sizes) -> Named:
    hidden, model = sizes.vision_hidden, "vit_model.vision_model"
    yield from random.layer(f"{model}.embeddings.patch_embedding", hidden, 3 * sizes.vision_patch**2)
    yield f"{model}.embeddings.position_embedding.weight", random.normal(sizes.vision_side**2, hidden)
    yield from random.norm(f"{model}.post_layernorm", hidden)
    for number in range(sizes.vision_layers):
        layer = f"{model}.encoder.layers.{number}"
        for norm in ("layer_norm1", "layer_norm2"):
            yield from random.norm(f"{layer}.{norm}", hidden)
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from random.layer(f"{layer}.self_attn.{projection}", hidden, hidden)
        yield from random.layer(f"{layer}.mlp.fc1", sizes.vision_mlp, hidden)
        yield from random.layer(f"{layer}.mlp.fc2", hidden, sizes.vision_mlp)


def _autoencoder(random: _Random, sizes: Sizes) -> Named:
    widths = [sizes.width * multiplier for multiplier in sizes.multipliers]
    yield from random.layer("encoder.conv_in", sizes.width, 3, 3, 3)
    yield from random.layer("decoder.conv_in", widths[-1], sizes.channels, 3, 3)
    before, after = [sizes.width, *widths[:-1]], [*widths[1:], widths[-1]]
    for level, width in enumerate(widths):
        for side, entry, count in (("encoder.down", before, sizes.blocks), ("decoder.up", after, sizes.blocks + 1)):
            for block in range(count):
                enters = entry[level] if block == 0 else width
                yield from _residual(random, f"{side}.{level}.block.{block}", enters, width)
        if level < len(widths) - 1:
            yield from random.layer(f"encoder.down.{level}.downsample.conv", width, width, 3, 3)
        if level > 0:
            yield from random.layer(f"decoder.up.{level}.upsample.conv", width, width, 3, 3)
    for side in ("encoder", "decoder"):
        for part in ("block_1", "block_2"):
            yield from _residual(random, f"{side}.mid.{part}", widths[-1], widths[-1])
        yield from random.norm(f"{side}.mid.attn_1.norm", widths[-1])
        for part in ("q", "k", "v", "proj_out"):
            yield from random.layer(f"{side}.mid.attn_1.{part}", widths[-1], widths[-1], 1, 1)
        width, out = (widths[-1], 2 * sizes.channels) if side == "encoder" else (widths[0], 3)
        yield from random.norm(f"{side}.norm_out", width)
        yield from random.layer(f"{side}.conv_out", out, width, 3, 3)


def _residual(random: _Random, name: str, channels: int, out: int) -> Named:
    yield from random.norm(f"{name}.norm1", channels)
    yield from random.layer(f"{name}.conv1", out, channels, 3, 3)
    yield from random.norm(f"{name}.norm2", out)
    yield from random.layer(f"{name}.conv2", out, out, 3, 3)
    if channels != out:
        yield from random.layer(f"{name}.nin_shortcut", out, channels, 1, 1)
