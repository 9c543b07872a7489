"""The networks and the arithmetic around them, against what their authors' code gave, and against transformers."""

from __future__ import annotations

import json
import math
import shutil
import time
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.spatial.transform import Rotation
from torch import Tensor, nn
from torch.nn import functional

from mstar.errors import ConfigError
from mstar.plugin.spec import Checkpoint
from mstar_plugin_vjepa2 import config as configs
from mstar_plugin_vjepa2 import tiny, weights
from mstar_plugin_vjepa2.config import VJEPA2ACConfig, VJEPA2Config
from mstar_plugin_vjepa2.modeling import cem, pose
from mstar_plugin_vjepa2.modeling.ac import ACPredictor, full_sequence
from mstar_plugin_vjepa2.modeling.blocks import full_attention, normalized
from mstar_plugin_vjepa2.modeling.encoder import Encoder
from mstar_plugin_vjepa2.modeling.predictor import Predictor
from mstar_plugin_vjepa2.modeling.preprocess import preprocess

GOLDEN = Path(__file__).parents[3] / "tests" / "golden"
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("no_grad")
near = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)
near_ac = partial(torch.testing.assert_close, atol=2e-4, rtol=0)
near_state = partial(torch.testing.assert_close, atol=1e-5, rtol=0)


@pytest.fixture
def no_grad() -> Any:
    with torch.no_grad():
        yield


def opened(folder: Path) -> Checkpoint:
    return Checkpoint(model=str(folder), folder=folder, config=configs.load(folder, {}))


def networks(folder: Path) -> tuple[Encoder, Any]:
    """Encoder and predictor, filled."""
    checkpoint = opened(folder)
    with torch.device("meta"):
        encoder = Encoder(checkpoint.config)
        predictor = (Predictor if checkpoint.config.kind == "hf" else ACPredictor)(checkpoint.config)
    weights.load_encoder(encoder, checkpoint, torch.float32, CPU)
    weights.load_predictor(predictor, checkpoint, torch.float32, CPU)
    return encoder, predictor


@cache
def golden(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor], Encoder, Any]:
    folder = GOLDEN / name
    tensors = load_file(folder / "golden.safetensors"), load_file(folder / "inputs.safetensors")
    return *tensors, *networks(folder / "checkpoint")


