"""Writes a tiny random checkpoint in the real on-disk layout: the language model, its tokenizer, the codec beside it.

It knows no language, but behaves: tokens come slot by slot in whole frames, codes depend on text, voice and seed, and
speech ends by itself after about four tokens per token of the prompt. The same files every time.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mstar_plugin_orpheus.config import AUDIO_OFFSET
from mstar_plugin_orpheus.modeling.frames import FRAME_CODES

SEED = 20

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS = 64, 4, 2, 16, 128, 2
CODEBOOK, CODEBOOK_DIM = 4096, 8

# Wired dimensions of the hidden state; the others are random content.
SLOT = 0  # .. 6: which slot the token fills; control and text tokens count as slot 6, so that slot 0 follows
IS_AUDIO, IS_TEXT, ONE, AUDIO_SHARE = 7, 8, 9, 10
WIRED = 11
EMBEDDING_NORM = 6.0

SLOT_LOGIT = 60.0
STOP_SLOPE, STOP_SHARE = 100.0, 0.72

MERGES = [
    ("t", "h"), ("th", "e"), ("i", "n"), ("in", "g"), ("e", "r"), ("a", "n"), ("an", "d"), ("o", "n"), ("o", "u"),
    ("r", "e"), ("h", "e"), ("l", "l"), ("e", "n"), ("a", "t"), ("o", "r"), ("s", "t"), ("i", "s"), ("e", "s"),
    ("a", "r"), ("i", "t"), ("e", "d"), ("Ġ", "t"), ("Ġ", "a"), ("Ġ", "s"), ("Ġ", "w"), ("Ġt", "he"), ("Ġ", "o"),
    ("Ġ", "i"), ("Ġ", "b"), ("Ġ", "c"), ("Ġ", "f"), ("Ġ", "m"),
]  # fmt: skip
SPECIAL_TOKENS = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eom_id|>", "<|eot_id|>",
]  # fmt: skip
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)

CODEC_CONFIG: dict[str, Any] = {
    "sampling_rate": 24000,
    "encoder_dim": 3,
    "encoder_rates": [2, 4, 8, 8],
    "decoder_dim": 32,
    "decoder_rates": [8, 8, 4, 2],
    "attn_window_size": None,
    "codebook_size": CODEBOOK,
    "codebook_dim": CODEBOOK_DIM,
    "vq_strides": [4, 2, 1],
    "noise": True,
    "depthwise": True,
}


def make(folder: Path) -> Path:
    """Write the checkpoint below `folder`; returns what `--model` takes."""
    model, codec = folder / "orpheus-3b-0.1-ft", folder / "snac_24khz"
    for place in (model, codec):
        place.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    audio_base = ids["<custom_token_0>"] + AUDIO_OFFSET
    config = _language_config(ids, vocab_size=audio_base + FRAME_CODES * CODEBOOK + 2)
    special = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<custom_token_7>"}
    _write_json(model / "config.json", config)
    _write_json(model / "generation_config.json", {name: config[name] for name in ("bos_token_id", "eos_token_id")})
    _write_json(model / "tokenizer.json", tokenizer)
    _write_json(model / "special_tokens_map.json", special)
    _write_json(
        model / "tokenizer_config.json",
        {**special, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False},
    )
    stop = ids["<custom_token_2>"]
    save_file(
        _language_weights(config["vocab_size"], audio_base=audio_base, stop=stop),
        model / "model.safetensors",
        metadata={"format": "pt"},
    )
    _write_json(codec / "config.json", CODEC_CONFIG)
    torch.save(codec_weights(CODEC_CONFIG), codec / "pytorch_model.bin")
    return model


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# ---- tokenizer ------------------------------------------------------------------------------------------


def _tokenizer() -> dict[str, Any]:
    """Byte-level BPE in the Llama 3 form of tokenizer.json."""
    letters = [*_byte_letters(), *("".join(pair) for pair in MERGES)]
    special = [*SPECIAL_TOKENS, *(f"<custom_token_{number}>" for number in range(AUDIO_OFFSET))]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": len(letters) + index, "content": content, **flags, "special": content in SPECIAL_TOKENS}
        for index, content in enumerate(special)
    ]
    begin = "<|begin_of_text|>"
    begin_id = next(token["id"] for token in added if token["content"] == begin)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False},
                byte_level,
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": begin, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {begin: {"id": begin, "ids": [begin_id], "tokens": [begin]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {letter: index for index, letter in enumerate(letters)},
            "merges": [list(pair) for pair in MERGES],
        },
    }


def _byte_letters() -> list[str]:
    """One printable letter per byte, as byte-level BPE writes bytes; bytes that print stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]


