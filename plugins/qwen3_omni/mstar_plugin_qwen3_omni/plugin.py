"""What Qwen3-Omni registers with mstar. Imports neither torch nor the model's code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from msgspec import Meta, Struct

from mstar.plugin.hooks import hookimpl
from mstar.plugin.spec import ModelSpec, Task
from mstar.types import LogitBias, UsualFrames
from mstar_plugin_qwen3_omni import graph
from mstar_plugin_qwen3_omni.config import CHECKPOINT

MOST_OUTPUTS = 10
"""Samples of a text that a request asks for."""

MOST_CONTEXT = 1024
"""Frames that are decoded again before a chunk."""

Heat = Annotated[float, Meta(ge=0, le=100, description="0 is greedy")]
Count = Annotated[int, Meta(ge=1)]
Kept = Annotated[int, Meta(ge=-1, description="keep the k likeliest; 0 or -1: all")]
Mass = Annotated[float, Meta(gt=0, le=1)]
Repetition = Annotated[float, Meta(ge=0.01, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Stop = Annotated[str, Meta(max_length=256)]


class CodecParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of `vocode`: null chunk frames decode all at once, a number as the authors' code does, with holes."""

    codec_chunk_frames: Count | None = None
    codec_left_context: (
        Annotated[int, Meta(ge=0, le=MOST_CONTEXT, description="frames decoded before a chunk; null: 25")] | None
    ) = None


class TemplateParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Variables of the chat template."""

    enable_thinking: Annotated[bool, Meta(description="for checkpoints whose template asks for it")] | None = None


class ChatParams(CodecParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of `chat`. Sampling without a prefix is the thinker's; what is null comes from the checkpoint's
    generation_config.json, then the model's published defaults."""

    temperature: Heat | None = None
    top_k: Kept | None = None
    top_p: Mass | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    max_tokens: Annotated[
        int, Meta(ge=1, description="null: the checkpoint's, else 2048; or what the model's limit leaves")
    ] | (None) = None
    thinker_max_tokens: Annotated[int, Meta(ge=1, description="another name of max_tokens")] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=16)] | None = None
    ignore_eos: bool = False
    logprobs: Annotated[
        int, Meta(ge=0, le=graph.MOST_LOGPROBS, description="likeliest tokens told beside each; null: none is scored")
    ] | (None) = None
    n: Annotated[int, Meta(ge=1, le=MOST_OUTPUTS, description="how many; of speech one")] = 1
    use_audio_in_video: Annotated[bool, Meta(description="hear the sound of videos too")] = False
    chat_template_kwargs: TemplateParams | None = None

    speaker: Annotated[str, Meta(max_length=256, description="null: Ethan")] | None = None
    talker_temperature: Heat | None = None
    talker_top_k: Kept | None = None
    talker_top_p: Mass | None = None
    talker_repetition_penalty: Repetition | None = None
    talker_max_tokens: Annotated[int, Meta(ge=1, description="gives at most one frame less; null: 4096")] | None = None
    code_predictor_temperature: Annotated[Heat, Meta(description="null: 1, or 0 if the talker's is")] | None = None
    code_predictor_top_k: Kept | None = None
    code_predictor_top_p: Mass | None = None
    codec_left_context: (
        Annotated[int, Meta(ge=1, le=MOST_CONTEXT, description="frames decoded before a chunk; null: 25")] | None
    ) = None
    speak_last_token: Annotated[bool, Meta(description="of an answer cut by its limit; the authors' code does not")] = (
        True
    )


PARTS = ("text", "token_ids", "image", "audio", "video")

SPEC = ModelSpec(
    name="qwen3_omni",
    description="Qwen3-Omni 30B-A3B: sees, hears and watches; answers in text and speech",
    graph=graph.build,
    config="mstar_plugin_qwen3_omni.config:load",
    checkpoint=CHECKPOINT,
    processor="mstar_plugin_qwen3_omni.processing:OmniProcessor",
    nodes={
        "audio_encoder": "mstar_plugin_qwen3_omni.nodes.thinker:AudioNode",
        "vision_encoder": "mstar_plugin_qwen3_omni.nodes.thinker:VisionNode",
        "thinker": "mstar_plugin_qwen3_omni.nodes.thinker:ThinkerNode",
        "talker": "mstar_plugin_qwen3_omni.nodes.speech:TalkerNode",
        "code_predictor": "mstar_plugin_qwen3_omni.nodes.speech:PredictorNode",
        "code2wav": "mstar_plugin_qwen3_omni.nodes.speech:VocoderNode",
    },
    tasks={
        "chat": Task(
            params=ChatParams,
            inputs=(*PARTS, "tensor"),
            tensors_in=("audio",),
            outputs=("text", "audio", "tensors"),
            tensors_out=("codes", "audio"),
            default_outputs=("text",),
            messages=True,
            tools=True,
            video_frames=UsualFrames(most=768, multiple=2, fps=2.0, least=4),
            video_sound="use_audio_in_video",
        ),
        "vocode": Task(
            params=CodecParams,
            inputs=("tensor",),
            tensors_in=("codes",),
            outputs=("audio", "tensors"),
            tensors_out=("audio",),
        ),
    },
    endpoints=("/v1/chat/completions",),
    offers="mstar_plugin_qwen3_omni.config:offers",
    tiny="mstar_plugin_qwen3_omni.tiny:make",
    max_model_len="mstar_plugin_qwen3_omni.config:max_model_len",
    voices="mstar_plugin_qwen3_omni.config:voices",
)


@hookimpl
def register_models(register: Callable[[ModelSpec], None]) -> None:
    register(SPEC)
