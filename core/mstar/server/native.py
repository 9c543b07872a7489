"""The native request: wire types and validation against a model's tasks (results are in `results`).

One schema for `POST /v1/generate` and `mstar run`. Runs in the server process, off the event loop where it decodes
media. Knows nothing about HTTP, queues or workers.
"""

from __future__ import annotations

import binascii
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import safetensors.torch
import torch
from msgspec import Meta, Struct
from torch import Tensor

from mstar.errors import RequestError
from mstar.ipc.tensors import tensor_from_bytes
from mstar.media.policy import MediaPolicy
from mstar.media.reader import MediaReader
from mstar.media.video import Sampling
from mstar.plugin.spec import ModelSpec, Task
from mstar.server.convert import check_known, convert, field_names, short
from mstar.server.tools import MAX_TEXT, MAX_TOOLS, Text, Tool, ToolCallInput, check_tools
from mstar.types import (
    AudioPart,
    Message,
    Part,
    Request,
    TensorPart,
    TextPart,
    TokensPart,
    ToolCall,
    UsualFrames,
    VideoPart,
)

MAX_SEED = 2**63 - 1
MAX_TIMEOUT_S = 86400
MAX_PARTS = 1024
"""Most inputs, messages, or parts of a message."""
_MOST_DIGITS = 4000  # of a whole number
_MOST_VALUES = 1 << 21  # of a whole body, by its commas
MAX_FRAMES = 1 << 16
"""Most frames that one video part asks for; what the operator allows is less."""
MediaSource = Annotated[str, Meta(description="a data URI in base64, or where the operator allows it a URL or a file")]
_DTYPES = ("float32", "float16", "bfloat16", "int64", "int32", "int16", "uint8", "bool")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPES}

# ---- wire types -------------------------------------------------------------------------------------------------


