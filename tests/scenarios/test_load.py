"""Overload and impatience on the real worker: stuck steps, deadlines, clients that leave, fairness, slow readers."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from mstar.errors import RequestError
from mstar.server.engine import RequestHandle


def gauge(served: Any, name: str) -> float:
    """The value of a metric without labels, as an operator would read it."""
    text = served.engine.metrics.render()[0].decode()
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))


def held(served: Any) -> dict[str, float]:
    """What requests hold, as the metrics say; values of a metric with labels are added up."""
    names = ("mstar_requests_running", "mstar_requests_waiting", "mstar_slot_rows_used", "mstar_kv_pages_used")
    lines = served.engine.metrics.render()[0].decode().splitlines()
    return {
        name: sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))
        for name in names
    }


async def until(condition: Callable[[], Any], *, within_s: float) -> float:
    """Seconds until `condition` holds."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() < started + within_s, f"not within {within_s} s"
        await asyncio.sleep(0.01)
    return time.monotonic() - started


async def ended_with(handle: RequestHandle) -> RequestError:
    with pytest.raises(RequestError) as caught:
        async for _ in handle:
            pass
    return caught.value


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_lasts_too_long_is_reported_refuses_more_and_is_forgiven(
    fresh: Callable[..., Any], make: Callable[..., Any], caplog: pytest.LogCaptureFixture, overlap: bool
) -> None:
    served = fresh(overlap=overlap, stall_timeout_s=1.0)
    state = served.engine.state
    slow = make("trouble", "slow", kind="sleep", sleep_s=2.5, steps=1)

    async def scenario() -> None:
        handle = await served.submit(slow)
        assert state.unhealthy is None
        await until(lambda: state.unhealthy, within_s=2.4)
        assert state.stuck is not None and re.fullmatch(r"trouble\.act has been running for [12] s", state.stuck)
        assert state.unready == state.unhealthy == state.stuck
        assert gauge(served, "mstar_long_step_seconds") >= 1 and gauge(served, "mstar_ready") == 0
        with pytest.raises(RequestError, match=r"trouble\.act has been running") as caught:
            await served.submit(make("generate", "more"))
        assert caught.value.status == 503
        async for _ in handle:
            pass
        assert handle.result is not None and handle.result.finish_reason == "stop"
        await until(lambda: state.unhealthy is None, within_s=1)
        assert gauge(served, "mstar_stalls_total") == 1 and gauge(served, "mstar_ready") == 1

    with caplog.at_level(logging.ERROR, logger="mstar"):
        served.run(scenario())
    assert [record.message[:11] for record in caplog.records].count("trouble.act") == 1
    served.assert_clean()


@pytest.mark.parametrize("phase", ["queued", "decoding", "codec"])
def test_a_client_that_leaves_frees_all_within_a_second(both: Any, make: Callable[..., Any], phase: str) -> None:
    blockers = [make("trouble", "b", kind="sleep", sleep_s=0.02, steps=1000) for _ in range(32 * (phase == "queued"))]
    ask = {
        "queued": make("generate", "waits"),
        "decoding": make("trouble", "slow", kind="sleep", sleep_s=0.02, steps=1000),
        "codec": make("nested", "speak", max_frames=400),
    }[phase]

    async def scenario() -> None:
        blocking = [await served.submit(blocker) for blocker in blockers]
        handle = await served.submit(ask)
        if phase == "queued":
            assert served.engine.state.num_waiting == 1
        else:
            if phase == "codec":
                await anext(handle)
            await until(lambda: held(served)["mstar_kv_pages_used"] > 0, within_s=5)
        assert not handle.is_over
        for each in (*blocking, handle):
            each.abort()
        await until(lambda: not any(held(served).values()), within_s=1)
        assert (await ended_with(handle)).code == "aborted"

    served = both
    served.run(scenario())
    served.assert_clean()


@pytest.mark.parametrize("phase", ["queued", "running"])
def test_a_deadline_is_kept_and_frees_all_within_a_second(both: Any, make: Callable[..., Any], phase: str) -> None:
    slow = make("trouble", "slow", kind="sleep", sleep_s=0.02, steps=1000)

    async def scenario() -> None:
        number = 32 if phase == "queued" else 0
        blocking = [await both.submit(slow) for _ in range(number)]
        wire = slow.wire()
        wire.timeout_s = 0.4
        started = time.monotonic()
        error = await ended_with(await both.engine.submit(wire))
        assert 0.4 <= time.monotonic() - started < 1.2
        assert (error.status, error.code) == (504, "deadline_exceeded")
        assert f"was {phase} when its 0.4 s were over" in error.message and "timeout_s" in error.message
        for handle in blocking:
            handle.abort()
        await until(lambda: not any(held(both).values()), within_s=1)

    both.run(scenario())
    both.assert_clean()


def test_whole_requests_are_served_as_fast_as_streams(fresh: Callable[..., Any], make: Callable[..., Any]) -> None:
    served = fresh(max_num_seqs=64)
    ask = make("trouble", "x", kind="sleep", sleep_s=0.04, steps=12)  # a step costs the same for one row and for many

    async def seconds(*, stream: bool) -> float:
        wire = ask.wire()
        wire.stream = stream
        started = time.monotonic()
        async for _ in await served.engine.submit(wire):
            pass
        return time.monotonic() - started

    async def scenario() -> None:
        alone = [await seconds(stream=False) for _ in range(3)]
        streams = [asyncio.ensure_future(seconds(stream=True)) for _ in range(50)]
        await asyncio.sleep(0.1)
        whole = await asyncio.gather(*(seconds(stream=False) for _ in range(5)))
        assert max(whole) < 3 * max(alone), f"alone {alone}, beside streams {whole}"
        assert max(whole) < 1.5 * max(await asyncio.gather(*streams))

    served.run(scenario())
    served.assert_clean()


def test_who_reads_slowly_holds_nothing_on_the_device_and_loses_nothing(both: Any, make: Callable[..., Any]) -> None:
    ask = make("nested", "speak", max_frames=40)

    async def scenario() -> list[Any]:
        handle = await both.submit(ask)
        first = await anext(handle)
        await until(lambda: handle.is_over, within_s=20)
        await until(lambda: not any(held(both).values()), within_s=1)
        return [first, *[chunk async for chunk in handle]]

    chunks, at_once = both.run(scenario()), both.ask(ask).chunks
    assert [type(chunk) for chunk in chunks] == [type(chunk) for chunk in at_once]
    both.assert_clean()
