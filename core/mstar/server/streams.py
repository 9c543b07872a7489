"""From a request's emissions to chunks: Processor.decode and step, the stop filter, and the result at the end.

`Decoding` runs in a thread pool, one thread at a time for one request. Knows nothing about HTTP or workers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mstar.errors import RequestError
from mstar.ipc.messages import Emit
from mstar.plugin.processor import Processor
from mstar.server.native import stop_strings
from mstar.server.requests import Entry, RunStep, Work, attributed, contained
from mstar.server.results import Result, is_wanted
from mstar.types import Chunk, Emission, Encoded, Path, Request, TensorChunk, TextChunk, ToolCallChunk


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
            return replace(chunk, text=text[: min(found)])
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return replace(chunk, text=text[: len(text) - held])

    def flush(self) -> str:
        """What was held back, when nothing more can come."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(slots=True)
class Decoded:
    """What came of a request's work: chunks, items to stop, what steps gave, and at the end a result or an error."""

    chunks: list[Chunk] = field(default_factory=list)
    stops: list[Path] = field(default_factory=list)
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)  # lane -> outputs
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
        self._text_of: dict[Path, str] = {}  # item -> the emission that gives its text

    def run(self, work: Iterable[Work]) -> Decoded:
        """Do what is next, in order. What the model's Processor raises is in the result, after what came before it."""
        decoded = Decoded()
        doing = f"request {self._request.id}: the model's processor"
        with attributed(doing, fail=lambda error: setattr(decoded, "error", error)), contained():
            for item in work:
                if isinstance(item, Emit):
                    emission = Emission(item.name, item.path, item.value, item.final, item.reason)
                    self._decode(emission, decoded)
                elif isinstance(item, RunStep):
                    decoded.steps[item.lane] = self._processor.step(item.step, self._request, item.outputs)
                else:
                    self._finish(item.entry, decoded)
        return decoded

    def _decode(self, emission: Emission, decoded: Decoded) -> None:
        for chunk in self._processor.decode(self._state, emission):
            if isinstance(chunk, TextChunk):
                self._text_of[emission.path] = emission.name
            self._take(chunk, path=emission.path, decoded=decoded)
        if emission.final and self._text_of.get(emission.path) == emission.name:
            self._flush(self._indices[emission.path], decoded)

    def _finish(self, end: Entry, decoded: Decoded) -> None:
        for index in self._texts:
            self._flush(index, decoded)
        # Walk outputs that no walk consumed and that the task names are tensors of the result.
        for name in (name for name in self._tensors_out if name not in self._sent):
            value = end.stored.get(name)
            if isinstance(value, list) and value and all(isinstance(item, Tensor) for item in value):
                value = torch.stack(value)
            if isinstance(value, Tensor):
                self._take(TensorChunk(name, value), path=(), decoded=decoded)
        decoded.result = self._result(end)

    def _take(self, chunk: Chunk, *, path: Path, decoded: Decoded) -> None:
        index: int = getattr(chunk, "index", -1)
        if index >= 0:  # progress is of no output
            self._indices.setdefault(path, index)
        if isinstance(chunk, TextChunk) and self._stops and chunk.channel == "answer":
            text = self._texts.setdefault(index, TextStream(self._stops))
            if (kept := text.feed(chunk)) is None:
                return
            if text.matched:  # by this very chunk: all later ones give None
                decoded.stops.append(path)
            chunk = kept
        if isinstance(chunk, ToolCallChunk) and index in self._texts and self._texts[index].matched:
            return
        if isinstance(chunk, TensorChunk):
            self._sent.add(chunk.name)
        if is_wanted(self._request, chunk):
            decoded.chunks.append(chunk)

    def _flush(self, index: int, decoded: Decoded) -> None:
        text = self._texts[index].flush() if index in self._texts else ""
        if text and is_wanted(self._request, chunk := TextChunk(text, index=index)):
            decoded.chunks.append(chunk)

    def _result(self, end: Entry) -> Result:
        indices = self._finish_reasons(end)
        counts = dict(end.counts)
        tokens = {name: counts.pop(name) for name in list(counts) if name.endswith("_tokens")}
        usage = {"prompt_tokens": len(self._encoded.prompt_token_ids), "completion_tokens": 0}
        usage |= self._encoded.usage | tokens
        dropped = sum(text.num_dropped for text in self._texts.values())
        usage["completion_tokens"] = max(usage["completion_tokens"] - dropped, 0)
        assert end.opened is not None
        fields: dict[str, Any] = {
            "finish_reason": _merged(indices.values()),
            "indices": indices,
            "usage": usage,
            "counts": counts,
            "counters": dict(end.counters),
            "prompt_token_ids": self._encoded.prompt_token_ids,
            "seed": self._request.seed,
            "timings": {"queued_s": round(end.opened - end.submitted, 6)},
        }
        self._processor.finish(self._state, fields)
        extra = {name: fields.pop(name) for name in list(fields) if name not in Result.__struct_fields__}
        return Result(**fields, extra=extra)

    def _finish_reasons(self, end: Entry) -> dict[int, str]:
        num = getattr(self._request.params, "n", None) or 1
        indices = ({(n,): n for n in range(num)} if num > 1 else {}) | self._indices  # one of n may give nothing
        reasons: dict[int, list[str]] = {index: [] for index in indices.values()} or {0: []}
        for (_, where), reason in end.reasons.items():
            path = tuple(int(step) for step in where.split(".")) if where else ()
            while path and path not in indices:
                path = path[:-1]
            reasons.setdefault(indices.get(path, 0), []).append(reason)
        stopped = {index for index, text in self._texts.items() if text.matched}
        return {index: "stop" if index in stopped else _merged(found) for index, found in sorted(reasons.items())}


def _merged(reasons: Iterable[str]) -> str:
    """One finish reason for several loops: that one was cut short is what a client must know."""
    found = list(reasons)
    return "length" if "length" in found else next((r for r in found if r not in ("stop", "end")), "stop")
