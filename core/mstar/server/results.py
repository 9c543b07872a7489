"""From chunks to the wire: a chunk as an event of a stream; a request's outputs as JSON, as safetensors, as files.

One schema for HTTP and `mstar run`. Runs in the server process, off the event loop where chunks may be large. Knows
nothing about HTTP.
"""

from __future__ import annotations

import io
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors.torch
import torch
from msgspec import Struct
from PIL import Image
from torch import Tensor

from mstar.errors import RequestError
from mstar.ipc.tensors import tensor_bytes
from mstar.media import audio
from mstar.types import AudioChunk, Chunk, ImageChunk, ProgressChunk, Request, TensorChunk, TextChunk, ToolCallChunk

JSON, NDJSON, SAFETENSORS = "application/json", "application/x-ndjson", "application/octet-stream"

Output = TextChunk | ToolCallChunk | AudioChunk | ImageChunk | TensorChunk
# In a result's order: chunk -> the output it belongs to.
_KINDS = {TextChunk: "text", ToolCallChunk: "text", AudioChunk: "audio", ImageChunk: "image", TensorChunk: "tensors"}


class Result(Struct, kw_only=True):
    """What is known of a request when it has ended well, besides its outputs.

    Args:
        indices: index of an output -> its finish reason.
        counts: what nodes counted that is not tokens, such as skipped items.
        timings: "queued_s", "first_output_s" and "total_s", since the request was taken in.
        extra: further fields the model's Processor added.
    """

    finish_reason: str
    indices: dict[int, str]
    usage: dict[str, int]
    counts: dict[str, int]
    counters: dict[str, int]
    prompt_token_ids: list[int]
    seed: int
    timings: dict[str, float] = {}
    extra: dict[str, Any] = {}


def summary(request: Request, result: Result) -> dict[str, Any]:
    """A result without its outputs, as built-in types."""
    fields = msgspec.to_builtins(result, str_keys=True)
    extra, indices = fields.pop("extra"), fields.pop("indices")
    head: dict[str, Any] = {"id": request.id, "model": request.model, "task": request.task}
    if request.session is not None:
        head["session"] = request.session
    if len(indices) > 1:
        head["finish_reasons"] = [result.indices[index] for index in sorted(result.indices)]
    return extra | head | fields


def is_wanted(request: Request, chunk: Chunk) -> bool:
    """Whether a chunk is of a kind the request asked for. A model thinks only if it was asked to."""
    if isinstance(chunk, TensorChunk) and f"tensor:{chunk.name}" in request.outputs:
        return True
    if isinstance(chunk, TextChunk) and chunk.channel == "reasoning":
        return True
    return isinstance(chunk, ProgressChunk) or _KINDS[type(chunk)] in request.outputs


# ---- one chunk --------------------------------------------------------------------------------------------------


def describe(chunk: Chunk) -> dict[str, Any]:
    """The JSON fields of a chunk, or of a whole output joined to one chunk; without its data."""
    if isinstance(chunk, TextChunk):
        more: dict[str, Any] = {"logprobs": chunk.logprobs} if chunk.logprobs else {}
        more |= {"channel": chunk.channel} if chunk.channel != "answer" else {}
        return {"type": "text", "text": chunk.text, "token_ids": chunk.token_ids, **more}
    if isinstance(chunk, ToolCallChunk):
        return {"type": "tool_call", "name": chunk.name, "arguments": chunk.arguments}
    if isinstance(chunk, AudioChunk):
        return {"type": "audio", "sample_rate": chunk.sample_rate}
    if isinstance(chunk, ImageChunk):
        return {"type": "image", **({"partial": True} if chunk.partial else {})}
    if isinstance(chunk, TensorChunk):
        dtype = str(chunk.tensor.dtype).removeprefix("torch.")
        more = {"start": chunk.start} if chunk.start else {}
        return {"type": "tensor", "name": chunk.name, "dtype": dtype, "shape": [*chunk.tensor.shape], **more}
    return {"type": "progress", "step": chunk.step, "total": chunk.total}


def encode_media(chunk: AudioChunk | ImageChunk, *, is_piece: bool = False) -> tuple[str, bytes]:
    """Format and bytes of a media file; a piece of audio is 16-bit PCM without a header."""
    if isinstance(chunk, ImageChunk):
        file = io.BytesIO()
        Image.fromarray(chunk.pixels).save(file, "PNG")
        return "png", file.getvalue()
    if is_piece:
        return "pcm", audio.encode_pcm(chunk.samples)
    return "wav", audio.encode_wav(chunk.samples, sample_rate=chunk.sample_rate)


