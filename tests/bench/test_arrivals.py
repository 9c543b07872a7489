"""Times of requests are a seeded process; loops keep their number, their times and their limits."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from typing import Any

import pytest

from mstar.bench.arrivals import arrivals, closed_loop, open_loop


def gaps(num: int = 20_000, **options: Any) -> list[float]:
    times = itertools.islice(arrivals(4.0, **options), num)
    return [after - before for before, after in itertools.pairwise(times)]


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gaps_have_the_rate_and_the_burstiness_asked_for(burstiness: float, variation: float) -> None:
    found = gaps(burstiness=burstiness, seed=1)
    assert statistics.mean(found) == pytest.approx(1 / 4.0, rel=0.05)
    assert statistics.stdev(found) / statistics.mean(found) == pytest.approx(variation, rel=0.05)
    assert min(found) >= 0


def test_a_seed_gives_the_same_times_again() -> None:
    assert gaps(9, burstiness=1.0, seed=1) == gaps(9, burstiness=1.0, seed=1) != gaps(9, burstiness=1.0, seed=2)
    assert next(arrivals(1.0, burstiness=1.0, seed=5)) == 0.0


class Requests:
    """Requests that take some time, and how many of them ran at once."""

    def __init__(self, *, seconds: float) -> None:
        self.seconds = seconds
        self.dues: list[float] = []
        self.numbers: list[int] = []
        self.running = self.most_running = 0

    async def send(self, number: int, due: float) -> None:
        self.numbers.append(number)
        self.dues.append(due)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(self.seconds)
        self.running -= 1


def test_a_closed_loop_keeps_its_concurrency_and_number() -> None:
    requests = Requests(seconds=0.01)
    asyncio.run(closed_loop(requests.send, concurrency=3, num_requests=10, duration_s=None))
    assert requests.numbers == list(range(10)) and requests.most_running == 3 and requests.running == 0


def test_a_closed_loop_begins_nothing_after_its_time_and_ends_what_has_begun() -> None:
    requests = Requests(seconds=0.1)
    asyncio.run(closed_loop(requests.send, concurrency=2, num_requests=None, duration_s=0.25))
    assert 2 <= len(requests.numbers) <= 6 and requests.running == 0
    assert max(requests.dues) - requests.dues[0] < 0.25 + 0.2


def test_an_open_loop_does_not_wait_for_answers() -> None:
    requests = Requests(seconds=0.3)
    times = [0.0, 0.05, 0.1, 0.1]
    asyncio.run(open_loop(requests.send, times=iter(times), num_requests=None, duration_s=None))
    assert requests.most_running == 4
    assert [due - requests.dues[0] for due in requests.dues] == pytest.approx(times)


def test_an_open_loop_keeps_number_and_time() -> None:
    for limits, expected in (
        ({"num_requests": 3, "duration_s": None}, 3),
        ({"num_requests": None, "duration_s": 0.05}, 5),
    ):
        requests = Requests(seconds=0)
        times = (n / 100 for n in itertools.count())
        asyncio.run(open_loop(requests.send, times=times, **limits))
        assert len(requests.numbers) == expected


def test_a_late_request_counts_from_when_it_was_due() -> None:
    requests = Requests(seconds=0)

    async def blocked() -> None:
        loop = asyncio.create_task(
            open_loop(requests.send, times=iter([0.0, 0.01, 0.02]), num_requests=None, duration_s=None)
        )
        await asyncio.sleep(0)
        time.sleep(0.2)  # the client itself is late
        await loop

    asyncio.run(blocked())
    assert requests.dues[2] - requests.dues[0] == pytest.approx(0.02)
