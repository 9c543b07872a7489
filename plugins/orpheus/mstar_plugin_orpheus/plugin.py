"""What Orpheus registers with mstar. Imports neither torch nor the model's code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from mstar.plugin.hooks import hookimpl
from mstar.plugin.spec import ModelSpec, Task
from mstar.types import LogitBias
from mstar_plugin_orpheus import graph
from mstar_plugin_orpheus.config import CHECKPOINT, CODEC


class CodecParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of `vocode`."""

    codec_noise: Annotated[bool, Meta(description="the codec's own noise, seeded; false: none")] = True


class SpeechParams(CodecParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of `speech`. What is null comes from the checkpoint's generation_config.json, then the model's
    published defaults: temperature 0.6, top_p 0.8, repetition_penalty 1.3 over prompt and output."""

    voice: Annotated[str, Meta(description="null: none; left out: the checkpoint's first")] | UnsetType | None = UNSET
    max_tokens: Annotated[int, Meta(ge=1, description="of all segments together; null: no limit but the model's")] | (
        None
    ) = None
    speed: Annotated[float, Meta(ge=0.25, le=4, description="2 is twice as fast, at the same pitch")] = 1.0
    ignore_eos: bool = False
    temperature: Annotated[float, Meta(ge=0, le=100, description="0 is greedy")] | None = None
    top_k: Annotated[int, Meta(ge=-1, description="keep the k likeliest; 0 or -1: all")] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: LogitBias | None = None


SPEC = ModelSpec(
    name="orpheus",
    description="Orpheus 3B: expressive text to speech, 24 kHz",
    graph=graph.build,
    config="mstar_plugin_orpheus.config:load",
    checkpoint=CHECKPOINT,
    parts={"snac_24khz": CODEC},
    processor="mstar_plugin_orpheus.processing:OrpheusProcessor",
    nodes={
        "lm": "mstar_plugin_orpheus.nodes:LanguageModel",
        "snac": "mstar_plugin_orpheus.nodes:Codec",
    },
    tasks={
        "speech": Task(
            params=SpeechParams,
            inputs=("text", "token_ids"),
            outputs=("audio", "tensors"),
            tensors_out=("audio", "codes"),
        ),
        "vocode": Task(
            params=CodecParams,
            inputs=("tensor",),
            tensors_in=("codes",),
            outputs=("audio", "tensors"),
            tensors_out=("audio",),
        ),
    },
    endpoints=("/v1/audio/speech",),
    tiny="mstar_plugin_orpheus.tiny:make",
    max_model_len="mstar_plugin_orpheus.config:max_model_len",
    voices="mstar_plugin_orpheus.config:voices",
)


@hookimpl
def register_models(register: Callable[[ModelSpec], None]) -> None:
    register(SPEC)
