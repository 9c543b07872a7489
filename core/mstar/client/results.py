"""What a request gives, typed: texts, audio, images, tensors, progress; the result around them; speech.

Arrays are NumPy's. torch is imported only if the server sends bfloat16, which NumPy does not have.
"""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np

from mstar.client.errors import NO_AUDIO, ClientError, StreamBroken
from mstar.types import AudioChunk, ImageChunk, ProgressChunk, TensorChunk, TextChunk, ToolCallChunk

if TYPE_CHECKING:
    from torch import Tensor as TorchTensor


class Audio(AudioChunk):
    """Samples in steps of 16 bits; name "tensor:audio" among the outputs for exact ones."""

    def save(self, path: str | Path) -> None:
        """Write a WAV file."""
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, self.sample_rate, 0, "NONE", ""))
            file.writeframes((self.samples * 32767).round().astype("<i2").tobytes())


Text, Image, Tensor, ToolCall, Progress = TextChunk, ImageChunk, TensorChunk, ToolCallChunk, ProgressChunk
Output = TextChunk | ToolCallChunk | Audio | ImageChunk | TensorChunk
Event = Output | ProgressChunk


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result:
    """An answer to `generate`, or what a stream's events come to.

    Args:
        raw: the JSON itself, for whatever has no field here; of a stream, that of its last event.
    """

    id: str
    model: str
    task: str
    finish_reason: str
    outputs: tuple[Output, ...]
    seed: int
    usage: Mapping[str, int]
    timings: Mapping[str, float]
    counters: Mapping[str, int]
    raw: Mapping[str, Any] = field(repr=False)

    @property
    def texts(self) -> list[str]:
        return [output.text for output in self.outputs if isinstance(output, Text) and output.channel == "answer"]

    @property
    def reasoning(self) -> list[str]:
        """What the model thought before its answers, apart from them."""
        return [output.text for output in self.outputs if isinstance(output, Text) and output.channel == "reasoning"]

    @property
    def tool_calls(self) -> list[ToolCallChunk]:
        return [output for output in self.outputs if isinstance(output, ToolCall)]

    @property
    def audio(self) -> list[Audio]:
        return [output for output in self.outputs if isinstance(output, Audio)]

    @property
    def images(self) -> list[np.ndarray]:
        """uint8 (height, width, 3)."""
        return [output.pixels for output in self.outputs if isinstance(output, Image)]

    @property
    def tensors(self) -> dict[str, np.ndarray | TorchTensor]:
        return {output.name: output.tensor for output in self.outputs if isinstance(output, Tensor)}

    def __getitem__(self, name: str) -> Any:
        """The tensor called `name`, which is an attribute too unless the result has one of this name."""
        return self.tensors[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in (known := self.tensors):
            raise AttributeError(f"the result has no {name!r}; its tensors: {', '.join(self.tensors) or 'none'}")
        return known[name]


class Speech(bytes):
    """A whole audio file, as `client.speech` gives it.

    Attributes: `content_type`, `sample_rate`, `finish_reason`, `seed`; None where the server does not say.
    """

    content_type: str
    sample_rate: int | None
    finish_reason: str | None
    seed: int | None

    @classmethod
    def make(cls, response: httpx.Response) -> Speech:
        """The body with what the headers say of it. Raises StreamBroken for none at all."""
        if not response.content:
            raise StreamBroken(NO_AUDIO)
        speech, headers = cls(response.content), response.headers
        speech.content_type = headers.get("content-type", "")
        speech.sample_rate = header_number(headers, "x-sample-rate")
        speech.finish_reason = headers.get("x-finish-reason")
        speech.seed = header_number(headers, "x-seed")
        return speech

    def __repr__(self) -> str:
        return f"Speech({len(self)} bytes of {self.content_type}, seed {self.seed})"

    def save(self, path: str | Path) -> None:
        """Write the file."""
        Path(path).write_bytes(self)


def header_number(headers: Mapping[str, str], name: str) -> int | None:
    """A whole number in a header; None if it is absent."""
    return int(headers[name]) if name in headers else None


# ---- from JSON --------------------------------------------------------------------------------------------------


def read_result(fields: Mapping[str, Any], *, outputs: Iterable[Output] | None = None) -> Result:
    """A result from its JSON. `outputs`: those of a stream, whose last event has none."""
    read = [read_output(entry, kind=entry["type"]) for entry in fields.get("outputs", ())]
    known = {name: fields[name] for name in Result.__annotations__.keys() - {"outputs", "raw"}}
    return Result(**known, outputs=tuple(read if outputs is None else outputs), raw=fields)


def read_output(fields: Mapping[str, Any], *, kind: str, as_torch: bool = False) -> Any:
    """An entry of a result, or an event of a stream; an `Event`. `as_torch`: whether tensors are torch's."""
    index = fields.get("index", 0)
    if kind == "text":
        logprobs, channel = tuple(fields.get("logprobs", ())), fields.get("channel", "answer")
        return Text(fields["text"], tuple(fields["token_ids"]), index, logprobs, channel)
    if kind == "audio":
        return Audio(_read_samples(_data(fields), format=fields["format"]), fields["sample_rate"], index)
    if kind == "image":
        from PIL import Image as Pillow

        pixels = np.asarray(Pillow.open(io.BytesIO(_data(fields))).convert("RGB"))
        return Image(pixels, index, fields.get("partial", False))
    if kind in ("tensor", "tensors"):
        return Tensor(fields["name"], _read_tensor(fields, as_torch=as_torch), index, tuple(fields.get("start", ())))
    if kind == "tool_call":
        return ToolCall(fields["name"], fields["arguments"], index)
    if kind == "progress":
        return Progress(fields["step"], fields["total"])
    raise ClientError(f"the server sent {kind!r}, which this client does not know; upgrade mstar-core here")


def _read_samples(data: bytes, *, format: str) -> np.ndarray:
    """float32 samples of 16-bit PCM, bare or in a WAV file."""
    if format == "wav":
        with wave.open(io.BytesIO(data)) as file:
            data = file.readframes(file.getnframes())
    return np.frombuffer(data, dtype="<i2").astype(np.float32) / np.float32(32767)


def _data(fields: Mapping[str, Any]) -> bytes:
    return base64.b64decode(fields["data"], validate=True)


def _read_tensor(fields: Mapping[str, Any], *, as_torch: bool) -> Any:
    """`fields["data"]` is base64, or memory that the tensor may be a view of."""
    data = fields["data"] if isinstance(fields["data"], memoryview) else bytearray(_data(fields))
    dtype, shape = fields["dtype"], fields["shape"]
    if dtype != "bfloat16":
        array = np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<")).reshape(shape)
        if not as_torch:
            return array
    import torch

    if dtype != "bfloat16":
        return torch.from_numpy(array)
    return torch.frombuffer(data, dtype=torch.bfloat16).reshape(shape) if data else torch.empty(shape).bfloat16()


# ---- joining what a stream gave ---------------------------------------------------------------------------------


class Outputs:
    """Collects a stream's events and joins the pieces of each output, as the server does for whole answers."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[Any, ...], list[Any]] = {}

    def add(self, event: Event) -> None:
        if isinstance(event, Progress) or (isinstance(event, Image) and event.partial):
            return
        name = event.name if isinstance(event, Tensor) else getattr(event, "channel", "")
        name = len(self._pieces) if isinstance(event, Image | ToolCall) else name
        self._pieces.setdefault((type(event), event.index, name), []).append(event)

    def joined(self) -> list[Output]:
        return [_join(pieces) for pieces in self._pieces.values()]


def _join(pieces: list[Any]) -> Output:
    first = pieces[0]
    if isinstance(first, Text):
        ids, logprobs = (tuple(x for piece in pieces for x in getattr(piece, n)) for n in ("token_ids", "logprobs"))
        return Text("".join(piece.text for piece in pieces), ids, first.index, logprobs, first.channel)
    if isinstance(first, Audio):
        return Audio(np.concatenate([piece.samples for piece in pieces]), first.sample_rate, first.index)
    if isinstance(first, Tensor):
        name = f"{first.name}-{first.index}" if first.index else first.name
        return Tensor(name, first.tensor if len(pieces) == 1 else _joined_tensor(pieces), first.index)
    return first


def _joined_tensor(pieces: list[Any]) -> Any:
    values = [piece.tensor for piece in pieces]
    is_numpy = isinstance(values[0], np.ndarray)
    if not is_numpy:
        import torch
    if not pieces[0].start:
        return np.concatenate(values) if is_numpy else torch.cat(values)
    ends = [np.add(piece.start, piece.tensor.shape) for piece in pieces]
    shape = tuple(int(end) for end in np.max(ends, axis=0))
    whole = np.zeros(shape, values[0].dtype) if is_numpy else torch.zeros(shape, dtype=values[0].dtype)
    for piece in pieces:
        whole[tuple(slice(i, i + n) for i, n in zip(piece.start, piece.tensor.shape, strict=True))] = piece.tensor
    return whole
