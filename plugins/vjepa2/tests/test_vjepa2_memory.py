"""Rollouts, plans and sessions in little memory: pages are shared, moved and given back, results stay what they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar.errors import RequestError
from mstar_plugin_vjepa2.modeling import cem

LATENT, SAME = 2e-4, 1e-5
FRAME = 18  # tokens of a frame's block
FRAME_BYTES = FRAME * 2 * 2 * 3 * 16 * 4  # keys and values, 2 layers, 3 heads of 16, float32


def room_for(frames: int, **more: Any) -> dict[str, Any]:
    """A KV cache in which each frame is a page."""
    return {"block_size": FRAME, "kv_cache_memory_bytes": frames * FRAME_BYTES, **more}


def assert_same(answer: Any, other: Any) -> None:
    assert not isinstance(answer, BaseException), repr(answer)
    differences = answer.differences(other)
    assert max(differences.values()) <= SAME, differences


@pytest.fixture
def world(serving: Callable[..., Any]) -> Iterator[Any]:
    found = serving(block_size=FRAME)
    yield found
    found.assert_clean()


@pytest.fixture
def peak(world: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The most pages that were in use at once."""
    pool, most = world.pool, [0]
    take = pool._take

    def counted() -> int:
        page: int = take()
        most[0] = max(most[0], pool.num_used)
        return page

    monkeypatch.setattr(pool, "_take", counted)
    return lambda: most[0]


# ---- rollouts -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rollouts(asks: Any) -> list[Any]:
    return [asks.rollout(seed, 8 - seed % 3, context=1 + seed % 3, rows=2 if seed == 5 else None) for seed in range(8)]


def test_eight_rollouts_with_room_for_three_give_what_they_give_alone(
    serving: Callable[..., Any], rollouts: list[Any]
) -> None:
    alone = [serving(block_size=FRAME).ask(ask) for ask in rollouts]
    for settings in ({}, {"overlap": True}, {"block_size": 7}):
        world = serving(**room_for(3 * 8, **settings))
        for answer, lone in zip(world.ask_all(rollouts), alone, strict=True):
            assert_same(answer, lone)
        assert world.worker.scheduler.num_swaps > 0
        world.assert_clean()
        assert world.pages() == 0


def test_without_swap_space_a_rollout_gives_its_result_or_says_that_memory_ran_out(
    serving: Callable[..., Any], rollouts: list[Any]
) -> None:
    alone = [serving(block_size=FRAME).ask(ask) for ask in rollouts]
    world = serving(**room_for(3 * 8, swap_space_bytes=0))
    for _ in range(2):
        answers = world.ask_all(rollouts)
        failed = [answer for answer in answers if isinstance(answer, RequestError)]
        assert 0 < len(failed) < 7
        assert {(error.status, error.code) for error in failed} == {(503, "kv_cache_exhausted")}
        for answer, lone in zip(answers, alone, strict=True):
            if answer not in failed:
                assert_same(answer, lone)
        world.assert_clean()
    for ask, lone in zip(rollouts, alone, strict=True):
        assert_same(world.ask(ask), lone)


def test_memory_grows_by_a_page_a_frame(world: Any, asks: Any, peak: Callable[[], int]) -> None:
    for horizon in (1, 4, 8, 16, 30):
        world.ask(asks.rollout(1, horizon, context=3).on("arm"))
        assert world.pages() == peak() == horizon + 2
        world.close_session("arm")
        world.assert_clean()


def test_what_never_fits_is_refused(serving: Callable[..., Any], asks: Any) -> None:
    world = serving(**room_for(6))
    for ask in (asks.rollout(1, 7), asks.rollout(1, 5, context=3, rows=2), asks.plan(1, context=4, horizon=4)):
        error = world.refusal(ask)
        assert (error.status, error.code) == (400, "context_length_exceeded") and "108" in error.message
    whole = asks.rollout(1, 6)
    right = world.ask(whole)
    parts = {"state": whole.tensors["state"], "frames": whole.tensors["frames"]}
    first = world.ask(asks.Ask("rollout", {"actions": whole.tensors["actions"][:4], **parts}, session="arm"))
    error = world.refusal(asks.Ask("rollout", {"actions": torch.zeros(3, 7)}, session="arm"))
    assert (error.status, error.code) == (400, "context_length_exceeded")
    last = world.ask(asks.Ask("rollout", {"actions": whole.tensors["actions"][4:]}, session="arm"))
    found = torch.cat([first["latents"], last["latents"]], dim=1)
    torch.testing.assert_close(found, right["latents"], atol=SAME, rtol=0)
    world.close_session("arm")
    world.assert_clean()


# ---- plans --------------------------------------------------------------------------------------------------


def by_whole_sequences(world: Any, ask: Any, cost: str) -> dict[str, Tensor]:
    """A plan whose every candidate is rolled out alone, without a cache."""
    given, params = ask.tensors, ask.params
    frames, horizon, context = given["frames"], params["horizon"], params["context_frames"]
    states = given["states"] if "states" in given else given["state"][None]
    before = given.get("actions", torch.zeros(0, 7))
    goal = world.ask(type(ask)("encode", {"frames": frames[-1:]}))["features"][0]
    limits, costs = {"max_norm": params.get("max_norm", 0.05)}, []
    mean, std = cem.begin(1, horizon, **limits)
    momenta = dict.fromkeys(("momentum_mean", "momentum_std", "momentum_mean_gripper", "momentum_std_gripper"), 0.15)
    for noise in given["noise"]:
        candidates = cem.propose(mean, std, noise[None], **limits, close_gripper_at=params.get("close_gripper_at"))
        ends = [
            world.by_full_sequences(frames[:context], torch.cat([before, actions]), states, horizon)["latents"][0, -1]
            for actions in candidates[0]
        ]
        costs.append(cem.costs(torch.stack(ends), goal, cost))
        mean, std = cem.select(candidates, costs[-1][None], mean, std, params["topk"], **momenta)
    return {"action": cem.finish(mean)[0], "costs": torch.stack(costs)}


