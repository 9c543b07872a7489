"""The golden checkpoint of this model, a tiny one written once, and engines that serve them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mstar import launch
from mstar.config import EngineConfig, ServerConfig
from mstar.media.audio import to_int16
from mstar.plugin.spec import Checkpoint
from mstar.server.app import create_app
from mstar.server.engine import Engine
from mstar.server.native import GenerateRequest, convert
from mstar.server.results import Result
from mstar.types import AudioChunk, Chunk, TensorChunk
from mstar.worker.worker import Worker
from mstar_plugin_orpheus import config, tiny

GOLDEN = Path(__file__).parents[3] / "tests" / "golden" / "orpheus"
WAIT_S = 100.0


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


class Served:
    """One engine and its worker, as `mstar run` and `mstar serve` start them.

    The engine's event loop runs in a thread of its own, so that tests are plain code.
    """

    def __init__(self, model: Path, settings: dict[str, Any]) -> None:
        torch.set_num_threads(1)  # several workers share the machine's cores
        self.config = EngineConfig(plugin="orpheus", model=str(model), **settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._stack = contextlib.AsyncExitStack()
        self.engine: Engine
        self.worker: Worker
        try:
            self.run(self._start())
        except BaseException:
            self._stop_loop()
            raise

    async def _start(self) -> None:
        workers: list[Worker] = []

        class Kept(Worker):
            def load(self) -> None:
                workers.append(self)
                super().load()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "Worker", Kept)
            self.engine = await self._stack.enter_async_context(launch.started_engine(self.config))
        (self.worker,) = workers

    def close(self) -> None:
        try:
            self.run(self._stack.aclose())
        finally:
            self._stop_loop()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, Any], *, timeout_s: float = WAIT_S) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

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

    # ---- HTTP -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def http(self) -> Iterator[str]:
        """Serve over HTTP on a free port of this machine; gives the address."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            app = create_app(self.engine, root=self.config.model, max_body_bytes=2**20)
            server = launch.Server(app, self.engine, config=ServerConfig(log_level="warning", drain_timeout_s=5))
            serving = asyncio.run_coroutine_threadsafe(server.serve(sockets=[listener]), self._loop)
            wait_until(lambda: server.started or serving.done())
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                serving.result(20)

    # ---- afterwards -------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """No request on either side, and by the worker's own statistics no page and no slot in use."""
        stats = self.engine.state.stats
        return (
            self.engine.num_active == 0
            and self.engine.state.num_running == 0
            and stats is not None
            and (stats.running, stats.waiting, stats.slots_used, stats.swapped) == (0, 0, 0, 0)
            and all(used == 0 for used, _ in stats.pools.values())
        )

    def assert_clean(self) -> None:
        """Nothing is left of any request: pages, slot rows, swapped pages, queues."""
        wait_until(lambda: self.is_idle or self.engine.state.dead is not None, what=lambda: self.engine.state.stats)
        assert self.engine.state.dead is None
        # The worker only waits for messages now, and there is nobody to send it one.
        self.worker.check_integrity()
        assert not list(self.worker.router.holdings.tenants())
        assert self.worker.modules.swap_space.used_bytes == 0


def wait_until(is_true: Callable[[], bool], *, timeout_s: float = 20.0, what: Callable[[], Any] = str) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, f"still waiting after {timeout_s} s: {what()}"
        time.sleep(0.002)


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
