"""The golden checkpoint of this model, served, and requests to it."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from served import Served
from torch import Tensor

from mstar.server.native import GenerateRequest, convert
from mstar.server.results import Outputs, Result
from mstar.types import Chunk, ImageChunk, TensorChunk, TextChunk

GOLDEN = Path(__file__).parents[3] / "tests" / "golden" / "bagel"


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(pixels: np.ndarray | Tensor) -> dict[str, Any]:
    file = io.BytesIO()
    Image.fromarray(np.asarray(pixels)).save(file, "PNG")
    return {"type": "image", "data": "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()}


def tensor(name: str, value: Tensor) -> dict[str, Any]:
    data = base64.b64encode(value.contiguous().flatten().view(torch.uint8).numpy().tobytes()).decode()
    dtype = str(value.dtype).removeprefix("torch.")
    return {"type": "tensor", "name": name, "tensor": {"dtype": dtype, "shape": list(value.shape), "data": data}}


def ask_for(
    *inputs: dict[str, Any], seed: int = 1, outputs: list[str] | None = None, **request: Any
) -> GenerateRequest:
    whole = {"inputs": list(inputs)} if inputs else {}
    whole |= {"seed": seed, **request} | ({"outputs": outputs} if outputs else {})
    return convert(whole, GenerateRequest)  # type: ignore[no-any-return]


@dataclass
class Answer:
    """What came of a request."""

    result: Result
    chunks: list[Chunk]
    texts: list[str] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    images: list[np.ndarray] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)


class Model:
    """A served checkpoint."""

    def __init__(self, model: str, **settings: Any) -> None:
        self.served = Served(plugin="bagel", model=model, **settings)

    async def _ask(self, wire: GenerateRequest) -> Answer:
        handle = await self.served.engine.submit(wire)
        chunks = [chunk async for chunk in handle]
        outputs = Outputs(handle.request)
        for chunk in chunks:
            outputs.add(chunk)
        assert handle.result is not None
        found = Answer(handle.result, chunks)
        for chunk in outputs.joined(indices=handle.result.indices):
            if isinstance(chunk, TextChunk):
                found.texts.append(chunk.text)
                found.ids.append(list(chunk.token_ids))
            elif isinstance(chunk, ImageChunk):
                found.images.append(chunk.pixels)
            elif isinstance(chunk, TensorChunk):
                found.tensors[chunk.name] = chunk.tensor
        return found

    def ask(self, *inputs: dict[str, Any], **request: Any) -> Answer:
        return self.served.run(self._ask(ask_for(*inputs, **request)))  # type: ignore[no-any-return]

    def ask_all(self, *wires: GenerateRequest) -> list[Answer]:
        async def gather() -> list[Answer]:
            return await asyncio.gather(*map(self._ask, wires))

        return self.served.run(gather())  # type: ignore[no-any-return]


@dataclass
class Golden:
    """What the authors' code was asked, and what it gave."""

    asked: dict[str, Any]
    inputs: dict[str, Tensor]
    facts: dict[str, Any]
    tensors: dict[str, Tensor]


@pytest.fixture(scope="session")
def golden() -> Golden:
    asked, facts = (json.loads((GOLDEN / f"{name}.json").read_text()) for name in ("inputs", "golden"))
    return Golden(asked, load_file(GOLDEN / "inputs.safetensors"), facts, load_file(GOLDEN / "golden.safetensors"))


@pytest.fixture(scope="module")
def served_golden() -> Iterator[Model]:
    model = Model(str(GOLDEN / "checkpoint"))
    yield model
    model.served.close()
