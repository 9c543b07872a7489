"""Reading and writing through the engine, against what the model's authors' code gave."""

from __future__ import annotations

from typing import Any

import pytest
from asking import Answer, Asked, token_ids

RUNS = ("text", "image", "audio", "video", "image_audio", "video_audio")
GREEDY = {"temperature": 0, "repetition_penalty": 1}


def ask(model: Asked, golden: Any, run: str, **params: Any) -> Answer:
    count = len(golden.facts["runs"][run]["greedy_ids"])
    params = {**GREEDY, "max_tokens": count, "use_audio_in_video": run == "video_audio", **params}
    return model.ask(messages=golden.messages(run), params=params)


@pytest.mark.parametrize("run", RUNS)
def test_answers_are_the_authors(model: Asked, golden: Any, run: str) -> None:
    facts, found = golden.facts["runs"][run], ask(model, golden, run)
    assert found.result.prompt_token_ids == facts["input_ids"]
    assert found.ids == [facts["greedy_ids"]]
    assert found.result.finish_reason == "length"
    counters = found.result.counters
    assert not any(name.startswith(("talker", "code")) for name in counters)
    assert counters["thinker.decode"] == len(facts["greedy_ids"]) and "thinker.tapped" not in counters


@pytest.mark.parametrize("run", RUNS)
def test_ids_are_read_as_they_are(model: Asked, golden: Any, run: str) -> None:
    facts = golden.facts["runs"][run]
    media = [part for part in golden.messages(run)[-1]["content"] if part["type"] != "text"]
    params = {**GREEDY, "max_tokens": 5, "use_audio_in_video": run == "video_audio"}
    found = model.ask(token_ids(facts["input_ids"]), *media, params=params)
    assert found.ids == [facts["greedy_ids"][:5]]


def test_together_they_are_what_they_are_alone(model: Asked, golden: Any) -> None:
    from asking import ask_for

    wires = []
    for run in RUNS * 2:
        params = {**GREEDY, "max_tokens": 12, "use_audio_in_video": run == "video_audio"}
        wires.append(ask_for(messages=golden.messages(run), params=params))
    for run, found in zip(RUNS * 2, model.ask_all(*wires), strict=True):
        assert found.ids == [golden.facts["runs"][run]["greedy_ids"]]


def test_media_seen_before_are_not_encoded_again(golden: Any) -> None:
    """But another picture of the same bytes is another; nor does a cache that is full keep anything wrong."""
    for size, again in ((2**20, 0), (0, 1), (5000, 1)):
        model = Asked(plugin="qwen3_omni", model=str(golden.folder), encoder_cache_bytes=size)
        try:
            for number in range(3):
                for run in ("image_audio", "video"):
                    found = ask(model, golden, run)
                    assert found.ids == [golden.facts["runs"][run]["greedy_ids"]]
                    encoded = [found.result.counters.get(f"{kind}_encoder.encode", 0) for kind in ("audio", "vision")]
                    wanted = 1 if number == 0 else again
                    assert encoded == ([wanted, wanted] if run == "image_audio" else [0, wanted])
            model.assert_clean()
        finally:
            model.close()