def seeded_noise(ask: Any) -> Tensor:
    """What torch's generator draws for a plan in turn, (I, H, S, 4)."""
    generator, params = torch.Generator().manual_seed(ask.seed), ask.params
    shape = params["iterations"], params["horizon"]
    draws = [torch.randn(params["samples"], 4, generator=generator) for _ in range(shape[0] * shape[1])]
    return torch.stack(draws).unflatten(0, shape)


@pytest.mark.parametrize(
    "size",
    [
        {"samples": 8, "cost": "l1"},
        {"samples": 6, "cost": "l2", "context": 3},
        {"samples": 6, "cost": "cosine", "context": 2, "given": True},
        {"samples": 2, "topk": 2, "iterations": 1, "horizon": 1},
        {"samples": 5, "topk": 5, "iterations": 3, "horizon": 1, "context": 3, "given": True},
        {"samples": 4, "horizon": 4, "iterations": 1, "close_gripper_at": 2, "max_norm": 0.2},
    ],
    ids=str,
)
def test_a_plan_is_what_whole_sequences_give(world: Any, asks: Any, size: dict[str, Any]) -> None:
    given, context = size.get("given"), size.get("context", 1)
    ask = asks.plan(1, **{name: value for name, value in size.items() if name != "given"})
    if given:
        ask.tensors["states"] = asks.draw(context, 7, seed=7, scale=0.5)
        del ask.tensors["state"]
    found = world.ask(ask)
    ask.tensors["noise"] = seeded_noise(ask)
    assert_same(world.ask(ask), found)
    right = by_whole_sequences(world, ask, size.get("cost", "l1"))
    for name, value in right.items():
        torch.testing.assert_close(found[name], value, atol=LATENT, rtol=0)
    assert found["action"].shape == (ask.params["horizon"], 7)


def test_plans_and_rollouts_share_steps_and_do_not_disturb_each_other(world: Any, asks: Any) -> None:
    together = [asks.plan(1), asks.plan(2, horizon=3, cost="l2"), asks.plan(1, context=3), asks.plan(1)]
    together += [asks.rollout(seed, 6) for seed in range(3)]
    alone = [world.ask(ask) for ask in together]
    before = world.calls("ac.step")
    answers = world.ask_all(together)
    calls, rows = (now - then for now, then in zip(world.calls("ac.step"), before, strict=True))
    for answer, lone in zip(answers, alone, strict=True):
        assert_same(answer, lone)
    assert_same(answers[0], answers[3])
    assert rows == 2 * (2 * 32 + 48 + 32) + 2 + 18 and calls <= 16


@pytest.mark.parametrize(("block_size", "shared", "own"), [(FRAME, 2, 2), (16, 2, 3), (64, 0, 2)])
def test_candidates_share_the_pages_of_the_context(
    serving: Callable[..., Any], asks: Any, block_size: int, shared: int, own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full pages are never copied; one that is partly filled is, by each that writes to it."""
    world = serving(block_size=block_size)
    pool, used = world.pool, []
    take = pool._take
    monkeypatch.setattr(pool, "_take", lambda: (take(), used.append(pool.num_used + 1))[0])
    world.ask(asks.plan(1, context=3, samples=64))
    partly = 2 * FRAME % block_size > 0
    assert max(used) - 1 in range(shared + partly + 64 * own - 1, shared + partly + 64 * own + 1)
    world.assert_clean()
    assert world.pages() == 0


@pytest.mark.parametrize(("context", "settings"), [(1, {}), (3, {"block_size": 16}), (3, {"overlap": True})], ids=str)
def test_a_plan_of_64_candidates_with_room_for_10_is_the_same_plan(
    serving: Callable[..., Any], asks: Any, context: int, settings: dict[str, Any]
) -> None:
    ask = asks.plan(3, context=context, samples=64, iterations=2)
    right = serving(block_size=FRAME).ask(ask)
    world = serving(**room_for(10 * (context + 1), **settings))
    before = world.worker.scheduler.num_swaps
    assert_same(world.ask(ask), right)
    assert world.worker.scheduler.num_swaps > before
    beside = [asks.rollout(seed, 4) for seed in range(3)]
    for answer, lone in zip(world.ask_all([ask, *beside]), [right, *map(world.ask, beside)], strict=True):
        assert_same(answer, lone)
    world.assert_clean()
    assert world.pages() == 0


def test_without_swap_space_such_a_plan_says_that_memory_ran_out(serving: Callable[..., Any], asks: Any) -> None:
    ask, beside = asks.plan(3, samples=64), asks.rollout(1, 3)
    world = serving(**room_for(20, swap_space_bytes=0))
    error, _ = world.ask_all([ask, beside])
    assert isinstance(error, RequestError) and (error.status, error.code) == (503, "kv_cache_exhausted")
    assert "--swap-space" in error.message
    world.assert_clean()
    assert_same(world.ask(beside), serving(block_size=FRAME).ask(beside))
    small = asks.plan(3, samples=10)
    assert_same(world.ask(small), serving(block_size=FRAME).ask(small))
    world.assert_clean()