class Kept:
    """The keys and values of earlier frames, by layer: what the engine's pages do."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (tensor.unflatten(0, (self.rows, -1)) for tensor in (q, k, v))
        if layer in self.layers:
            k, v = (torch.cat(pair, dim=1) for pair in zip(self.layers[layer], (k, v), strict=True))
        self.layers[layer] = k, v
        return full_attention(q, k, v).flatten(0, 1)


def frame(number: int, rows: int) -> Tensor:
    return torch.full((rows,), number)


def rollout(
    predictor: ACPredictor, context: Tensor, actions: Tensor, states: Tensor, *, given: bool = False
) -> tuple[Tensor, Tensor]:
    """context (B, C, P, D), actions (B, C - 1 + H, 7) -> latents (B, H, P, D) and states (B, C + H, 7)."""
    kept, latents, walked = Kept(len(context)), [], [states[:, 0]]
    for step in range(actions.shape[1]):
        z = context[:, step] if step < context.shape[1] else latents[-1]
        state = states[:, step] if given else walked[-1]
        latents.append(predictor(z, actions[:, step], state, frame(step, len(z)), kept))
        walked.append(pose.integrate(state, actions[:, step]))
    return torch.stack(latents[context.shape[1] - 1 :], dim=1), torch.stack(walked, dim=1)


# ---- V-JEPA 2 -------------------------------------------------------------------------------------------


def test_encoder_gives_the_published_tokens() -> None:
    expected, inputs, encoder, _ = golden("vjepa2")
    pixels = inputs["pixel_values_videos"]
    near(encoder(pixels), expected["encoder.last_hidden_state"])
    for index, hidden in enumerate(encoder.layers(pixels[:1])):
        near(hidden, expected[f"encoder.hidden_states.{index}"])


def test_encoder_repeats_a_single_image() -> None:
    expected, inputs, encoder, _ = golden("vjepa2")
    near(encoder(inputs["pixel_values_videos"][:1, :1]), expected["image.last_hidden_state"])


def test_predictor_gives_the_published_tokens() -> None:
    expected, inputs, encoder, predictor = golden("vjepa2")
    features = encoder(inputs["pixel_values_videos"])
    every = torch.arange(features.shape[1]).expand(2, -1)
    near(predictor(features, every, every), expected["full.predictor_last_hidden_state"])
    context, target = inputs["context_mask"], inputs["target_mask"]
    near(predictor(features, context, target), expected["masked.predictor_last_hidden_state"])
    for mask, name in ((context, "masked"), (target, "target")):
        gathered = features.gather(1, mask[..., None].expand(-1, -1, features.shape[-1]))
        near(gathered, expected[f"masked.{name}_hidden_state"])


def test_predictor_anticipates_tokens_after_the_clip() -> None:
    expected, inputs, encoder, predictor = golden("vjepa2")
    features = encoder(inputs["pixel_values_videos"][:1])
    context, target = inputs["anticipate_context"], inputs["anticipate_target"]
    near(predictor(features, context, target), expected["anticipate.predictor_last_hidden_state"])
    predicted = []
    for _ in range(3):
        predicted.append(predictor(features, context, target))
        features = torch.cat((features[:, target.shape[1] :], predicted[-1]), dim=1)
    near(torch.cat(predicted, dim=1), expected["anticipate_rollout3.predicted"])


SIZES = {
    "small": {
        "crop_size": 48, "patch_size": 8, "tubelet_size": 3, "frames_per_clip": 9, "hidden_size": 60,
        "num_attention_heads": 3, "num_hidden_layers": 3, "mlp_ratio": 3.5, "layer_norm_eps": 1e-5, "qkv_bias": False,
        "hidden_act": "gelu_pytorch_tanh", "pred_hidden_size": 24, "pred_num_attention_heads": 2,
        "pred_num_hidden_layers": 1, "pred_mlp_ratio": 2.5, "pred_num_mask_tokens": 1,
    },
    "larger": {
        "crop_size": 112, "patch_size": 16, "tubelet_size": 2, "frames_per_clip": 4, "hidden_size": 256,
        "num_attention_heads": 4, "num_hidden_layers": 2, "mlp_ratio": 4, "pred_hidden_size": 132,
        "pred_num_attention_heads": 6, "pred_num_hidden_layers": 3, "pred_num_mask_tokens": 3,
    },
}  # fmt: skip


@pytest.fixture(params=SIZES)
def published(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    """A model of transformers with every parameter random, and its folder (of several files for the larger)."""
    from transformers import VJEPA2Config as PublishedConfig
    from transformers import VJEPA2Model

    torch.manual_seed(5)
    model = VJEPA2Model(PublishedConfig(**SIZES[request.param])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path, max_shard_size="1MB" if request.param == "larger" else "1GB")
    return model, tmp_path


def test_encoder_and_predictor_agree_with_transformers(published: tuple[Any, Path]) -> None:
    model, folder = published
    encoder, predictor = networks(folder)
    side, frames = model.config.crop_size, model.config.frames_per_clip
    pixels = torch.randn(2, frames, 3, side, side)
    num_tokens = model.config.frames_per_clip // model.config.tubelet_size * configs.load(folder, {}).patches
    order = torch.stack([torch.randperm(num_tokens) for _ in range(2)])
    context, target = order[:, : num_tokens // 2], order[:, num_tokens // 2 : -3]
    theirs = model(pixels, context_mask=[context], target_mask=[target])
    features = encoder(pixels)
    near(features, theirs.last_hidden_state)
    near(predictor(features, context, target), theirs.predictor_output.last_hidden_state)
    beyond = (num_tokens + torch.arange(5)).expand(2, -1)
    published_beyond = model.predictor(features, [context], [beyond]).last_hidden_state
    near(predictor(features, context, beyond), published_beyond)


def test_positions_stay_on_the_trained_grid_for_frames_of_another_size(published: tuple[Any, Path]) -> None:
    model, folder = published
    side, patch = model.config.crop_size, model.config.patch_size
    pixels = torch.randn(1, model.config.tubelet_size + 1, 3, side + patch + 1, side - patch)
    near(networks(folder)[0](pixels), model(pixels, skip_predictor=True).last_hidden_state)


# ---- V-JEPA 2-AC ----------------------------------------------------------------------------------------


def test_frames_are_preprocessed_as_published() -> None:
    expected, inputs, _, _ = golden("vjepa2_ac")
    clip = preprocess(inputs["frames_uint8"], configs.load(GOLDEN / "vjepa2_ac/checkpoint", {}).preprocess)
    torch.testing.assert_close(clip, expected["clip"], atol=1e-5, rtol=0)


def test_frames_are_encoded_alone() -> None:
    expected, _, encoder, _ = golden("vjepa2_ac")
    clip = expected["clip"]
    near_ac(encoder(clip[:, None].repeat(1, 2, 1, 1, 1)), expected["encode.raw"])
    near_ac(encoder.encode_frames(clip), expected["encode.normalized"])
    video = encoder(clip[None, : len(clip) // 2 * 2])[0]
    near_ac(video, expected["encode.video_tubelets"])


def start(rows: int = 2, context: int = 1) -> Tensor:
    return golden("vjepa2_ac")[0]["encode.normalized"][:context].expand(rows, -1, -1, -1)


def test_one_step_of_the_predictor() -> None:
    expected, inputs, _, predictor = golden("vjepa2_ac")
    arguments = start()[:, 0], inputs["actions"][:, 0], inputs["state0"][:, 0], frame(0, 2)
    near_ac(predictor.predict(*arguments, Kept(2)), expected["one_step.raw"])
    near_ac(predictor(*arguments, Kept(2)), expected["one_step.normalized"])
    near_state(pose.integrate(arguments[2], arguments[1]), expected["one_step.next_state"][:, 0])


@pytest.mark.parametrize("horizon", [4, 8])
def test_rollouts_with_integrated_states(horizon: int) -> None:
    expected, inputs, _, predictor = golden("vjepa2_ac")
    latents, states = rollout(predictor, start(), inputs["actions"][:, :horizon], inputs["state0"])
    near_ac(latents, expected[f"rollout_H{horizon}.latents"])
    near_state(states, expected[f"rollout_H{horizon}.states"])


def test_rollouts_with_given_states_and_with_a_longer_context() -> None:
    expected, inputs, _, predictor = golden("vjepa2_ac")
    actions, states = inputs["actions"], inputs["states_given"]
    latents, _ = rollout(predictor, start(), actions[:, :4], states, given=True)
    near_ac(latents, expected["rollout_H4_given_states.latents"])
    latents, _ = rollout(predictor, start(context=2), actions[:, :3], states, given=True)
    near_ac(latents, expected["rollout_ctx2.latents"])


def test_teacher_forcing() -> None:
    expected, inputs, _, predictor = golden("vjepa2_ac")
    context = expected["encode.normalized"][:-1][None]
    actions, states = (inputs[name][:1, : context.shape[1]] for name in ("actions", "states_given"))
    near_ac(full_sequence(predictor, context, actions, states)[0], expected["teacher_forced.normalized"])
    kept = Kept(1)
    for step in range(context.shape[1]):
        ahead = predictor(context[:, step], actions[:, step], states[:, step], frame(step, 1), kept)
        near_ac(ahead[0], expected["teacher_forced.normalized"][step])


def test_kept_keys_and_values_equal_the_whole_sequence_computed_anew() -> None:
    _, inputs, _, predictor = golden("vjepa2_ac")
    latents, states = rollout(predictor, start(), inputs["actions"], inputs["state0"])
    sequence = torch.cat((start(), latents[:, :-1]), dim=1)
    again = full_sequence(predictor, sequence, inputs["actions"], states[:, :-1])
    torch.testing.assert_close(again, latents, atol=2e-5, rtol=0)


def test_energies_of_a_grid_of_actions() -> None:
    expected, inputs, _, predictor = golden("vjepa2_ac")
    actions = expected["energy.actions"][:, 0]
    rows = len(actions)
    ahead = predictor(start(rows)[:, 0], actions, inputs["state0"][:1, 0].expand(rows, -1), frame(0, rows), Kept(rows))
    near_ac(cem.costs(ahead, expected["encode.normalized"][-1]), expected["energy.loss"])


# ---- planning -------------------------------------------------------------------------------------------


def plan(close_gripper_at: int | None = None, rows: int = 1) -> tuple[list[Tensor], Tensor]:
    """Costs of every iteration, (rows, samples) each, and the plan, for equal requests."""
    expected, inputs, _, predictor = golden("vjepa2_ac")
    settings = json.loads((GOLDEN / "vjepa2_ac/inputs.json").read_text())["cem"]
    momenta = {name: value for name, value in settings.items() if name.startswith("momentum")}
    noise = expected["cem.noise"]
    samples, max_norm = settings["samples"], settings["maxnorm"]
    mean, std = cem.begin(rows, settings["rollout"], max_norm=max_norm)
    seen = []
    for draw in noise:
        actions = cem.propose(mean, std, draw.expand(rows, -1, -1, -1), max_norm, close_gripper_at=close_gripper_at)
        states = inputs["state0"][:1].expand(rows * samples, -1, -1)
        latents, _ = rollout(predictor, start(rows * samples), actions.flatten(0, 1), states)
        seen.append(cem.costs(latents[:, -1], expected["encode.normalized"][-1]).unflatten(0, (rows, samples)))
        mean, std = cem.select(actions, seen[-1], mean, std, settings["topk"], **momenta)
    return seen, cem.finish(mean)


def test_planning_with_the_recorded_noise_gives_the_published_actions() -> None:
    expected = golden("vjepa2_ac")[0]
    seen, actions = plan()
    near_ac(torch.cat(seen), expected["cem.costs"])
    torch.testing.assert_close(actions[0], expected["cem.action"], atol=1e-3, rtol=0)
    _, actions = plan(close_gripper_at=1)
    torch.testing.assert_close(actions[0], expected["cem.action_close_gripper_at_1"], atol=1e-3, rtol=0)


def test_planning_for_several_requests_gives_each_what_it_gets_alone() -> None:
    torch.testing.assert_close(plan(rows=3)[1], plan()[1].expand(3, -1, -1), atol=1e-6, rtol=0)


def test_limits_and_momenta_may_differ_by_request() -> None:
    noise = torch.randn(2, 3, 8, 4)
    norms, momenta = torch.tensor([0.05, 0.2]), torch.tensor([0.1, 0.9])
    names = ("momentum_mean", "momentum_std", "momentum_mean_gripper", "momentum_std_gripper")
    fixed = {1: 0.01}

    def iterate(rows: slice) -> tuple[Tensor, Tensor]:
        mean, std = cem.begin(len(norms[rows]), 3, max_norm=norms[rows], fixed=fixed)
        actions = cem.propose(mean, std, noise[rows], norms[rows], fixed=fixed)
        assert (actions[..., :3].abs() <= norms[rows, None, None, None]).all()
        assert (actions[..., 1] == 0.01).all() and not actions[..., 3:6].any()
        assert actions[..., 6].abs().max() <= cem.GRIPPER_LIMIT
        return cem.select(actions, actions.sum((2, 3)), mean, std, 3, **dict.fromkeys(names, momenta[rows]))

    both = iterate(slice(0, 2))
    for row in range(2):
        for together, alone in zip(both, iterate(slice(row, row + 1)), strict=True):
            torch.testing.assert_close(together[row], alone[0], atol=1e-7, rtol=0)


def test_costs() -> None:
    z, goal = torch.randn(3, 2, 5, 8), torch.randn(5, 8)
    torch.testing.assert_close(cem.costs(z, goal), (z - goal).flatten(2).abs().mean(-1))
    torch.testing.assert_close(
        cem.costs(z, goal, "l2"), functional.mse_loss(z, goal.expand_as(z), reduction="none").mean((2, 3))
    )
    torch.testing.assert_close(cem.costs(goal, goal, "cosine"), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(cem.costs(-goal, goal, "cosine"), torch.tensor(2.0))


def test_small_gripper_movements_are_left_out_of_a_plan() -> None:
    mean = torch.tensor([[[0.01, 0.02, 0.03, 0.2499], [0, 0, 0, -0.25]]])
    assert cem.finish(mean)[0].tolist() == [pytest.approx([0.01, 0.02, 0.03, 0, 0, 0, 0]), [0, 0, 0, 0, 0, 0, -0.25]]


# ---- poses ----------------------------------------------------------------------------------------------


def scipy_pose(state: np.ndarray, action: np.ndarray) -> np.ndarray:
    before, change = (Rotation.from_euler("xyz", part[:, 3:6]).as_matrix() for part in (state, action))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gimbal lock
        angles = Rotation.from_matrix(change @ before).as_euler("xyz")
    gripper = np.clip(state[:, 6:] + action[:, 6:], 0, 1)
    return np.concatenate((state[:, :3] + action[:, :3], angles, gripper), axis=1)


def poses(count: int, *, scale: float = math.pi) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    states = (torch.rand(count, 7, generator=generator, dtype=torch.float64) * 2 - 1) * scale
    return states, (torch.rand(count, 7, generator=generator, dtype=torch.float64) * 2 - 1) * scale


def compare_with_scipy(states: Tensor, actions: Tensor) -> None:
    expected = torch.from_numpy(scipy_pose(states.numpy(), actions.numpy()))
    torch.testing.assert_close(pose.integrate(states, actions), expected, atol=1e-7, rtol=0)


def test_poses_are_integrated_as_scipy_does() -> None:
    compare_with_scipy(*poses(1000))
    compare_with_scipy(*poses(1000, scale=0.1))


@pytest.mark.parametrize("off", [0.0, 1e-9, 1e-8, 1e-6, 1e-5, 1e-3])
def test_poses_are_integrated_as_scipy_does_near_gimbal_lock(off: float) -> None:
    states, actions = poses(1000)
    states[:, 4] = (math.pi / 2 - off) * torch.where(torch.arange(1000) % 2 == 0, 1, -1)
    actions[:, 3:5] = 0  # about z: the middle angle stays
    expected = torch.from_numpy(scipy_pose(states.numpy(), actions.numpy()))
    result = pose.integrate(states, actions)
    # The matrix that scipy goes through costs digits where two angles nearly are one.
    torch.testing.assert_close(result[:, [0, 1, 2, 4, 6]], expected[:, [0, 1, 2, 4, 6]], atol=1e-7, rtol=0)
    turn = torch.remainder(result[:, [3, 5]] - expected[:, [3, 5]] + math.pi, 2 * math.pi) - math.pi
    assert turn.abs().max() < max(1e-7, min(1e-4, 1e-14 / off if off > 1e-7 else 0))


def test_the_action_between_two_poses() -> None:
    expected = golden("vjepa2_ac")[0]
    states = expected["rollout_H4.states"][:1]
    near_state(pose.action_between(states[:, 0], states[:, 1])[0], expected["poses_to_diff.action"])
    starts, ends = (poses(100, scale=1.2)[index] for index in range(2))
    ends[:, 6] = ends[:, 6].clamp(0, 1)
    near_state(pose.integrate(starts, pose.action_between(starts, ends)), ends)


def test_float32_poses_stay_float32() -> None:
    states, actions = poses(100, scale=0.5)
    result = pose.integrate(states.float(), actions.float())
    assert result.dtype == torch.float32
    near_state(result, torch.from_numpy(scipy_pose(states.float().numpy(), actions.float().numpy())).float())


# ---- preprocessing of V-JEPA 2 --------------------------------------------------------------------------


def test_bytes_are_resized_cropped_and_normalised() -> None:
    recipe = configs.load(GOLDEN / "vjepa2/checkpoint", {}).preprocess
    assert (recipe.size, recipe.short_side, recipe.antialias) == (64, 73, True)
    frames = torch.randint(0, 256, (2, 200, 300, 3), dtype=torch.uint8)
    resized = functional.interpolate(
        frames.permute(0, 3, 1, 2).float(), (73, 109), mode="bilinear", antialias=True, align_corners=False
    )
    expected = resized[..., 4:68, 22:86] / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in (recipe.mean, recipe.std))
    result = preprocess(frames, recipe)
    assert result.shape == (2, 3, 64, 64)
    torch.testing.assert_close(result * std + mean, expected, atol=1.01 / 255, rtol=0)  # rounded to bytes
    upright = preprocess(frames.transpose(1, 2), recipe).transpose(2, 3)
    torch.testing.assert_close(upright, result, atol=1.01 / 255 / min(recipe.std), rtol=0)


def test_frames_of_the_right_short_side_are_only_cropped() -> None:
    recipe = configs.load(GOLDEN / "vjepa2/checkpoint", {}).preprocess
    frames = torch.randint(0, 256, (1, 73, 90, 3), dtype=torch.uint8)
    mean, std = (torch.tensor(values) for values in (recipe.mean, recipe.std))
    expected = (frames[:, 4:68, 13:77] / 255 - mean) / std
    torch.testing.assert_close(preprocess(frames, recipe), expected.permute(0, 3, 1, 2), atol=1e-5, rtol=0)


# ---- tracing --------------------------------------------------------------------------------------------


class WithinFrame(nn.Module):
    """The predictor of a first frame, as one function of tensors."""

    def __init__(self, predictor: ACPredictor) -> None:
        super().__init__()
        self.predictor = predictor

    def forward(self, z: Tensor, action: Tensor, state: Tensor, number: Tensor) -> Tensor:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (tensor.unflatten(0, (z.shape[0], z.shape[1] + 2)) for tensor in (q, k, v))
            return full_attention(q, k, v).flatten(0, 1)

        return normalized(self.predictor.predict(z, action, state, number, attend))


class Poses(nn.Module):
    def forward(self, state: Tensor, action: Tensor) -> Tensor:
        return pose.integrate(state, action)


def traced_cases() -> dict[str, tuple[nn.Module, Callable[[int], tuple[Tensor, ...]]]]:
    _, _, encoder, predictor = golden("vjepa2")
    _, _, ac_encoder, ac_predictor = golden("vjepa2_ac")
    ids = torch.randperm(64)
    return {
        "encoder": (encoder, lambda rows: (torch.randn(rows, 4, 3, 64, 64),)),
        "ac_encoder": (ac_encoder, lambda rows: (torch.randn(rows, 2, 3, 64, 64),)),
        "predictor": (
            predictor,
            lambda rows: (torch.randn(rows, 64, 64), ids[:40].repeat(rows, 1), ids[40:].repeat(rows, 1)),
        ),
        "ac": (
            WithinFrame(ac_predictor),
            lambda rows: (
                torch.randn(rows, 16, 64), torch.randn(rows, 7), torch.randn(rows, 7), torch.randint(0, 32, (rows,)),
            ),
        ),
        "pose": (Poses(), lambda rows: (torch.randn(rows, 7), torch.randn(rows, 7))),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder", "ac_encoder", "predictor", "ac", "pose"])
def test_exported_and_compiled_networks_equal_eager_ones_for_any_batch(name: str) -> None:
    module, arguments = traced_cases()[name]
    rows = torch.export.Dim("rows", min=1, max=64)
    example = arguments(3)
    exported = torch.export.export(module, example, dynamic_shapes=tuple({0: rows} for _ in example)).module()
    compiled = torch.compile(module, backend="eager", dynamic=True, fullgraph=True)
    for count in range(1, 5):
        values = arguments(count)
        torch.testing.assert_close(exported(*values), module(*values), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(compiled(*values), module(*values), atol=1e-5, rtol=1e-5)


# ---- tiny checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [tiny.make, tiny.make_ac])
def test_tiny_checkpoints_are_written_at_once_and_always_the_same(make: Callable[[Path], Path], tmp_path: Path) -> None:
    started = time.process_time()
    folder = make(tmp_path / "one")
    assert time.process_time() - started < 2
    again = make(tmp_path / "two")
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in again.iterdir())
    first, second = (networks(place) for place in (folder, again))
    for one, two in zip(first, second, strict=True):
        for name, parameter in one.state_dict().items():
            assert torch.equal(parameter, two.state_dict()[name])
            assert parameter.float().std() > 0.01, name


def test_tiny_checkpoints_run(tmp_path: Path) -> None:
    encoder, predictor = networks(tiny.make(tmp_path))
    features = encoder(torch.randn(1, 4, 3, 64, 64))
    every = torch.arange(features.shape[1])[None]
    assert predictor(features, every[:, :8], every[:, 8:]).std() > 0.1
    encoder, ahead = networks(tiny.make_ac(tmp_path))
    latents = encoder.encode_frames(torch.randn(2, 3, 64, 64))
    zero = torch.zeros(2, 7)
    moved = ahead(latents, zero + 0.1, zero, frame(0, 2), Kept(2))
    assert not torch.allclose(moved, ahead(latents, zero, zero, frame(0, 2), Kept(2)), atol=1e-3)


def test_tiny_checkpoints_load_in_transformers(tmp_path: Path) -> None:
    from transformers import VJEPA2Model

    folder = tiny.make(tmp_path)
    pixels = torch.randn(1, 4, 3, 64, 64)
    near(
        networks(folder)[0](pixels), VJEPA2Model.from_pretrained(folder)(pixels, skip_predictor=True).last_hidden_state
    )


# ---- configurations -------------------------------------------------------------------------------------


def test_both_kinds_have_the_same_surface() -> None:
    plain, ac = (configs.load(GOLDEN / name / "checkpoint", {}) for name in ("vjepa2", "vjepa2_ac"))
    for config in (plain, ac):
        shape = config.image_size, config.patch_size, config.tubelet_size, config.grid, config.patches, config.dim
        assert shape == (64, 16, 2, 4, 16, 64)
    assert isinstance(plain, VJEPA2Config) and plain.kind == "hf" and plain.frames_per_clip == 8
    assert isinstance(ac, VJEPA2ACConfig) and ac.kind == "ac" and (ac.action_dim, ac.max_frames) == (7, 32)
    assert (ac.predictor.dim, ac.predictor.depth, ac.predictor.heads, ac.predictor.head_dim) == (48, 2, 3, 16)


def test_without_a_configuration_the_release_s_architecture_is_taken(tmp_path: Path) -> None:
    (tmp_path / configs.AC_FILE).touch()
    config = configs.load(tmp_path, {})
    assert isinstance(config, VJEPA2ACConfig)
    blocks, ahead = config.encoder.blocks, config.predictor
    assert (blocks.dim, blocks.depth, blocks.heads, blocks.mlp_dim, blocks.eps) == (1408, 40, 22, 6144, 1e-6)
    assert (ahead.dim, ahead.depth, ahead.heads, ahead.blocks.mlp_dim) == (1024, 24, 16, 4096)
    assert (config.image_size, config.patches, config.max_frames, config.action_dim) == (256, 256, 32, 7)


def write(folder: Path, source: str, change: dict[str, Any]) -> Path:
    """A copy of a golden checkpoint whose config.json has other values, by dotted name; None removes."""
    shutil.copytree(GOLDEN / source / "checkpoint", folder)
    for file in folder.iterdir():
        file.chmod(0o644)
    content = json.loads((folder / "config.json").read_text())
    for name, value in change.items():
        *parents, last = name.split(".")
        place = content
        for parent in parents:
            place = place[parent]
        place.pop(last, None)
        if value is not None:
            place[last] = value
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("source", "change", "words"),
    [
        ("vjepa2", {"model_type": "vit"}, ["model_type is 'vit'", "vjepa2_ac", "pass a checkpoint"]),
        ("vjepa2", {"model_type": None}, ["lacks model_type"]),
        ("vjepa2", {"hidden_act": "mish"}, ["hidden_act is 'mish'", "gelu_pytorch_tanh"]),
        ("vjepa2", {"num_attention_heads": 5}, ["hidden_size is 64", "multiple of num_attention_heads (5)"]),
        ("vjepa2", {"pred_num_attention_heads": 12}, ["pred_num_attention_heads is 12", "need 6"]),
        ("vjepa2", {"patch_size": [16, 16]}, ["patch_size is [16, 16]", "whole number"]),
        ("vjepa2", {"patch_size": 65}, ["crop_size is 64", "smaller than patch_size (65)"]),
        ("vjepa2", {"in_chans": 1}, ["in_chans is 1"]),
        ("vjepa2", {"mlp_ratio": -1}, ["mlp_ratio is -1", "above 0"]),
        ("vjepa2", {"qkv_bias": "yes"}, ["qkv_bias is 'yes'", "true or false"]),
        ("vjepa2", {"crop_size": 80}, ["video_preprocessor_config.json", "crop_size", "the model's crop_size is 80"]),
        ("vjepa2_ac", {"predictor.use_extrinsics": True}, ["predictor.use_extrinsics is True", "only false"]),
        ("vjepa2_ac", {"predictor.action_embed_dim": 8}, ["predictor.action_embed_dim is 8", "only 7"]),
        ("vjepa2_ac", {"predictor.is_frame_causal": False}, ["predictor.is_frame_causal is False", "only true"]),
        ("vjepa2_ac", {"encoder.use_rope": False}, ["encoder.use_rope is False"]),
        ("vjepa2_ac", {"encoder.use_silu": True}, ["encoder.use_silu is True", "no gate"]),
        ("vjepa2_ac", {"encoder.embed_dim": None}, ["lacks encoder.embed_dim"]),
        ("vjepa2_ac", {"predictor": None}, ["lacks predictor"]),
        ("vjepa2_ac", {"predictor.embed_dim": 32}, ["predictor.embed_dim is 32", "the encoder's is 64"]),
        ("vjepa2_ac", {"predictor.img_size": 32}, ["predictor.img_size is 32", "the encoder's is 64"]),
        ("vjepa2_ac", {"encoder.img_size": [64, 96]}, ["encoder.img_size is [64, 96]", "square"]),
        ("vjepa2_ac", {"predictor.num_frames": 1}, ["predictor.num_frames is 1", "tubelet_size (2)"]),
        ("vjepa2_ac", {"encoder.window": 3}, ["encoder.window is 3", "not known"]),
    ],
)
def test_configurations_that_cannot_be_served_are_refused(
    source: str, change: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        configs.load(write(tmp_path / "copy", source, change), {})
    assert all(word in str(caught.value) for word in [*words, "copy"]), caught.value


def test_folders_that_hold_no_checkpoint_or_two_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither config\.json nor a \.pt"):
        configs.load(tmp_path, {})
    folder = write(tmp_path / "copy", "vjepa2_ac", {})
    (folder / "other.pt").touch()
    with pytest.raises(ConfigError, match=r"one \.pt file.*other\.pt, vjepa2-ac-vitg\.pt"):
        configs.load(folder, {})
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        configs.load(folder, {})


def test_the_processor_s_settings_are_kept(tmp_path: Path) -> None:
    folder = write(tmp_path / "copy", "vjepa2", {})
    path = folder / "video_preprocessor_config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "do_rescale": False, "image_mean": [1, 2, 3], "resample": 3}))
    recipe = configs.load(folder, {}).preprocess
    assert (recipe.scale, recipe.mean, recipe.resampling) == (1.0, (1.0, 2.0, 3.0), "bicubic")
    path.write_text(json.dumps({**content, "do_center_crop": False}))
    with pytest.raises(ConfigError, match="do_center_crop is False"):
        configs.load(folder, {})


# ---- weights --------------------------------------------------------------------------------------------


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "copy", "vjepa2", {})
    tensors = load_file(folder / "model.safetensors")
    tensors["encoder.layer.0.gate.weight"] = tensors.pop("encoder.layer.1.attention.key.bias")
    tensors["pooler.query"] = torch.zeros(1)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"missing: blocks\.1\.qkv\.bias\[1\]; unexpected: .*") as caught:
        networks(folder)
    assert "encoder.layer.0.gate.weight" in str(caught.value) and "pooler.query" in str(caught.value)


def ac_content(folder: Path) -> dict[str, Any]:
    return dict(torch.load(folder / configs.AC_FILE, weights_only=True))


def test_prefixes_are_stripped_independently_and_idle_tensors_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "copy", "vjepa2_ac", {})
    content = ac_content(folder)
    bare = {name.replace("module.backbone.", ""): tensor for name, tensor in content["encoder"].items()}
    prefixes = ("", "module.", "backbone.", "module.backbone.")
    content["encoder"] = {prefixes[index % 4] + name: tensor for index, (name, tensor) in enumerate(bare.items())}
    content["encoder"]["module.backbone.pos_embed"] = torch.zeros(1, 512, 64)
    content["predictor"] = {name.replace("module.", ""): tensor for name, tensor in content["predictor"].items()}
    content["predictor"]["predictor_pos_embed"] = torch.zeros(1, 512, 48)
    torch.save({**content, "opt": {"state": {0: {"exp_avg": torch.zeros(3)}}}}, folder / configs.AC_FILE)
    _, _, *expected = golden("vjepa2_ac")
    for one, two in zip(networks(folder), expected, strict=True):
        assert all(torch.equal(tensor, two.state_dict()[name]) for name, tensor in one.state_dict().items())


def test_an_ac_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "copy", "vjepa2_ac", {})
    content = ac_content(folder)
    gone = content["predictor"].pop("module.state_encoder.bias")
    torch.save({**content, "predictor": {**content["predictor"], "module.extra.bias": gone}}, folder / configs.AC_FILE)
    with pytest.raises(ConfigError, match=r"missing: embed_state\.bias; unexpected: extra\.bias"):
        networks(folder)
    torch.save({"encoder": content["encoder"]}, folder / configs.AC_FILE)
    with pytest.raises(ConfigError, match="has no 'predictor'; it holds encoder"):
        networks(folder)
    torch.save(
        {**content, "predictor": content["predictor"] | {"extra.bias": gone, "module.extra.bias": gone}},
        folder / configs.AC_FILE,
    )
    with pytest.raises(ConfigError, match="'extra.bias' twice"):
        networks(folder)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    folder = write(tmp_path / "copy", "vjepa2_ac", {})
    torch.save({**ac_content(folder), "config": Rotation.identity()}, folder / configs.AC_FILE)
    with pytest.raises(ConfigError, match="code of a checkpoint is not run") as caught:
        networks(folder)
    assert "weights_only=False" not in str(caught.value)
    (folder / configs.AC_FILE).write_bytes(b"not a checkpoint")
    with pytest.raises(ConfigError, match="cannot read"):
        networks(folder)


def test_an_ac_checkpoint_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, calls, load = tiny.make_ac(tmp_path), [], torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: calls.append(kwargs) or load(*args, **kwargs))
    networks(folder)
    assert [(call["weights_only"], call["mmap"]) for call in calls] == [(True, True)]
