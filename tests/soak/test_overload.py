"""Ten times what a server can do: it answers, refuses or is done soon, and afterwards it is as quick as before.

The bound on the event loop's lag is twice what is promised (50 ms at the 99th percentile), since tests share their
machine; the share below 50 ms is logged. The server measures it itself, 20 times a second.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import math
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from serve_process import ServeProcess

logger = logging.getLogger(__name__)

MAX_NUM_SEQS = 4
SPEECH: dict[str, Any] = {"input": "On and on and on.", "ignore_eos": True, "max_tokens": 140, "seed": 1}
NUM_BYTES = 44 + 19 * 2048 * 2
"""At least so many bytes has a whole answer: at most one frame of twenty may be lost to a stop token passed over."""
OVERLOAD_S = 30.0
LAG_BOUND_S = 0.1


@dataclass(frozen=True, slots=True)
class Outcome:
    status: int
    seconds: float
    num_bytes: int
    retry_after: str | None
    is_broken: bool = False


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    flags = ("--plugin", "orpheus", "--max-model-len", "512", "--max-num-seqs", str(MAX_NUM_SEQS), "--max-queue", "8")
    with ServeProcess(*flags) as server:
        yield server


async def speak(client: httpx.AsyncClient, *, stream: bool = False) -> Outcome:
    started = time.monotonic()
    try:
        response = await client.post("/v1/audio/speech", json=SPEECH | {"stream": stream})
    except httpx.HTTPError as error:
        return Outcome(-1, time.monotonic() - started, 0, repr(error), is_broken=True)
    seconds = time.monotonic() - started
    return Outcome(response.status_code, seconds, len(response.content), response.headers.get("retry-after"))


def open_client(server: ServeProcess) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
    return httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits)


async def closed_loop(client: httpx.AsyncClient, *, clients: int, seconds: float, stream: bool) -> list[Outcome]:
    """Each client asks again as soon as it is answered."""
    until = time.monotonic() + seconds

    async def one() -> list[Outcome]:
        found = []
        while time.monotonic() < until:
            found.append(await speak(client, stream=stream))
        return found

    return [outcome for found in await asyncio.gather(*(one() for _ in range(clients))) for outcome in found]


async def alone(client: httpx.AsyncClient, *, count: int) -> float:
    """Median seconds of requests one after the other."""
    outcomes = [await speak(client) for _ in range(count)]
    assert all(outcome.status == 200 for outcome in outcomes), outcomes
    return statistics.median(outcome.seconds for outcome in outcomes)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_overload_is_refused_and_then_it_is_quick_again(server: ServeProcess) -> None:
    async def scenario() -> tuple[float, float, list[Outcome], float]:
        async with open_client(server) as client:
            before = await alone(client, count=8)
            usual = await closed_loop(client, clients=MAX_NUM_SEQS, seconds=6, stream=False)
            assert {outcome.status for outcome in usual} == {200}
            rate = len(usual) / 6
            chance, works = random.Random(1), []
            until = time.monotonic() + OVERLOAD_S
            due = time.monotonic()
            while due < until:  # arrivals do not wait for answers
                works.append(asyncio.create_task(speak(client, stream=len(works) % 2 == 0)))
                due += chance.expovariate(10 * rate)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
            outcomes = await asyncio.gather(*works)
            return rate, before, outcomes, await alone(client, count=8)

    rate, before, outcomes, after = asyncio.run(scenario())
    counts = collections.Counter(outcome.status for outcome in outcomes)
    logger.info("%s", f"sustainable {rate:.1f}/s; asked {len(outcomes) / OVERLOAD_S:.1f}/s: {dict(counts)}")
    logger.info("%s", f"alone before {before:.3f} s, after {after:.3f} s")
    assert set(counts) <= {200, 429, 503}, (counts, [outcome for outcome in outcomes if outcome.is_broken])
    assert counts[429] > 0 and counts[200] >= 0.4 * rate * OVERLOAD_S, counts
    for outcome in outcomes:
        if outcome.status == 200:
            assert outcome.num_bytes >= NUM_BYTES, outcome
        else:
            assert outcome.retry_after is not None and 1 <= int(outcome.retry_after) <= 60
    refused = sorted(outcome.seconds for outcome in outcomes if outcome.status != 200)
    assert refused[len(refused) // 2] < 1.0, "refusals should not wait"
    assert after < 2 * before + 0.2
    assert not any(server.metrics()[f"mstar_requests_{name}"] for name in ("running", "waiting"))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_event_loop_keeps_up_under_load(server: ServeProcess) -> None:
    async def scenario() -> None:
        async with open_client(server) as client:
            await closed_loop(client, clients=2 * MAX_NUM_SEQS, seconds=10, stream=True)

    before = server.histogram("mstar_event_loop_lag_seconds")
    asyncio.run(scenario())
    after = server.histogram("mstar_event_loop_lag_seconds")
    below = {bound: after[bound] - before[bound] for bound in after}
    total = below[math.inf]
    shares = {bound: number / total for bound, number in below.items()}
    logger.info("%s", f"event loop lag: {100 * shares[0.05]:.2f} % below 50 ms, {100 * shares[0.01]:.1f} % below 10 ms")
    assert total > 50
    assert shares[LAG_BOUND_S] >= 0.99, shares
    assert shares[0.025] >= 0.5, shares
