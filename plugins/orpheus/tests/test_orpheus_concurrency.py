"""Thirty-two requests together, a third of them aborted: each of the others is spoken as it is alone.

Under every setting that may change how work is batched, cut, cached or moved. The oracle is a request's lone run, by
the same settings where results are promised bit for bit, else by the usual ones.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mstar.errors import RequestError

MAX_MODEL_LEN = 288
KV_TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # keys and values, 2 layers, 2 heads of 16, float32: the tiny model's
ROOM_FOR_TWO = {"kv_cache_memory_bytes": 2 * MAX_MODEL_LEN * KV_TOKEN_BYTES, "block_size": 16}
SETTINGS: dict[str, dict[str, Any]] = {
    "usual": {},
    "swapping": ROOM_FOR_TWO,
    "no prefix cache": {"enable_prefix_caching": False},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "recomputing": {"swap_space_bytes": 0, **ROOM_FOR_TWO},
    "overlapped and swapping": {"overlap": True, **ROOM_FOR_TWO},
}

NUM_REQUESTS = 32
TWO_SEGMENTS = (5, 18)
VOICES = ("tara", "zoe", "zac", "jess", "leo", "mia", "julia", "leah", "dan", None)
WORDS = "sea sand stone bright cold apple letter under slowly never again river and the of".split()
# Few candidates: where thousands are as likely as each other, float32 cannot promise the same draw in every batch.
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "top_k": 20, "top_p": 1.0, "repetition_penalty": 1.0},
    {"temperature": 0.8, "top_k": 10},
    {"temperature": 0.9, "top_k": 20, "min_p": 0.02, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 0},
)


@pytest.fixture(scope="module")
def aborts() -> list[int | None]:
    """After how many chunks each request is aborted; None: never."""
    draw = random.Random(2)
    unlucky = set(draw.sample([number for number in range(NUM_REQUESTS) if number not in TWO_SEGMENTS], 11))
    return [draw.randint(0, 12) if number in unlucky else None for number in range(NUM_REQUESTS)]


@pytest.fixture(scope="module")
def requests(speech: Any, tiny_checkpoint: Any, aborts: list[int | None]) -> list[dict[str, Any]]:
    """No two alike; some end by themselves, some by their limit, and none that is to be aborted before it is."""
    stop = tiny_checkpoint.config.tokens.end_of_speech
    draw, made = random.Random(1), []
    for number, after in enumerate(aborts):
        text = f"{number}: " + " ".join(draw.choices(WORDS, k=draw.randint(1, 6)))
        params = {"voice": VOICES[number % len(VOICES)], "max_tokens": draw.randint(24, 49)}
        if after is not None:
            params |= {"max_tokens": 180, "ignore_eos": True}
        elif number in TWO_SEGMENTS:
            text = " ".join(f"{text} {more}." for more in range(16))[:330]
        elif number % 3 == 0:
            params["logit_bias"] = {str(stop): 45.0}
        if number % 7 == 3:
            params["codec_noise"] = False
        made.append(speech(text, seed=1000 + number, **params, **SAMPLING[number % len(SAMPLING)]))
    assert len({request["inputs"][0]["text"] for request in made}) == NUM_REQUESTS
    return made


def lone_runs(served: Any, requests: list[dict[str, Any]], aborts: list[int | None]) -> dict[int, Any]:
    """Request number -> its answer when nothing else runs, for those that are not aborted."""
    return {number: served.ask(requests[number]) for number, after in enumerate(aborts) if after is None}


@pytest.fixture(scope="module")
def alone(serving: Any, tiny_folder: Path, requests: list[dict[str, Any]], aborts: list[int | None]) -> dict[int, Any]:
    with serving(tiny_folder, max_model_len=MAX_MODEL_LEN) as served:
        answers = lone_runs(served, requests, aborts)
        served.assert_clean()
    reasons = [answer.result.finish_reason for answer in answers.values()]
    assert min(reasons.count("stop"), reasons.count("length")) >= 3
    return answers


def together(served: Any, requests: list[dict[str, Any]], aborts: list[int | None]) -> dict[int, Any]:
    """The answers of those that are not aborted, all having run at once."""
    draw = random.Random(3)
    delays = [draw.uniform(0.0, 0.4) for _ in requests]
    answers = served.ask_all(requests, after_s=delays, abort_after=aborts)
    for answer, after in zip(answers, aborts, strict=True):
        if after is None:
            assert not isinstance(answer, BaseException), repr(answer)
        else:
            assert isinstance(answer, RequestError) and answer.code == "aborted", repr(answer)
    served.assert_clean()
    return {number: answers[number] for number, after in enumerate(aborts) if after is None}


@pytest.mark.parametrize("setting", SETTINGS)
def test_requests_among_others_are_spoken_as_alone(
    serving: Any,
    tiny_folder: Path,
    requests: list[dict[str, Any]],
    aborts: list[int | None],
    alone: dict[int, Any],
    setting: str,
) -> None:
    with serving(tiny_folder, max_model_len=MAX_MODEL_LEN, **SETTINGS[setting]) as served:
        answers = together(served, requests, aborts)
        if "swapping" in setting:
            assert served.engine.state.stats.swaps > 0
        elif setting == "recomputing":
            assert served.worker.scheduler.num_rebuilds > 0 and served.engine.state.stats.swaps == 0
        else:
            num_batches, num_rows, _ = served.engine.state.stats.method_s["lm.decode"]
            # Prompts in small pieces keep requests apart: decoding steps are short beside them.
            assert num_rows > (4 if setting == "chunks of 7" else 8) * num_batches
    for number, answer in answers.items():
        right = alone[number]
        assert answer.ids == right.ids, number
        assert answer.result.finish_reason == right.result.finish_reason
        assert answer.result.usage == right.result.usage
        assert answer.result.counts == right.result.counts
        assert answer.result.counters["lm.decode"] == right.result.counters["lm.decode"]
        assert answer.pcm.shape == right.pcm.shape
        assert np.abs(answer.pcm - right.pcm).max(initial=0) <= 2, number


def test_flat_sampling_draws_among_others_what_it_draws_alone(serving: Any, tiny_folder: Path, speech: Any) -> None:
    """All candidates in play: a draw lies near the border of two where float32 could tell them apart only by luck."""
    flat = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "max_tokens": 28}
    requests = [speech(f"{number} {WORDS[number]}", seed=number, **flat) for number in range(8)]
    with serving(tiny_folder, max_model_len=MAX_MODEL_LEN) as served:
        alone = [served.ask(request) for request in requests]
        together = served.ask_all(requests)
        served.assert_clean()
    assert [answer.ids for answer in together] == [answer.ids for answer in alone]
    assert len({tuple(answer.ids) for answer in alone}) == len(requests)
    assert all(len(answer.ids) > 0 for answer in alone)


@pytest.fixture(scope="module")
def invariant_alone(
    serving: Any, tiny_folder: Path, requests: list[dict[str, Any]], aborts: list[int | None]
) -> dict[int, Any]:
    with serving(tiny_folder, max_model_len=MAX_MODEL_LEN, batch_invariant=True) as served:
        return lone_runs(served, requests, aborts)


@pytest.mark.parametrize("room", [{}, ROOM_FOR_TWO], ids=["ample", "swapping"])
def test_batch_invariant_requests_are_bit_for_bit_what_they_are_alone(
    serving: Any,
    tiny_folder: Path,
    requests: list[dict[str, Any]],
    aborts: list[int | None],
    invariant_alone: dict[int, Any],
    room: dict[str, Any],
) -> None:
    with serving(tiny_folder, max_model_len=MAX_MODEL_LEN, batch_invariant=True, **room) as served:
        answers = together(served, requests, aborts)
        assert not room or served.engine.state.stats.swaps > 0
    for number, answer in answers.items():
        assert answer.ids == invariant_alone[number].ids, number
        assert answer.samples.tobytes() == invariant_alone[number].samples.tobytes(), number
