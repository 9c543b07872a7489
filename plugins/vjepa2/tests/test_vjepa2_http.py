"""V-JEPA 2 over HTTP from outside: what is refused and how, sessions, and that all forms of an answer agree."""

from __future__ import annotations

import base64
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy
from scenes import moving_square
from served import Served, wait_until

from mstar.cli import main
from mstar.client import tensor

BINARY = {"Accept": "application/octet-stream"}
FRAMES = moving_square(5, height=48, width=64)
ACTIONS = np.linspace(-0.1, 0.1, 28, dtype=np.float32).reshape(4, 7)
STATE = np.zeros(7, dtype=np.float32)
STATES = np.zeros((4, 7), dtype=np.float32)
PIXELS = np.zeros((2, 3, 64, 64), dtype=np.float32)
POSITIONS = 32
"""Of the tiny checkpoint: frames that a rollout may step from."""


@pytest.fixture(scope="module")
def video() -> Iterator[Served]:
    served = Served(plugin="vjepa2", model="tiny")
    yield served
    served.close()


@pytest.fixture(scope="module")
def action() -> Iterator[Served]:
    served = Served(plugin="vjepa2", model="tiny-ac", max_sessions=2)
    yield served
    served.close()


@pytest.fixture(scope="module")
def clip(video: Served) -> Iterator[httpx.Client]:
    with video.http(max_body_bytes=2**26) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def arm(action: Served) -> Iterator[httpx.Client]:
    with action.http(max_body_bytes=2**26) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def body(task: str, *, session: str | None = None, outputs: list[str] | None = None, **more: Any) -> dict[str, Any]:
    """A request; `more`: tensors by name, and `params`, `stream`, `seed`, `inputs` (further parts)."""
    own = {name: more.pop(name) for name in ("params", "stream", "seed") if name in more}
    inputs = more.pop("inputs", []) + [tensor(name, value) for name, value in more.items()]
    given = {"session": session, "outputs": outputs}
    return {"task": task, "inputs": inputs, "seed": 1} | own | {k: v for k, v in given.items() if v is not None}


def ask(client: httpx.Client, task: str, **more: Any) -> dict[str, np.ndarray]:
    """The tensors of an answer, as one safetensors body."""
    response = client.post("/v1/generate", json=body(task, **more), headers=BINARY)
    assert response.status_code == 200, response.text
    return dict(safetensors.numpy.load(response.content))


def refusal(client: httpx.Client, task: str, **more: Any) -> tuple[int, str, str]:
    """Status, param and message of an error, which names the field in its param."""
    response = client.post("/v1/generate", json=body(task, **more))
    assert response.status_code >= 400, response.text[:200]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error["param"], error["message"]


