"""From a request's emissions to the socket: Processor.decode, the stop filter, chunks as events and audio bytes.

`Decoding` runs in a thread pool, one thread at a time for one request; the encoders are pure functions. Knows
nothing about HTTP or workers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from mstar.errors import RequestError
from mstar.media import audio
from mstar.plugin.processor import Processor
from mstar.server.native import stop_strings
from mstar.server.requests import Entry, internal_error
from mstar.server.results import Result, encode_base64, encode_png, is_wanted, summary, tensor_fields
from mstar.types import AudioChunk, Chunk, Emission, Encoded, ImageChunk, Path, Request, TensorChunk, TextChunk

logger = logging.getLogger(__name__)


class TextStream:
    """Cuts one text output at the first stop string, holding back what may be the start of one.

    A chunk is the unit for token ids: those of the chunk that completes the match are reported, later ones are not.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.matched = False
        self.num_dropped = 0  # token ids after the match

    def feed(self, chunk: TextChunk) -> TextChunk | None:
        """The part of the text that can be sent; None after a match."""
        if self.matched:
            self.num_dropped += len(chunk.token_ids)
            return None
        text = self._held + chunk.text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.matched, self._held = True, ""
            return _with_text(chunk, text[: min(found)])
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return _with_text(chunk, text[: len(text) - held])

    def flush(self) -> str:
        """What was held back, when nothing more can come."""
        text, self._held = self._held, ""
        return text


def _with_text(chunk: TextChunk, text: str) -> TextChunk:
    return TextChunk(text, chunk.token_ids, chunk.index, chunk.logprobs)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(slots=True)
class Decoded:
    """What came of a request's emissions: chunks, items to stop, and at the end a result or an error."""

    chunks: list[Chunk] = field(default_factory=list)
    stops: list[Path] = field(default_factory=list)
    result: Result | None = None
    error: RequestError | None = None


