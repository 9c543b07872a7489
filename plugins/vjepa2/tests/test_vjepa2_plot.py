"""Pictures: their colours, that they can be drawn of every result, and what `--plot` says where they cannot."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from scenes import moving_square

from mstar.cli import main
from mstar.client import tensor
from mstar.plugin.spec import narrowed
from mstar.server.convert import convert
from mstar.server.native import GenerateRequest, read_request
from mstar.types import Request, TensorPart
from mstar_plugin_vjepa2 import config, tiny
from mstar_plugin_vjepa2.plugin import SPEC
from mstar_plugin_vjepa2.processing import plot

FRAMES = torch.from_numpy(moving_square(12, height=40, width=70))


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("tiny")
    return SimpleNamespace(video=config.load(tiny.make(folder), {}), action=config.load(tiny.make_ac(folder), {}))


def request(of: Any, task: str, **more: Any) -> Request:
    """A request with these tensors and `params`, as a processor and a plot see it."""
    params = more.pop("params", {})
    inputs = [tensor(name, value) for name, value in ({"frames": FRAMES} | more).items()]
    wire = convert({"task": task, "inputs": inputs, "params": params}, GenerateRequest)
    return read_request(wire, spec=narrowed(SPEC, of), model_names=("tiny",), request_id="1", seed=1)


def draw(number: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def sizes(paths: list[Path]) -> dict[str, tuple[int, ...]]:
    return {path.name: Image.open(path).size for path in paths}


# ---- colours ----------------------------------------------------------------------------------------------


def test_one_basis_gives_equal_tokens_equal_colours() -> None:
    a, b = draw(0, 6, 16, 64), draw(1, 3, 16, 64)
    colours = plot.Colours(a, b)
    seen = colours(a)
    assert seen.shape == (6, 16, 3) and seen.min() == 0 and seen.max() == 1
    torch.testing.assert_close(colours(a[2, 3]), seen[2, 3])
    torch.testing.assert_close(colours(5 * a + 1), seen)  # tokens are normalised first
    torch.testing.assert_close(plot.Colours(a, b)(b), colours(b))


def test_main_components_become_colours_whatever_outliers_there_are() -> None:
    basis = torch.linalg.qr(draw(2, 64, 3)).Q
    tokens = draw(3, 500, 3) * torch.tensor([9.0, 6.0, 4.0]) @ basis.T + 0.01 * draw(4, 500, 64)
    colours = plot.Colours(tokens)(tokens)
    assert (colours.std(0) > 0.15).all()
    tokens[0] = 1000 * draw(5, 64)
    assert (plot.Colours(tokens)(tokens).std(0) > 0.15).all()
    one = plot.Colours(torch.ones(1, 1, 64))
    assert torch.isfinite(one(torch.ones(1, 64))).all()


# ---- every task ---------------------------------------------------------------------------------------------


def test_clips_are_drawn(configs: SimpleNamespace, tmp_path: Path) -> None:
    of = configs.video
    encoded = plot.draw(request(of, "encode"), {"features": draw(0, 1, 96, 64)}, of, tmp_path)
    assert list(sizes(encoded)) == ["encode.png"]
    masks = {"context_mask": torch.arange(40)[None], "target_mask": torch.arange(50, 96)[None]}
    tensors = {"context": draw(1, 1, 40, 64), "target": draw(2, 1, 46, 64), "predicted": draw(3, 1, 46, 64)}
    predicted = sizes(plot.draw(request(of, "predict", **masks), tensors, of, tmp_path))
    assert predicted["predict.png"][1] > 2 * sizes(encoded)["encode.png"][1]  # five rows, not two
    asked = request(of, "anticipate", params={"steps": 20, "offset": 0})
    plot.draw(asked, {"predicted": draw(4, 1, 320, 64)}, of, tmp_path)
    assert plot.draw(request(of, "predict"), {"context": draw(1, 1, 96, 64)}, of, tmp_path) == []


def test_several_clips_are_several_pictures(configs: SimpleNamespace, tmp_path: Path) -> None:
    of = configs.video
    asked = request(of, "encode", frames=torch.zeros(1, 8, 8, 3, dtype=torch.uint8))  # an image
    assert list(sizes(plot.draw(asked, {"features": draw(0, 1, 16, 64)}, of, tmp_path))) == ["encode.png"]
    asked.parts = (TensorPart("pixel_values", draw(1, 9, 2, 3, 64, 64)),)
    found = plot.draw(asked, {"features": draw(0, 9, 16, 64)}, of, tmp_path)
    assert [path.name for path in found] == [f"encode-{n}.png" for n in range(plot.MOST_ROWS)]


@pytest.mark.parametrize(("rows", "goal"), [(1, "none"), (2, "frame"), (20, "latents")])
def test_rollouts_are_drawn(configs: SimpleNamespace, tmp_path: Path, rows: int, goal: str) -> None:
    of, tensors = configs.action, {"latents": draw(0, rows, 10, 16, 64), "states": draw(1, rows, 12, 7)}
    more: dict[str, Any] = {"actions": draw(2, 11, 7), "state": draw(3, 7), "params": {"context_frames": 2}}
    if goal != "none":
        tensors["distances"] = draw(4, rows, 10)
        more |= {"goal": draw(5, 16, 64)} if goal == "latents" else {}
        more["params"] |= {"goal_frame": 11} if goal == "frame" else {}
    found = sizes(plot.draw(request(of, "rollout", **more), tensors, of, tmp_path))
    assert found["rollout.png"][1] > 300 + 140 * min(rows, plot.MOST_ROWS)
    assert plot.draw(request(of, "rollout", **more), {"states": tensors["states"]}, of, tmp_path) == []


def test_teaching_planning_and_encoding_are_drawn(configs: SimpleNamespace, tmp_path: Path) -> None:
    of = configs.action
    moves = {"actions": draw(0, 11, 7), "states": draw(1, 11, 7)}
    assert plot.draw(request(of, "teacher_forced", **moves), {"latents": draw(2, 1, 11, 16, 64)}, of, tmp_path)
    assert plot.draw(request(of, "encode"), {"features": draw(3, 12, 16, 64)}, of, tmp_path)
    for horizon, iterations, goal in ((2, 10, {}), (1, 1, {"goal": draw(4, 16, 64)})):
        params = {"horizon": horizon, "iterations": iterations, "samples": 40, "topk": 5}
        asked = request(of, "plan", state=draw(5, 7), params=params, **goal)
        tensors = {"action": 0.1 * draw(6, horizon, 7), "costs": draw(7, iterations, 40).abs()}
        assert [path.name for path in plot.draw(asked, tensors, of, tmp_path)] == ["plan.png"]


def test_what_the_model_sees_is_shown(configs: SimpleNamespace) -> None:
    views = plot._views(request(configs.action, "encode"), configs.action)
    assert views.shape == (12, 64, 64, 3)
    square = FRAMES[:, :, 15:55].float() / 255  # the centre, 40 pixels wide
    assert (views.mean((1, 2)) - square.mean((1, 2))).abs().max() < 0.01


# ---- what is said where there is nothing to draw with -------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["run", *words, "--plot"])
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_plots_need_matplotlib_and_a_plugin_that_draws(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told = refused(capsys, "--plugin", "echo", "--text", "hi", "--out", str(tmp_path / "out"))
    assert "plugin 'echo' draws no pictures" in told and "leave --plot out" in told
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "matplotlib" else find(name))
    (video := tmp_path / "x.mp4").touch()
    told = refused(capsys, "--plugin", "vjepa2", "--video", str(video), "--out", str(tmp_path / "out"))
    assert "pip install 'mstar-core[plot]'" in told and not (tmp_path / "out").exists()


def test_flags_of_inputs_need_what_they_are_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "there is none" in refused(capsys, "--plugin", "vjepa2", "--num-frames", "4", "--image", "x.png")
    assert "expected NAME=FILE" in refused(capsys, "--plugin", "vjepa2", "--tensor", "actions")
    told = refused(capsys, "--plugin", "vjepa2", "--model", "tiny-ac", "--tensor", f"actions={tmp_path}/no.safetensors")
    assert "there is no file" in told
