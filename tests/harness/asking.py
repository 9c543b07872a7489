"""Native requests made of plain values, and their answers by kind: for tests of plugins through the engine."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from served import Served
from torch import Tensor

from mstar.server.convert import convert
from mstar.server.native import GenerateRequest
from mstar.server.results import Outputs, Result
from mstar.types import Chunk, ImageChunk, TensorChunk, TextChunk

Part = dict[str, Any]


def text(words: str) -> Part:
    return {"type": "text", "text": words}


def token_ids(ids: Sequence[int]) -> Part:
    return {"type": "token_ids", "ids": list(ids)}


def image(pixels: Any) -> Part:
    """uint8 (H, W, 3) as a PNG in a data URI."""
    file = io.BytesIO()
    Image.fromarray(np.asarray(pixels)).save(file, "PNG")
    return {"type": "image", "data": "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()}


def tensor(name: str, value: Tensor) -> Part:
    data = base64.b64encode(value.contiguous().flatten().view(torch.uint8).numpy().tobytes()).decode()
    dtype = str(value.dtype).removeprefix("torch.")
    return {"type": "tensor", "name": name, "tensor": {"dtype": dtype, "shape": list(value.shape), "data": data}}


def ask_for(*inputs: Part, seed: int | None = 1, **request: Any) -> GenerateRequest:
    """A request, its defaults left out."""
    whole = request | ({"inputs": list(inputs)} if inputs else {}) | ({} if seed is None else {"seed": seed})
    return convert(whole, GenerateRequest)


@dataclass
class Answer:
    """What came of a request; outputs in order of their index."""

    result: Result
    chunks: list[Chunk]
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    images: list[np.ndarray] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def add(self, chunk: Chunk) -> None:
        if isinstance(chunk, TextChunk):
            (self.texts if chunk.channel == "answer" else self.thoughts).append(chunk.text)
            self.ids.append(list(chunk.token_ids))
        elif isinstance(chunk, ImageChunk):
            self.images.append(chunk.pixels)
        elif isinstance(chunk, TensorChunk):
            self.tensors[chunk.name] = chunk.tensor


class Asked(Served):
    """A served model that answers native requests."""

    async def answer(self, wire: GenerateRequest, *, abort_after: int | None = None) -> Answer:
        """Send a request and wait for its end. `abort_after`: hang up after so many chunks (0: at once)."""
        handle = await self.engine.submit(wire)
        found = Answer(None, [])  # type: ignore[arg-type]  # set below
        if abort_after == 0:
            handle.abort()
        async for chunk in handle:
            found.chunks.append(chunk)
            if len(found.chunks) == abort_after:
                handle.abort()
        assert handle.result is not None
        found.result = handle.result
        outputs = Outputs(handle.request)
        for chunk in found.chunks:
            outputs.add(chunk)
        for joined in outputs.joined(indices=found.result.indices):
            found.add(joined)
        return found

    def ask(self, *inputs: Part, **request: Any) -> Answer:
        return self.run(self.answer(ask_for(*inputs, **request)))  # type: ignore[no-any-return]

    def ask_all(
        self, *wires: GenerateRequest, apart_s: float = 0.0, abort_after: Mapping[int, int] | None = None
    ) -> list[Answer]:
        """All together, or each so long after the one before.

        `abort_after`: place -> chunks, as of `answer`; an error stands in these places.
        """
        aborted = abort_after or {}

        async def later(number: int, wire: GenerateRequest) -> Answer:
            await asyncio.sleep(number * apart_s)
            return await self.answer(wire, abort_after=aborted.get(number))

        async def gather() -> list[Any]:
            works = [later(number, wire) for number, wire in enumerate(wires)]
            return await asyncio.gather(*works, return_exceptions=True)

        found: list[Any] = self.run(gather())
        for number, answer in enumerate(found):
            if isinstance(answer, BaseException) and number not in aborted:
                raise answer
        return found
