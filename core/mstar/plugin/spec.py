"""`ModelSpec`: what a plugin registers. Importable without torch, in milliseconds.

Paths are dotted strings ("package.module:Name") so that the spec costs nothing until the model is served.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mstar.errors import ConfigError, PluginError
from mstar.plugin.graph import Graph
from mstar.types import UsualFrames


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing a model can be asked for.

    Args:
        inputs: kinds of part accepted: "text", "token_ids", "image", "audio", "video", "tensor".
        tensors_in: names of tensor inputs.
        outputs: kinds of output, the default ones first: "text", "audio", "image", "video", "tensors".
        tensors_out: names of tensor outputs.
        params: a msgspec Struct (frozen, kw_only, forbid_unknown_fields) of the task's parameters with defaults.
        default_outputs: outputs when the request names none (default: the first of `outputs`).
        messages: whether chat messages are accepted instead of inputs.
        sessions: whether a request may name a session, which keeps what later requests go on with.
        video_frames: of a video whose part does not choose frames, `UsualFrames`, or its first two fields. None: every
            frame.
        video_sound: name of the parameter that, if true, asks for the sound of videos too (`VideoPart.sound`).
        tools: whether tools may come with messages (`Request.tools`), whose calls the processor gives as chunks.
    """

    params: type[Any]
    inputs: tuple[str, ...] = ("text",)
    outputs: tuple[str, ...] = ("text",)
    tensors_in: tuple[str, ...] = ()
    tensors_out: tuple[str, ...] = ()
    default_outputs: tuple[str, ...] = ()
    messages: bool = False
    sessions: bool = False
    video_frames: tuple[int, int] | UsualFrames | None = None
    video_sound: str | None = None
    tools: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Where a model's files are, resolved before anything is loaded.

    Args:
        model: what the operator asked for: a folder, a hub id or "tiny".
        folder: the main part's folder.
        parts: other parts by short name.
        config: parsed configuration, by `ModelSpec.config`.
    """

    model: str
    folder: Path
    parts: Mapping[str, Path] = field(default_factory=dict)
    config: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the operator allows; processors check requests against it.

    Args:
        max_model_len: most tokens (prompt and output) of one sequence.
    """

    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What a plugin registers.

    Args:
        name: the model's name; the same as the entry point's.
        graph: configuration -> `Graph`. None stands for the published checkpoint's configuration.
        config: `Checkpoint` folders -> configuration object: called as `config(folder, parts)`; a dotted path.
        checkpoint: hub id of the published checkpoint.
        parts: short name -> hub id of further repositories the model needs.
        processor: dotted path of the `Processor`.
        nodes: module name -> dotted path of the `Node` class.
        tasks: task name -> `Task`; the first is the default.
        endpoints: HTTP routes the model serves besides /v1/generate. "/v1/audio/speech": by the first task with text in
            and audio out. "/v1/chat/completions": by tasks with `messages`, the first that gives what is asked for; of
            their parameters `max_tokens`, `n`, `stop`, those of `SamplingParams` and `logprobs` (how many of the
            likeliest beside each token) have OpenAI's meaning. "/v1/images/generations", "/v1/images/edits": by the
            first task with an image out and text, or text and image, in; its parameters `n`, `height`, `width` and
            `partial_images` serve `n`, `size` and `partial_images`.
        offers: dotted path of `config, tasks -> tasks`: those that a checkpoint can do, as it does them. None: all, as
            they are.
        tiny: dotted path of `make(folder)`, which writes a tiny random checkpoint and returns the folder to load: what
            `--model tiny` stands for. Of several, a mapping: "tiny" and other words for `--model` -> such a path.
        max_model_len: dotted path of `config -> int`, or None for models without a token limit.
        voices: dotted path of `config -> list of names` for speech models.
        plot: dotted path of `(request, tensors, config, folder) -> paths`, which draws what a request gave: its named
            tensors, each whole, as pictures in a folder; what `mstar run --plot` calls. It may import matplotlib.
        requires_core: PEP 440 specifier of the core versions it works with, such as ">=0.1".
    """

    name: str
    graph: Callable[[Any], Graph]
    config: str
    checkpoint: str
    processor: str
    nodes: Mapping[str, str]
    tasks: Mapping[str, Task]
    parts: Mapping[str, str] = field(default_factory=dict)
    endpoints: tuple[str, ...] = ()
    offers: str | None = None
    tiny: str | Mapping[str, str] | None = None
    max_model_len: str | None = None
    voices: str | None = None
    plot: str | None = None
    requires_core: str = ">=0.1"
    description: str = ""

    @property
    def modalities_in(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(kind for task in self.tasks.values() for kind in task.inputs))

    @property
    def modalities_out(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(kind for task in self.tasks.values() for kind in task.outputs))


def narrowed(spec: ModelSpec, config: Any) -> ModelSpec:
    """The spec with those tasks alone that a checkpoint with this configuration offers, as it does them."""
    if spec.offers is None:
        return spec
    tasks = load_object(spec.offers, plugin=spec.name)(config, spec.tasks)
    if not tasks or not set(tasks) <= set(spec.tasks):
        raise PluginError(f"plugin {spec.name!r}: {spec.offers} gave {list(tasks)}; known: {', '.join(spec.tasks)}")
    return replace(spec, tasks=tasks)


def load_object(path: str, *, plugin: str) -> Any:
    """The object a dotted path ("package.module:Name") names. Raises PluginError that names the plugin and path."""
    module_name, _, name = path.partition(":")
    if not name:
        raise PluginError(f"plugin {plugin!r}: {path!r} is not of the form 'package.module:Name'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise PluginError(f"plugin {plugin!r}: its spec names {path!r}, but there is no {error.name!r}") from error
        raise PluginError(f"plugin {plugin!r}: importing {module_name!r} failed: {error}") from error
    except Exception as error:
        raise PluginError(
            f"plugin {plugin!r}: importing {module_name!r} failed: {type(error).__name__}: {error}"
        ) from error
    if not hasattr(module, name):
        raise PluginError(f"plugin {plugin!r}: {module_name!r} has no {name!r}, which its spec names")
    return getattr(module, name)


def tinies(spec: ModelSpec) -> Mapping[str, str]:
    """Words for `--model` that stand for tiny checkpoints -> their makers. Raises ConfigError if there is none."""
    if not spec.tiny:
        raise ConfigError(f"plugin {spec.name!r} has no tiny checkpoint; pass --model FOLDER or a hub id")
    return {"tiny": spec.tiny} if isinstance(spec.tiny, str) else spec.tiny
