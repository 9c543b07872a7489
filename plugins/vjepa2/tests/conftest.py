"""Engines that serve the golden checkpoints, requests to ask of them, and rollouts by the slow twin that keeps none."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import served
import torch
from safetensors.torch import load_file
from torch import Tensor

from mstar.errors import RequestError
from mstar.server.convert import convert
from mstar.server.native import GenerateRequest
from mstar.server.results import Outputs, Result
from mstar.types import Chunk, TensorChunk
from mstar_plugin_vjepa2.modeling.ac import full_sequence
from mstar_plugin_vjepa2.modeling.pose import integrate

GOLDEN = Path(__file__).parents[3] / "tests" / "golden"


@dataclass(frozen=True)
class Ask:
    """A request, which may be asked more than once."""

    task: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    seed: int = 1
    session: str | None = None

    def wire(self) -> GenerateRequest:
        inputs = [_part(name, value) for name, value in self.tensors.items()]
        request: dict[str, Any] = {"task": self.task, "inputs": inputs, "params": self.params, "seed": self.seed}
        return convert(request | ({"session": self.session} if self.session else {}), GenerateRequest)

    def on(self, session: str) -> Ask:
        return replace(self, session=session)


def _part(name: str, value: Tensor) -> dict[str, Any]:
    data = base64.b64encode(value.contiguous().flatten().view(torch.uint8).numpy().tobytes()).decode()
    dtype = str(value.dtype).removeprefix("torch.")
    return {"type": "tensor", "name": name, "tensor": {"dtype": dtype, "shape": list(value.shape), "data": data}}


@dataclass(slots=True)
class Answer:
    """What a request gave: its tensors by name, each whole."""

    tensors: dict[str, Tensor]
    chunks: list[Chunk]
    result: Result

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def differences(self, other: Answer) -> dict[str, float]:
        """Tensor -> the most that a value differs; shapes and types must be the same."""
        assert set(self.tensors) == set(other.tensors)
        found = {}
        for name, value in self.tensors.items():
            assert (value.shape, value.dtype) == (other[name].shape, other[name].dtype), name
            found[name] = float((value.double() - other[name].double()).abs().max())
        return found


class World(served.Served):
    """A golden checkpoint of this plugin in an engine."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.inputs = load_file(GOLDEN / name / "inputs.safetensors")
        super().__init__(plugin="vjepa2", model=str(GOLDEN / name / "checkpoint"), **settings)

    # ---- asking -----------------------------------------------------------------------------------------

    async def answer(self, ask: Ask, *, after_s: float = 0.0, abort_after: int | None = None) -> Answer:
        """Send a request and wait for its end. `abort_after`: hang up after so many chunks."""
        await asyncio.sleep(after_s)
        handle = await self.engine.submit(ask.wire())
        if abort_after == 0:
            handle.abort()
        outputs, chunks = Outputs(handle.request), []
        async for chunk in handle:
            chunks.append(chunk)
            outputs.add(chunk)
            if len(chunks) == abort_after:
                handle.abort()
        assert handle.result is not None
        found = {chunk.name: chunk.tensor for chunk in outputs.joined() if isinstance(chunk, TensorChunk)}
        return Answer(found, chunks, handle.result)

    def ask(self, ask: Ask, **how: Any) -> Answer:
        answer: Answer = self.run(self.answer(ask, **how))
        return answer

    def ask_all(self, asks: list[Ask], **how: list[Any]) -> list[Any]:
        """Ask all at once; answers, and errors in their place. `how`: one argument of `answer` for each."""

        async def gather() -> list[Any]:
            each = [{name: values[number] for name, values in how.items()} for number in range(len(asks))]
            works = [self.answer(ask, **more) for ask, more in zip(asks, each, strict=True)]
            return await asyncio.gather(*works, return_exceptions=True)

        answers: list[Any] = self.run(gather())
        return answers

    def refusal(self, ask: Ask, **how: Any) -> RequestError:
        """What a request is refused with."""
        with pytest.raises(RequestError) as caught:
            self.ask(ask, **how)
        return caught.value

    def close_session(self, name: str) -> None:
        async def close() -> None:
            self.engine.close_session(name)

        self.run(close())

    # ---- looking ----------------------------------------------------------------------------------------

    def calls(self, method: str) -> tuple[int, int]:
        """Batches and rows of a method so far."""
        module, _, name = method.partition(".")
        calls, rows, _ = self.on_worker(lambda: list(self.worker.modules[module].method_s.get(name, (0, 0, 0.0))))
        return int(calls), int(rows)

    def pages(self) -> int:
        """Pages of the predictor's KV cache that are in use."""
        pages: int = self.on_worker(lambda: self.pool.num_used)
        return pages

    @property
    def pool(self) -> Any:
        return self.worker.modules["ac"].pool

    # ---- the slow twin ------------------------------------------------------------------------------------

    @torch.inference_mode()
    def by_full_sequences(self, frames: Tensor, actions: Tensor, states: Tensor, horizon: int) -> dict[str, Tensor]:
        """A rollout whose every step re-runs the whole sequence.

        Args:
            frames: (C, H, W, 3) uint8, the context.
            actions: (C - 1 + horizon, A).
            states: (1, A), to be integrated, or one for each action.

        Returns: latents (1, horizon, P, D) and states (1, C + horizon, A).
        """
        z = self.ask(Ask("encode", {"frames": frames}))["features"]
        predictor = self.worker.modules["ac"].node.predictor
        given, known = len(states), list(states)
        for action in actions[given - 1 :]:
            known.append(integrate(known[-1][None], action[None])[0])
        for _ in range(horizon):
            n = len(z)
            ahead = full_sequence(predictor, z[None], actions[None, :n], torch.stack(known[:n])[None])
            z = torch.cat([z, ahead[0, -1:]])
        return {"latents": z[None, len(frames) :], "states": torch.stack(known)[None]}


