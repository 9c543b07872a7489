"""The checkpoint's configuration: config.json, preprocessor_config.json, generation_config.json. Imports no torch.

Read once per process from the checkpoint's folder. Every field that changes the numbers is kept, or refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mstar.errors import ConfigError
from mstar.plugin.fields import Fields, read_object
from mstar.plugin.spec import Task
from mstar_plugin_qwen3_omni.config.media import PictureConfig, SoundConfig, read_pictures, read_sound
from mstar_plugin_qwen3_omni.config.speech import SpeechConfig, read_speech
from mstar_plugin_qwen3_omni.config.thinker import ThinkerConfig, read_thinker

CHECKPOINT = "Qwen/Qwen3-Omni-30B-A3B-Instruct"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTokens:
    """Ids of the tokens that begin and end a turn, and that name who speaks."""

    start: int
    end: int
    system: int
    user: int
    assistant: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OmniConfig:
    """Everything the graph, the nodes and the processor need to know of a checkpoint.

    Args:
        folder: with the tokenizer's files.
        speech: None where the checkpoint cannot speak.
        stops: ids that end an answer.
        chat_template: Jinja, of messages to a prompt.
        generation: its generation_config.json, or {}.
        dtype: what the weights were saved in.
    """

    folder: Path
    thinker: ThinkerConfig
    speech: SpeechConfig | None
    turns: TurnTokens
    stops: tuple[int, ...]
    pictures: PictureConfig
    sound: SoundConfig
    chat_template: str
    generation: Mapping[str, Any]
    dtype: str


def load(folder: Path, parts: Mapping[str, Path]) -> OmniConfig:
    """The configuration of a checkpoint. Raises ConfigError that names the file, the field, its value and a remedy."""
    path = folder / "config.json"
    if not path.exists():
        raise ConfigError(f"{path} is missing; --model takes a checkpoint such as {CHECKPOINT}")
    fields = Fields(read_object(path), path)
    if fields.text("model_type", "qwen3_omni_moe") != "qwen3_omni_moe":
        raise fields.refuse("model_type", "expected 'qwen3_omni_moe'", f"pass a checkpoint such as {CHECKPOINT}")
    media, video, generation = (
        Fields(read_object(folder / name, optional=True), folder / name)
        for name in ("preprocessor_config.json", "video_preprocessor_config.json", "generation_config.json")
    )
    return _build(
        fields,
        media=media,
        video=video,
        generation=generation,
        token_ids=_token_ids(folder),
        template=_template(folder),
    )


def published() -> OmniConfig:
    """That of the release, without its files."""
    empty = Fields({}, Path("preprocessor_config.json"))
    fields = Fields(RELEASE, Path("config.json"))
    return _build(fields, media=empty, video=empty, generation=empty, token_ids={}, template="")


def max_model_len(config: OmniConfig) -> int:
    """Most tokens of one sequence that the thinker was made for."""
    return config.thinker.max_positions


def _build(
    fields: Fields, *, media: Fields, video: Fields, generation: Fields, token_ids: Mapping[str, int], template: str
) -> OmniConfig:
    outer = fields.part("thinker_config")
    thinker = read_thinker(outer, token_ids=token_ids)
    turns = TurnTokens(
        start=fields.whole("im_start_token_id", 151644),
        end=fields.whole("im_end_token_id", 151645),
        system=fields.whole("system_token_id", 8948),
        user=fields.whole("user_token_id", outer.whole("user_token_id", 872)),
        assistant=fields.whole("assistant_token_id", 77091),
    )
    return OmniConfig(
        folder=fields.path.parent,
        thinker=thinker,
        speech=read_speech(fields),
        turns=turns,
        stops=_stops(generation, end=turns.end),
        pictures=read_pictures(media, thinker.vision, video=video),
        sound=read_sound(media, thinker.audio),
        chat_template=template,
        generation=generation.values,
        dtype=fields.text("torch_dtype", fields.text("dtype", "bfloat16")),
    )


def _stops(generation: Fields, *, end: int) -> tuple[int, ...]:
    given = generation.values.get("eos_token_id")
    more = () if given is None else (given,) if isinstance(given, int) else generation.wholes("eos_token_id", least=0)
    return tuple(dict.fromkeys((end, *more)))


def _token_ids(folder: Path) -> Mapping[str, int]:
    """Added tokens by what they say. Raises ConfigError without a tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ConfigError(f"{folder} has no tokenizer.json; copy the one of {CHECKPOINT} there")
    try:
        return {token["content"]: token["id"] for token in read_object(path)["added_tokens"]}
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path} does not list its special tokens: {error!r}; download it again") from error


