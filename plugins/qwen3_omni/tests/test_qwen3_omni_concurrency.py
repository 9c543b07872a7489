"""Sixteen mixed requests, staggered, some of them aborted: each of the others is what it is alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from asking import Answer, Asked, ask_for, text

from mstar_plugin_qwen3_omni.config import OmniConfig

RUNS = ("text", "image", "audio", "video", "image_audio", "video_audio")
SPEAKERS = ("ethan", "chelsie", "aiden")
ABORTED = {3: 1, 7: 3, 10: 8, 14: 0}
"""Requests that are aborted, after so many chunks."""
DRAWING: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "talker_temperature": 0},
    {"top_k": 8, "talker_top_k": 10, "code_predictor_top_k": 6},
    {"temperature": 0.5, "top_k": 5, "talker_temperature": 0.6, "talker_top_k": 8, "code_predictor_temperature": 0.5},
)
# Few rows; small chunks of prompts; results taken late.
TIGHT = {"max_num_batched_tokens": 23, "max_num_seqs": 6, "overlap": True}
LONGEST = 256


def wires(golden: Any) -> list[Any]:
    """No two alike: modalities, voices, text alone and speech."""
    made = []
    for number in range(16):
        run = RUNS[number % len(RUNS)]
        messages = golden.messages(run)
        messages[-1]["content"].append(text(f" {number}"))
        params = {
            **DRAWING[number % len(DRAWING)],
            "max_tokens": 3 + number % 5,
            "use_audio_in_video": "video_a" in run,
        }
        spoken = number % 3 != 1
        if spoken:
            params |= {"speaker": SPEAKERS[number % 3], "talker_max_tokens": 5 + number % 7}
        outputs = ["text", "audio", "tensors"] if spoken else ["text"]
        made.append(ask_for(messages=messages, outputs=outputs, params=params, seed=number))
    return made


async def _all(model: Asked, asked: list[Any]) -> list[Answer | None]:
    async def one(number: int, wire: Any) -> Answer | None:
        await asyncio.sleep(0.03 * number)
        if number not in ABORTED:
            return await model.answer(wire)
        handle, left = await model.engine.submit(wire), ABORTED[number]
        async for _ in handle:
            if not left:
                break
            left -= 1
        handle.abort()
        return None

    return await asyncio.gather(*(one(number, wire) for number, wire in enumerate(asked)))


def check(found: Answer | None, expected: Answer) -> None:
    assert found is not None and found.texts == expected.texts and found.ids == expected.ids
    assert found.tensors.keys() == expected.tensors.keys()
    mine, theirs = (  # media that another request has shown already are not encoded again
        {name: count for name, count in one.result.counters.items() if "_encoder" not in name}
        for one in (found, expected)
    )
    assert mine == theirs
    if "codes" in expected.tensors:
        assert torch.equal(found.tensors["codes"], expected.tensors["codes"])
        sound, lone = found.tensors["audio"], expected.tensors["audio"]
        assert len(lone) == expected.tensors["codes"].shape[1] * 1920 - 555
        assert torch.equal(sound, lone)


@pytest.fixture(scope="module")
def alone(golden: Any) -> Iterator[list[Answer]]:
    served = Asked(plugin="qwen3_omni", model=str(golden.folder))
    yield [served.ask_all(wire)[0] for wire in wires(golden)]
    served.close()


def room_for_one(config: OmniConfig) -> dict[str, Any]:
    """Pages for one request of the longest, so that lanes and slots of the others move to the host and back."""
    assert config.speech is not None
    shapes = config.thinker.decoder, config.speech.talker.decoder
    token_bytes = sum(2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 4 for shape in shapes)
    return {"max_model_len": LONGEST, "block_size": 16, "kv_cache_memory_bytes": LONGEST * token_bytes}


@pytest.mark.parametrize("setting", ["usual", "tight", "swapping", "eager"])
def test_mixed_requests_are_what_they_are_alone(golden: Any, alone: list[Answer], setting: str) -> None:
    swapping = room_for_one(golden.config)
    settings = {"usual": {}, "tight": TIGHT, "swapping": swapping, "eager": {"enforce_eager": True}}[setting]
    served = Asked(plugin="qwen3_omni", model=str(golden.folder), **settings)
    try:
        found = served.run(_all(served, wires(golden)))
        served.assert_clean()
        assert (served.worker.scheduler.num_swaps > 0) == (setting == "swapping")
    finally:
        served.close()
    for number, expected in enumerate(alone):
        if number not in ABORTED:
            check(found[number], expected)


def test_batch_invariant_requests_are_bit_for_bit_what_they_are_alone(golden: Any) -> None:
    served = Asked(plugin="qwen3_omni", model=str(golden.folder), batch_invariant=True)
    try:
        expected = {n: served.ask_all(wire)[0] for n, wire in enumerate(wires(golden)) if n not in ABORTED}
        found = served.run(_all(served, wires(golden)))
        served.assert_clean()
    finally:
        served.close()
    for number, lone in expected.items():
        check(found[number], lone)


def test_streamed_speech_is_the_whole_one(model: Asked, golden: Any) -> None:
    wire = wires(golden)[12]
    whole = model.ask_all(wire)[0]
    wire.stream = True
    streamed = model.ask_all(wire)[0]
    assert torch.equal(streamed.tensors["audio"], whole.tensors["audio"])
    pieces = [chunk for chunk in streamed.chunks if type(chunk).__name__ == "AudioChunk"]
    assert len([piece for piece in pieces if len(piece.samples)]) > 1
