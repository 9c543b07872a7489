"""Every example placement answers and speaks as one worker does: sixteen mixed requests, others beside them hang up.

No two show or play the same, so that nothing is found in a cache by one and not by the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from asking import Answer, Asked, ask_for, image, tensor, text
from placing import NEAR, ask_beside, asking, assert_same, placements

SETTINGS = {"plugin": "qwen3_omni", "model": "tiny", "max_model_len": 512, "threads": 1}
EXACT = {"usual": {}, "batch invariant": {"batch_invariant": True}}
DRAWING: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "talker_temperature": 0},
    {"top_k": 8, "talker_top_k": 10, "code_predictor_top_k": 6},
    {"temperature": 0.5, "top_k": 5, "talker_temperature": 0.6, "talker_top_k": 8, "code_predictor_temperature": 0.5},
)
WRITING, SPEAKING = ["text"], ["text", "audio", "tensors"]


def chat(number: int, *kinds: str, outputs: list[str] = WRITING, **params: Any) -> Any:
    """What is asked about media of these kinds, no two alike."""
    draw = np.random.default_rng(number)
    made = {
        "image": lambda: image(draw.integers(256, size=(64, 96, 3), dtype=np.uint8)),
        "audio": lambda: tensor("audio", torch.from_numpy(draw.normal(size=16000).astype(np.float32)) / 8),
        "video": lambda: {"type": "video", "frames": _frames(draw), "fps": 2},
    }
    drawing = {name: value for name, value in DRAWING[number % 3].items() if outputs != WRITING or name[0] != "c"}
    params = {**drawing, "max_tokens": 4 + number % 5, **params}
    if outputs != WRITING:
        speaker = ("ethan", "chelsie", "aiden")[number % 3]
        params = {"speaker": speaker, "talker_max_tokens": 5 + number % 9, **params}
    content = [*(made[kind]() for kind in kinds), text(f"{number}: what is it?")]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    return ask_for(messages=messages, outputs=outputs, params=params, seed=number, stream=bool(number % 2))


def _frames(draw: np.random.Generator) -> Any:
    return tensor("", torch.from_numpy(draw.integers(256, size=(4, 64, 64, 3), dtype=np.uint8)))["tensor"]


def vocode(number: int) -> Any:
    codes = torch.randint(40, (16, 3 + 4 * number), generator=torch.Generator().manual_seed(number))
    return ask_for(tensor("codes", codes), task="vocode", outputs=["audio"], params={"codec_chunk_frames": 5})


WRITTEN = [
    chat(0), chat(1, n=3), chat(2, "image", logprobs=2), chat(3, "audio", n=2), chat(4, "video"),
    chat(5, "image", "audio", "image", max_tokens=9),
]  # fmt: skip
SPOKEN = [
    chat(6, outputs=SPEAKING), chat(7, "image", outputs=SPEAKING), chat(8, "audio", outputs=SPEAKING),
    chat(9, "video", outputs=SPEAKING, codec_chunk_frames=3), chat(10, "image", "audio", outputs=SPEAKING),
    chat(11, "video", "audio", outputs=SPEAKING, use_audio_in_video=True), chat(12, outputs=["text", "tensor:codes"]),
    chat(13, "image", outputs=SPEAKING, logprobs=2),
]  # fmt: skip
WIRES = [*WRITTEN, *SPOKEN, vocode(1), vocode(2)]
LONG: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
LEAVING = [
    chat(20, "image", **LONG), chat(21, n=2, **LONG),
    *(chat(22 + n, *kinds, outputs=SPEAKING, talker_max_tokens=90, **LONG) for n, kinds in enumerate([["audio"], []])),
]  # fmt: skip


@pytest.fixture(scope="module")
def whole() -> dict[str, list[Answer]]:
    """What one worker gives."""
    found = {}
    for setting, more in EXACT.items():
        with asking(**SETTINGS, **more) as served:
            found[setting] = served.ask_all(*WIRES)
    return found


@pytest.mark.parametrize("setting", EXACT)
@pytest.mark.parametrize("placement", placements("qwen3_omni"))
def test_a_split_model_answers_as_a_whole_one(whole: dict[str, list[Answer]], placement: str, setting: str) -> None:
    more = EXACT[setting]
    with asking(**SETTINGS, **more, placement=placement, in_threads=True) as served:
        found = ask_beside(served, WIRES, LEAVING)
    assert_same(found, whole[setting], atol=0 if more else NEAR)


def told(served: Asked) -> list[set[str]]:
    """Kinds of messages about requests that each worker gets from now on."""
    kinds = [set[str]() for _ in served.workers]

    def listen(worker: Any) -> None:
        handle, own = worker.router.handle, kinds[worker.worker]

        def heard(message: Any) -> None:
            if hasattr(message, "request_id"):
                own.add(type(message).__name__)
            handle(message)

        worker.router.handle = heard

    served.on_each(listen)
    return kinds


@pytest.mark.parametrize("placement", ["talker_codec", "disaggregated"])
def test_text_alone_never_reaches_who_speaks(whole: dict[str, list[Answer]], placement: str) -> None:
    with asking(**SETTINGS, placement=placement, in_threads=True) as served:
        kinds = told(served)
        found = served.ask_all(*WRITTEN)
        steps = [worker.num_steps for worker in served.workers]
    for worker in served.workers:
        if {"talker", "code2wav"} & set(worker.modules.by_name):
            assert kinds[worker.worker] == {"Open", "Begin", "Close"} and not steps[worker.worker]
    assert_same(found, whole["usual"][: len(WRITTEN)])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("placement", ["disaggregated", *placements("qwen3_omni", split=True)])
def test_processes_answer_as_one_does(whole: dict[str, list[Answer]], placement: str) -> None:
    with asking(**SETTINGS, placement=placement) as served:
        found = ask_beside(served, WIRES[::3], LEAVING[:2])
    assert_same(found, whole["usual"][::3])
