"""OpenAI's wire shapes, mapped to and from native requests: speech, the list of models.

Runs in the server process. Knows nothing about sockets or the engine's insides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from mstar.errors import RequestError
from mstar.media import audio
from mstar.plugin.spec import ModelSpec
from mstar.server.native import MAX_SEED, GenerateRequest, TextInput, convert, field_names
from mstar.server.results import Form, Outputs, Result, encode_media
from mstar.types import AudioChunk, Chunk, Request

SPEECH = "/v1/audio/speech"
AUDIO_TYPES = {"wav": "audio/wav", "pcm": "audio/pcm"}
"""`response_format` -> Content-Type; pcm is mono signed 16-bit little-endian at the rate in X-Sample-Rate."""


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
    response_format: Literal["wav", "pcm"] = "wav"
    speed: Annotated[float, Meta(ge=0.25, le=4.0)] = 1.0
    stream: bool = False
    stream_format: Literal["audio"] | None = None
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None

    @property
    def is_streamed(self) -> bool:
        return self.stream or self.stream_format is not None


def read_speech(body: Any, *, spec: ModelSpec) -> tuple[SpeechRequest, GenerateRequest]:
    """A speech request and the native request it stands for. Raises RequestError 400."""
    if not isinstance(body, Mapping):
        raise RequestError("the body must be a JSON object")
    task = next(name for name, task in spec.tasks.items() if "audio" in task.outputs and "text" in task.inputs)
    names, native = field_names(SpeechRequest), field_names(spec.tasks[task].params)
    extensions = [name for name in native if name not in (*names, "n")]
    params = {name: value for name, value in body.items() if name in extensions}
    fields = {name: value for name, value in body.items() if name not in extensions}
    speech = convert(fields, SpeechRequest, more=extensions)
    if "voice" in body:
        params["voice"] = speech.voice
    if "speed" in native:
        params["speed"] = speech.speed
    elif speech.speed != 1.0:
        raise RequestError(f"speed is {speech.speed:g}; this model supports 1.0 only", param="speed")
    if not speech.input.strip():
        raise RequestError("input is blank; give at least one character that can be spoken", param="input")
    return speech, GenerateRequest(
        model=speech.model, task=task, inputs=[TextInput(text=speech.input)], outputs=["audio"], params=params,
        seed=speech.seed, stream=speech.is_streamed,
    )  # fmt: skip


def speech_error(error: RequestError) -> RequestError:
    """An error about a native request, in the words of the speech request it came from."""
    param = error.param and error.param.removeprefix("params.")
    if param is not None and param.startswith("inputs"):
        param = "input"
    return RequestError(error.message.replace("params.", ""), status=error.status, param=param, code=error.code)


class SpeechForm(Form):
    """Audio as a file, or as a stream of bytes with one header at most."""

    def __init__(self, response_format: str) -> None:
        self.media_type = AUDIO_TYPES[response_format]
        self._is_pcm = response_format == "pcm"
        self._needs_header = not self._is_pcm

    def begins(self, chunk: Chunk) -> bool:
        return isinstance(chunk, AudioChunk) and len(chunk.samples) > 0

    def headers(self, request: Request, *, first: Chunk | None, result: Result | None) -> dict[str, str]:
        if not isinstance(first, AudioChunk):
            limit = getattr(request.params, "max_tokens", None)
            if limit is not None and result is not None and result.finish_reason == "length":
                message = f"max_tokens is {limit}, too few for any sound; raise it, or leave it out for no limit"
                raise RequestError(message, param="max_tokens", code="no_audio")
            message = "the model ended without any audio; try another seed or a longer input"
            raise RequestError(message, status=500, code="no_audio")
        return {"X-Sample-Rate": str(first.sample_rate), "X-Seed": str(request.seed)}

    def piece(self, chunk: Chunk) -> bytes:
        if not isinstance(chunk, AudioChunk):
            return b""
        header = audio.wav_header(sample_rate=chunk.sample_rate, data_bytes=None) if self._needs_header else b""
        self._needs_header = False
        return header + audio.encode_pcm(chunk.samples)

    def whole(self, outputs: Outputs, result: Result) -> tuple[bytes, dict[str, str]]:
        speech = next(filter(self.begins, outputs.joined()), None)
        headers = self.headers(outputs.request, first=speech, result=result) | {"X-Finish-Reason": result.finish_reason}
        assert isinstance(speech, AudioChunk)
        return encode_media(speech, is_piece=self._is_pcm)[1], headers
