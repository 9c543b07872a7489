"""Writes a tiny random checkpoint in the real on-disk layout: the same files every time, nothing left at its start."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from mstar_plugin_qwen3_omni.config.speech import SPECIAL_CODES
from mstar_plugin_qwen3_omni.tiny import tokenizer, weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a random checkpoint; the codec's strides are the release's.

    Args:
        side: rows and columns of the vision encoder's table of positions.
        taps: layers of the vision encoder that give a further set of tokens.
        tap: which layer's input of the thinker the talker hears media by.
        codes: that sound, in each codebook.
        window: frames that a frame of the codec sees.
    """

    hidden: int = 48
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    experts: int = 6
    chosen: int = 2
    expert_mlp: int = 24
    audio_hidden: int = 32
    audio_layers: int = 2
    audio_heads: int = 2
    audio_mlp: int = 48
    channels: int = 6
    vision_hidden: int = 32
    vision_layers: int = 3
    vision_heads: int = 2
    vision_mlp: int = 40
    side: int = 6
    taps: tuple[int, ...] = (1, 2)
    tap: int = 3
    groups: int = 16
    codes: int = 64
    talker_hidden: int = 32
    talker_mlp: int = 40
    talker_layers: int = 2
    talker_heads: int = 4
    talker_kv_heads: int = 2
    talker_head_dim: int = 16
    talker_experts: int = 4
    talker_chosen: int = 2
    talker_expert_mlp: int = 16
    shared_mlp: int = 24
    predictor_layers: int = 2
    predictor_heads: int = 4
    predictor_kv_heads: int = 2
    predictor_head_dim: int = 8
    predictor_mlp: int = 40
    codec_hidden: int = 32
    codec_layers: int = 2
    codec_heads: int = 4
    codec_mlp: int = 48
    codec_width: int = 32
    window: int = 12

    @property
    def codec_vocab(self) -> int:
        """Of the talker: what sounds, and special ones."""
        return self.codes + SPECIAL_CODES


def make(folder: Path) -> Path:
    """Write the checkpoint below `folder`; returns what `--model` takes."""
    return write(folder / "Qwen3-Omni", Sizes())


def write(home: Path, sizes: Sizes) -> Path:
    """Write a checkpoint of other sizes into `home`, which is returned."""
    home.mkdir(parents=True, exist_ok=True)
    words = tokenizer.tokenizer()
    ids = tokenizer.ids_of(words)
    vocab_size = len(ids) + 6  # as in the release, more rows than tokens
    files = {
        "config.json": _config(sizes, ids, vocab_size=vocab_size),
        "generation_config.json": GENERATION,
        "preprocessor_config.json": PREPROCESSOR,
        "chat_template.json": {"chat_template": tokenizer.CHAT_TEMPLATE},
        "tokenizer.json": words,
        "tokenizer_config.json": tokenizer.settings(words["added_tokens"]),
        "vocab.json": words["model"]["vocab"],
    }
    for name, value in files.items():
        (home / name).write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    merges = "".join(f"{left} {right}\n" for left, right in tokenizer.MERGES)
    (home / "merges.txt").write_text("#version: 0.2\n" + merges, encoding="utf-8")
    tensors = dict(weights.tensors(sizes, vocab_size=vocab_size))
    save_file(tensors, home / "model.safetensors", metadata={"format": "pt"})
    return home


GENERATION = {
    "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "talker_max_new_tokens": 256,
    "talker_repetition_penalty": 1.05, "talker_temperature": 0.9, "talker_top_k": 50, "talker_top_p": 1.0,
}  # fmt: skip
PREPROCESSOR = {
    "processor_class": "Qwen3OmniMoeProcessor",
    "feature_extractor_type": "WhisperFeatureExtractor",
    "image_processor_type": "Qwen2VLImageProcessor",
    "chunk_length": 30, "dither": 0.0, "feature_size": 128, "hop_length": 160, "n_fft": 400, "n_samples": 480000,
    "nb_max_frames": 3000, "padding_side": "right", "padding_value": 0.0, "return_attention_mask": True,
    "sampling_rate": 16000,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "max_pixels": 16384, "merge_size": 2, "min_pixels": 1024,
    "patch_size": 16, "temporal_patch_size": 2,
}  # fmt: skip


