"""Every example placement writes and draws as one worker does: sixteen mixed requests, others that hang up beside them.

No two show the same image, so that none is found in a cache by one and not by the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from asking import Answer, ask_for, image, text
from placing import NEAR, ask_beside, asking, assert_same, placements

SETTINGS = {"plugin": "bagel", "model": "tiny", "max_model_len": 512, "threads": 1}
EXACT = {"usual": {}, "batch invariant": {"batch_invariant": True}}
GREEDY = {"temperature": 0}


def picture(seed: int, height: int = 40, width: int = 56) -> dict[str, Any]:
    return image(np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8))


def draw(*inputs: dict[str, Any], seed: int = 1, stream: bool = False, **params: Any) -> Any:
    params = {"num_timesteps": 5} | ({"height": 16, "width": 24} if len(inputs) == 1 else {}) | params
    outputs = ["image", "tensors"]
    return ask_for(*inputs, task="image", outputs=outputs, seed=seed, stream=stream, params=params)


def chat(*inputs: dict[str, Any], seed: int = 1, stream: bool = False, **params: Any) -> Any:
    return ask_for(*inputs, seed=seed, stream=stream, params={"max_tokens": 12, **params})


WIRES = [
    chat(text("What is a fox?"), **GREEDY),
    chat(text("What is a fox?"), seed=3, temperature=1.0, top_p=0.9, stream=True),
    chat(text("Say it"), n=3, temperature=0.8, max_tokens=9),
    chat(text("How likely?"), logprobs=3, **GREEDY),
    chat(picture(1, 30, 70), text("and this?"), seed=7, temperature=1.0),
    chat(text("Say"), picture(2), text("more"), n=2, temperature=0.8, stream=True),
    chat(picture(3), picture(4, 24, 24), text("both"), max_tokens=20, **GREEDY),
    draw(text("a red fox")),
    draw(text("a blue fox"), seed=2, stream=True, preview_every=2, num_timesteps=7),
    draw(text("a hill"), cfg_text_scale=1, height=24, width=8),
    draw(text("two boats"), n=2, seed=5, cfg_interval=[0.3, 0.9]),
    draw(text("a boat"), think=True, think_max_tokens=7, cfg_img_scale=1.5, **GREEDY),
    draw(picture(5), text("make it blue"), seed=2),
    draw(picture(6), picture(7, 24, 24), text("both"), cfg_renorm_type="channel", cfg_interval=[0.3, 0.9]),
    draw(picture(8), text("without its colours"), cfg_renorm_type="text_channel", cfg_img_scale=1.0, seed=9),
    draw(text("think"), picture(9, 32, 32), think=True, think_max_tokens=5, n=2, temperature=0.7),
]
LEAVING = [
    chat(picture(20), text("What is it?"), max_tokens=200, ignore_eos=True, stream=True),
    chat(text("A long story"), max_tokens=300, ignore_eos=True, n=2),
    draw(picture(21), text("red"), num_timesteps=60, stream=True),
    draw(text("a sea"), num_timesteps=60, stream=True),
    draw(text("a wood"), think=True, think_max_tokens=200, ignore_eos=True, stream=True),
]


@pytest.fixture(scope="module")
def whole() -> dict[str, list[Answer]]:
    """What one worker gives."""
    found = {}
    for setting, more in EXACT.items():
        with asking(**SETTINGS, **more) as served:
            found[setting] = served.ask_all(*WIRES)
    return found


@pytest.mark.parametrize("setting", EXACT)
@pytest.mark.parametrize("placement", placements("bagel"))
def test_a_split_model_answers_as_a_whole_one(whole: dict[str, list[Answer]], placement: str, setting: str) -> None:
    more = EXACT[setting]
    with asking(**SETTINGS, **more, placement=placement, in_threads=True) as served:
        found = ask_beside(served, WIRES, LEAVING)
    assert_same(found, whole[setting], atol=0 if more else NEAR)


def test_branches_of_guidance_run_side_by_side(whole: dict[str, list[Answer]]) -> None:
    """Each in a worker of its own, whose statistics show no other's steps."""
    edit = WIRES[12]
    with asking(**SETTINGS, placement="cfg_parallel", in_threads=True) as served:
        (found,) = served.ask_all(edit)
        flows = [stats.method_s["llm.flow"][1] for stats in served.on_each(lambda worker: worker.stats())]
    assert flows == [4, 4, 4]
    assert_same([found], [whole["usual"][12]])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("placement", ["cfg_parallel", *placements("bagel", split=True)])
def test_processes_answer_as_one_does(whole: dict[str, list[Answer]], placement: str) -> None:
    with asking(**SETTINGS, placement=placement) as served:
        found = ask_beside(served, WIRES[::3], LEAVING[:2])
    assert_same(found, whole["usual"][::3])