def inline(chunk: Chunk, *, is_piece: bool = False) -> dict[str, Any]:
    """The JSON fields that hold a chunk's data; JSON gives bytes in base64."""
    if isinstance(chunk, AudioChunk | ImageChunk):
        kind, data = encode_media(chunk, is_piece=is_piece)
        return {"data": data, "format": kind}
    return {"data": tensor_bytes(chunk.tensor)} if isinstance(chunk, TensorChunk) else {}


def chunk_event(chunk: Chunk) -> bytes:
    """A chunk as one NDJSON line: text, tool_call, audio (16-bit PCM in base64), image (PNG), tensor or progress."""
    fields = describe(chunk) | inline(chunk, is_piece=True)
    if not isinstance(chunk, ProgressChunk):
        fields["index"] = chunk.index
    return event(fields.pop("type"), **fields)


def event(kind: str, **fields: Any) -> bytes:
    """One NDJSON line."""
    return msgspec.json.encode({"event": kind, **fields}) + b"\n"


# ---- all of them ------------------------------------------------------------------------------------------------


class Outputs:
    """Collects the chunks of one request, joins those of each output, and renders the whole."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._pieces: dict[tuple[int, int, str], list[Output]] = {}  # (place of the kind, index, name) -> in order

    def add(self, chunk: Chunk) -> None:
        if isinstance(chunk, ProgressChunk) or (isinstance(chunk, ImageChunk) and chunk.partial):
            return
        name = chunk.name if isinstance(chunk, TensorChunk) else getattr(chunk, "channel", "")
        if isinstance(chunk, ImageChunk | ToolCallChunk):
            name = str(len(self._pieces))  # nothing is joined to it
        self._pieces.setdefault(([*_KINDS].index(type(chunk)), chunk.index, name), []).append(chunk)

    def joined(self, *, indices: Iterable[int] = ()) -> list[Output]:
        """One chunk for each output: texts, audio, images, tensors; each kind in order of index.

        Args:
            indices: outputs whose texts, if texts were asked for, are there even when they are empty.
        """
        for index in indices if "text" in self.request.outputs else ():
            self.add(TextChunk("", index=index))
        return [_join(self._pieces[key]) for key in sorted(self._pieces, key=lambda key: key[:2])]

    def as_json(self, result: Result) -> bytes:
        """The result with media and tensors in base64."""
        return self._render(self.joined(indices=result.indices), result, place=inline)

    def as_safetensors(self, result: Result) -> bytes:
        """One safetensors body: tensors, samples and pixels, with the JSON result under "result" in its metadata."""
        text, files = self._with_files(result)
        return safetensors.torch.save(files.tensors, metadata={"result": text.decode()})

    def write(self, folder: Path, result: Result) -> list[str]:
        """Write result.json, tensors.safetensors and media files, with names of our choosing, into a folder.

        Returns the names of the first and the last.
        """
        folder.mkdir(parents=True, exist_ok=True)
        text, files = self._with_files(result)
        safetensors.torch.save_file(files.tensors, folder / "tensors.safetensors")
        shown = msgspec.json.format(text, indent=2)
        shown = re.sub(rb"\[\n[-+.eE\d,\s]+\]", _on_one_line, shown)  # a string of JSON has no raw newline
        for name, data in (files.media | {"result.json": shown + b"\n"}).items():
            (folder / name).write_bytes(data)
        return ["result.json", *files.media]

    def _with_files(self, result: Result) -> tuple[bytes, _Files]:
        outputs = self.joined(indices=result.indices)
        files = _Files(outputs)
        return self._render(outputs, result, place=files.place), files

    def _render(self, outputs: list[Output], result: Result, *, place: Callable[[Output], dict[str, Any]]) -> bytes:
        """A result as JSON. `place` gives the fields that say where an output's data is."""
        entries = []
        for chunk in outputs:
            entry = describe(chunk) | place(chunk)
            if len(result.indices) > 1:
                reason = result.indices.get(chunk.index, result.finish_reason)
                entry |= {"index": chunk.index, "finish_reason": reason}
            entries.append(entry)
        return msgspec.json.encode(summary(self.request, result) | {"outputs": entries})


