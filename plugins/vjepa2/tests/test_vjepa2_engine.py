"""Every task through the engine, against the outputs of the models' original code."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from served import Served
from torch import Tensor

from mstar.errors import RequestError
from mstar.server.convert import convert
from mstar.server.native import GenerateRequest
from mstar.server.results import Outputs
from mstar.types import ProgressChunk, TensorChunk

GOLDEN = Path(__file__).parents[3] / "tests" / "golden"
LATENT = {"atol": 2e-4, "rtol": 0.0}
STATE = {"atol": 1e-5, "rtol": 0.0}


def tensor(name: str, value: Tensor) -> dict[str, Any]:
    data = base64.b64encode(value.contiguous().flatten().view(torch.uint8).numpy().tobytes()).decode()
    dtype = str(value.dtype).removeprefix("torch.")
    return {"type": "tensor", "name": name, "tensor": {"dtype": dtype, "shape": list(value.shape), "data": data}}


def ask_for(
    task: str, *, params: dict[str, Any] | None = None, seed: int = 1, session: str | None = None, **tensors: Any
) -> Any:
    inputs = [tensor(name, value) for name, value in tensors.items()]
    request = {"task": task, "inputs": inputs, "params": params or {}, "seed": seed}
    return convert(request | ({"session": session} if session else {}), GenerateRequest)


class Model:
    """A served checkpoint with its golden inputs and outputs."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.inputs = load_file(GOLDEN / name / "inputs.safetensors")
        self.golden = load_file(GOLDEN / name / "golden.safetensors")
        self.notes = json.loads((GOLDEN / name / "inputs.json").read_text())
        self.served = Served(plugin="vjepa2", model=str(GOLDEN / name / "checkpoint"), **settings)

    async def _ask(self, wire: GenerateRequest) -> tuple[dict[str, Tensor], Any, list[Any]]:
        handle = await self.served.engine.submit(wire)
        chunks = [chunk async for chunk in handle]
        outputs = Outputs(handle.request)
        for chunk in chunks:
            outputs.add(chunk)
        joined = {chunk.name: chunk.tensor for chunk in outputs.joined() if isinstance(chunk, TensorChunk)}
        return joined, handle.result, chunks

    def ask(self, task: str, **how: Any) -> dict[str, Tensor]:
        return self.served.run(self._ask(ask_for(task, **how)))[0]

    def ask_fully(self, task: str, **how: Any) -> Any:
        return self.served.run(self._ask(ask_for(task, **how)))

    def ask_all(self, *wires: GenerateRequest) -> list[dict[str, Tensor]]:
        async def gather() -> list[Any]:
            import asyncio

            return await asyncio.gather(*map(self._ask, wires))

        return [found[0] for found in self.served.run(gather())]


@pytest.fixture(scope="module")
def video() -> Iterator[Model]:
    model = Model("vjepa2")
    yield model
    model.served.close()


@pytest.fixture(scope="module")
def action() -> Iterator[Model]:
    model = Model("vjepa2_ac")
    yield model
    model.served.close()


