"""OpenAI's wire shapes, mapped to and from native requests: speech, the lists of voices and models.

Runs in the server process. Knows nothing about sockets or the engine's insides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from mstar.errors import RequestError
from mstar.media.encode import FORMATS, AudioEncoder, check_format, open_encoder
from mstar.plugin.spec import ModelSpec, Task
from mstar.server.convert import convert, field_names, unknown_field
from mstar.server.native import MAX_SEED, MAX_TIMEOUT_S, GenerateRequest, Text, TextInput
from mstar.server.results import Form, Outputs, Result, error_fields, server_sent
from mstar.types import AudioChunk, Chunk, Request

SPEECH = "/v1/audio/speech"


def list_models(
    spec: ModelSpec, *, names: tuple[str, ...], root: str, created: int, max_model_len: int | None
) -> list[dict[str, Any]]:
    """Entries of `/v1/models`, with what the model takes, gives and offers as extra keys."""
    return [
        {
            "id": name, "object": "model", "created": created, "owned_by": "mstar", "root": root, "parent": None,
            "max_model_len": max_model_len, "tasks": list(spec.tasks),
            "modalities": {"input": list(spec.modalities_in), "output": list(spec.modalities_out)},
            "endpoints": ["/v1/generate", *spec.endpoints],
        }
        for name in names
    ]  # fmt: skip


def list_voices(names: Sequence[str]) -> dict[str, Any]:
    """The answer of `/v1/audio/voices`, in the two shapes that clients read; the first voice is the default."""
    voices = [{"id": name, "object": "voice", "name": name} for name in names]
    return {"object": "list", "data": voices, "voices": list(names), "default": names[0] if names else None}


# ---- what the routes share --------------------------------------------------------------------------------------


def split_params(
    body: Mapping[str, Any], own: type[Struct], *, task: Task, neutral: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A body's own fields, and those that are parameters of a task. Raises RequestError 400 for others.

    Args:
        neutral: OpenAI's parameters, and the value that asks for nothing; null does so too. A task without such a
            parameter takes this value alone.
    """
    own_names = field_names(own)
    known = [name for name in field_names(task.params) if name not in own_names]
    fields = {name: value for name, value in body.items() if name in own_names}
    params = {}
    for name, value in body.items():
        is_nothing = name in neutral and value is None
        if name in own_names or is_nothing or (name not in known and name in neutral and value == neutral[name]):
            continue
        if name not in known:
            if name not in neutral:
                raise unknown_field(name, [*own_names, *known], name=name)
            text = f"this model takes no {name}; known: {', '.join([*own_names, *known])}"
            raise RequestError(text, param=name, code="unsupported_parameter")
        params[name] = value
    return fields, params


def check_param(name: str, *, task: Task, param: str) -> None:
    """Raises RequestError 400 for what a task lacks the parameter for."""
    if name not in field_names(task.params):
        raise RequestError(f"this model takes no {param}; leave it out", param=param, code="unsupported_parameter")


def reworded(error: RequestError, *, names: Mapping[str, str]) -> RequestError:
    """An error about a native request, in the words of the request it came from.

    Args:
        names: a field of the native request -> what it was called; more special ones first.
    """
    param, message = error.param, error.message
    if param is not None:
        inside = next((name for name in names if param == name or param.startswith(name + ".")), None)
        param = param if inside is None else names[inside] + param[len(inside) :]
        param = param.removeprefix("params.")
        message = message.replace(error.param or "", param)
    return RequestError(message.replace("params.", ""), status=error.status, param=param, code=error.code)


# ---- speech -----------------------------------------------------------------------------------------------------


class SpeechRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/audio/speech`; parameters of the model's speech task may stand beside these.

    Unlike OpenAI's, `response_format` is wav by default, and `model` and `voice` may be left out. `seed`, `stream` and
    `timeout_s` are ours.
    """

    input: Text
    model: str | None = None
    voice: str | None = None
    response_format: Literal["wav", "pcm", "mp3", "flac", "opus", "aac"] = "wav"
    speed: Annotated[float, Meta(ge=0.25, le=4.0)] = 1.0
    stream_format: Literal["audio", "sse"] | None = None
    stream: bool | None = None
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)] | None = None

    @property
    def is_streamed(self) -> bool:
        return bool(self.stream) or self.stream_format is not None


def speech_task(spec: ModelSpec) -> str:
    """The task that speech requests stand for."""
    return next(name for name, task in spec.tasks.items() if "audio" in task.outputs and "text" in task.inputs)


def extensions(spec: ModelSpec) -> list[str]:
    """Parameters of the speech task that may stand beside a speech request's own fields."""
    native = field_names(spec.tasks[speech_task(spec)].params)
    return [name for name in native if name not in (*field_names(SpeechRequest), "n")]


def read_speech(body: Any, *, spec: ModelSpec) -> tuple[SpeechRequest, GenerateRequest]:
    """A speech request and the native request it stands for. Raises RequestError 400."""
    if not isinstance(body, Mapping):
        raise RequestError("the body must be a JSON object")
    task, known = speech_task(spec), extensions(spec)
    params = {name: value for name, value in body.items() if name in known}
    fields = {name: value for name, value in body.items() if name not in known}
    if fields.pop("instructions", None) is not None:
        message = "this model takes no instructions; leave the field out, and choose a voice instead"
        raise RequestError(message, param="instructions", code="unsupported_parameter")
    speech = convert(fields, SpeechRequest, more=known)
    if "voice" in body:
        params["voice"] = speech.voice
    if "speed" in field_names(spec.tasks[task].params):
        params["speed"] = speech.speed
    elif speech.speed != 1.0:
        raise RequestError(f"speed is {speech.speed:g}; this model supports 1.0 only", param="speed")
    if not speech.input.strip():
        raise RequestError("input is blank; give at least one character that can be spoken", param="input")
    if speech.stream is False and speech.stream_format is not None:
        message = f"stream is false, but stream_format is {speech.stream_format!r}; leave one of them out"
        raise RequestError(message, param="stream")
    check_format(speech.response_format, is_streamed=speech.is_streamed, param="response_format")
    return speech, GenerateRequest(
        model=speech.model, task=task, inputs=[TextInput(text=speech.input)], outputs=["audio"], params=params,
        seed=speech.seed, stream=speech.is_streamed, timeout_s=speech.timeout_s,
    )  # fmt: skip


def speech_error(error: RequestError) -> RequestError:
    """An error about a native request, in the words of the speech request it came from."""
    param = error.param and error.param.removeprefix("params.")
    if param is not None and param.startswith("inputs"):
        param = "input"
    return RequestError(error.message.replace("params.", ""), status=error.status, param=param, code=error.code)


def speech_form(speech: SpeechRequest) -> SpeechForm:
    """How a speech request is answered."""
    return (SpeechEvents if speech.stream_format == "sse" else SpeechForm)(speech.response_format)


class SpeechForm(Form):
    """Audio as one file: whole, or in pieces as they come."""

    def __init__(self, response_format: str) -> None:
        self.media_type = FORMATS[response_format].media_type
        self.runs_in_thread = FORMATS[response_format].codec is not None
        self._response_format = response_format
        self._encoder: AudioEncoder | None = None

    def worded(self, error: RequestError) -> RequestError:
        return speech_error(error)

    def begins(self, chunk: Chunk) -> bool:
        return isinstance(chunk, AudioChunk) and len(chunk.samples) > 0

    def headers(self, request: Request, *, first: Chunk | None, result: Result | None) -> dict[str, str]:
        if not isinstance(first, AudioChunk):
            limit = getattr(request.params, "max_tokens", None)
            if limit is not None and result is not None and result.finish_reason == "length":
                message = f"max_tokens is {limit}, and no sound came of so many; raise it, or sample less freely"
                raise RequestError(message, param="max_tokens", code="no_audio")
            message = (
                "the model ended without any audio for this input and these parameters; try another seed, a longer "
            )
            raise RequestError(message + "input or a lower temperature", param="input", code="no_audio")
        return {"X-Sample-Rate": str(self._file(first).sample_rate), "X-Seed": str(request.seed)}

    def piece(self, chunk: Chunk) -> bytes:
        return self._file(chunk).feed(chunk.samples) if isinstance(chunk, AudioChunk) else b""

    def end(self, request: Request, *, result: Result | None, error: RequestError | None) -> bytes:
        return b"" if error is not None or self._encoder is None else self._encoder.finish()

    def whole(self, outputs: Outputs, result: Result) -> tuple[bytes, dict[str, str]]:
        speech = next(filter(self.begins, outputs.joined()), None)
        if isinstance(speech, AudioChunk):
            self._file(speech, num_samples=len(speech.samples))
        headers = self.headers(outputs.request, first=speech, result=result) | {"X-Finish-Reason": result.finish_reason}
        assert speech is not None
        return self.piece(speech) + self.end(outputs.request, result=result, error=None), headers

    def _file(self, chunk: AudioChunk, *, num_samples: int | None = None) -> AudioEncoder:
        if self._encoder is None:
            self._encoder = open_encoder(self._response_format, sample_rate=chunk.sample_rate, num_samples=num_samples)
        return self._encoder


class SpeechEvents(SpeechForm):
    """The same file as server-sent events that each hold a piece of it in base64; the last one tells how it went."""

    def __init__(self, response_format: str) -> None:
        super().__init__(response_format)
        self.media_type = "text/event-stream"

    def headers(self, request: Request, *, first: Chunk | None, result: Result | None) -> dict[str, str]:
        return super().headers(request, first=first, result=result) | {"Cache-Control": "no-cache"}

    def piece(self, chunk: Chunk) -> bytes:
        return _delta(super().piece(chunk))

    def end(self, request: Request, *, result: Result | None, error: RequestError | None) -> bytes:
        if error is not None:
            return server_sent(error_fields(error))
        assert result is not None
        taken, given = result.usage["prompt_tokens"], result.usage["completion_tokens"]
        usage = {"input_tokens": taken, "output_tokens": given, "total_tokens": taken + given}
        done = {"usage": usage, "finish_reason": result.finish_reason, "seed": result.seed}
        return _delta(super().end(request, result=result, error=error)) + server_sent(
            {"type": "speech.audio.done", **done}
        )


def _delta(data: bytes) -> bytes:
    """An event with more of the file; JSON gives bytes in base64."""
    return server_sent({"type": "speech.audio.delta", "audio": data}) if data else b""
