"""OpenAI's wire shapes, mapped to and from native requests: speech, the list of models, errors.

Pure functions; runs in the server process. Knows nothing about sockets or the engine's insides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from mstar.errors import RequestError
from mstar.media import audio
from mstar.plugin.spec import ModelSpec
from mstar.server.native import MAX_SEED, GenerateRequest, TextInput, convert, field_names
from mstar.types import AudioChunk, Chunk

SPEECH = "/v1/audio/speech"
AUDIO_TYPES = {"wav": "audio/wav", "pcm": "audio/pcm"}
"""`response_format` -> Content-Type; pcm is mono signed 16-bit little-endian at the rate in X-Sample-Rate."""


def error_fields(error: RequestError) -> dict[str, Any]:
    """The body of every response that reports an error."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


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


# ---- speech -----------------------------------------------------------------------------------------------------


class SpeechRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/audio/speech`; parameters of the model's speech task may stand beside these.

    Unlike OpenAI's, `response_format` is wav by default, and `model` and `voice` may be left out.
    """

    input: str
    model: str | None = None
    voice: str | None = None
    response_format: str = "wav"
    speed: Annotated[float, Meta(ge=0.25, le=4.0)] = 1.0
    stream: bool = False
    stream_format: str | None = None
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None

    @property
    def is_streamed(self) -> bool:
        return self.stream or self.stream_format is not None


def read_speech(body: Any, *, spec: ModelSpec) -> tuple[SpeechRequest, GenerateRequest]:
    """A speech request and the native request it stands for. Raises RequestError 400."""
    task = next(name for name, task in spec.tasks.items() if "audio" in task.outputs and "text" in task.inputs)
    if not isinstance(body, Mapping):
        raise RequestError("the body must be a JSON object")
    names = field_names(SpeechRequest)
    extensions = [n for n in field_names(spec.tasks[task].params) if n not in (*names, "n")]
    for name in body:
        if name not in names and name not in extensions:
            raise RequestError(
                f"{name!r} is unknown; known: {', '.join([*names, *extensions])}", param=name, code="unknown_parameter"
            )
    speech = convert({name: value for name, value in body.items() if name in names}, SpeechRequest)
    params = {name: value for name, value in body.items() if name in extensions}
    if "voice" in body:
        params["voice"] = speech.voice
    if "speed" in field_names(spec.tasks[task].params):
        params["speed"] = speech.speed
    elif speech.speed != 1.0:
        raise RequestError(f"speed is {speech.speed:g}; this model supports 1.0 only", param="speed")
    if not speech.input.strip():
        raise RequestError("input is blank; give at least one character that can be spoken", param="input")
    if speech.response_format not in AUDIO_TYPES:
        raise RequestError(
            f"response_format {speech.response_format[:40]!r} is not supported; use one of {', '.join(AUDIO_TYPES)}",
            param="response_format",
        )
    if speech.stream_format not in (None, "audio"):
        raise RequestError(
            f"stream_format {speech.stream_format[:40]!r} is not supported; use 'audio'", param="stream_format"
        )
    return speech, GenerateRequest(
        model=speech.model, task=task, inputs=[TextInput(text=speech.input)], outputs=["audio"], params=params,
        seed=speech.seed, stream=speech.is_streamed,
    )  # fmt: skip


def speech_error(error: RequestError) -> RequestError:
    """An error about a native request, in the words of the speech request it came from."""
    param = error.param
    if param is not None and param.startswith("inputs"):
        param = "input"
    elif param is not None:
        param = param.removeprefix("params.")
    message = error.message.replace("params.", "")
    return RequestError(message, status=error.status, param=param, code=error.code)


class SpeechEncoder:
    """Audio chunks of one response as a stream of bytes: one WAV header at most."""

    def __init__(self, response_format: str) -> None:
        self._needs_header = response_format == "wav"

    def encode(self, chunk: Chunk) -> bytes:
        if not isinstance(chunk, AudioChunk):
            return b""
        header = audio.wav_header(sample_rate=chunk.sample_rate, data_bytes=None) if self._needs_header else b""
        self._needs_header = False
        return header + audio.encode_pcm(chunk.samples)
