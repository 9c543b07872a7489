"""Rollouts in parts and in company, in every mode of execution: what they give is what they give alone and whole.

The oracles are a request's lone run, and `full_sequence`, which keeps nothing from step to step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mstar.errors import RequestError
from mstar.layers import kernels, shims
from mstar.worker import tape
from mstar_compile_cache import Store

LATENT, SAME = 2e-4, 1e-5


@pytest.fixture
def world(serving: Callable[..., Any]) -> Iterator[Any]:
    found = serving()
    yield found
    found.assert_clean()


def assert_same(answer: Any, other: Any, *, atol: float = SAME) -> None:
    assert not isinstance(answer, BaseException), repr(answer)
    differences = answer.differences(other)
    assert max(differences.values()) <= atol, differences


# ---- a rollout in parts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [False, True], ids=["integrated", "given"])
@pytest.mark.parametrize("context", [1, 2, 3])
def test_a_rollout_is_one_of_any_parts_and_of_whole_sequences(world: Any, asks: Any, context: int, given: bool) -> None:
    horizon = 6
    whole = asks.rollout(3, horizon, context=context, given=given)
    expected = world.ask(whole)
    states = whole.tensors["states"] if given else whole.tensors["state"][None]
    slow = world.by_full_sequences(whole.tensors["frames"], whole.tensors["actions"], states, horizon)
    for name, value in slow.items():
        torch.testing.assert_close(expected[name], value, atol=LATENT, rtol=0)
    for parts in ((1,) * horizon, (2, 3, 1), (5, 1), (1, 5)):
        found = in_parts(world, asks, whole, parts, context=context)
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], atol=SAME, rtol=0)


def in_parts(world: Any, asks: Any, whole: Any, parts: tuple[int, ...], *, context: int) -> dict[str, torch.Tensor]:
    """A rollout by one request on a session for each part: its latents and states, joined."""
    latents, states, start = [], [], context - 1
    for number, part in enumerate(parts):
        end = start + part
        tensors, params = dict(whole.tensors), whole.params
        if number:
            tensors, params = {name: tensors[name] for name in ("actions", "states") if name in tensors}, {}
        for name in {"actions", "states"} & tensors.keys():
            tensors[name] = tensors[name][start if number else 0 : end]
        answer = world.ask(asks.Ask("rollout", tensors, params, session="parts"))
        assert answer["latents"].shape[1] == part
        latents.append(answer["latents"])
        states.append(answer["states"])  # of which the last is where the next part begins, or was given by it
        start = end
    world.close_session("parts")
    before = [state[:, :-1] for state in states]
    return {"latents": torch.cat(latents, 1), "states": torch.cat([*before, states[-1][:, -1:]], 1)}


# ---- in company -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crowd(asks: Any) -> list[Any]:
    """Eight rollouts of mixed horizons, contexts and rows, and of every other task some."""
    rollouts = [
        asks.rollout(1, 1), asks.rollout(2, 3), asks.rollout(3, 8, rows=3), asks.rollout(4, 5, context=2),
        asks.rollout(5, 2, context=3, given=True), asks.rollout(6, 12), asks.rollout(7, 4, rows=2, given=True),
        asks.rollout(8, 7, context=2, rows=2, goal_frame=1, cost="cosine"),
    ]  # fmt: skip
    forced = {"frames": asks.frames(4, seed=9), "actions": asks.draw(3, 7, seed=9), "states": asks.draw(3, 7, seed=8)}
    others = [
        asks.Ask("encode", {"frames": asks.frames(3, seed=10)}),
        asks.Ask("teacher_forced", forced),
        asks.plan(11),
        asks.plan(12, context=3, samples=9, cost="l2"),
    ]
    return rollouts + others


@pytest.mark.parametrize(
    "settings", [{}, {"batch_invariant": True}, {"overlap": True}, {"enforce_eager": True}], ids=str
)
def test_requests_in_company_give_what_they_give_alone(
    serving: Callable[..., Any], crowd: list[Any], settings: dict[str, Any]
) -> None:
    world = serving(**settings)
    exact = "batch_invariant" in settings
    alone = [world.ask(ask) for ask in crowd]
    draw = random.Random(5)
    for delay_s in (0.0, 0.05):
        aborts = [draw.randint(0, 3) for _ in range(4)]
        leaving = [crowd[2], crowd[5], crowd[10], crowd[7]]
        before = world.calls("ac.step")
        answers = world.ask_all(
            crowd + leaving,
            after_s=[draw.uniform(0, delay_s) for _ in range(len(crowd) + len(leaving))],
            abort_after=[None] * len(crowd) + aborts,
        )
        for answer, lone in zip(answers, alone, strict=False):
            assert_same(answer, lone, atol=0 if exact else SAME)
        for answer in answers[len(crowd) :]:
            assert isinstance(answer, RequestError) and answer.code == "aborted", answer
        calls, rows = (now - then for now, then in zip(world.calls("ac.step"), before, strict=True))
        assert rows > 4 * calls, "steps were to be shared"
    world.assert_clean()


def test_three_hundred_rollouts_of_one_request_finish_in_order(world: Any, asks: Any) -> None:
    many = asks.rollout(20, 2, rows=300)
    before = world.calls("ac.step")
    found = world.ask(many)
    calls, rows = (now - then for now, then in zip(world.calls("ac.step"), before, strict=True))
    assert found["latents"].shape[:2] == (300, 2) and found["states"].shape == (300, 3, 7)
    assert rows == 600 and calls < 20
    for row in (0, 128, 299):
        tensors = many.tensors | {name: many.tensors[name][row] for name in ("actions", "state")}
        alone = world.ask(asks.Ask("rollout", tensors))
        for name in ("latents", "states"):
            torch.testing.assert_close(alone[name][0], found[name][row], atol=SAME, rtol=0)


# ---- modes ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_frames_and_eager_steps_give_what_eager_ones_give(
    serving: Callable[..., Any], crowd: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Both servers find in one cache what the first has put there."""
    if not shims.load():
        pytest.skip("no C++ compiler")
    alone = [serving().ask(ask) for ask in crowd]
    tape.library()
    with Store(tmp_path_factory.mktemp("cache")) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "compile_cache", lambda: store)
        for settings in ({"compile": True}, {"compile": True, "overlap": True}):
            world = serving(**settings)
            compilation = world.worker.compilation
            assert set(compilation.compiled) == {"encoder.frame"}
            assert compilation.eager["ac.step"] == "it has 18 tokens a row"
            for answers in (map(world.ask, crowd), world.ask_all(crowd)):
                for answer, lone in zip(answers, alone, strict=True):
                    assert_same(answer, lone)
            code = compilation.compiled["encoder.frame"]
            assert code.num_runs > 8 and code.num_eager == 0
            world.assert_clean()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close_and_its_states_are_exact(
    serving: Callable[..., Any], crowd: list[Any], asks: Any, dtype: str
) -> None:
    """Features and latents are about 1 large; which of two candidates is better may be told otherwise."""
    clip = {"pixel_values": asks.draw(2, 4, 3, 64, 64, seed=1, scale=1.0)}
    videos = [asks.Ask("encode", clip), asks.Ask("predict", clip), asks.Ask("anticipate", clip, {"steps": 3})]
    for name, some in (("vjepa2_ac", crowd), ("vjepa2", videos)):
        wide, narrow = serving(name), serving(name, dtype=dtype)
        for ask in some:
            right, found = wide.ask(ask), narrow.ask(ask)
            assert right.tensors.keys() == found.tensors.keys()
            for tensor in right.tensors.keys() - {"action"}:
                first = slice(1 if tensor == "costs" else None)
                error = (right[tensor][first] - found[tensor][first]).abs()
                assert error.max() < 0.3 and error.mean() < 0.03, (ask.task, tensor)
                assert tensor != "states" or not error.any()
        narrow.assert_clean()


