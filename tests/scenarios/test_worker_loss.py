"""Workers that are killed, stopped or stuck: who is told what, and that the others never notice."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mstar.errors import ConfigError, RequestError

STALL_S = 3.0

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def _pair(spread_once: Callable[..., Any]) -> Any:
    return spread_once(workers=2, stall_timeout_s=STALL_S)


@pytest.fixture
def pair(_pair: Any) -> Iterator[Any]:
    """Two workers, both ready before and after."""
    _pair.wait_for_workers()
    yield _pair
    _pair.wait_for_workers()
    _pair.assert_clean()


def slow(make: Callable[..., Any], *, sleep_s: float = 0.1, seed: int = 0, steps: int = 60) -> Any:
    return make("trouble", "slow", kind="sleep", sleep_s=sleep_s, steps=steps, seed=seed)


async def outcome(handle: Any) -> RequestError | None:
    try:
        async for _ in handle:
            pass
    except RequestError as error:
        return error
    return None


def test_a_killed_worker_fails_its_requests_at_once_and_comes_back(pair: Any, make: Callable[..., Any]) -> None:
    asks = [slow(make, seed=seed, steps=20) for seed in range(4)]

    async def scenario() -> list[RequestError | None]:
        handles = [await pair.submit(ask) for ask in asks]
        await asyncio.sleep(0.3)
        victim = pair.engine.workers()[0]
        assert victim.running == 2
        killed = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        found = await asyncio.gather(*map(outcome, handles))
        first = time.monotonic() - killed
        assert first < 5
        return found

    found = pair.run(scenario())
    errors = [error for error in found if error is not None]
    assert len(errors) == 2 and {(error.status, error.code) for error in errors} == {(503, "worker_lost")}
    assert all("worker 0" in error.message and "SIGKILL" in error.message for error in errors)
    state = pair.engine.state
    assert state.unhealthy is None and state.most_running == pair.config.max_num_seqs
    pair.check_all([make("generate", "meanwhile", seed=seed) for seed in range(4)])  # by the other one
    pair.wait_for_workers()
    assert pair.engine.workers()[0].restarts == 1 and state.most_running == 2 * pair.config.max_num_seqs
    pair.check_all([make("generate", "afterwards", seed=seed) for seed in range(4)])


def test_a_session_of_a_killed_worker_is_open_no_more(pair: Any, make: Callable[..., Any]) -> None:
    for name in ("a", "b"):
        pair.ask(make("session", "opening", session=name))
    killed = {worker.pid for worker in pair.engine.workers()}
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    while killed & {worker.pid for worker in pair.engine.workers()}:
        time.sleep(0.01)
    for name in ("a", "b"):
        with pytest.raises(RequestError) as caught:
            pair.drop_session(name)
        assert caught.value.status == 404


@pytest.mark.parametrize("how", ["stopped", "in a step without end"])
def test_a_worker_that_hangs_is_found_and_started_again(pair: Any, make: Callable[..., Any], how: str) -> None:
    before = sum(worker.restarts for worker in pair.engine.workers())

    async def scenario() -> RequestError | None:
        handle = await pair.submit(slow(make, sleep_s=10 if how == "in a step without end" else 0.1, steps=600))
        (victim,) = [worker for worker in pair.engine.workers() if worker.running]
        if how == "stopped":
            os.kill(victim.pid, signal.SIGSTOP)
        return await asyncio.wait_for(outcome(handle), STALL_S + 20)

    error = pair.run(scenario())
    assert error is not None and (error.status, error.code) == (503, "worker_lost")
    assert ("not been heard" if how == "stopped" else "trouble.act had been running") in error.message
    pair.wait_for_workers()
    assert sum(worker.restarts for worker in pair.engine.workers()) == before + 1
    pair.check_all([make("generate", "afterwards", seed=seed) for seed in range(4)])


def test_without_its_only_worker_a_server_says_so_until_it_is_back(
    spread: Callable[..., Any], make: Callable[..., Any]
) -> None:
    served = spread(workers=1, max_num_seqs=1)

    async def scenario() -> None:
        running, queued = await served.submit(slow(make)), await served.submit(make("generate", "queued"))
        os.kill(served.engine.workers()[0].pid, signal.SIGKILL)
        error = await asyncio.wait_for(outcome(running), 5)
        assert error is not None and error.status == 503
        assert "SIGKILL" in served.engine.state.unhealthy and served.engine.state.dead is None
        with pytest.raises(RequestError) as caught:
            await served.submit(make("generate", "refused"))
        assert caught.value.status == 503
        assert await asyncio.wait_for(outcome(queued), 60) is None, "it has waited for the new one"

    served.run(scenario())
    assert served.engine.state.unhealthy is None
    served.check_all([make("generate", "afterwards")])


def test_a_start_that_fails_names_the_worker_and_the_real_cause(spread: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"worker [01] has ended: .*--kv-cache-memory-bytes"):
        spread(workers=2, kv_cache_memory_bytes=1)


def test_a_start_that_takes_too_long_says_who_is_late(spread: Callable[..., Any]) -> None:
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"not ready after 1 s: worker 0: .*, worker 1: .*--start-timeout"):
        spread(workers=2, start_timeout_s=1)
    assert time.monotonic() - started < 30
