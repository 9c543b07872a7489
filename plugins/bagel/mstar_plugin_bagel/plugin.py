"""What BAGEL registers with mstar. Imports neither torch nor the model's code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from msgspec import Meta, Struct

from mstar.plugin.hooks import hookimpl
from mstar.plugin.spec import ModelSpec, Task
from mstar.types import LogitBias
from mstar_plugin_bagel import graph
from mstar_plugin_bagel.config import CHECKPOINT

MOST_TIMESTEPS = 1000
MOST_OUTPUTS = 10
"""Samples of a text, or drawings, that a request asks for."""

Number = Annotated[int, Meta(ge=1, le=MOST_OUTPUTS, description="how many")]
Scale = Annotated[float, Meta(ge=0, le=100)]
Border = Annotated[float, Meta(ge=0, le=1)]
Side = Annotated[int, Meta(ge=1, le=65536)]
Stop = Annotated[str, Meta(max_length=256)]


class WritingParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drawn, in answers and thoughts. What is null comes from the checkpoint's generation_config.json,
    then the model's published defaults: temperature 0.3."""

    think: bool = False
    n: Number = 1
    ignore_eos: bool = False
    temperature: Annotated[float, Meta(ge=0, le=100, description="0 is greedy")] | None = None
    top_k: Annotated[int, Meta(ge=-1, description="keep the k likeliest; 0 or -1: all")] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: LogitBias | None = None


class TextParams(WritingParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of `text`."""

    max_tokens: Annotated[int, Meta(ge=1, description="null: 2048, or what the model's limit leaves")] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=16)] | None = None
    logprobs: Annotated[
        int, Meta(ge=0, le=graph.MOST_LOGPROBS, description="likeliest tokens told beside each; null: none is scored")
    ] | (None) = None


class ImageParams(WritingParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of `image`. Guidance left out is the published one: that of a drawing, or with images of an edit."""

    height: Annotated[Side, Meta(description="null: the last image's after its resize; without one 1024")] | None = None
    width: Side | None = None
    num_timesteps: Annotated[int, Meta(ge=2, le=MOST_TIMESTEPS, description="one more than steps")] = 50
    timestep_shift: Annotated[float, Meta(ge=0.01, le=100)] = 3.0
    cfg_text_scale: Annotated[Scale, Meta(description="at most 1: no guidance at all")] = 4.0
    cfg_img_scale: Annotated[Scale, Meta(description="null: 1 drawing, 2 editing")] | None = None
    cfg_interval: Annotated[
        tuple[Border, Border], Meta(description="times (low, high] that are guided; null: 0.4 to 1, or 0 to 1 editing")
    ] | (None) = None
    cfg_renorm_type: Literal["global", "channel", "text_channel"] | None = None
    cfg_renorm_min: Border = 0.0
    think_max_tokens: Annotated[int, Meta(ge=1)] = 1000
    preview_every: Annotated[int, Meta(ge=1, description="steps between pictures of what is foreseen")] | None = None
    partial_images: Annotated[int, Meta(ge=0, le=3, description="so many such pictures, evenly spread")] = 0


PARTS = ("text", "token_ids", "image")

SPEC = ModelSpec(
    name="bagel",
    description="BAGEL 7B-MoT: chat about images, draw, edit, think",
    graph=graph.build,
    config="mstar_plugin_bagel.config:load",
    checkpoint=CHECKPOINT,
    processor="mstar_plugin_bagel.processing:BagelProcessor",
    nodes={
        "vit_encoder": "mstar_plugin_bagel.nodes:Vision",
        "vae": "mstar_plugin_bagel.nodes:Latents",
        "llm": "mstar_plugin_bagel.nodes:LanguageModel",
        "combine_cfg": "mstar_plugin_bagel.nodes:Guide",
    },
    tasks={
        "text": Task(params=TextParams, inputs=PARTS, outputs=("text",), messages=True),
        "image": Task(
            params=ImageParams,
            inputs=(*PARTS, "tensor"),
            tensors_in=("latents", "vae_noise"),
            outputs=("image", "text", "tensors"),
            tensors_out=("latents", "pixels"),
            default_outputs=("image",),
            messages=True,
        ),
    },
    endpoints=("/v1/chat/completions", "/v1/images/generations", "/v1/images/edits"),
    tiny="mstar_plugin_bagel.tiny:make",
    max_model_len="mstar_plugin_bagel.config:max_model_len",
)


@hookimpl
def register_models(register: Callable[[ModelSpec], None]) -> None:
    register(SPEC)
