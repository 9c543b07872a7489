"""Every example placement gives what one worker gives: sixteen mixed requests, sessions too, others that leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from asking import Answer, Asked, ask_for, tensor
from placing import NEAR, ask_beside, asking, assert_same, placements

SETTINGS = {"plugin": "vjepa2", "threads": 1}
EXACT = {"usual": {}, "batch invariant": {"batch_invariant": True}}
SIDE = 64


def ask(task: str, tensors: dict[str, Any], *, seed: int = 1, session: str | None = None, **params: Any) -> Any:
    more = {"session": session} if session else {}
    return ask_for(*(tensor(*item) for item in tensors.items()), task=task, params=params, seed=seed, **more)


def draw(*shape: int, seed: int, scale: float = 0.1) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def frames(number: int, *, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(0, 256, (number, SIDE, SIDE, 3), generator=generator, dtype=torch.uint8)


def video(number: int) -> Any:
    clip = {"pixel_values": draw(*((2,) if number % 4 == 3 else ()), 4, 3, SIDE, SIDE, seed=number, scale=1.0)}
    task = ("encode", "predict", "anticipate")[number % 3]
    return ask(task, clip, **({"steps": 1 + number % 4} if task == "anticipate" else {}))


def rollout(seed: int, horizon: int, *, context: int = 1, rows: int | None = None, **more: Any) -> Any:
    batch = () if rows is None else (rows,)
    drawn = {
        "frames": frames(context, seed=seed),
        "actions": draw(*batch, context - 1 + horizon, 7, seed=seed),
        "state": draw(*batch, 7, seed=seed + 100, scale=0.5),
    }
    return ask("rollout", drawn, context_frames=context, **more)


def plan(seed: int, *, context: int = 1, samples: int = 12, **more: Any) -> Any:
    tensors = {"frames": frames(context + 1, seed=seed), "state": draw(7, seed=seed, scale=0.5)}
    if context > 1:
        tensors["actions"] = draw(context - 1, 7, seed=seed + 1)
    more = {"context_frames": context, "samples": samples, "horizon": 2, "topk": 4, "iterations": 2} | more
    return ask("plan", tensors, seed=seed, **more)


SESSIONS = [f"session {number}" for number in range(4)]
WIRES = {
    "tiny": [[video(number) for number in range(16)]],
    "tiny-ac": [
        [
            *(rollout(n, 1 + n, context=1 + n % 3) for n in range(4)),
            rollout(5, 4, rows=3), rollout(6, 5, context=2, goal_frame=1, cost="cosine"),
            *(rollout(10 + n, 2, context=1 + n % 2, session=name) for n, name in enumerate(SESSIONS)),
            ask("encode", {"frames": frames(3, seed=20)}), ask("encode", {"frames": frames(1, seed=21)}),
            ask(
                "teacher_forced",
                {"frames": frames(4, seed=9), "actions": draw(3, 7, seed=9), "states": draw(3, 7, seed=8)},
            ),
            plan(11), plan(12, context=3, samples=9, cost="l2"), plan(13, iterations=3),
        ],
        [
            *(ask("rollout", {"actions": draw(3, 7, seed=n)}, session=name) for n, name in enumerate(SESSIONS)),
            rollout(30, 6), plan(31),
        ],
    ],
}  # fmt: skip
LEAVING = {
    "tiny": [video(number) for number in range(2, 17, 3)],
    "tiny-ac": [rollout(40, 12), rollout(41, 9, session="left"), plan(42, iterations=20), rollout(43, 9, rows=2)],
}


def answers(served: Asked, model: str, *, leaving: bool) -> list[Answer]:
    """One wave of requests after the other."""
    found: list[Answer] = []
    for number, wires in enumerate(WIRES[model]):
        found += ask_beside(served, wires, LEAVING[model] if leaving else [], seed=number)

    async def close() -> None:
        for name in {wire.session for wires in WIRES[model] for wire in wires} - {None}:
            served.engine.close_session(name)

    served.run(close())
    return found


@pytest.fixture(scope="module")
def whole() -> dict[tuple[str, str], list[Answer]]:
    """What one worker gives."""
    found = {}
    for model in WIRES:
        for setting, more in EXACT.items():
            with asking(**SETTINGS, **more, model=model) as served:
                found[model, setting] = answers(served, model, leaving=False)
    return found


@pytest.mark.parametrize("setting", EXACT)
@pytest.mark.parametrize("model", WIRES)
@pytest.mark.parametrize("placement", placements("vjepa2"))
def test_a_split_model_gives_what_a_whole_one_gives(
    whole: dict[tuple[str, str], list[Answer]], placement: str, model: str, setting: str
) -> None:
    more = EXACT[setting]
    with asking(**SETTINGS, **more, model=model, placement=placement, in_threads=True) as served:
        found = answers(served, model, leaving=True)
    assert_same(found, whole[model, setting], atol=0 if more else NEAR)


@pytest.mark.timeout(300)
def test_processes_give_what_one_gives(whole: dict[tuple[str, str], list[Answer]]) -> None:
    with asking(**SETTINGS, model="tiny-ac", placement="encoders2") as served:
        found = answers(served, "tiny-ac", leaving=True)
    assert_same(found, whole["tiny-ac", "usual"])