# ---- shapes, dtypes and sizes -----------------------------------------------------------------------------


def test_clips_of_any_length_run_beside_each_other(serving: Callable[..., Any], asks: Any) -> None:
    world = serving("vjepa2")
    shapes = [(1,), (2,), (32,), (4,), (3, 4), (2, 2), (1,), (5, 1), (17, 2)]
    clips = [asks.draw(*shape, 3, 64, 64, seed=i, scale=1.0) for i, shape in enumerate(shapes)]
    some = [asks.Ask("encode", {"pixel_values": clip}) for clip in clips]
    some += [asks.Ask("anticipate", {"pixel_values": clip}, {"steps": 1 + i % 3}) for i, clip in enumerate(clips)]
    some += [asks.Ask("predict", {"pixel_values": clip}) for clip in clips[:5]]
    alone = [world.ask(ask) for ask in some]
    for ask, answer, lone in zip(some, world.ask_all(some), alone, strict=True):
        assert_same(answer, lone)
        batch = ask.tensors["pixel_values"].shape
        tokens = max(1, batch[-4] // 2) * 16
        for name, value in answer.tensors.items():
            rows = 16 * ask.params["steps"] if ask.task == "anticipate" else tokens
            assert value.shape == (batch[0] if len(batch) == 5 else 1, rows, 64), name
    with pytest.raises(RequestError, match="34 frames, 272 tokens; the limit is 256 .*give at most 32 frames"):
        world.ask(asks.Ask("encode", {"pixel_values": torch.zeros(34, 3, 64, 64)}))
    world.assert_clean()


def test_masks_may_skip_repeat_and_turn_patches_around(serving: Callable[..., Any], asks: Any) -> None:
    """Attention takes tokens in any order: what is asked for comes in the order it is asked for in."""
    world = serving("vjepa2")
    clips = asks.draw(2, 4, 3, 64, 64, seed=3, scale=1.0)
    context = torch.tensor([[31, 0, 5, 17, 9], [1, 2, 3, 30, 29]])
    target = torch.tensor([[7, 3, 28], [0, 16, 5]], dtype=torch.int32)

    def predict(context: torch.Tensor, target: torch.Tensor, pixels: torch.Tensor = clips) -> Any:
        return asks.Ask("predict", {"pixel_values": pixels, "context_mask": context, "target_mask": target})

    right = world.ask(predict(context, target))
    turned = world.ask(predict(context.flip(1), target.flip(1)))
    for name in ("predicted", "target", "context"):
        torch.testing.assert_close(turned[name].flip(1), right[name], atol=SAME, rtol=0)
    for row in (0, 1):  # masks of other lengths and dtypes beside it
        alone, *_ = world.ask_all(
            [predict(context[row], target[row].to(torch.uint8), clips[row]), predict(context[:, :2], target[:, :1])]
        )
        torch.testing.assert_close(alone["predicted"][0], right["predicted"][row], atol=SAME, rtol=0)
    twice = world.ask(predict(context, target[:, [0, 0, 1]]))["predicted"]
    torch.testing.assert_close(twice[:, 0], twice[:, 1], atol=SAME, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_inputs_may_be_narrower_floats(world: Any, asks: Any, dtype: torch.dtype) -> None:
    ask = asks.rollout(4, 3, context=2)
    pixels = asks.draw(2, 3, 64, 64, seed=4, scale=1.0).to(dtype)
    tensors = {name: ask.tensors[name].to(dtype) for name in ("actions", "state")} | {"pixel_values": pixels}
    found = world.ask(asks.Ask("rollout", tensors, ask.params))
    assert_same(found, world.ask(asks.Ask("rollout", {name: x.float() for name, x in tensors.items()}, ask.params)))


def test_what_is_too_large_for_the_model_fails_alone_and_is_no_result(world: Any, asks: Any) -> None:
    good, pixels = asks.rollout(1, 4), torch.full((1, 3, 64, 64), 3e38)
    wrong = [asks.rollout(2, 3), asks.rollout(3, 3), asks.rollout(4, 1, goal_frame=0), asks.plan(5)]
    wrong[0].tensors["actions"][1, 0] = wrong[1].tensors["state"][2] = 3e38
    tensors = ({"goal": torch.full((16, 64), 3e38)}, {"pixel_values": pixels.expand(2, -1, -1, -1)})
    wrong[2] = asks.Ask("rollout", wrong[2].tensors | tensors[0])
    wrong[3].tensors.pop("frames")
    wrong[3].tensors.update(tensors[1])
    wrong.append(asks.Ask("encode", {"pixel_values": pixels}))
    right, *answers = world.ask_all([good, *wrong])
    assert_same(right, world.ask(good))
    for error in answers:
        assert isinstance(error, RequestError) and error.status == 422 and "NaN or infinity" in error.message, error


@pytest.mark.parametrize(
    ("task", "name", "shape"),
    [
        ("encode", "pixel_values", (0, 3, 64, 64)), ("encode", "frames", (0, 64, 64, 3)),
        ("rollout", "actions", (0, 7)), ("rollout", "actions", (0, 2, 7)), ("rollout", "actions", (2, 0)),
        ("rollout", "state", (0, 7)), ("rollout", "states", (0, 7)), ("rollout", "goal", (0, 64)),
        ("teacher_forced", "actions", (0, 7)), ("plan", "noise", (0, 2, 16, 4)), ("plan", "goal", (16, 0)),
    ],
)  # fmt: skip
def test_empty_tensors_are_refused_by_name(world: Any, asks: Any, task: str, name: str, shape: tuple[int, ...]) -> None:
    whole = {
        "encode": asks.Ask("encode"),
        "rollout": asks.rollout(1, 2),
        "plan": asks.plan(1),
        "teacher_forced": asks.Ask("teacher_forced", {"frames": asks.frames(2), "states": asks.draw(1, 7, seed=1)}),
    }[task]
    kept = {key: value for key, value in whole.tensors.items() if not (name == "states" and key == "state")}
    dtype = torch.uint8 if name == "frames" else torch.float32
    error = world.refusal(asks.Ask(task, kept | {name: torch.zeros(shape, dtype=dtype)}, whole.params))
    assert error.status == 400 and name in f"{error.param} {error.message}", error
