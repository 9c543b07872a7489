"""Requests at the limits of each stage and beyond, over HTTP: answered or refused with the numbers, alone and together.

Cases 27, 55 and 59 of tests/bug_cases/README.md.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from asking import Asked, image
from sounds import sound_file, wave

from mstar.media.audio import encode_wav

LIMIT = 128
NATIVE = "/v1/generate"


@pytest.fixture(scope="module")
def serving() -> Iterator[Asked]:
    """Few tokens a step, a cache of encoders for less than one sound, KV for two of the longest requests."""
    asked = Asked(
        plugin="qwen3_omni", model="tiny", max_model_len=LIMIT, max_num_batched_tokens=24, encoder_cache_bytes=4000,
        kv_cache_memory_bytes=2 * LIMIT * KV_BYTES, block_size=16, max_audio_duration_s=1000, max_num_seqs=4,
    )  # fmt: skip
    yield asked
    asked.close()


KV_BYTES = 2 * 4 * 2 * 16 * 4 + 2 * 2 * 2 * 16 * 4
"""Of a token: the thinker's four layers and the talker's two, of two heads of 16 float32 keys and values."""


@pytest.fixture(scope="module")
def http(serving: Asked) -> Iterator[httpx.Client]:
    with serving.http(max_body_bytes=2**25) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def outcome(http: httpx.Client, body: dict[str, Any]) -> tuple[Any, ...]:
    """Status, and what was said, or why not."""
    answer = http.post(NATIVE, json=body | {"seed": 1})
    found = answer.json()
    if answer.status_code != 200:
        assert set(found["error"]) == {"message", "type", "param", "code"} and found["error"]["param"]
        return answer.status_code, found["error"]["code"], found["error"]["message"]
    texts = [one["token_ids"] for one in found["outputs"] if one["type"] == "text"]
    return answer.status_code, found["finish_reason"], found["usage"]["prompt_tokens"], texts, found["counts"]


def prompt(config: Any, count: int, **request: Any) -> dict[str, Any]:
    """A user's turn and the beginning of the assistant's: so many tokens."""
    turns = config.turns
    ids = [turns.start, turns.user, *(1 + number % 200 for number in range(count - 4)), turns.start, turns.assistant]
    params = {"ignore_eos": True, "temperature": 0, "talker_temperature": 0, **request.pop("params", {})}
    return {"inputs": [{"type": "token_ids", "ids": ids}], "params": params, **request}


def test_prompts_around_the_limit_of_each_stage_alone_and_together(model: Asked, http: httpx.Client) -> None:
    config = model.model.checkpoint.config
    spoken = {"outputs": ["text", "audio"], "params": {"max_tokens": 2, "talker_max_tokens": 4}}
    asked = {
        **{count: prompt(config, count, params={"max_tokens": 3}) for count in (LIMIT - 1, LIMIT, LIMIT + 1)},
        **{f"spoken {count}": prompt(config, count, **spoken) for count in range(LIMIT - 9, LIMIT - 2)},
        "spoken short": prompt(config, 20, **spoken),
    }
    alone = {name: outcome(http, body) for name, body in asked.items()}
    assert alone[LIMIT - 1][:3] == (200, "length", LIMIT - 1) and len(alone[LIMIT - 1][3][0]) == 1
    for count in (LIMIT, LIMIT + 1):
        assert alone[count][:2] == (400, "context_length_exceeded")
        assert f"{count} tokens" in alone[count][2] and f"fit into {LIMIT}" in alone[count][2]
    frames = {}
    for name, found in alone.items():
        if str(name).startswith("spoken") and found[0] == 200:
            frames[name] = found[4]["frames"]
        elif str(name).startswith("spoken"):
            assert found[1] == "context_length_exceeded" and "too long to be answered aloud" in found[2]
    assert frames["spoken short"] == 3 and sorted(frames.values())[:2] == [1, 2], frames
    assert 0 < len(frames) < 8
    names = list(asked)
    with ThreadPoolExecutor(2) as pool:
        for first, second in zip(names, names[3:] + names[:3], strict=True):
            found = list(pool.map(lambda name: outcome(http, asked[name]), (first, second)))
            assert found == [alone[first], alone[second]], f"{first} beside {second}"


def sound(seconds: float) -> dict[str, Any]:
    data = base64.b64encode(encode_wav(wave(seconds), sample_rate=16000)).decode()
    return {"type": "audio", "data": f"data:audio/wav;base64,{data}"}


def test_media_larger_than_a_step_or_the_cache_are_read_and_larger_than_the_limit_refused(
    model: Asked, http: httpx.Client
) -> None:
    """A step takes 24 tokens, the cache of encoders holds fewer; one sound has 65, and two of them do not fit."""
    picture = image(np.zeros((128, 128, 3), np.uint8))
    few = {"params": {"max_tokens": 2, "temperature": 0}}
    ask = {"type": "text", "text": "?"}
    for parts, tokens in (([sound(5)], 65), ([picture, picture, picture], 48), ([picture, sound(3)], 16 + 39)):
        body = {"inputs": [*parts, ask], **few}
        alone = outcome(http, body)
        assert alone[0] == 200 and tokens < alone[2] < tokens + 20
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(outcome, [http] * 2, [body] * 2)) == [alone] * 2
    for parts, told in (
        ([sound(5), sound(5)], "130 of them 10.0 s of sound"), ([picture] * 9, "144 of them pictures"),
        ([sound(11)], "143 of them 11.0 s of sound"),
    ):  # fmt: skip
        start = time.monotonic()
        status, code, message = outcome(http, {"inputs": [*parts, ask], **few})
        assert (status, code) == (400, "context_length_exceeded") and time.monotonic() - start < 5
        assert told in message and f"fit into {LIMIT}" in message
    assert outcome(http, {"inputs": [ask], **few})[0] == 200


def test_sixteen_minutes_are_refused_with_both_numbers(model: Asked, http: httpx.Client) -> None:
    data = sound_file(wave(960, rate=8000, hertz=3)[None], rate=8000, codec="pcm_mulaw")
    long = {"type": "audio", "data": "data:audio/wav;base64," + base64.b64encode(data).decode()}
    status, code, message = outcome(http, {"inputs": [long]})
    assert (status, code) == (400, "context_length_exceeded")
    assert "12480 of them 960.0 s of sound" in message and f"fit into {LIMIT}" in message