# ---- language model -------------------------------------------------------------------------------------


def _language_config(ids: dict[str, int], *, vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": ids["<|begin_of_text|>"],
        "eos_token_id": ids["<|eot_id|>"],
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": vocab_size,
    }


def _language_weights(vocab_size: int, *, audio_base: int, stop: int) -> dict[str, Tensor]:
    """Random weights that leave the wired dimensions alone, but for the three wires.

    Slots: a token's slot is a dimension of its embedding, and the head answers it with the next slot's tokens.
    Share: head 0 of layer 0 attends to everything alike, and so writes how much of the context is audio.
    Stop: after slot 6 the stop token competes with slot 0, and wins once that share is large.
    """
    generator = torch.Generator().manual_seed(SEED)

    def random(*shape: int, std: float) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    audio_ids = torch.arange(FRAME_CODES * CODEBOOK)
    slots = audio_ids // CODEBOOK
    embedding = torch.zeros(vocab_size, HIDDEN)
    embedding[:, SLOT + FRAME_CODES - 1] = 4.0
    embedding[:, IS_TEXT] = 1.0
    audio = embedding[audio_base : audio_base + len(audio_ids)]
    audio[:, [SLOT + FRAME_CODES - 1, IS_TEXT]] = 0.0
    audio[audio_ids, SLOT + slots] = 4.0
    audio[:, IS_AUDIO] = 1.0
    embedding[:, ONE] = 1.0
    content = random(vocab_size, HIDDEN - WIRED, std=1.0)
    rest = math.sqrt(EMBEDDING_NORM**2 - embedding[0].square().sum().item())  # so that all have the same norm
    embedding[:, WIRED:] = content / content.norm(dim=1, keepdim=True) * rest
    head = torch.zeros(vocab_size, HIDDEN)
    head[:, WIRED:] = random(vocab_size, HIDDEN - WIRED, std=0.4)
    head[:, ONE] = -SLOT_LOGIT / 4
    speaking = head[audio_base : audio_base + len(audio_ids)]
    speaking[:, ONE] = 0.0
    speaking[audio_ids, SLOT + (slots - 1) % FRAME_CODES] = SLOT_LOGIT / 4.0
    head[stop] = 0.0
    head[stop, SLOT + FRAME_CODES - 1] = SLOT_LOGIT / 4.0
    head[stop, AUDIO_SHARE], head[stop, ONE] = STOP_SLOPE, -STOP_SLOPE * STOP_SHARE

    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(LAYERS):
        for name, out_size, in_size in (
            ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
            ("mlp.gate_proj", MLP, HIDDEN),
            ("mlp.up_proj", MLP, HIDDEN),
            ("mlp.down_proj", HIDDEN, MLP),
        ):
            weight = random(out_size, in_size, std=1.0 / math.sqrt(in_size))
            if out_size == HIDDEN and name.endswith(("o_proj", "down_proj")):
                weight[:WIRED] = 0.0
            tensors[f"model.layers.{layer}.{name}.weight"] = weight
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(HIDDEN)
    first = "model.layers.0.self_attn"
    tensors[f"{first}.q_proj.weight"][:HEAD_DIM] = 0.0
    tensors[f"{first}.v_proj.weight"][0] = 0.0
    rms = EMBEDDING_NORM / math.sqrt(HIDDEN)
    tensors[f"{first}.v_proj.weight"][0, IS_AUDIO] = rms
    tensors[f"{first}.o_proj.weight"][AUDIO_SHARE, 0] = 1.0
    return tensors