class TensorValue(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tensor in JSON: dtype, shape and base64 data; or, in `mstar run`, a file and a name in it."""

    dtype: str | None = None
    shape: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=16)] | None = None
    data: str | None = None
    file: str | None = None
    name: str | None = None


class TextInput(Struct, tag="text", tag_field="type", kw_only=True, forbid_unknown_fields=True):
    text: Text


class TokensInput(Struct, tag="token_ids", tag_field="type", kw_only=True, forbid_unknown_fields=True):
    ids: Annotated[list[Annotated[int, Meta(ge=0, le=2**31 - 1)]], Meta(max_length=MAX_TEXT)]


class AudioInput(Struct, tag="audio", tag_field="type", kw_only=True, forbid_unknown_fields=True):
    """A sound file; or its samples, float32 or int16, [n] or [channels, n], at `sample_rate` (absent: 16000)."""

    data: MediaSource | None = None
    samples: TensorValue | None = None
    sample_rate: Annotated[int, Meta(ge=1000, le=768_000)] | None = None


class ImageInput(Struct, tag="image", tag_field="type", kw_only=True, forbid_unknown_fields=True):
    data: MediaSource


class VideoInput(Struct, tag="video", tag_field="type", kw_only=True, forbid_unknown_fields=True):
    """A video file, or its frames. At most one of `fps`, `num_frames` and `frame_indices`; none: every frame,
    or as many as the task usually takes.

    Args:
        frames: instead of `data`: uint8 [T, H, W, 3], of which none are left out; `fps` is then their rate.
        fps: the frame shown at 0 s, at 1 / fps s, and so on.
        num_frames: spread evenly over the clip, the first and the last among them.
        frame_indices: these frames, in this order; the first of the clip is 0.
    """

    data: MediaSource | None = None
    frames: TensorValue | None = None
    fps: Annotated[float, Meta(gt=0, le=1000)] | None = None
    num_frames: Annotated[int, Meta(ge=1, le=MAX_FRAMES)] | None = None
    frame_indices: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1, max_length=MAX_FRAMES)] | None = None


class TensorInput(Struct, tag="tensor", tag_field="type", kw_only=True, forbid_unknown_fields=True):
    name: str
    tensor: TensorValue


Input = TextInput | TokensInput | AudioInput | ImageInput | VideoInput | TensorInput


class ChatMessage(Struct, kw_only=True, forbid_unknown_fields=True):
    """`tool_calls` and `reasoning_content` are an assistant's; the latter reaches models that look back at it.
    `tool_call_id` is a tool's: which of the calls before it this answers."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: Text | Annotated[list[Input], Meta(max_length=MAX_PARTS)]
    tool_calls: Annotated[list[ToolCallInput], Meta(max_length=MAX_TOOLS)] = []
    tool_call_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    reasoning_content: Text | None = None

    @property
    def parts(self) -> list[Input]:
        return [TextInput(text=self.content)] if isinstance(self.content, str) else self.content


class GenerateRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/generate` and the request file of `mstar run`."""

    model: str | None = None
    task: str | None = None
    inputs: Annotated[list[Input], Meta(max_length=MAX_PARTS)] | None = None
    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_PARTS)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] = []
    outputs: Annotated[list[str], Meta(max_length=MAX_PARTS)] | None = None
    params: dict[str, Any] = {}
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    stream: bool = False
    session: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)] | None = None


# ---- validation -------------------------------------------------------------------------------------------------


def parse_json(body: bytes) -> Any:
    """JSON as built-in types. Raises RequestError for what is not JSON, gives a key twice, or takes very long."""
    if (number := body.count(b",")) > _MOST_VALUES:
        message = f"the body has {number} commas; at most {_MOST_VALUES} are read; send less at once"
        raise RequestError(message, status=413, code="body_too_large")
    try:
        return _JSON.decode(body.decode())
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid JSON: byte {error.start} is not UTF-8") from error
    except RecursionError as error:
        raise RequestError("the body is not valid JSON, or is nested too deeply to be read") from error
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, number in Counter(key for key, _ in pairs).items() if number > 1)
        raise RequestError(f"the key {short(twice)} is given twice; leave one out", param=twice[:60])
    return found


def _number(text: str) -> float:
    if len(text) <= _MOST_DIGITS and text.lstrip("-").isdigit():
        return int(text)
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is no number that can be held")
    return number


# Numbers are read by a function of ours, since Python's own would hold up all other threads to the end of the body.
_JSON = json.JSONDecoder(object_pairs_hook=_object, parse_int=_number, parse_float=_number, parse_constant=_number)


def check_model(model: str, *, names: tuple[str, ...]) -> None:
    """Raises RequestError 404 if a request asks for a model that is not served."""
    problem = f"model {short(model)} does not exist; served:"
    check_known(model, names, problem, param="model", status=404, code="model_not_found")


# ---- wire to request --------------------------------------------------------------------------------------------


def check_request(wire: GenerateRequest, *, spec: ModelSpec, model_names: tuple[str, ...]) -> tuple[str, str, Any]:
    """Model, task and parameters of a request. Raises RequestError for all that is wrong without looking into parts."""
    model = model_names[0] if wire.model is None else wire.model
    check_model(model, names=model_names)
    given = [items for items in (wire.inputs, wire.messages) if items is not None]
    if len(given) != 1 or not given[0]:
        raise RequestError("give exactly one of 'inputs' and 'messages', and not empty", param="inputs")
    name = _task(wire, spec=spec)
    is_chat, takes_tools = wire.messages is not None, spec.tasks[name].tools
    check_tools(wire.messages or (), wire.tools, is_chat=is_chat, takes_tools=takes_tools)
    params = convert(wire.params, spec.tasks[name].params, prefix="params.")
    if "" in stop_strings(params):
        raise RequestError("params.stop holds an empty string; give at least 1 character", param="params.stop")
    return model, name, params


def read_request(
    wire: GenerateRequest, *, spec: ModelSpec, model_names: tuple[str, ...], request_id: str, seed: int,
    resumed: bool = False, base: Path | None = None, media: MediaPolicy | None = None, deadline: float | None = None,
) -> Request:  # fmt: skip
    """A validated request with decoded parts. Slow (decodes media): not for the event loop.

    Args:
        seed: used when the request names none.
        base: folder relative file names start from (`mstar run`); None: files are refused, but for media that the
            policy allows.
        media: what may be read of media; None: the defaults of `MediaPolicy`, which allow data URIs alone.
        deadline: in seconds of `time.monotonic`; reading media goes on no longer.
    """
    model, name, params = check_request(wire, spec=spec, model_names=model_names)
    task, policy = spec.tasks[name], media or MediaPolicy()
    _check_amounts(wire, policy.most_of_kind)
    parts = _Parts(
        reader=MediaReader(policy, deadline=deadline, base=base), base=base, usual=task.video_frames,
        with_sound=task.video_sound is not None and bool(getattr(params, task.video_sound)),
    )  # fmt: skip
    read = [(turn, tuple(parts.read(part, param=at) for at, part in own)) for turn, own in _turns(wire)]
    return Request(
        id=request_id, model=model, task=name, params=params, session=wire.session, resumed=resumed, stream=wire.stream,
        parts=tuple(part for turn, own in read if turn is None for part in own),
        messages=tuple(_message(turn, own) for turn, own in read if turn is not None),
        tools=tuple(msgspec.to_builtins(tool) for tool in wire.tools),
        outputs=tuple(wire.outputs or task.default_outputs or task.outputs[:1]),
        seed=seed if wire.seed is None else wire.seed,
    )  # fmt: skip


def _message(turn: ChatMessage, parts: tuple[Part, ...]) -> Message:
    calls = tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in turn.tool_calls)
    return Message(turn.role, parts, calls, turn.tool_call_id, turn.reasoning_content or "")


def _check_amounts(wire: GenerateRequest, most: Mapping[str, int]) -> None:
    """Raises RequestError for more media of a kind than the operator allows."""
    found: Counter[str] = Counter()
    for at, part in (one for _, parts in _turns(wire) for one in parts):
        kind = str(part.__struct_config__.tag)
        found[kind] += 1
        if found[kind] > (limit := most.get(kind, MAX_PARTS * MAX_PARTS)):
            message = f"{at} is {kind} number {found[kind]} of the request; the limit is {limit}; "
            message += f"send fewer, or raise --limit-mm-per-prompt {kind}={limit}"
            raise RequestError(message, param=at, code="too_many_media")


def _turns(wire: GenerateRequest) -> list[tuple[ChatMessage | None, list[tuple[str, Input]]]]:
    """Messages, or None for the inputs, with their parts; each part after its `param`."""
    turns: list[tuple[ChatMessage | None, list[tuple[str, Input]]]] = []
    if wire.inputs is not None:
        turns.append((None, [(f"inputs.{index}", part) for index, part in enumerate(wire.inputs)]))
    for index, message in enumerate(wire.messages or ()):
        turns.append((message, [(f"messages.{index}.content.{i}", part) for i, part in enumerate(message.parts)]))
    return turns


def has_media(wire: GenerateRequest) -> bool:
    """Whether reading the request may wait for other hosts, or for a decoder."""
    return any(isinstance(part, AudioInput | ImageInput | VideoInput) for _, parts in _turns(wire) for _, part in parts)


def _task(wire: GenerateRequest, *, spec: ModelSpec) -> str:
    """The task asked for, or the first that takes these inputs and gives these outputs."""
    if wire.task is not None:
        problem = f"task {short(wire.task)} is unknown; known:"
        check_known(wire.task, spec.tasks, problem, param="task", code="unknown_task")
    problems = []
    for name in spec.tasks if wire.task is None else [wire.task]:
        try:
            _check_fit(wire, name=name, task=spec.tasks[name])
        except RequestError as error:
            problems.append(error)
        else:
            return name
    if len(problems) == 1:
        raise problems[0]
    message = f"no task takes these inputs and gives these outputs: {'; '.join(p.message for p in problems)}"
    raise RequestError(message, param=problems[0].param)


def _check_fit(wire: GenerateRequest, *, name: str, task: Task) -> None:
    if wire.messages is not None and not task.messages:
        raise RequestError(f"task {name!r} takes 'inputs', not 'messages'", param="messages")
    if wire.session is not None and not task.sessions:
        raise RequestError(f"task {name!r} keeps no sessions; leave 'session' out", param="session")
    seen: set[str] = set()
    for param, part in (item for _, parts in _turns(wire) for item in parts):
        kind = str(part.__struct_config__.tag)
        check_known(kind, task.inputs, f"task {name!r} takes no {kind} part; known:", param=param)
        if isinstance(part, TensorInput):
            problem = f"task {name!r} takes no tensor {short(part.name)}; known:"
            check_known(part.name, task.tensors_in, problem, param=f"{param}.name")
            if part.name in seen:
                raise RequestError(f"tensor {part.name!r} is given twice", param=f"{param}.name")
            seen.add(part.name)
    known = [*task.outputs, *(f"tensor:{tensor}" for tensor in task.tensors_out)]
    for index, output in enumerate(wire.outputs or ()):
        problem = f"task {name!r} gives no output {short(output)}; known:"
        check_known(output, known, problem, param=f"outputs.{index}")


def stop_strings(params: Any) -> tuple[str, ...]:
    """The stop strings of a params struct, if it has any."""
    stop = getattr(params, "stop", None)
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Reads the parts of one request.

    Args:
        base: see `read_request`.
        usual: frames of a video whose part does not choose.
        with_sound: whether the sound of videos is wanted.
    """

    reader: MediaReader
    base: Path | None
    usual: tuple[int, int] | UsualFrames | None
    with_sound: bool

    def read(self, part: Input, *, param: str) -> Part:
        """A part decoded; `param` is its place."""
        if isinstance(part, TextInput):
            return TextPart(part.text)
        if isinstance(part, TokensInput):
            return TokensPart(part.ids)
        if isinstance(part, TensorInput):
            return TensorPart(part.name, self._tensor(part.tensor, f"{param}.tensor", name=repr(part.name[:60])))
        if isinstance(part, AudioInput):
            return self._audio(part, param)
        if isinstance(part, ImageInput):
            return self.reader.image(part.data, param=param)
        return self._video(part, param)

    def _tensor(self, value: TensorValue, param: str, *, name: str) -> Tensor:
        return _tensor(value, param=param, base=self.base, name=name)

    def _audio(self, part: AudioInput, param: str) -> AudioPart:
        if (part.data is None) == (part.samples is None):
            raise RequestError(f"{param} needs exactly one of 'data' and 'samples'", param=param)
        if part.data is not None:
            if part.sample_rate is not None:
                message = f"{param}.sample_rate is for 'samples'; a file tells its own: leave it out"
                raise RequestError(message, param=f"{param}.sample_rate")
            return self.reader.audio(part.data, param=param)
        assert part.samples is not None
        where, rate = f"{param}.samples", part.sample_rate or 16000
        samples = self._tensor(part.samples, where, name="samples")
        if samples.dtype not in (torch.float32, torch.int16) or not 1 <= samples.dim() <= 2 or not samples.numel():
            message = f"{where} is {str(samples.dtype)[6:]} {list(samples.shape)}; it must be float32 or int16, [n] or "
            raise RequestError(f"{message}[channels, n], of 1 sample or more", param=where)
        if samples.shape[-1] > (longest := self.reader.budget.policy.max_audio_s) * rate:
            message = f"{where} lasts {samples.shape[-1] / rate:.1f} s; the limit is {longest:g} s; send a shorter part"
            raise RequestError(f"{message}, or raise --max-audio-duration", param=where, code="media_too_large")
        self.reader.budget.take(4 * samples.numel(), "samples", where)
        scale = 32768 if samples.dtype is torch.int16 else 1
        return AudioPart(np.atleast_2d((samples.float() / scale).numpy()), rate)

    def _video(self, part: VideoInput, param: str) -> VideoPart:
        if (part.data is None) == (part.frames is None):
            raise RequestError(f"{param} needs exactly one of 'data' and 'frames'", param=param)
        if part.data is not None:
            chosen = {name: getattr(part, name) for name in ("fps", "num_frames", "frame_indices")}
            sampling = Sampling(**chosen, usual=self.usual)
            return self.reader.video(part.data, sampling=sampling, param=param, with_sound=self.with_sound)
        assert part.frames is not None
        for name in ("num_frames", "frame_indices"):
            if getattr(part, name) is not None:
                message = f"{param}.{name} chooses frames of a file; of 'frames' all are taken: send those you want"
                raise RequestError(message, param=f"{param}.{name}")
        if part.fps is None:
            raise RequestError(f"{param}.fps is missing: at how many a second 'frames' are shown", param=f"{param}.fps")
        where = f"{param}.frames"
        frames = self._tensor(part.frames, where, name="frames")
        if frames.dtype is not torch.uint8 or frames.dim() != 4 or frames.shape[-1] != 3 or not frames.numel():
            message = f"{where} is {str(frames.dtype)[6:]} {list(frames.shape)}; it must be uint8 [T, H, W, 3], of 1 "
            raise RequestError(f"{message}frame or more", param=where)
        if len(frames) > (most := self.reader.budget.policy.max_video_frames):
            message = f"{where} are {len(frames)}; the limit is {most}; send fewer, or raise --max-video-frames"
            raise RequestError(message, param=where, code="media_too_large")
        if (lasts := len(frames) / part.fps) > (longest := self.reader.budget.policy.max_video_s):
            message = f"{param} lasts {lasts:.1f} s, {len(frames)} frames at {part.fps:g} a second; the limit is "
            message += f"{longest:g} s; send fewer, or raise fps or --max-video-duration"
            raise RequestError(message, param=f"{param}.fps", code="media_too_large")
        self.reader.budget.take(frames.numel(), f"{len(frames)} frames", where)
        return VideoPart(frames.numpy(), np.arange(len(frames), dtype=np.float32) / np.float32(part.fps), None, lasts)


def _file(name: str, *, base: Path, param: str) -> Path:
    path = base / Path(name).expanduser()
    if not path.is_file():
        raise RequestError(f"there is no file {str(path)!r}", param=param)
    return path


# ---- tensors ----------------------------------------------------------------------------------------------------


def _tensor(value: TensorValue, *, param: str, base: Path | None, name: str) -> Tensor:
    given = {name for name in field_names(TensorValue) if getattr(value, name) is not None}
    if given == {"dtype", "shape", "data"}:
        tensor = _tensor_of_data(value, param=param)
    elif given != {"file", "name"}:
        raise RequestError("a tensor needs 'dtype', 'shape' and 'data', or else 'file' and 'name'", param=param)
    elif base is None:
        message = "tensors in files are read by 'mstar run' only; send dtype, shape and data"
        raise RequestError(message, param=f"{param}.file")
    else:
        tensor = _tensor_of_file(value, param=param, base=base)
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise RequestError(f"the tensor {name} holds NaN or infinity; all values must be finite", param=param)
    return tensor


def _tensor_of_data(value: TensorValue, *, param: str) -> Tensor:
    assert value.dtype is not None and value.shape is not None and value.data is not None
    check_known(value.dtype, DTYPES, f"dtype {short(value.dtype)} is unknown; known:", param=f"{param}.dtype")
    dtype = DTYPES[value.dtype]
    try:
        data = binascii.a2b_base64(value.data, strict_mode=True)
    except ValueError as error:  # binascii's, or of text that is not ASCII
        raise RequestError(f"the tensor's data is not valid base64: {error}", param=f"{param}.data") from error
    expected = math.prod(value.shape) * dtype.itemsize
    if len(data) != expected:
        message = f"the tensor's data has {len(data)} bytes; {value.dtype} {value.shape} needs {expected}"
        raise RequestError(message, param=f"{param}.data")
    if dtype is torch.bool and data.strip(b"\0\1"):
        raise RequestError("the data of a bool tensor must be bytes 0 and 1", param=f"{param}.data")
    return tensor_from_bytes(data, dtype=dtype, shape=value.shape)


def _tensor_of_file(value: TensorValue, *, param: str, base: Path) -> Tensor:
    assert value.file is not None and value.name is not None
    path = _file(value.file, base=base, param=f"{param}.file")
    try:
        tensors = safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise RequestError(f"{str(path)!r} is no safetensors file: {error}", param=f"{param}.file") from error
    check_known(value.name, tensors, f"{path.name} has no tensor {value.name!r}; it has", param=f"{param}.name")
    tensor = tensors[value.name]
    if tensor.dtype not in DTYPES.values():
        raise RequestError(f"tensor {value.name!r} is {tensor.dtype}; known: {', '.join(DTYPES)}", param=param)
    return tensor