def assert_well(served: Served, client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200
    served.assert_clean()


# ---- what is refused ------------------------------------------------------------------------------------

ROLLOUT: dict[str, Any] = {"frames": FRAMES, "actions": ACTIONS, "state": STATE}
PLAN: dict[str, Any] = {"frames": FRAMES, "state": STATE}
TAUGHT: dict[str, Any] = {"frames": FRAMES, "actions": ACTIONS, "states": STATES}


def rollout(**more: Any) -> tuple[str, dict[str, Any]]:
    """A rollout with something changed; None leaves a tensor out."""
    return "rollout", {name: value for name, value in (ROLLOUT | more).items() if value is not None}


def plan(**more: Any) -> tuple[str, dict[str, Any]]:
    params = {"samples": 4, "topk": 2, "iterations": 1} | more.pop("params", {})
    return "plan", {name: value for name, value in (PLAN | more | {"params": params}).items() if value is not None}


def taught(**more: Any) -> tuple[str, dict[str, Any]]:
    return "teacher_forced", {name: value for name, value in (TAUGHT | more).items() if value is not None}


def changed(value: np.ndarray, to: float) -> np.ndarray:
    copy = value.copy()
    copy.flat[3] = to
    return copy


WRONG_ACTIONS = {
    # values
    "NaN": (rollout(actions=changed(ACTIONS, float("nan"))), "inputs.1.tensor", "'actions' holds NaN or infinity"),
    "infinity": (rollout(actions=changed(ACTIONS, float("inf"))), "inputs.1.tensor", "finite"),
    "NaN in a state": (rollout(state=changed(STATE, float("nan"))), "inputs.2.tensor", "'state' holds NaN or infinity"),
    # widths, shapes and types
    "six columns": (rollout(actions=ACTIONS[:, :6]), "actions", r"float32 \[4, 6\]"),
    "eight columns in a state": (rollout(state=np.zeros(8, np.float32)), "state", r"\[7\] or \[B,7\]"),
    "one dimension": (rollout(actions=ACTIONS[0]), "actions", r"\[N,7\] or \[B,N,7\]"),
    "no rows": (rollout(actions=ACTIONS[:0]), "actions", r"\[0, 7\]"),
    "integers": (rollout(actions=ACTIONS.astype(np.int64)), "actions", "int64"),
    "uneven rows": (rollout(actions=np.stack([ACTIONS] * 2), state=np.stack([STATE] * 3)), "actions", "2 rows .* 3"),
    "too many rows": (rollout(actions=np.zeros((1025, 1, 7), np.float32)), "actions", "at most 1024"),
    "float frames": (rollout(frames=FRAMES.astype(np.float32)), "frames", "uint8"),
    "four channels": (rollout(frames=np.zeros((2, 8, 8, 4), np.uint8)), "frames", r"\[T,H,W,3\]"),
    "a strip of a frame": (rollout(frames=np.zeros((2, 1, 4096, 3), np.uint8)), "frames", "at most 32 times"),
    "pixels of another size": (rollout(frames=None, pixel_values=PIXELS[..., :32]), "pixel_values", r"\[T,3,64,64\]"),
    "pixels and frames": (rollout(pixel_values=PIXELS), "inputs", "several places"),
    # what is missing or twice
    "no frames": (rollout(frames=None), "inputs", "no frames"),
    "no actions": (rollout(actions=None), "actions", "missing"),
    "no state": (rollout(state=None), "state", "neither 'state' nor 'states'"),
    "state and states": (rollout(states=STATES), "state", "both 'state' and 'states'"),
    "too few states": (rollout(state=None, states=STATES[:2]), "states", "2 rows; 4 are needed"),
    "too few actions": (rollout(params={"horizon": 5}), "actions", "4 rows; 5 are needed"),
    "actions for the context alone": (rollout(params={"context_frames": 5}), "actions", "4 rows; 5 are needed"),
    "a tensor of no task": (rollout(pose=STATE), "inputs.3.name", "known: frames, pixel_values, actions"),
    "a tensor of another task": (rollout(noise=STATE), "inputs.3.name", "no tensor 'noise'"),
    # limits
    "horizon 0": (rollout(params={"horizon": 0}), "params.horizon", ">= 1"),
    "half a horizon": (rollout(params={"horizon": 1.5}), "params.horizon", "int"),
    "no context": (rollout(params={"context_frames": 0}), "params.context_frames", ">= 1"),
    "more context than frames": (rollout(params={"context_frames": 6}), "params.context_frames", "5 frames"),
    "beyond the positions": (
        rollout(actions=np.zeros((POSITIONS + 1, 7), np.float32)), "params.horizon", "a horizon of 32 fits"
    ),
    "context beyond the positions": (
        rollout(actions=np.zeros((36, 7), np.float32), params={"context_frames": 5}), "params.horizon", "of 28 fits"
    ),
    "a goal beyond the frames": (rollout(params={"goal_frame": 5}), "params.goal_frame", "0 to 4"),
    "two goals": (rollout(goal=np.zeros((16, 64), np.float32), params={"goal_frame": 4}), "params.goal_frame", "one"),
    "a goal of another shape": (rollout(goal=np.zeros((64, 16), np.float32)), "goal", r"\[16, 64\]"),
    "an unknown cost": (rollout(params={"cost": "l3"}), "params.cost", "l1, l2, cosine"),
    "an unknown parameter": (rollout(params={"samples": 2}), "params.samples", "known: context_frames, horizon"),
    # teacher forcing
    "teaching without states": (taught(states=None), "states", r"missing; give \[4,7\]"),
    "teaching without actions": (taught(actions=None), "actions", "missing"),
    "teaching one frame": (taught(frames=FRAMES[:1]), "frames", "at least 2"),
    "teaching too few actions": (taught(actions=ACTIONS[:3]), "actions", "3 rows for 5 frames; give 4"),
    "teaching too many states": (taught(states=np.zeros((5, 7), np.float32)), "states", "5 rows for 5 frames"),
    "teaching beyond the positions": (
        taught(frames=np.zeros((POSITIONS + 2, 8, 8, 3), np.uint8)), "frames", "at most 33"
    ),
    "teaching in a session": (taught(session="a"), "session", "keeps no sessions"),
    # plans
    "a plan without a goal": (plan(frames=FRAMES[:1]), "frames", "the goal"),
    "a plan without a state": (plan(state=None), "state", "neither"),
    "a plan with state and states": (plan(states=STATES[:1]), "state", "both"),
    "a plan from two states": (plan(state=np.zeros((2, 7), np.float32)), "state", "starts from one"),
    "a plan without actions between": (plan(params={"context_frames": 2}), "actions", r"\[1,7\]"),
    "a plan of a goal's wrong shape": (plan(goal=np.zeros((16, 63), np.float32)), "goal", r"\[16, 64\]"),
    "noise of another shape": (plan(noise=np.zeros((1, 2, 3, 4), np.float32)), "noise", r"\[1, 2, 4, 4\]"),
    "more best ones than samples": (plan(params={"topk": 5}), "params.topk", "4 samples"),
    "one sample": (plan(params={"samples": 1, "topk": 1}), "params.samples", ">= 2"),
    "a momentum above 1": (plan(params={"momentum_std": 1.5}), "params.momentum_std", "<= 1"),
    "a norm of 0": (plan(params={"max_norm": 0}), "params.max_norm", "> 0"),
    "a plan beyond the positions": (plan(params={"horizon": 33}), "params.horizon", "of 32 fits"),
    "closing after the plan": (plan(params={"close_gripper_at": 2}), "params.close_gripper_at", "0 to 1"),
    "more draws than are made": (
        plan(params={"samples": 60000, "iterations": 1000}), "params.samples", "at most 4000000"
    ),
    # the rest
    "a task of the other checkpoint": (("predict", {"frames": FRAMES}), "task", "encode, rollout, teacher_forced"),
    "text": (rollout(inputs=[{"type": "text", "text": "left"}]), "inputs.0", "takes no text part"),
    "distances without a goal": (rollout(outputs=["tensor:distances"]), "outputs", "no goal"),
    "an output it does not give": (rollout(outputs=["tensor:features"]), "outputs.0", "latents"),
    "more frames than are encoded": (
        ("encode", {"frames": np.zeros((1025, 1, 1, 3), np.uint8)}), "frames", "at most 1024"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_ACTIONS)
def test_wrong_actions_are_refused_by_name(arm: httpx.Client, case: str) -> None:
    (task, fields), param, message = WRONG_ACTIONS[case]
    status, named, told = refusal(arm, task, **fields)
    assert (status, named) == (400, param), told
    assert re.search(message, told), told


CLIP = np.zeros((4, 8, 8, 3), np.uint8)


def predict(**masks: Any) -> tuple[str, dict[str, Any]]:
    """A prediction with masks, floats of which are of 32 bits."""
    arrays = {name: np.asarray(mask) for name, mask in masks.items()}
    return "predict", {"frames": CLIP} | {n: m.astype("f") if m.dtype == "f8" else m for n, m in arrays.items()}


WRONG_CLIPS = {
    "an odd number of frames": (("encode", {"frames": CLIP[:3]}), "frames", "multiple of 2"),
    "more frames than are encoded": (("encode", {"frames": np.zeros((1026, 1, 1, 3), np.uint8)}), "frames", "1024"),
    "a strip of a frame": (("encode", {"frames": np.zeros((2, 2, 1000, 3), np.uint8)}), "frames", "at most 32 times"),
    "no pixels": (("encode", {"frames": CLIP[:, :0]}), "frames", "none of them 0"),
    "pixels of another size": (("encode", {"pixel_values": PIXELS[..., :32]}), "pixel_values", r"\[B,T,3,64,64\]"),
    "pixels of bytes": (("encode", {"pixel_values": PIXELS.astype(np.uint8)}), "pixel_values", "floats"),
    "no clips": (("encode", {"pixel_values": PIXELS[None][:0]}), "pixel_values", "no clip"),
    "nothing": (("encode", {"inputs": [tensor("frames", CLIP[:0])]}), "frames", "none of them 0"),
    "parameters of encode": (("encode", {"frames": CLIP, "params": {"steps": 1}}), "params.steps", "known: none"),
    "a mask beyond the clip": (predict(target_mask=[[31, 32]]), "target_mask", "contains 32; .* 0 to 31"),
    "a negative mask": (predict(context_mask=[-1]), "context_mask", "contains -1"),
    "a mask of floats": (predict(context_mask=[[0.0]]), "context_mask", "float32 .* integers"),
    "a mask of truths": (predict(target_mask=[[True] * 32]), "target_mask", "bool"),
    "an empty mask": (predict(target_mask=np.zeros((1, 0), np.int64)), "target_mask", "at least 1"),
    "a mask of two clips": (predict(target_mask=[[0], [1]]), "target_mask", "2 rows for 1 clips"),
    "a mask longer than the clip": (predict(target_mask=[[0] * 33]), "target_mask", "33 .* 32 patches"),
    "no steps": (("anticipate", {"frames": CLIP, "params": {"steps": 0}}), "params.steps", ">= 1"),
    "a negative offset": (("anticipate", {"frames": CLIP, "params": {"offset": -1}}), "params.offset", ">= 0"),
    "a task of the other checkpoint": (("rollout", {"frames": CLIP}), "task", "encode, predict, anticipate"),
    "a session": (("encode", {"frames": CLIP, "session": "a"}), "session", "keeps no sessions"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_CLIPS)
def test_wrong_clips_are_refused_by_name(clip: httpx.Client, case: str) -> None:
    (task, fields), param, message = WRONG_CLIPS[case]
    status, named, told = refusal(clip, task, **fields)
    assert (status, named) == (400, param), told
    assert re.search(message, told), told


def test_after_all_that_the_servers_are_well(
    video: Served, action: Served, clip: httpx.Client, arm: httpx.Client
) -> None:
    assert_well(video, clip)
    assert_well(action, arm)
    assert ask(clip, "encode", frames=CLIP)["features"].shape == (1, 32, 64)
    assert ask(arm, *rollout()[:1], **ROLLOUT)["latents"].shape == (1, 4, 16, 64)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_a_file_with_wrong_numbers_is_refused_offline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: float
) -> None:
    arrays = {"frames": FRAMES, "actions": changed(ACTIONS, wrong), "state": STATE}
    safetensors.numpy.save_file(arrays, tmp_path / "inputs.safetensors")
    flags = [flag for name in arrays for flag in ("--tensor", f"{name}={tmp_path / 'inputs.safetensors'}")]
    with pytest.raises(SystemExit) as caught:
        main(["run", "--plugin", "vjepa2", "--model", "tiny-ac", "--task", "rollout", *flags, "--out", str(tmp_path)])
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert "finite" in told and not (tmp_path / "result.json").exists()


# ---- sessions -------------------------------------------------------------------------------------------


@pytest.fixture
def clean_sessions(action: Served, arm: httpx.Client) -> Iterator[None]:
    yield
    for name in ("arm", "other", "first", "second", "third"):
        assert arm.delete(f"/v1/sessions/{name}").status_code in (200, 404, 410)
    assert_well(action, arm)


@pytest.mark.usefixtures("clean_sessions")
def test_a_session_gives_in_steps_what_one_rollout_gives(arm: httpx.Client) -> None:
    whole = ask(arm, "rollout", **ROLLOUT)
    first = arm.post("/v1/generate", json=body("rollout", session="arm", **(ROLLOUT | {"actions": ACTIONS[:1]})))
    assert first.json()["session"] == "arm"
    for step in range(1, 4):
        found = ask(arm, "rollout", session="arm", actions=ACTIONS[step : step + 1])
        np.testing.assert_allclose(found["latents"][:, 0], whole["latents"][:, step], atol=1e-5)
        np.testing.assert_allclose(found["states"], whole["states"][:, step : step + 2], atol=1e-6)
    assert arm.delete("/v1/sessions/arm").json() == {"session": "arm", "deleted": True}
    assert refusal(arm, "rollout", session="arm", actions=ACTIONS)[:2] == (404, "session")


@pytest.mark.usefixtures("clean_sessions")
def test_an_open_session_refuses_what_would_open_it(arm: httpx.Client) -> None:
    ask(arm, "rollout", session="arm", **ROLLOUT)
    for more, param in (
        ({"frames": FRAMES}, "frames"),
        ({"pixel_values": PIXELS}, "pixel_values"),
        ({"state": STATE}, "state"),
        ({"params": {"context_frames": 2}}, "params.context_frames"),
        ({"params": {"goal_frame": 0}}, "params.goal_frame"),
    ):
        status, named, told = refusal(arm, "rollout", session="arm", actions=ACTIONS, **more)
        assert (status, named) == (409, param) and "is open" in told, told
    rows = np.stack([ACTIONS] * 2)
    assert refusal(arm, "rollout", session="arm", actions=rows)[:2] == (400, "actions")
    assert refusal(arm, "rollout", session="other", **(ROLLOUT | {"actions": rows}))[:2] == (400, "actions")
    status, named, told = refusal(arm, "rollout", session="arm", actions=np.zeros((29, 7), np.float32))
    assert (status, named) == (400, "params.horizon") and "4 are spent; a horizon of 28 fits" in told
    assert ask(arm, "rollout", session="arm", actions=ACTIONS)["latents"].shape == (1, 4, 16, 64)  # none has closed it


@pytest.mark.usefixtures("clean_sessions")
def test_a_busy_session_is_409(action: Served, arm: httpx.Client) -> None:
    ask(arm, "rollout", session="arm", **ROLLOUT)
    gate = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        held = pool.submit(action.on_worker, lambda: gate.wait(20))
        try:
            running = pool.submit(ask, arm, "rollout", session="arm", actions=ACTIONS)
            wait_until(lambda: action.engine.num_active == 1)
            status, param, told = refusal(arm, "rollout", session="arm", actions=ACTIONS)
            assert (status, param) == (409, "session") and "busy" in told
            assert arm.delete("/v1/sessions/arm").status_code == 409
        finally:
            gate.set()
        assert held.result() and running.result()["latents"].shape == (1, 4, 16, 64)


@pytest.mark.usefixtures("clean_sessions")
def test_unknown_sessions_are_404_and_expired_ones_410(
    action: Served, arm: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal(arm, "rollout", session="never", actions=ACTIONS)[:2] == (404, "session")
    assert arm.delete("/v1/sessions/never").status_code == 404
    for name in ("first", "second", "third"):  # the third takes the first one's place
        ask(arm, "rollout", session=name, **ROLLOUT)
    assert refusal(arm, "rollout", session="first", actions=ACTIONS)[:2] == (410, "session")
    monkeypatch.setattr(action.engine.state._sessions, "ttl_s", 0.05)
    time.sleep(0.3)
    for name in ("second", "third"):
        status, param, told = refusal(arm, "rollout", session=name, actions=ACTIONS)
        assert (status, param) == (410, "session") and "expired" in told
    assert arm.delete("/v1/sessions/second").status_code == 410
    monkeypatch.undo()
    assert ask(arm, "rollout", session="second", **ROLLOUT)["states"].shape == (1, 5, 7)  # a name may be used anew


# ---- forms of an answer ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "fields", "names"),
    [
        (*rollout(params={"goal_frame": 4}), {"latents", "states", "distances"}),
        (*rollout(actions=np.stack([ACTIONS, -ACTIONS])), {"latents", "states"}),
        (*taught(), {"latents"}),
        (*plan(), {"action", "costs"}),
        ("encode", {"frames": FRAMES}, {"features"}),
    ],
    ids=["rollout", "rollouts", "teacher_forced", "plan", "encode"],
)
def test_json_stream_and_safetensors_agree(
    arm: httpx.Client, task: str, fields: dict[str, Any], names: set[str]
) -> None:
    asked = body(task, **fields)
    packed = ask(arm, task, **fields)
    assert set(packed) == names
    plain = arm.post("/v1/generate", json=asked).json()
    for entry in plain["outputs"]:
        assert entry["type"] == "tensor" and entry["dtype"] == "float32"
        np.testing.assert_array_equal(read(entry), packed[entry["name"]])
    lines = [json.loads(line) for line in arm.post("/v1/generate", json=asked | {"stream": True}).text.splitlines()]
    assert lines[-1]["event"] == "done" and lines[-1]["finish_reason"] == plain["finish_reason"]
    whole = {name: np.full_like(value, np.nan) for name, value in packed.items()}
    rows: dict[str, int] = {}
    for event in lines:
        if event["event"] == "tensor":
            name, value = event["name"], read(event)
            start = event.get("start") or [rows.get(name, 0), *[0] * (value.ndim - 1)]
            rows[name] = start[0] + len(value)
            whole[name][tuple(slice(i, i + n) for i, n in zip(start, value.shape, strict=True))] = value
    for name, value in whole.items():
        np.testing.assert_array_equal(value, packed[name])


def read(entry: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(entry["data"]), entry["dtype"]).reshape(entry["shape"])