@pytest.fixture(autouse=True)
def _left_clean(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in {"video", "action"} & set(request.fixturenames):
        request.getfixturevalue(name).served.assert_clean()


# ---- V-JEPA 2 -------------------------------------------------------------------------------------------


def test_encode_clips(video: Model) -> None:
    pixels = video.inputs["pixel_values_videos"]
    features = video.ask("encode", pixel_values=pixels)["features"]
    torch.testing.assert_close(features, video.golden["encoder.last_hidden_state"], **LATENT)
    alone = video.ask("encode", pixel_values=pixels[0])["features"]
    torch.testing.assert_close(alone, features[:1], **LATENT)
    image = video.ask("encode", pixel_values=pixels[0, :1])["features"]
    torch.testing.assert_close(image, video.golden["image.last_hidden_state"], **LATENT)


def test_predict(video: Model) -> None:
    pixels = video.inputs["pixel_values_videos"]
    masks = {name: video.inputs[name] for name in ("context_mask", "target_mask")}
    found = video.ask("predict", pixel_values=pixels, **masks)
    for name, original in {
        "predicted": "predictor_last_hidden_state", "context": "masked_hidden_state", "target": "target_hidden_state",
    }.items():  # fmt: skip
        torch.testing.assert_close(found[name], video.golden[f"masked.{original}"], **LATENT)
    whole = video.ask("predict", pixel_values=pixels)
    torch.testing.assert_close(whole["predicted"], video.golden["full.predictor_last_hidden_state"], **LATENT)


def test_anticipate(video: Model) -> None:
    pixels = video.inputs["pixel_values_videos"][:1]
    asked = video.notes["anticipate"]
    offset = asked["skip_tokens"] // asked["tokens_per_step"]
    found = video.ask("anticipate", pixel_values=pixels, params={"steps": asked["steps"], "offset": offset})
    torch.testing.assert_close(found["predicted"], video.golden["anticipate_rollout3.predicted"], **LATENT)
    one = video.ask("anticipate", pixel_values=pixels, params={"offset": offset})
    torch.testing.assert_close(one["predicted"], video.golden["anticipate.predictor_last_hidden_state"], **LATENT)


# ---- V-JEPA 2-AC ----------------------------------------------------------------------------------------


def test_encode_frames(action: Model) -> None:
    features = action.ask("encode", frames=action.inputs["frames_uint8"])["features"]
    torch.testing.assert_close(features, action.golden["encode.normalized"], **LATENT)
    normalised = action.ask("encode", pixel_values=action.golden["clip"])["features"]
    torch.testing.assert_close(normalised, features, **LATENT)


@pytest.mark.parametrize("horizon", [4, 8])
def test_rollouts_that_integrate(action: Model, horizon: int) -> None:
    frames, actions, state = (action.inputs[name] for name in ("frames_uint8", "actions", "state0"))
    found = action.ask("rollout", frames=frames[:1], actions=actions[:, :horizon], state=state[:, 0])
    torch.testing.assert_close(found["latents"], action.golden[f"rollout_H{horizon}.latents"], **LATENT)
    torch.testing.assert_close(found["states"], action.golden[f"rollout_H{horizon}.states"], **STATE)
    one = action.ask("rollout", frames=frames, actions=actions[0], state=state[0, 0], params={"horizon": horizon})
    torch.testing.assert_close(one["latents"], action.golden[f"rollout_H{horizon}.latents"][:1], **LATENT)
    torch.testing.assert_close(one["states"], action.golden[f"rollout_H{horizon}.states"][:1], **STATE)


def test_rollouts_with_given_states(action: Model) -> None:
    frames, actions, states = (action.inputs[name] for name in ("frames_uint8", "actions", "states_given"))
    found = action.ask("rollout", frames=frames[:1], actions=actions[:, :4], states=states[:, :4])
    torch.testing.assert_close(found["latents"], action.golden["rollout_H4_given_states.latents"], **LATENT)
    assert torch.equal(found["states"][:, :4], states[:, :4]) and found["states"].shape == (2, 5, 7)
    two = action.ask(
        "rollout", frames=frames, actions=actions[:, :3], states=states[:, :3], params={"context_frames": 2}
    )
    torch.testing.assert_close(two["latents"], action.golden["rollout_ctx2.latents"], **LATENT)
    assert two["states"].shape == (2, 4, 7)


def test_teacher_forcing(action: Model) -> None:
    frames, actions, states = (action.inputs[name] for name in ("frames_uint8", "actions", "states_given"))
    found = action.ask("teacher_forced", frames=frames, actions=actions[0, :4], states=states[0, :4])
    torch.testing.assert_close(found["latents"][0], action.golden["teacher_forced.normalized"], **LATENT)


def test_energies_are_distances_to_a_goal_frame(action: Model) -> None:
    frames, state = action.inputs["frames_uint8"], action.inputs["state0"][0]
    actions = action.golden["energy.actions"]
    found = action.ask("rollout", frames=frames, actions=actions, state=state, params={"goal_frame": 4})
    torch.testing.assert_close(found["distances"][:, 0], action.golden["energy.loss"], **LATENT)
    goal = action.golden["encode.normalized"][4]
    again = action.ask("rollout", frames=frames[:1], actions=actions, state=state, goal=goal)
    torch.testing.assert_close(again["distances"], found["distances"], **LATENT)


def plan(model: Model, **more: Any) -> dict[str, Any]:
    asked = model.notes["cem"]
    params = {
        "horizon": asked["rollout"], "samples": asked["samples"], "topk": asked["topk"],
        "iterations": asked["cem_steps"], "max_norm": asked["maxnorm"],
        **{name: asked[name] for name in asked if name.startswith("momentum")}, **more,
    }  # fmt: skip
    return {"frames": model.inputs["frames_uint8"], "state": model.inputs["state0"][0, 0], "params": params}


def test_plans(action: Model) -> None:
    found, result, chunks = action.ask_fully("plan", noise=action.golden["cem.noise"], **plan(action))
    torch.testing.assert_close(found["action"], action.golden["cem.action"], atol=1e-3, rtol=0)
    torch.testing.assert_close(found["costs"], action.golden["cem.costs"], **LATENT)
    assert result.counters["ac.step"] == 3 * 2 * 16 and result.counters["encoder.frame"] == 2
    assert [chunk.step for chunk in chunks if isinstance(chunk, ProgressChunk)] == [1, 2, 3]
    seeded = action.ask("plan", seed=action.notes["cem"]["torch_manual_seed"], **plan(action))
    torch.testing.assert_close(seeded["action"], action.golden["cem.action"], atol=1e-3, rtol=0)
    closing = action.ask("plan", noise=action.golden["cem.noise"], **plan(action, close_gripper_at=1))
    torch.testing.assert_close(closing["action"], action.golden["cem.action_close_gripper_at_1"], atol=1e-3, rtol=0)


def test_a_session_goes_on(action: Model) -> None:
    frames, actions, state = (action.inputs[name] for name in ("frames_uint8", "actions", "state0"))
    first = action.ask("rollout", session="arm", frames=frames[:1], actions=actions[0, :1], state=state[0, 0])
    latents, states = [first["latents"]], [first["states"]]
    for step in range(1, 8):
        found = action.ask("rollout", session="arm", actions=actions[0, step : step + 1])
        latents.append(found["latents"])
        states.append(found["states"][:, 1:])
    torch.testing.assert_close(torch.cat(latents, 1), action.golden["rollout_H8.latents"][:1], **LATENT)
    torch.testing.assert_close(torch.cat(states, 1), action.golden["rollout_H8.states"][:1], **STATE)
    with pytest.raises(RequestError, match="positions for 32, of which 8 are spent; a horizon of 24 fits"):
        action.ask("rollout", session="arm", actions=torch.zeros(25, 7))
    whole = action.ask("rollout", session="arm", actions=torch.zeros(24, 7))
    assert whole["latents"].shape[1] == 24
    action.served.run(_close(action, "arm"))


async def _close(model: Model, name: str) -> None:
    model.served.engine.close_session(name)