class Decoding:
    """One request's way from emissions to chunks."""

    def __init__(
        self, processor: Processor, *, request: Request, encoded: Encoded, tensors_out: tuple[str, ...] = ()
    ) -> None:
        self._processor = processor
        self._request = request
        self._encoded = encoded
        self._tensors_out = tensors_out
        self._state = processor.start(request, encoded)
        self._stops = stop_strings(request.params)
        self._texts: dict[int, TextStream] = {}
        self._sent: set[str] = set()  # names of tensors that were emitted
        self._indices: dict[Path, int] = {}  # item -> the output it gives

    def run(self, emissions: Iterable[Emission], *, end: Entry | None) -> Decoded:
        """Decode emissions, in order; `end`: nothing follows. What the model's Processor raises is in the result."""
        decoded = Decoded()
        try:
            for emission in emissions:
                for chunk in self._processor.decode(self._state, emission):
                    self._take(chunk, path=emission.path, decoded=decoded)
                if emission.final and emission.path in self._indices:
                    self._flush(self._indices[emission.path], decoded)
            if end is not None:
                for index in self._texts:
                    self._flush(index, decoded)
                self._take_stored(end, decoded)
                decoded.result = self._result(end)
        except RequestError as error:
            decoded.error = error
        except Exception as error:
            logger.exception("request %s: the model's processor failed", self._request.id)
            decoded.error = internal_error(error)
        return decoded

    def step(self, name: str, outputs: dict[str, Any]) -> dict[str, Any] | RequestError:
        """Run a step between walks."""
        try:
            return self._processor.step(name, self._request, outputs)
        except RequestError as error:
            return error
        except Exception as error:
            logger.exception("request %s: step %r of the model's processor failed", self._request.id, name)
            return internal_error(error)

    def _take(self, chunk: Chunk, *, path: Path, decoded: Decoded) -> None:
        index = getattr(chunk, "index", 0)
        self._indices.setdefault(path, index)
        if isinstance(chunk, TextChunk) and self._stops:
            text = self._texts.setdefault(index, TextStream(self._stops))
            was_matched = text.matched
            kept = text.feed(chunk)
            if kept is None:
                return
            if text.matched and not was_matched:
                decoded.stops.append(path)
            chunk = kept
        if isinstance(chunk, TensorChunk):
            self._sent.add(chunk.name)
        if is_wanted(self._request, chunk):
            decoded.chunks.append(chunk)

    def _flush(self, index: int, decoded: Decoded) -> None:
        text = self._texts[index].flush() if index in self._texts else ""
        if text and is_wanted(self._request, chunk := TextChunk(text, index=index)):
            decoded.chunks.append(chunk)

    def _take_stored(self, end: Entry, decoded: Decoded) -> None:
        """Walk outputs that no walk consumed and that the task names are tensors of the result."""
        for name in (name for name in self._tensors_out if name not in self._sent):
            value = end.stored.get(name)
            if isinstance(value, list) and value and all(isinstance(item, Tensor) for item in value):
                value = torch.stack(value)
            if isinstance(value, Tensor):
                self._take(TensorChunk(name, value), path=(), decoded=decoded)

    def _result(self, end: Entry) -> Result:
        indices = self._finish_reasons(end)
        counts = dict(end.counts)
        tokens = {name: counts.pop(name) for name in list(counts) if name.endswith("_tokens")}
        usage = {"prompt_tokens": len(self._encoded.prompt_token_ids), "completion_tokens": 0}
        usage |= self._encoded.usage | tokens
        dropped = sum(text.num_dropped for text in self._texts.values())
        usage["completion_tokens"] = max(usage["completion_tokens"] - dropped, 0)
        fields: dict[str, Any] = {
            "finish_reason": _merged(indices.values()),
            "indices": indices,
            "usage": usage,
            "counts": counts,
            "counters": dict(end.counters),
            "prompt_token_ids": self._encoded.prompt_token_ids,
            "seed": self._request.seed,
        }
        self._processor.finish(self._state, fields)
        extra = {name: fields.pop(name) for name in list(fields) if name not in Result.__struct_fields__}
        return Result(**fields, extra=extra)

    def _finish_reasons(self, end: Entry) -> dict[int, str]:
        reasons: dict[int, list[str]] = {index: [] for index in self._indices.values()} or {0: []}
        for (_, where), reason in end.reasons.items():
            path = tuple(int(step) for step in where.split(".")) if where else ()
            while path and path not in self._indices:
                path = path[:-1]
            reasons.setdefault(self._indices.get(path, 0), []).append(reason)
        stopped = {index for index, text in self._texts.items() if text.matched}
        return {index: "stop" if index in stopped else _merged(found) for index, found in sorted(reasons.items())}


def _merged(reasons: Iterable[str]) -> str:
    """One finish reason for several loops: that one was cut short is what a client must know."""
    found = list(reasons)
    return "length" if "length" in found else next((r for r in found if r not in ("stop", "end")), "stop")


# ---- chunks to bytes --------------------------------------------------------------------------------------------


def event(kind: str, **fields: Any) -> bytes:
    """One NDJSON line."""
    return msgspec.json.encode({"event": kind, **fields}) + b"\n"


def chunk_event(chunk: Chunk) -> bytes:
    """A chunk as one NDJSON line: text, audio (16-bit PCM in base64), image (PNG), tensor or progress."""
    if isinstance(chunk, TextChunk):
        more = {"logprobs": chunk.logprobs} if chunk.logprobs else {}
        return event("text", text=chunk.text, token_ids=chunk.token_ids, index=chunk.index, **more)
    if isinstance(chunk, AudioChunk):
        data = encode_base64(audio.encode_pcm(chunk.samples))
        return event("audio", data=data, format="pcm", sample_rate=chunk.sample_rate, index=chunk.index)
    if isinstance(chunk, ImageChunk):
        data = encode_base64(encode_png(chunk.pixels))
        return event("image", data=data, format="png", index=chunk.index, partial=chunk.partial)
    if isinstance(chunk, TensorChunk):
        fields = tensor_fields(chunk.name, chunk.tensor, data=True)
        del fields["type"]
        return event("tensor", index=chunk.index, **fields)
    return event("progress", step=chunk.step, total=chunk.total)


def done_event(request: Request, result: Result) -> bytes:
    """The last line of a stream that ended well."""
    return event("done", **summary(request, result))
