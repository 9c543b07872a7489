"""Whole results: the chunks of a request put together, as JSON with base64, as one safetensors body, or as files.

One schema for HTTP and `mstar run`. Runs in the server process, off the event loop. Knows nothing about HTTP.
"""

from __future__ import annotations

import binascii
import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors.torch
import torch
from msgspec import Struct
from PIL import Image
from torch import Tensor

from mstar.ipc.tensors import tensor_bytes
from mstar.media import audio
from mstar.types import AudioChunk, Chunk, ImageChunk, Request, TensorChunk, TextChunk


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


class Outputs:
    """Collects the chunks of one request."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._texts: dict[int, list[TextChunk]] = {}
        self._audio: dict[int, list[AudioChunk]] = {}
        self._images: list[ImageChunk] = []
        self._tensors: dict[tuple[str, int], list[Tensor]] = {}

    def add(self, chunk: Chunk) -> None:
        if isinstance(chunk, TextChunk):
            self._texts.setdefault(chunk.index, []).append(chunk)
        elif isinstance(chunk, AudioChunk):
            self._audio.setdefault(chunk.index, []).append(chunk)
        elif isinstance(chunk, ImageChunk) and not chunk.partial:
            self._images.append(chunk)
        elif isinstance(chunk, TensorChunk):
            self._tensors.setdefault((chunk.name, chunk.index), []).append(chunk.tensor)

    def audio(self, index: int = 0) -> tuple[np.ndarray, int] | None:
        """Samples of one output, float32 (n,), and their rate; None if there are none."""
        chunks = self._audio.get(index)
        if not chunks:
            return None
        return np.concatenate([chunk.samples for chunk in chunks]), chunks[0].sample_rate

    # -- rendering -------------------------------------------------------------------------------------------

    def as_json(self, result: Result) -> bytes:
        """The result with media and tensors in base64."""
        outputs = [*self._text_entries(result)]
        for index in sorted(self._audio):
            samples, rate = self._samples(index)
            entry = {
                "type": "audio",
                "data": encode_base64(audio.encode_wav(samples, sample_rate=rate)),
                "format": "wav",
            }
            outputs.append(_indexed(entry | {"sample_rate": rate}, index, result))
        for image in self._images:
            entry = {"type": "image", "data": encode_base64(encode_png(image.pixels)), "format": "png"}
            outputs.append(_indexed(entry, image.index, result))
        outputs += [tensor_fields(name, tensor, data=True) for name, tensor in self._named_tensors().items()]
        return msgspec.json.encode(summary(self._request, result) | {"outputs": outputs})

    def as_safetensors(self, result: Result) -> bytes:
        """One safetensors body: tensors, samples and pixels, with the JSON result under "result" in its metadata."""
        outputs, tensors, _ = self._as_tensors(result)
        text = msgspec.json.encode(summary(self._request, result) | {"outputs": outputs}).decode()
        return safetensors.torch.save(tensors, metadata={"result": text})

    def write(self, folder: Path, result: Result) -> None:
        """Write result.json, tensors.safetensors and media files, with names of our choosing, into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        outputs, tensors, files = self._as_tensors(result)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        safetensors.torch.save_file(tensors, folder / "tensors.safetensors")
        text = msgspec.json.encode(summary(self._request, result) | {"outputs": outputs})
        (folder / "result.json").write_bytes(msgspec.json.format(text, indent=2) + b"\n")

    def _as_tensors(self, result: Result) -> tuple[list[dict[str, Any]], dict[str, Tensor], dict[str, bytes]]:
        """Output entries that point to tensors and files, and those."""
        outputs = [*self._text_entries(result)]
        tensors, files = self._named_tensors(), {}
        for index in sorted(self._audio):
            samples, rate = self._samples(index)
            name, file = _numbered("audio", index), f"{_numbered('audio', index)}.wav"
            tensors.setdefault(name, torch.from_numpy(samples))
            files[file] = audio.encode_wav(samples, sample_rate=rate)
            entry = {"type": "audio", "file": file, "tensor": name, "sample_rate": rate}
            outputs.append(_indexed(entry, index, result))
        for number, image in enumerate(self._images):
            file = f"image-{number}.png"
            files[file] = encode_png(image.pixels)
            name = _numbered("pixels", image.index)  # the model's own, before quantisation, if it sends one
            if name not in tensors:
                tensors[name := f"image-{number}"] = torch.from_numpy(image.pixels)
            outputs.append(_indexed({"type": "image", "file": file, "tensor": name}, image.index, result))
        outputs += [tensor_fields(name, tensor) for name, tensor in self._named_tensors().items()]
        return outputs, {name: tensor.contiguous() for name, tensor in tensors.items()}, files

    def _samples(self, index: int) -> tuple[np.ndarray, int]:
        found = self.audio(index)
        assert found is not None
        return found

    def _text_entries(self, result: Result) -> list[dict[str, Any]]:
        entries = []
        for index, chunks in sorted(self._texts.items()):
            entry: dict[str, Any] = {
                "type": "text",
                "text": "".join(chunk.text for chunk in chunks),
                "token_ids": [token for chunk in chunks for token in chunk.token_ids],
            }
            if any(chunk.logprobs for chunk in chunks):
                entry["logprobs"] = [value for chunk in chunks for value in chunk.logprobs]
            entries.append(_indexed(entry, index, result))
        return entries

    def _named_tensors(self) -> dict[str, Tensor]:
        parts = self._tensors.items()
        return {_numbered(name, i): torch.cat(found) if len(found) > 1 else found[0] for (name, i), found in parts}


def is_wanted(request: Request, chunk: Chunk) -> bool:
    """Whether a chunk is of a kind the request asked for."""
    if isinstance(chunk, TextChunk):
        return "text" in request.outputs
    if isinstance(chunk, AudioChunk):
        return "audio" in request.outputs
    if isinstance(chunk, ImageChunk):
        return "image" in request.outputs
    if isinstance(chunk, TensorChunk):
        return "tensors" in request.outputs or f"tensor:{chunk.name}" in request.outputs
    return True


def tensor_fields(name: str, tensor: Tensor, *, data: bool = False) -> dict[str, Any]:
    """A tensor's JSON entry, with its elements in base64 or without."""
    fields = {
        "type": "tensor",
        "name": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": [*tensor.shape],
    }
    return fields | {"data": encode_base64(tensor_bytes(tensor))} if data else fields


def encode_png(pixels: np.ndarray) -> bytes:
    """uint8 (H, W, 3) pixels as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def _indexed(entry: dict[str, Any], index: int, result: Result) -> dict[str, Any]:
    if len(result.indices) < 2:
        return entry
    return entry | {"index": index, "finish_reason": result.indices.get(index, result.finish_reason)}


def _numbered(name: str, index: int) -> str:
    return f"{name}-{index}" if index else name


def encode_base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode()
