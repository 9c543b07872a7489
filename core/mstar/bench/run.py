"""A whole run: warm-up, what the client costs by itself, the load, and what the server says of itself meanwhile.

Runs in a process of its own, far from the engine; knows a server by its address only.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import platform
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from mstar import __version__
from mstar.bench.arrivals import arrivals, closed_loop, open_loop
from mstar.bench.measure import Job, Sample, measure
from mstar.bench.report import distribution, server_lag, summarize
from mstar.client import APIError, AsyncClient, ClientError, ConnectionFailed
from mstar.errors import ConfigError

SPEECH = "/v1/audio/speech"
_TICK_S = 0.01
_NULL_CHUNKS, _NULL_BYTES, _NULL_ROUNDS = 12, 8192, 4  # a short answer, about two seconds of audio


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do. With `rate` requests come by themselves, else `concurrency` of them are always under way."""

    url: str
    job: Job
    api_key: str | None = None
    concurrency: int = 8
    rate: float | None = None
    burstiness: float = 1.0
    num_requests: int | None = None
    duration_s: float | None = None
    num_warmups: int = 0
    max_first_audio_s: float | None = None
    max_rtf: float | None = None


async def run(plan: Plan, *, on_sample: Callable[[Sample], None]) -> tuple[dict[str, Any], list[Sample]]:
    """Carry a plan out. Cancelling it ends the load; the report holds what there is then.

    Raises ConfigError if there is no server, or it says that it cannot work.
    """
    await _check_server(plan)
    floor = await _floor(plan)
    limits: dict[str, Any] = {"num_requests": plan.num_requests, "duration_s": plan.duration_s}
    samples: list[Sample] = []
    num_started = 0
    async with AsyncClient(plan.url, api_key=plan.api_key, timeout=plan.job.timeout_s, max_retries=0) as client:

        async def send(number: int, due: float) -> None:
            nonlocal num_started
            num_started += 1
            sample = await measure(client, plan.job, number=number, due=due, began=began)
            samples.append(sample)
            on_sample(sample)

        began = time.perf_counter()
        warmups = [measure(client, plan.job, number=-1 - n, due=began, began=began) for n in range(plan.num_warmups)]
        warm = await asyncio.gather(*warmups)
        before, cpu_s, lags = await _metrics(client), time.process_time(), list[float]()
        watching, is_interrupted, began = asyncio.create_task(_watch(lags)), False, time.perf_counter()
        try:
            if plan.rate is None:
                await closed_loop(send, concurrency=plan.concurrency, **limits)
            else:
                times = arrivals(plan.rate, burstiness=plan.burstiness, seed=plan.job.seed)
                await open_loop(send, times=times, **limits)
        except asyncio.CancelledError:
            is_interrupted = True
        watching.cancel()
        cpu_s = time.process_time() - cpu_s
        wall_s = time.perf_counter() - began
        lag = server_lag(before, await _metrics(client))
    summary = summarize(samples, wall_s=wall_s, max_first_audio_s=plan.max_first_audio_s, max_rtf=plan.max_rtf)
    cost = {"event_loop_lag_s": distribution(lags), "cpu_s": cpu_s, "cpu_share": cpu_s / wall_s}
    report = {
        "summary": summary | {"num_unfinished": num_started - len(samples)},
        "is_interrupted": is_interrupted,
        "num_failed_warmups": sum(sample.failure is not None for sample in warm),
        "server": {"event_loop_lag_s": lag},
        "client": cost | floor,
        "machine": {"platform": platform.platform(), "num_cores": os.cpu_count(), "python": platform.python_version()},
        "mstar": __version__,
        "samples": [dataclasses.asdict(sample) for sample in sorted(samples, key=lambda sample: sample.number)],
    }
    return report, samples


async def _check_server(plan: Plan) -> None:
    seconds = min(plan.job.timeout_s, 30)
    async with AsyncClient(plan.url, api_key=plan.api_key, timeout=seconds, max_retries=0) as client:
        try:
            await client.health()
        except ConnectionFailed as error:
            wanted = "start one with 'mstar serve', or give its address with --url"
            raise ConfigError(f"no server answers at {plan.url} ({error}); {wanted}") from error
        except ClientError as error:  # other servers may have no such route
            if isinstance(error, APIError) and error.status == 503:
                raise ConfigError(f"the server at {plan.url} cannot work now: {error}") from error
        with contextlib.suppress(ClientError):
            routes = [route for model in await client.models() for route in model.get("endpoints", (SPEECH,))]
            if routes and SPEECH not in routes:
                raise ConfigError(f"the server at {plan.url} has no {SPEECH}; it has {', '.join(sorted({*routes}))}")


async def _metrics(client: AsyncClient) -> str:
    with contextlib.suppress(ClientError):  # other servers have none
        return await client.metrics()
    return ""


async def _watch(lags: list[float]) -> None:
    """How much later than asked this event loop wakes, again and again."""
    while True:
        asleep = time.perf_counter()
        await asyncio.sleep(_TICK_S)
        lags.append(max(0.0, time.perf_counter() - asleep - _TICK_S))


# ---- what the client costs by itself ----------------------------------------------------------------------------


async def _floor(plan: Plan) -> dict[str, Any]:
    """Latencies of a server in this process that does nothing: what of all latencies is the client's, at most."""
    job, n = dataclasses.replace(plan.job, format="pcm", is_streamed=True), plan.concurrency
    samples: list[Sample] = []
    async with _null_server() as url, AsyncClient(url, max_retries=0) as client:

        async def send(number: int, due: float) -> None:
            samples.append(await measure(client, job, number=number, due=due, began=due))

        await closed_loop(send, concurrency=n, num_requests=_NULL_ROUNDS * n, duration_s=None)
    numbers = summarize(samples, wall_s=1.0, max_first_audio_s=None, max_rtf=None)
    return {f"null_{name}": numbers[name] for name in ("first_audio_s", "latency_s")}


@contextlib.asynccontextmanager
async def _null_server() -> AsyncIterator[str]:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: audio/pcm\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"%x\r\n%b\r\n" % (_NULL_BYTES, bytes(_NULL_BYTES))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while asked := await reader.readuntil(b"\r\n\r\n"):
                length = re.search(rb"content-length: (\d+)", asked, re.IGNORECASE)
                await reader.readexactly(int(length[1]) if length else 0)
                for data in (head, *[chunk] * _NULL_CHUNKS, b"0\r\n\r\n"):
                    writer.write(data)
                    await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
