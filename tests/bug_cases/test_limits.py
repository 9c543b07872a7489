"""Requests at the very limit, and past it: each is answered or refused by itself, and nobody beside it suffers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

LIMIT = 160


@pytest.fixture(scope="module")
def small(start: Callable[..., Any]) -> Iterator[Any]:
    """A KV cache for two of the longest requests."""
    with start(plugin="orpheus", max_model_len=LIMIT, block_size=16, kv_cache_memory_bytes=2 * LIMIT * 1024) as site:
        yield site
        site.served.assert_clean()


def prompt(num_tokens: int, **params: Any) -> dict[str, Any]:
    ids = [1 + number % 250 for number in range(num_tokens)]
    return {"inputs": [{"type": "token_ids", "ids": ids}], "seed": 1, "params": params, "outputs": ["tensor:codes"]}


def outcome(site: Any, body: dict[str, Any]) -> tuple[Any, ...]:
    """Status, and what was said or why not."""
    response = site.post("/v1/generate", body)
    found = response.json()
    if response.status_code != 200:
        return response.status_code, found["error"]["code"], found["error"]["message"]
    usage = found["usage"]
    return response.status_code, found["finish_reason"], usage["prompt_tokens"] + usage["completion_tokens"]


# ---- case 55: at the limit, one below, one above, alone and in pairs ------------------------------------------------


LENGTHS = {"half": LIMIT // 2, "one below": LIMIT - 1, "at": LIMIT, "one above": LIMIT + 1, "ten times": 10 * LIMIT}


def test_prompts_around_the_limit_are_answered_or_refused_alone_and_together(small: Any) -> None:
    asked = {name: prompt(length, ignore_eos=True) for name, length in LENGTHS.items()}
    alone = {name: outcome(small, body) for name, body in asked.items()}
    for name in ("half", "one below"):  # cut at the limit, and told so
        assert alone[name] == (200, "length", LIMIT), alone[name]
    for name in ("at", "one above", "ten times"):
        assert alone[name][:2] == (400, "context_length_exceeded")
        assert str(LENGTHS[name]) in alone[name][2] and str(LIMIT) in alone[name][2]
    with ThreadPoolExecutor(2) as pool:
        for first, second in ((first, second) for first in asked for second in asked):
            found = list(pool.map(lambda name: outcome(small, asked[name]), (first, second)))
            assert found == [alone[first], alone[second]], f"{first} beside {second}"
    assert outcome(small, prompt(20, max_tokens=14)) == (200, "length", 34)


# ---- case 60: a prompt that is too long stalls nobody ----------------------------------------------------------------


def test_short_requests_behind_long_prompts_take_their_usual_time(small: Any) -> None:
    short = prompt(12, max_tokens=21)

    def seconds_of_ten(pool: ThreadPoolExecutor) -> float:
        started = time.monotonic()
        assert list(pool.map(lambda _: outcome(small, short)[0], range(10))) == [200] * 10
        return time.monotonic() - started

    with ThreadPoolExecutor(16) as pool:
        solo = max(seconds_of_ten(pool) for _ in range(3))
        for name in ("one below", "at", "one above", "ten times"):
            long = pool.submit(outcome, small, prompt(LENGTHS[name]))
            assert seconds_of_ten(pool) < 2 * solo + 1.0, name
            assert long.result(30)[0] in (200, 400)