class _Files:
    """The tensors and media files of a result."""

    def __init__(self, outputs: list[Output]) -> None:
        self.tensors = {chunk.name: chunk.tensor.contiguous() for chunk in outputs if isinstance(chunk, TensorChunk)}
        self.media: dict[str, bytes] = {}  # file name -> content

    def place(self, chunk: Output) -> dict[str, Any]:
        """Take a chunk in, and say where it is."""
        if isinstance(chunk, AudioChunk):
            name = own = _numbered("audio", chunk.index)
            values = chunk.samples
        elif isinstance(chunk, ImageChunk):
            name, own = f"image-{sum(file.endswith('.png') for file in self.media)}", _numbered("pixels", chunk.index)
            values = chunk.pixels
        else:
            return {}
        tensor = own if own in self.tensors else name  # the model's own, before quantisation, if it sent one
        self.tensors.setdefault(tensor, torch.from_numpy(values).contiguous())
        suffix, data = encode_media(chunk)
        self.media[f"{name}.{suffix}"] = data
        return {"file": f"{name}.{suffix}", "tensor": tensor}


def _on_one_line(numbers: re.Match[bytes]) -> bytes:
    return b"[" + b" ".join(numbers[0][1:-1].split()) + b"]"


def _join(pieces: list[Any]) -> Output:
    """The pieces of one output, all of one type, as one chunk."""
    first: Output = pieces[0]
    if isinstance(first, TextChunk):
        ids, logprobs = (tuple(x for p in pieces for x in getattr(p, name)) for name in ("token_ids", "logprobs"))
        return TextChunk("".join(piece.text for piece in pieces), ids, first.index, logprobs, first.channel)
    if isinstance(first, AudioChunk):
        return AudioChunk(np.concatenate([piece.samples for piece in pieces]), first.sample_rate, first.index)
    if isinstance(first, TensorChunk):
        return TensorChunk(_numbered(first.name, first.index), _joined_tensor(pieces), first.index)
    return first


def _joined_tensor(pieces: list[TensorChunk]) -> Tensor:
    if len(pieces) == 1:
        return pieces[0].tensor
    if not pieces[0].start:
        return torch.cat([piece.tensor for piece in pieces])
    ends = [torch.tensor(piece.start) + torch.tensor(piece.tensor.shape) for piece in pieces]
    whole = pieces[0].tensor.new_zeros(torch.stack(ends).amax(0).tolist())
    for piece in pieces:
        at = tuple(slice(i, i + n) for i, n in zip(piece.start, piece.tensor.shape, strict=True))
        whole[at] = piece.tensor
    return whole


def _numbered(name: str, index: int) -> str:
    return f"{name}-{index}" if index else name


# ---- answers ----------------------------------------------------------------------------------------------------


class Form(ABC):
    """How a route answers: all at once, or in pieces and an end.

    Args:
        runs_in_thread: its pieces take milliseconds to make: too long for the event loop.
    """

    media_type: str
    runs_in_thread: bool = False

    def worded(self, error: RequestError) -> RequestError:
        """An error about a native request, in the words of the request it came from."""
        return error

    def begins(self, chunk: Chunk) -> bool:
        """Whether a stream may begin with this chunk; what fails before has its own status."""
        return True

    def headers(self, request: Request, *, first: Chunk | None, result: Result | None) -> dict[str, str]:
        """Further headers. Raises RequestError if there has to be a first chunk and is none (`result`: why)."""
        return {}

    @abstractmethod
    def piece(self, chunk: Chunk) -> bytes:
        """One chunk of a stream."""

    def end(self, request: Request, *, result: Result | None, error: RequestError | None) -> bytes:
        """The last bytes of a stream that ended with a result or an error. Raises RequestError for what that lacks."""
        return b""

    @abstractmethod
    def whole(self, outputs: Outputs, result: Result) -> tuple[bytes, dict[str, str]]:
        """The body of an answer that is no stream, and its headers."""


class NativeForm(Form):
    """NDJSON events, one JSON object, or one safetensors body."""

    def __init__(self, media_type: str) -> None:
        self.media_type = media_type

    def piece(self, chunk: Chunk) -> bytes:
        return chunk_event(chunk)

    def end(self, request: Request, *, result: Result | None, error: RequestError | None) -> bytes:
        if error is not None:
            return event("error", **error_fields(error))
        assert result is not None
        return event("done", **summary(request, result))

    def whole(self, outputs: Outputs, result: Result) -> tuple[bytes, dict[str, str]]:
        render = outputs.as_safetensors if self.media_type == SAFETENSORS else outputs.as_json
        return render(result), {}


def server_sent(fields: Mapping[str, Any], *, event: str | None = None) -> bytes:
    """One server-sent event. JSON gives bytes in base64."""
    head = b"" if event is None else f"event: {event}\n".encode()
    return head + b"data: " + msgspec.json.encode(fields) + b"\n\n"


def error_fields(error: RequestError) -> dict[str, Any]:
    """The body of every response that reports an error, OpenAI's."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}
