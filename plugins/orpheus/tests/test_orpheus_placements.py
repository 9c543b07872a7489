"""Every example placement speaks as one worker does: sixteen mixed requests, others beside them that hang up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from asking import Answer, ask_for, tensor, text
from placing import NEAR, ask_beside, asking, assert_same, placements

SETTINGS = {"plugin": "orpheus", "model": "tiny", "max_model_len": 256, "threads": 1}
EXACT = {"usual": {}, "batch invariant": {"batch_invariant": True}}
VOICES = ("tara", "zoe", "leo", None)
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0},
    {"temperature": 0.9, "top_k": 20, "min_p": 0.02, "presence_penalty": 0.5, "frequency_penalty": 0.2},
)


def speech(number: int, **params: Any) -> Any:
    words = f"{number}: the river goes slowly to the sea" if number % 4 else f"{number}: " + "A stone. Under sand. " * 9
    params = {"voice": VOICES[number % 4], "max_tokens": 25 + 7 * (number % 4), **SAMPLING[number % 3], **params}
    outputs = (["audio", "tensors"], ["tensor:codes"], ["audio"])[number % 5 % 3]
    return ask_for(text(words), task="speech", outputs=outputs, params=params, seed=number, stream=bool(number % 2))


def vocode(number: int) -> Any:
    codes = torch.randint(4096, (7 * (3 + number),), generator=torch.Generator().manual_seed(number))
    params = {"codec_noise": bool(number % 2)}
    return ask_for(tensor("codes", codes), task="vocode", outputs=["audio"], params=params, seed=number)


WIRES = [*(speech(number) for number in range(13)), *(vocode(number) for number in range(3))]
LEAVING = [speech(20 + number, max_tokens=150, ignore_eos=True) for number in range(5)]


@pytest.fixture(scope="module")
def whole() -> dict[str, list[Answer]]:
    """What one worker gives."""
    found = {}
    for setting, more in EXACT.items():
        with asking(**SETTINGS, **more) as served:
            found[setting] = served.ask_all(*WIRES)
    return found


@pytest.mark.parametrize("setting", EXACT)
@pytest.mark.parametrize("placement", placements("orpheus"))
def test_a_split_model_speaks_as_a_whole_one(whole: dict[str, list[Answer]], placement: str, setting: str) -> None:
    more = EXACT[setting]
    with asking(**SETTINGS, **more, placement=placement, in_threads=True) as served:
        found = ask_beside(served, WIRES, LEAVING)
    assert_same(found, whole[setting], atol=0 if more else NEAR)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("placement", ["disaggregated", *placements("orpheus", split=True)])
def test_processes_speak_as_one_does(whole: dict[str, list[Answer]], placement: str) -> None:
    with asking(**SETTINGS, placement=placement) as served:
        found = ask_beside(served, WIRES[::3], LEAVING[:2])
    assert_same(found, whole["usual"][::3])
