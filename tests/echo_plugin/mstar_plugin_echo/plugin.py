"""The echo plugin: its hook and spec. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable

from mstar.plugin import ModelSpec, Task, UsualFrames, hookimpl
from mstar_plugin_echo import config
from mstar_plugin_echo.graph import CONSUMERS, graph

NODES = {
    "lm": "LanguageModel",
    "depth": "Depth",
    "voice": "Voice",
    "affine": "Affine",
    "mix": "Mix",
    "join": "Join",
    "pace": "Pace",
    "tally": "Tally",
    "source": "Source",
    "sink": "Sink",
    "trouble": "Trouble",
}

TASKS = {
    "generate": Task(params=config.GenerateParams, inputs=("text", "token_ids")),
    "nested": Task(
        params=config.NestedParams,
        outputs=("tensors", "audio"),
        tensors_out=("frames",),
        default_outputs=("tensors", "audio"),
    ),
    "branches": Task(
        params=config.BranchesParams, outputs=("tensors",), tensors_out=("steps", "last_round", "x", "trace")
    ),
    "fanout": Task(
        params=config.FanoutParams,
        outputs=("text", "tensors"),
        tensors_out=("joined",),
        default_outputs=("text", "tensors"),
    ),
    "spans": Task(
        params=config.SpansParams,
        inputs=("text", "tensor"),
        tensors_in=("image", "image2", "latents"),
        outputs=("tensors", "text"),
        tensors_out=("image",),
        default_outputs=("tensors", "text"),
    ),
    "chunks": Task(params=config.ChunksParams, outputs=("tensors",), tensors_out=CONSUMERS),
    "chunks_each": Task(params=config.ChunksParams, outputs=("tensors",), tensors_out=CONSUMERS),
    "trouble": Task(params=config.TroubleParams, outputs=("tensors",), tensors_out=("x", "seen")),
    "session": Task(
        params=config.SessionParams,
        outputs=("text", "tensors"),
        tensors_out=("total",),
        default_outputs=("text", "tensors"),
        sessions=True,
    ),
    "states": Task(
        params=config.StatesParams,
        outputs=("text", "tensors"),
        tensors_out=("draft", "revised"),
        default_outputs=("text", "tensors"),
    ),
    "media": Task(
        params=config.MediaParams,
        inputs=("text", "image", "audio", "video"),
        outputs=("tensors",),
        tensors_out=("facts",),
    ),
    "chat": Task(
        params=config.ChatParams,
        inputs=("text", "image", "audio", "video"),
        outputs=("text", "audio"),
        messages=True,
        tools=True,
        video_frames=UsualFrames(most=8, fps=4.0),
        video_sound="hear_videos",
    ),
    "draw": Task(params=config.DrawParams, inputs=("text", "image"), outputs=("image", "text"), messages=True),
}


@hookimpl
def register_models(register: Callable[[ModelSpec], None]) -> None:
    register(
        ModelSpec(
            name="echo",
            graph=graph,
            config="mstar_plugin_echo.config:load",
            checkpoint="mstar/echo",
            processor="mstar_plugin_echo.processing:EchoProcessor",
            nodes={module: f"mstar_plugin_echo.nodes:{name}" for module, name in NODES.items()},
            tasks=TASKS,
            endpoints=("/v1/audio/speech", "/v1/chat/completions", "/v1/images/generations", "/v1/images/edits"),
            voices="mstar_plugin_echo.config:voices",
            tiny="mstar_plugin_echo.tiny:make",
            max_model_len="mstar_plugin_echo.config:max_model_len",
            description="Every primitive on a CPU, without weights",
        )
    )