# ---- requests ---------------------------------------------------------------------------------------------


def draw(*shape: int, seed: int, scale: float = 0.1) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def draw_frames(number: int, *, seed: int = 0, side: int = 64) -> Tensor:
    """(T, side, side, 3) uint8."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(0, 256, (number, side, side, 3), generator=generator, dtype=torch.uint8)


def rollout(
    seed: int, horizon: int, *, context: int = 1, rows: int | None = None, given: bool = False, **params: Any
) -> Ask:
    """A rollout of drawn frames and actions; states are given, or integrated from a drawn one."""
    steps, batch = context - 1 + horizon, () if rows is None else (rows,)
    tensors = {"frames": draw_frames(context, seed=seed), "actions": draw(*batch, steps, 7, seed=seed)}
    if given:
        tensors["states"] = draw(*batch, steps, 7, seed=seed + 100, scale=0.5)
    else:
        tensors["state"] = draw(*batch, 7, seed=seed + 100, scale=0.5)
    return Ask("rollout", tensors, {"context_frames": context, **params})


def plan(seed: int, *, context: int = 1, samples: int = 16, horizon: int = 2, **params: Any) -> Ask:
    """A plan from drawn frames to a drawn goal frame, small."""
    tensors = {"frames": draw_frames(context + 1, seed=seed), "state": draw(7, seed=seed, scale=0.5)}
    if context > 1:
        tensors["actions"] = draw(context - 1, 7, seed=seed + 1)
    size = {"context_frames": context, "samples": samples, "horizon": horizon, "topk": 4, "iterations": 2}
    return Ask("plan", tensors, size | params, seed=seed)


@pytest.fixture(scope="session")
def asks() -> SimpleNamespace:
    """`asks.rollout(...)`, `asks.plan(...)`, `asks.Ask(...)`: requests, and what they are drawn from."""
    return SimpleNamespace(Ask=Ask, rollout=rollout, plan=plan, draw=draw, frames=draw_frames)


@pytest.fixture(scope="module")
def serving() -> Iterator[Callable[..., World]]:
    """`serving(name="vjepa2_ac", **settings)`: an engine, kept until the module's tests are over."""
    started: dict[str, World] = {}

    def start(name: str = "vjepa2_ac", **settings: Any) -> World:
        key = f"{name} {sorted(settings.items())}"
        if key not in started:
            started[key] = World(name, **settings)
        return started[key]

    yield start
    for world in started.values():
        world.close()
