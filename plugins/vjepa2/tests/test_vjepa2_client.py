"""The client's methods of tasks against served tiny checkpoints: what they take, what they give, what they raise."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scenes import moving_square, write_video
from served import Served

import mstar
from mstar.client import APIError, AsyncClient, Client, Progress, Tensor

FRAMES = moving_square(4, height=48, width=64)
ACTIONS = np.linspace(-0.1, 0.1, 21, dtype=np.float32).reshape(3, 7)
STATE = np.zeros(7, dtype=np.float32)


@pytest.fixture(scope="module")
def urls() -> Iterator[tuple[str, str]]:
    servers = [Served(plugin="vjepa2", model=model) for model in ("tiny", "tiny-ac")]
    with servers[0].http(max_body_bytes=2**26) as video, servers[1].http(max_body_bytes=2**26) as action:
        yield video, action
    for server in servers:
        server.assert_clean()
        server.close()


@pytest.fixture(scope="module")
def video(urls: tuple[str, str]) -> Iterator[Client]:
    with Client(urls[0], timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def world(urls: tuple[str, str]) -> Iterator[Client]:
    with Client(urls[1], timeout=60) as client:
        yield client


def test_tensors_are_attributes_and_items(world: Client) -> None:
    result = world.encode(frames=FRAMES, seed=3, model="tiny-ac")
    assert result.features is not None and (result["features"] == result.features).all()
    assert result.features.shape == (4, 16, 64) and result.features.dtype == np.float32
    result.features[0] = 0  # they are the caller's own
    assert (result.task, result.seed, result.usage["prompt_tokens"]) == ("encode", 3, 64)
    assert result.timings["total_s"] > 0 and result.counters["encoder.frame"] == 4
    with pytest.raises(AttributeError, match=r"no 'latents'; its tensors: features"):
        result.latents  # noqa: B018
    with pytest.raises(KeyError):
        result["latents"]


def test_what_a_result_holds_is_what_generate_gives(world: Client) -> None:
    inputs = [mstar.client.tensor(n, v) for n, v in (("frames", FRAMES), ("actions", ACTIONS), ("state", STATE))]
    plain = world.generate(inputs=inputs, task="rollout", params={"goal_frame": 3}, seed=1)
    packed = world.rollout(frames=FRAMES, actions=ACTIONS, state=STATE, goal_frame=3, seed=1)
    assert set(plain.tensors) == set(packed.tensors) == {"latents", "states", "distances"}
    for name, value in plain.tensors.items():
        np.testing.assert_array_equal(value, packed[name])
    assert (packed.finish_reason, packed.usage) == (plain.finish_reason, plain.usage)


def test_arrays_of_any_kind_are_the_same_input(world: Client) -> None:
    expected = world.rollout(frames=FRAMES, actions=ACTIONS, state=STATE).latents
    for actions, state, frames in (
        (torch.from_numpy(ACTIONS), torch.zeros(7), torch.from_numpy(FRAMES)),
        (torch.from_numpy(ACTIONS).double(), [0] * 7, list(FRAMES)),
        (ACTIONS.astype(np.float64), STATE.tolist(), FRAMES),
        (ACTIONS.tolist(), tuple(STATE), FRAMES[::1]),
        (np.asfortranarray(ACTIONS), STATE, np.flip(FRAMES[::-1], axis=0)),
    ):
        found = world.rollout(frames=frames, actions=actions, state=state).latents
        np.testing.assert_array_equal(found, expected)
    found = world.rollout(images=[Image.fromarray(FRAMES[0])], actions=ACTIONS, state=STATE).latents
    np.testing.assert_array_equal(found, expected)


def test_torch_is_given_where_it_is_asked_for(world: Client) -> None:
    asked: dict[str, Any] = {"frames": FRAMES, "actions": ACTIONS, "state": STATE, "seed": 1}
    expected = world.rollout(**asked)
    result = world.rollout(**asked, as_torch=True, outputs=["tensor:latents"])
    assert list(result.tensors) == ["latents"] and isinstance(result.latents, torch.Tensor)
    torch.testing.assert_close(result.latents, torch.from_numpy(expected.latents), atol=0, rtol=0)
    result.latents.zero_()
    with world.stream_rollout(**asked, as_torch=True) as stream:
        assert all(isinstance(event.tensor, torch.Tensor) for event in stream if isinstance(event, Tensor))
    torch.testing.assert_close(stream.answer.result.states, torch.from_numpy(expected.states), atol=0, rtol=0)


def test_a_rollout_streams_step_by_step(world: Client) -> None:
    actions = np.stack([ACTIONS, -ACTIONS])
    asked: dict[str, Any] = {"frames": FRAMES, "actions": actions, "state": STATE, "goal_frame": 3, "seed": 1}
    whole = world.rollout(**asked)
    with world.stream_rollout(**asked) as stream:
        events = [event for event in stream if isinstance(event, Tensor)]
    starts = sorted(event.start[:2] for event in events if event.name == "latents")
    assert starts == [(row, step) for row in range(2) for step in range(3)]
    for event in events:
        at = tuple(slice(i, i + n) for i, n in zip(event.start, event.tensor.shape, strict=True))
        np.testing.assert_array_equal(event.tensor, whole[event.name][at])
    for name, value in whole.tensors.items():
        np.testing.assert_array_equal(value, stream.answer.result[name])


def test_plans_and_progress(world: Client) -> None:
    asked: dict[str, Any] = {"frames": FRAMES, "state": STATE, "samples": 8, "topk": 2, "iterations": 3, "seed": 4}
    plan = world.plan(**asked)
    assert plan.action.shape == (2, 7) and plan.costs.shape == (3, 8)
    with world.stream_task(
        "plan", tensors={"state": STATE}, **{k: v for k, v in asked.items() if k != "state"}
    ) as all_:
        assert [event.step for event in all_ if isinstance(event, Progress)] == [1, 2, 3]
    np.testing.assert_array_equal(all_.answer.result.action, plan.action)
    noise = np.random.default_rng(0).normal(size=(3, 2, 8, 4))
    assert np.isfinite(world.plan(**asked, noise=noise, goal=world.encode(frames=FRAMES).features[-1]).costs).all()


def test_sessions_and_teacher_forcing(world: Client) -> None:
    whole = world.rollout(frames=FRAMES, actions=ACTIONS, state=STATE)
    world.rollout(frames=FRAMES, actions=ACTIONS[:1], state=STATE, session="a b/c")
    for step in (1, 2):
        found = world.rollout(actions=ACTIONS[step : step + 1], session="a b/c")
        np.testing.assert_allclose(found.latents[:, 0], whole.latents[:, step], atol=1e-5)
        assert found.raw["session"] == "a b/c"
    world.close_session("a b/c")
    with pytest.raises(APIError) as caught:
        world.rollout(actions=ACTIONS, session="a b/c")
    assert (caught.value.status, caught.value.param) == (404, "session")
    taught = world.teacher_forced(frames=FRAMES, actions=ACTIONS, states=np.zeros((3, 7)))
    assert taught.latents.shape == (1, 3, 16, 64)


def test_clips_from_files_and_arrays(video: Client, tmp_path: Path) -> None:
    path = write_video(tmp_path / "clip.mp4", moving_square(8, height=64, width=64))
    found = video.encode(video=path, num_frames=4).features
    assert found.shape == (1, 2 * 16, 64)
    np.testing.assert_array_equal(video.encode(video=path.read_bytes(), frame_indices=[0, 2, 4, 7]).features, found)
    both = video.encode(video=[path, mstar.client.video(path, num_frames=8)]).features
    assert both.shape == (2, 4 * 16, 64)
    np.testing.assert_allclose(both[0], both[1], atol=1e-5)
    predicted = video.predict(frames=FRAMES, context_mask=[0, 1, 2], target_mask=[[30, 31]])
    assert {name: value.shape[1] for name, value in predicted.tensors.items()} == {
        "predicted": 2, "context": 3, "target": 2,
    }  # fmt: skip
    pixels = np.zeros((2, 4, 3, 64, 64))
    assert video.anticipate(pixel_values=pixels, steps=2, offset=0).predicted.shape == (2, 2 * 16, 64)


def test_mistakes_are_errors_of_the_client(video: Client, world: Client) -> None:
    for call, param in (
        (lambda: world.rollout(frames=FRAMES, actions=ACTIONS[:, :6], state=STATE), "actions"),
        (lambda: world.rollout(frames=FRAMES, actions=ACTIONS), "state"),
        (lambda: world.rollout(frames=FRAMES, actions=ACTIONS, state=STATE, horizon=0), "params.horizon"),
        (lambda: next(world.stream_rollout(frames=FRAMES, actions=ACTIONS, state=STATE, fast=True)), "params.fast"),
        (lambda: world.run_task("predict", frames=FRAMES), "task"),
        (lambda: video.run_task("encode", frames=FRAMES, tensors={"actions": ACTIONS}), "inputs.1.name"),
    ):
        with pytest.raises(APIError) as caught:
            call()
        assert (caught.value.status, caught.value.param) == (400, param), caught.value
    with pytest.raises(TypeError, match="num_frames choose frames of video="):
        world.encode(frames=FRAMES, num_frames=2)
    with pytest.raises(TypeError, match="use generate"):
        world.encode(frames=FRAMES, outputs=["text"])


def test_the_same_with_asyncio(urls: tuple[str, str], world: Client) -> None:
    asked: dict[str, Any] = {"frames": FRAMES, "actions": ACTIONS, "state": STATE, "seed": 1}

    async def ask() -> Any:
        async with AsyncClient(urls[1], timeout=60) as client:
            results = await asyncio.gather(client.encode(frames=FRAMES), client.rollout(**asked))
            async with client.stream_rollout(**asked) as stream:
                events = [event async for event in stream]
            return results, events, stream.answer.result

    (encoded, rolled), events, streamed = asyncio.run(ask())
    np.testing.assert_array_equal(encoded.features, world.encode(frames=FRAMES).features)
    expected = world.rollout(**asked)
    for found in (rolled, streamed):
        np.testing.assert_allclose(found.latents, expected.latents, atol=1e-5)
    assert len(events) == 3 + 1 + 3