def _config(sizes: Sizes, ids: dict[str, int], *, vocab_size: int) -> dict[str, Any]:
    media = {
        "audio_start_token_id": ids["<|audio_start|>"],
        "audio_end_token_id": ids["<|audio_end|>"],
        "audio_token_id": ids["<|audio_pad|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
    }
    return {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "dtype": "float32",
        "enable_audio_output": True,
        "im_start_token_id": ids["<|im_start|>"],
        "im_end_token_id": ids["<|im_end|>"],
        "system_token_id": ids["system"],
        "user_token_id": ids["user"],
        "assistant_token_id": ids["assistant"],
        "tts_pad_token_id": ids["<tts_pad>"],
        "tts_bos_token_id": ids["<tts_text_bos>"],
        "tts_eos_token_id": ids["<tts_text_eod>"],
        "thinker_config": {**_thinker(sizes, vocab_size=vocab_size), **media, "user_token_id": ids["user"]},
        "talker_config": {**_talker(sizes), **media},
        "code2wav_config": _codec(sizes),
    }


def _thinker(sizes: Sizes, *, vocab_size: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3_omni_moe_thinker",
        "text_config": {
            **_decoder(sizes.hidden, sizes.layers, sizes.heads, sizes.kv_heads, sizes.head_dim),
            "model_type": "qwen3_omni_moe_text",
            "intermediate_size": 2 * sizes.hidden,
            "moe_intermediate_size": sizes.expert_mlp,
            "num_experts": sizes.experts,
            "num_experts_per_tok": sizes.chosen,
            "shared_expert_intermediate_size": 0,
            "vocab_size": vocab_size,
        },
        "audio_config": {
            "model_type": "qwen3_omni_moe_audio_encoder",
            "activation_function": "gelu",
            "d_model": sizes.audio_hidden,
            "downsample_hidden_size": sizes.channels,
            "encoder_attention_heads": sizes.audio_heads,
            "encoder_ffn_dim": sizes.audio_mlp,
            "encoder_layers": sizes.audio_layers,
            "max_source_positions": 1500,
            "n_window": 50,
            "n_window_infer": 200,
            "num_mel_bins": 128,
            "output_dim": sizes.hidden,
        },
        "vision_config": {
            "model_type": "qwen3_omni_moe_vision_encoder",
            "deepstack_visual_indexes": list(sizes.taps),
            "depth": sizes.vision_layers,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": sizes.vision_hidden,
            "in_channels": 3,
            "intermediate_size": sizes.vision_mlp,
            "num_heads": sizes.vision_heads,
            "num_position_embeddings": sizes.side**2,
            "out_hidden_size": sizes.hidden,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }


def _talker(sizes: Sizes) -> dict[str, Any]:
    first = sizes.codes + 100  # of the special codes
    heads = sizes.talker_heads, sizes.talker_kv_heads, sizes.talker_head_dim
    predictor = sizes.predictor_heads, sizes.predictor_kv_heads, sizes.predictor_head_dim
    return {
        "model_type": "qwen3_omni_moe_talker",
        "accept_hidden_layer": sizes.tap,
        "thinker_hidden_size": sizes.hidden,
        "num_code_groups": sizes.groups,
        "codec_pad_id": first,
        "codec_bos_id": first + 1,
        "codec_eos_token_id": first + 2,
        "codec_nothink_id": first + 7,
        "codec_think_bos_id": first + 8,
        "codec_think_eos_id": first + 9,
        "speaker_id": {"chelsie": first + 153, "ethan": first + 154, "aiden": first + 155},
        "spatial_merge_size": 2,
        "text_config": {
            **_decoder(sizes.talker_hidden, sizes.talker_layers, *heads),
            "model_type": "qwen3_omni_moe_talker_text",
            "intermediate_size": sizes.talker_mlp,
            "moe_intermediate_size": sizes.talker_expert_mlp,
            "num_experts": sizes.talker_experts,
            "num_experts_per_tok": sizes.talker_chosen,
            "shared_expert_intermediate_size": sizes.shared_mlp,
            "vocab_size": sizes.codec_vocab,
        },
        "code_predictor_config": {
            **_decoder(sizes.talker_hidden, sizes.predictor_layers, *predictor),
            "model_type": "qwen3_omni_moe_talker_code_predictor",
            "intermediate_size": sizes.predictor_mlp,
            "layer_types": ["full_attention"] * sizes.predictor_layers,
            "num_code_groups": sizes.groups,
            "rope_scaling": None,
            "vocab_size": sizes.codes,
        },
    }


def _decoder(hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    third = head_dim // 8
    sections = [head_dim // 2 - 2 * third, third, third]
    return {
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "max_position_embeddings": 32768,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"interleaved": True, "mrope_section": sections, "rope_type": "default", "type": "default"},
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    }


def _codec(sizes: Sizes) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "codebook_size": sizes.codes,
        "decoder_dim": sizes.codec_width,
        "hidden_act": "silu",
        "hidden_size": sizes.codec_hidden,
        "intermediate_size": sizes.codec_mlp,
        "layer_scale_initial_scale": 0.01,
        "max_position_embeddings": 8000,
        "num_attention_heads": sizes.codec_heads,
        "num_hidden_layers": sizes.codec_layers,
        "num_key_value_heads": sizes.codec_heads,
        "num_quantizers": sizes.groups,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000,
        "sliding_window": sizes.window,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
    }
