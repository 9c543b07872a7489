"""Workers that are killed, stopped or stuck: who is told what, and that the others never notice."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mstar.errors import ConfigError, RequestError

STALL_S = 3.0

pytestmark = pytest.mark.slow


Fleets = Callable[[str], Any]


@pytest.fixture(scope="module")
def _fleets(spread_once: Callable[..., Any], decoding_twice: str) -> Fleets:
    settings = {"two": {"workers": 2}, "three groups": {"placement": decoding_twice}}
    return functools.cache(lambda name: spread_once(**settings[name], stall_timeout_s=STALL_S))


@pytest.fixture
def fleets(_fleets: Fleets) -> Iterator[Fleets]:
    """Workers by how they are placed: "two" with everything, or "three groups"; all ready before and after."""
    used: list[Any] = []

    def get(name: str) -> Any:
        used.append(_fleets(name))
        used[-1].wait_for_workers()
        return used[-1]

    yield get
    for served in used:
        served.wait_for_workers()
        served.assert_clean()


def slow(make: Callable[..., Any], *, sleep_s: float = 0.1, seed: int = 0, steps: int = 60) -> Any:
    return make("trouble", "slow", kind="sleep", sleep_s=sleep_s, steps=steps, seed=seed)


async def outcome(handle: Any) -> RequestError | None:
    try:
        async for _ in handle:
            pass
    except RequestError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("placing", "group", "num_lost"),
    [("two", "all", 2), ("three groups", "prefill", 4), ("three groups", "decode", 2), ("three groups", "streams", 4)],
)
def test_a_killed_worker_fails_its_requests_at_once_and_comes_back(
    fleets: Fleets, make: Callable[..., Any], placing: str, group: str, num_lost: int
) -> None:
    served = fleets(placing)
    asks = [slow(make, seed=seed, steps=20) for seed in range(4)]

    async def scenario() -> tuple[Any, list[RequestError | None]]:
        handles = [await served.submit(ask) for ask in asks]
        await asyncio.sleep(0.3)
        victim = next(worker for worker in served.engine.workers() if worker.group == group)
        assert victim.running == num_lost
        killed = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        found = await asyncio.gather(*map(outcome, handles))
        first = time.monotonic() - killed
        assert first < 5
        return victim, found

    victim, found = served.run(scenario())
    errors = [error for error in found if error is not None]
    assert len(errors) == num_lost and {(error.status, error.code) for error in errors} == {(503, "worker_lost")}
    name = f"worker {victim.worker}" + (f" ({group})" if placing != "two" else "")
    assert all(f"{name} has ended" in error.message and "SIGKILL" in error.message for error in errors)
    served.assert_nothing_held()  # by those that are left
    state, most = served.engine.state, served.config.max_num_seqs
    is_left = num_lost < len(asks)
    assert state.most_running == (most if is_left else 0) and (state.unhealthy is None) == is_left
    if is_left:
        served.check_all([make("generate", "meanwhile", seed=seed) for seed in range(4)])  # by the other one
    served.wait_for_workers()
    assert served.engine.workers()[victim.worker].restarts == victim.restarts + 1
    assert state.unhealthy is None and state.most_running == served.most_running
    served.check_all([make(task, "afterwards", seed=seed) for seed in range(2) for task in ("generate", "nested")])


@pytest.mark.parametrize(("placing", "group"), [("two", "all"), ("three groups", "streams")])
def test_a_session_of_a_killed_worker_is_open_no_more(
    fleets: Fleets, make: Callable[..., Any], placing: str, group: str
) -> None:
    served = fleets(placing)
    for name in ("a", "b"):
        served.ask(make("session", "opening", session=name))
    killed = {worker.pid for worker in served.engine.workers() if worker.group == group}
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    while killed & {worker.pid for worker in served.engine.workers()}:
        time.sleep(0.01)
    for name in ("a", "b"):
        with pytest.raises(RequestError) as caught:
            served.drop_session(name)
        assert caught.value.status == 404


@pytest.mark.parametrize(
    ("placing", "group", "how"),
    [("two", "all", "stopped"), ("three groups", "streams", "stopped"), ("three groups", "decode", "without end")],
)
def test_a_worker_that_hangs_is_found_and_started_again(
    fleets: Fleets, make: Callable[..., Any], placing: str, group: str, how: str
) -> None:
    served = fleets(placing)
    before = sum(worker.restarts for worker in served.engine.workers())

    async def scenario() -> RequestError | None:
        handle = await served.submit(slow(make, sleep_s=10 if how == "without end" else 0.1, steps=600))
        victim = next(worker for worker in served.engine.workers() if worker.running and worker.group == group)
        if how == "stopped":
            os.kill(victim.pid, signal.SIGSTOP)
        return await asyncio.wait_for(outcome(handle), STALL_S + 20)

    error = served.run(scenario())
    assert error is not None and (error.status, error.code) == (503, "worker_lost")
    assert ("not been heard" if how == "stopped" else "trouble.act had been running") in error.message
    assert placing == "two" or f"({group})" in error.message
    served.wait_for_workers()
    assert sum(worker.restarts for worker in served.engine.workers()) == before + 1
    served.check_all([make("generate", "afterwards", seed=seed) for seed in range(4)])


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


STARTS = pytest.mark.parametrize(
    ("placing", "names"),
    [({"workers": 2}, "worker 0|worker 1"), ({"placement": "three"}, r"worker 0 \(prefill\)|worker 1 \(decode\)")],
    ids=["two", "three groups"],
)


@STARTS
def test_a_start_that_fails_names_the_worker_and_the_real_cause(
    spread: Callable[..., Any], placing: dict[str, Any], names: str
) -> None:
    with pytest.raises(ConfigError, match=rf"({names}) has ended: .*--kv-cache-memory-bytes"):
        spread(**placing, kv_cache_memory_bytes=1)


@STARTS
def test_a_start_that_takes_too_long_says_who_is_late(
    spread: Callable[..., Any], placing: dict[str, Any], names: str
) -> None:
    started, (first, second) = time.monotonic(), names.split("|")
    with pytest.raises(ConfigError, match=rf"not ready after 1 s: {first}: .*, {second}: .*--start-timeout"):
        spread(**placing, start_timeout_s=1)
    assert time.monotonic() - started < 30
