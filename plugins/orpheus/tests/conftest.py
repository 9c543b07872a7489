"""The golden checkpoint of this model, a tiny one written once, and engines that serve them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import served
import torch
from safetensors.torch import load_file
from torch import Tensor

from mstar.media.audio import to_int16
from mstar.plugin.spec import Checkpoint
from mstar.server.convert import convert
from mstar.server.native import GenerateRequest
from mstar.server.results import Result
from mstar.types import AudioChunk, Chunk, TensorChunk
from mstar_plugin_orpheus import config, tiny

GOLDEN = Path(__file__).parents[3] / "tests" / "golden" / "orpheus"


@dataclass(frozen=True)
class Golden:
    answers: dict[str, Any]
    tensors: dict[str, Tensor]
    inputs: dict[str, Any]
    codes: Tensor
    checkpoint: Checkpoint


def open_checkpoint(folder: Path, codec: Path) -> Checkpoint:
    parts = {"snac_24khz": codec}
    return Checkpoint(model=str(folder), folder=folder, parts=parts, config=config.load(folder, parts))


@pytest.fixture(scope="session")
def golden() -> Golden:
    folder = GOLDEN / "checkpoint"
    return Golden(
        answers=json.loads((GOLDEN / "golden.json").read_text()),
        tensors=load_file(GOLDEN / "golden.safetensors"),
        inputs=json.loads((GOLDEN / "inputs.json").read_text()),
        codes=load_file(GOLDEN / "inputs.safetensors")["codes7"],
        checkpoint=open_checkpoint(folder / "orpheus-3b-0.1-ft", folder / "snac_24khz"),
    )


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny_folder: Path) -> Checkpoint:
    return open_checkpoint(tiny_folder, tiny_folder.parent / "snac_24khz")


# ---- a served model -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Answer:
    """What a request gave, as far as it came."""

    chunks: list[Chunk] = field(default_factory=list)
    result: Result | None = None

    def tensor(self, name: str) -> Tensor:
        found = [chunk.tensor for chunk in self.chunks if isinstance(chunk, TensorChunk) and chunk.name == name]
        return torch.cat(found) if found else torch.zeros(0)

    @property
    def ids(self) -> list[int]:
        """Vocabulary ids of the codes, in order."""
        return [int(token) for token in self.tensor("codes")]

    @property
    def samples(self) -> np.ndarray:
        waves = [chunk.samples for chunk in self.chunks if isinstance(chunk, AudioChunk)]
        return np.concatenate(waves) if waves else np.zeros(0, dtype=np.float32)

    @property
    def sample_rates(self) -> set[int]:
        return {chunk.sample_rate for chunk in self.chunks if isinstance(chunk, AudioChunk)}

    @property
    def pcm(self) -> np.ndarray:
        """The audio as int32, in steps of int16."""
        return to_int16(self.samples).astype(np.int32)


class Served(served.Served):
    """One engine for a checkpoint of this model, and its worker."""

    def __init__(self, model: Path, settings: dict[str, Any]) -> None:
        super().__init__(plugin="orpheus", model=str(model), **settings)

    @property
    def processor(self) -> Any:
        return self.engine._processor

    @property
    def audio_base(self) -> int:
        """Id of code 0 in slot 0."""
        base: int = self.worker.checkpoint.config.tokens.audio_base
        return base

    @property
    def stop(self) -> int:
        """Id of the token that ends speech."""
        stop: int = self.worker.checkpoint.config.tokens.end_of_speech
        return stop

    # ---- asking -----------------------------------------------------------------------------------------

    async def answer(self, request: dict[str, Any], *, after_s: float = 0.0, abort_after: int | None = None) -> Answer:
        """Send a request, as JSON has it, and wait for its end. `abort_after`: hang up after so many chunks."""
        await asyncio.sleep(after_s)
        handle = await self.engine.submit(convert(request, GenerateRequest))
        answer = Answer()
        if abort_after == 0:
            handle.abort()
        async for chunk in handle:
            answer.chunks.append(chunk)
            if len(answer.chunks) == abort_after:
                handle.abort()
        answer.result = handle.result
        return answer

    def ask(self, request: dict[str, Any]) -> Answer:
        answer: Answer = self.run(self.answer(request))
        return answer

    def ask_all(self, requests: list[dict[str, Any]], **how: list[Any]) -> list[Any]:
        """Ask all at once; answers, and errors in their place. `how`: one argument of `answer` for each."""

        async def gather() -> list[Any]:
            each = [{name: values[number] for name, values in how.items()} for number in range(len(requests))]
            works = [self.answer(request, **more) for request, more in zip(requests, each, strict=True)]
            return await asyncio.gather(*works, return_exceptions=True)

        answers: list[Any] = self.run(gather())
        return answers


@pytest.fixture(scope="session")
def serving() -> Callable[..., contextlib.AbstractContextManager[Served]]:
    """`with serving(folder, **settings) as served:` — an engine for the checkpoint in a folder."""

    @contextlib.contextmanager
    def serve(model: Path, **settings: Any) -> Iterator[Served]:
        served = Served(model, settings)
        try:
            yield served
        finally:
            served.close()

    return serve


@pytest.fixture(scope="session")
def speech() -> Callable[..., dict[str, Any]]:
    """`speech(text, seed=1, voice="leo", max_tokens=70)`: a native speech request; text or a prompt's ids."""

    def make(
        said: str | list[int], *, seed: int = 1, outputs: tuple[str, ...] = ("audio", "tensors"), **params: Any
    ) -> dict[str, Any]:
        part = {"type": "text", "text": said} if isinstance(said, str) else {"type": "token_ids", "ids": said}
        return {"task": "speech", "inputs": [part], "outputs": list(outputs), "params": params, "seed": seed}

    return make


@pytest.fixture(scope="session")
def long_text() -> Callable[[int], str]:
    """`long_text(3000)`: prose of about so many characters, the same every time, no two sentences alike."""
    words = "river stone quiet window morning carries under seven lanterns while distant bells answer slowly".split()

    def make(num_characters: int) -> str:
        draw, text, number = random.Random(5), "", 0
        while len(text) < num_characters:
            number += 1
            sentence = " ".join([f"Line {number}", *draw.choices(words, k=draw.randint(4, 14))])
            text += sentence + draw.choice([". ", "? ", "! ", ", he said. ", ".\n\n", "… "])
        return text.strip()

    return make