# ---- codec ----------------------------------------------------------------------------------------------


def codec_weights(config: dict[str, Any], *, seed: int = SEED) -> dict[str, Tensor]:
    """Random weights under the names of the released codec, encoder included, every convolution weight-normed."""
    writer = _CodecWriter(torch.Generator().manual_seed(seed), depthwise=config["depthwise"])
    width = config["encoder_dim"]
    writer.convolution("encoder.block.0", width, 1, 7)
    for index, rate in enumerate(config["encoder_rates"], start=1):
        block = f"encoder.block.{index}.block"
        for unit in range(3):
            writer.residual(f"{block}.{unit}", width)
        writer.snake(f"{block}.3", width)
        writer.convolution(f"{block}.4", 2 * width, width, 2 * rate)
        width *= 2
    writer.over_time(f"encoder.block.{len(config['encoder_rates']) + 1}", width)
    for level in range(len(config["vq_strides"])):
        quantizer = f"quantizer.quantizers.{level}"
        writer.convolution(f"{quantizer}.in_proj", config["codebook_dim"], width, 1)
        writer.convolution(f"{quantizer}.out_proj", width, config["codebook_dim"], 1)
        writer.tensors[f"{quantizer}.codebook.weight"] = writer.random(config["codebook_size"], config["codebook_dim"])
    writer.decoder(config, latent=width)
    return writer.tensors


class _CodecWriter:
    """Collects a codec's parameters; row lengths are such that signals keep their size from layer to layer."""

    def __init__(self, generator: torch.Generator, *, depthwise: bool) -> None:
        self.generator = generator
        self.depthwise = depthwise
        self.tensors: dict[str, Tensor] = {}

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def convolution(self, name: str, rows: int, columns: int, kernel: int, *, length: float = 1.0) -> None:
        self.tensors[f"{name}.bias"] = self.random(rows) * 0.02
        self.weight(name, rows, columns, kernel, length=length)

    def weight(self, name: str, rows: int, columns: int, kernel: int, *, length: float) -> None:
        self.tensors[f"{name}.parametrizations.weight.original0"] = torch.full((rows, 1, 1), length)
        self.tensors[f"{name}.parametrizations.weight.original1"] = self.random(rows, columns, kernel)

    def over_time(self, name: str, channels: int) -> None:
        self.convolution(name, channels, 1 if self.depthwise else channels, 7)

    def snake(self, name: str, channels: int) -> None:
        self.tensors[f"{name}.alpha"] = 0.5 + torch.rand((1, channels, 1), generator=self.generator)

    def residual(self, name: str, channels: int) -> None:
        self.snake(f"{name}.block.0", channels)
        self.over_time(f"{name}.block.1", channels)
        self.snake(f"{name}.block.2", channels)
        self.convolution(f"{name}.block.3", channels, channels, 1, length=0.3)

    def decoder(self, config: dict[str, Any], *, latent: int) -> None:
        width = config["decoder_dim"]
        if self.depthwise:
            self.over_time("decoder.model.0", latent)
            self.convolution("decoder.model.1", width, latent, 1)
        else:
            self.convolution("decoder.model.0", width, latent, 7)
        index = 2 if self.depthwise else 1
        for rate in config["decoder_rates"]:
            block = f"decoder.model.{index}.block"
            self.snake(f"{block}.0", width)
            # A row of a transposed convolution is an input; each output sums two of its taps.
            self.weight(f"{block}.1", width, width // 2, 2 * rate, length=math.sqrt(rate / 2))
            width //= 2
            self.tensors[f"{block}.1.bias"] = self.random(width) * 0.02
            if config["noise"]:
                self.weight(f"{block}.2.linear", width, width, 1, length=0.1)
            for unit in range(3):
                self.residual(f"{block}.{unit + (3 if config['noise'] else 2)}", width)
            index += 1
        self.snake(f"decoder.model.{index}", width)
        self.convolution(f"decoder.model.{index + 1}", 1, width, 7, length=0.05)
