"""When requests come, and who lets them go: open loop by a seeded process, or closed loop by the answers.

Knows nothing of what a request is.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

Send = Callable[[int, float], Coroutine[Any, Any, None]]
"""Makes request number n, whose time is given on `time.perf_counter`'s clock."""


def arrivals(rate: float, *, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds from the start, for ever. Gaps are gamma-distributed: burstiness 1 is Poisson, less comes in bursts."""
    draw, at = random.Random(seed), 0.0
    while True:
        yield at
        at += draw.gammavariate(burstiness, 1 / (rate * burstiness))


async def closed_loop(send: Send, *, concurrency: int, num_requests: int | None, duration_s: float | None) -> None:
    """Always so many requests at once; each answer lets the next one go, until number or time is over."""
    began, numbers = time.perf_counter(), itertools.islice(itertools.count(), num_requests)

    async def one_after_the_other() -> None:
        for number in numbers:
            if duration_s is not None and time.perf_counter() - began >= duration_s:
                return
            await send(number, time.perf_counter())

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one_after_the_other())


async def open_loop(send: Send, *, times: Iterator[float], num_requests: int | None, duration_s: float | None) -> None:
    """Requests at given times whatever the answers do; one that goes late is counted from when it was due."""
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number, at in enumerate(itertools.islice(times, num_requests)):
            if duration_s is not None and at >= duration_s:
                return
            await asyncio.sleep(began + at - time.perf_counter())
            group.create_task(send(number, began + at))