def _template(folder: Path) -> str:
    """From whichever file has it; newer ones win."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = read_object(folder / name, optional=True).get("chat_template")
        if isinstance(found, str):
            return found
    raise ConfigError(f"{folder} has no chat template; copy chat_template.json of {CHECKPOINT} there")


RELEASE: Mapping[str, Any] = json.loads(
    """{
    "thinker_config": {
        "text_config": {
            "hidden_size": 2048, "intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 152064, "max_position_embeddings": 65536,
            "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": true,
            "rope_theta": 1000000, "rope_scaling": {"mrope_section": [24, 20, 20], "interleaved": true}
        },
        "audio_config": {
            "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120,
            "num_mel_bins": 128, "n_window": 50, "n_window_infer": 800, "downsample_hidden_size": 480,
            "output_dim": 2048
        },
        "vision_config": {
            "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
            "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24], "out_hidden_size": 2048
        },
        "position_id_per_seconds": 13, "audio_token_id": 151675, "image_token_id": 151655, "video_token_id": 151656,
        "audio_start_token_id": 151669, "audio_end_token_id": 151670, "vision_start_token_id": 151652,
        "vision_end_token_id": 151653
    },
    "talker_config": {
        "text_config": {
            "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 20, "num_attention_heads": 16,
            "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 3072, "max_position_embeddings": 65536,
            "num_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 384, "norm_topk_prob": true,
            "shared_expert_intermediate_size": 768, "rope_theta": 1000000,
            "rope_scaling": {"mrope_section": [24, 20, 20], "interleaved": true}
        },
        "code_predictor_config": {
            "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 5, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 2048, "num_code_groups": 16, "rope_theta": 1000000
        },
        "accept_hidden_layer": 24, "thinker_hidden_size": 2048, "num_code_groups": 16, "codec_pad_id": 2148,
        "codec_bos_id": 2149, "codec_eos_token_id": 2150, "codec_nothink_id": 2155, "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157, "speaker_id": {"chelsie": 2301, "ethan": 2302, "aiden": 2303}
    },
    "code2wav_config": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 16, "codebook_size": 2048, "num_quantizers": 16, "sliding_window": 72,
        "decoder_dim": 1536, "upsample_rates": [8, 5, 4, 3], "upsampling_ratios": [2, 2], "rope_theta": 10000
    },
    "tts_pad_token_id": 151671, "tts_bos_token_id": 151672, "tts_eos_token_id": 151673
}"""
)


# ---- what a checkpoint can do ---------------------------------------------------------------------------


def voices(config: OmniConfig) -> list[str]:
    """Who can speak, the default first; nobody, if the checkpoint does not speak."""
    return config.speech.talker.names if config.speech is not None else []


def offers(config: OmniConfig, tasks: Mapping[str, Task]) -> dict[str, Task]:
    """The tasks of a checkpoint, with what it can take and give."""
    chat = tasks["chat"]
    missing = {"audio": config.thinker.audio is None, "image": config.thinker.vision is None}
    missing["video"] = missing["image"]
    inputs = tuple(kind for kind in chat.inputs if not missing.get(kind))
    tensors_in = () if missing["audio"] else chat.tensors_in
    if not tensors_in:
        inputs = tuple(kind for kind in inputs if kind != "tensor")
    if config.speech is None:
        return {"chat": replace(chat, inputs=inputs, tensors_in=tensors_in, outputs=("text",), tensors_out=())}
    return {**tasks, "chat": replace(chat, inputs=inputs, tensors_in=tensors_in)}
