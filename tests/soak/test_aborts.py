"""Clients that hang up by the hundred, at any moment: memory, files, threads, pages, slots and tasks stay flat.

How memory is measured: glibc keeps freed memory in arenas, one per thread, and gives it back when it likes. So the
server gets few arenas and gives back soon (environment below); aborts come in rounds of the same mix; after each round
the server is idle and its resident memory is read; the first rounds warm caches up and are left out; and the slope is
the median of the slopes between all pairs of the other rounds (Theil and Sen), which single jumps do not move.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
import socket
import statistics
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from serve_process import ServeProcess, num_files, num_threads, resident_bytes
from served import Served, wait_until

logger = logging.getLogger(__name__)

ABORTS_A_ROUND = 25
WARM_UP_ROUNDS = {  # the codec's kernels are made once for every shape of a batch
    "echo": 30, "orpheus": 60, "echo in three processes": 20,
}  # fmt: skip
ROUNDS = {"echo": 40, "orpheus": 40, "echo in three processes": 20}  # after them: 500 or 1,000 aborts
MOST_BYTES_EACH = 1024  # resident, an abort
AT_ONCE = 8
STEADY_MEMORY = {"MALLOC_ARENA_MAX": "2", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}
GAUGES = (
    "mstar_requests_running", "mstar_requests_waiting", "mstar_kv_pages_used", "mstar_slot_rows_used",
    "mstar_kv_swapped",
)  # fmt: skip


def bodies(plugin: str, chance: random.Random) -> tuple[str, dict[str, Any]]:
    """A request that goes on until it is hung up on."""
    text = " ".join(chance.choices(["sea", "stone", "apple", "never", "again"], k=chance.randint(1, 60)))
    is_streamed = chance.random() < 0.6
    if plugin == "orpheus" and chance.random() < 0.7:
        more = chance.choice([{}, {"response_format": "mp3"}, {"stream_format": "sse"}, {"speed": 1.5}])
        body = {"input": text, "ignore_eos": True, "stream": is_streamed} | more
        if "stream_format" in more:
            del body["stream"]
        return "/v1/audio/speech", body
    params: dict[str, Any] = {"ignore_eos": True}
    if plugin == "echo":
        params |= {"max_tokens": 300, "n": chance.randint(1, 3), "temperature": 1.0}
        if chance.random() < 0.5:
            params = {"kind": "sleep", "sleep_s": 0.02, "steps": 1000}
    task = "trouble" if "kind" in params else None
    return "/v1/generate", {
        "task": task, "inputs": [{"type": "text", "text": text[:100]}], "params": params, "stream": is_streamed
    }  # fmt: skip


def hang_up(address: tuple[str, int], *, plugin: str, seed: int) -> None:
    """Send a request, wait for a while or for some bytes, and reset the connection."""
    chance = random.Random(seed)
    path, body = bodies(plugin, chance)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection(address, timeout=30) as connection:
        whole = head.encode() + content
        if chance.random() < 0.1:
            whole = whole[: chance.randrange(len(whole))]  # in the middle of sending
        connection.sendall(whole)
        if (body.get("stream") or "stream_format" in body) and whole.endswith(content) and chance.random() < 0.5:
            connection.recv(chance.choice([1, 4096, 65536]))
        else:
            time.sleep(chance.choice([0, 0.005, 0.02, 0.05, 0.1, 0.2]))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def slope(values: list[int], *, each: int) -> float:
    """Theil and Sen's: the median over all pairs, per abort."""
    pairs = itertools.combinations(enumerate(values), 2)
    return statistics.median((later - sooner) / (j - i) for (i, sooner), (j, later) in pairs) / each


@pytest.fixture(params=WARM_UP_ROUNDS)
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, ServeProcess]]:
    plugin, _, placing = request.param.partition(" in ")
    flags = ("--plugin", plugin, "--max-model-len", "512", "--max-num-seqs", "4")
    if plugin == "orpheus":
        flags = (*flags, "--kv-cache-memory-bytes", "2MiB", "--block-size", "16")
    if placing:
        flags = (*flags, "--placement", "three", "--threads", "1")
    with ServeProcess(*flags, environment=STEADY_MEMORY, start_s=110) as server:
        yield request.param, server


def idle(server: ServeProcess) -> dict[str, float]:
    """The server's numbers once it holds nothing."""
    found: dict[str, float] = {}

    def is_idle() -> bool:
        nonlocal found
        found = server.metrics()
        return not any(found[name] for name in GAUGES)

    wait_until(is_idle, timeout_s=30, what=lambda: {name: found[name] for name in GAUGES})
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_five_hundred_aborts_leave_nothing_behind(server: tuple[str, ServeProcess]) -> None:
    name, process = server
    host, _, port = process.url.removeprefix("http://").partition(":")
    seeds, num_warm, num_rounds = itertools.count(), WARM_UP_ROUNDS[name], ROUNDS[name]
    pids = {"server": process.process.pid} | {worker["group"]: worker["pid"] for worker in process.workers()}
    held: dict[str, list[tuple[int, int, int]]] = {who: [] for who in pids}  # bytes, files, threads
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in range(num_warm + num_rounds):
            works = [
                pool.submit(hang_up, (host, int(port)), plugin=name.partition(" ")[0], seed=next(seeds))
                for _ in range(ABORTS_A_ROUND)
            ]
            for work in works:
                work.result(60)
            idle(process)
            for who, pid in pids.items():
                held[who].append((resident_bytes(pid), num_files(pid), num_threads(pid)))
    found = idle(process)
    assert found["mstar_requests_total"] > ABORTS_A_ROUND * num_rounds // 2, "too few requests got as far as the engine"
    for who, rounds in held.items():
        resident, *others = map(list, zip(*rounds, strict=True))
        grown = slope(resident[num_warm:], each=ABORTS_A_ROUND)
        shown = [round(r / 2**20, 1) for r in resident]
        logger.info("%s", f"{name}, {who}: {grown:.0f} bytes an abort; resident MiB: {shown}")
        assert grown < MOST_BYTES_EACH, (who, resident)
        for numbers in others:  # of files, of threads
            assert max(numbers[-5:]) <= max(numbers[:-num_rounds]) + 2, (who, numbers)
    assert httpx.get(f"{process.url}/health").status_code == 200
    spoken = httpx.post(f"{process.url}/v1/audio/speech", json={"input": "Hello."}, timeout=60)
    assert spoken.status_code == 200 and spoken.content.startswith(b"RIFF")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_aborts_leave_no_task_on_the_event_loop() -> None:
    async def num_tasks() -> int:
        return len(asyncio.all_tasks())

    served = Served(plugin="echo", max_num_seqs=4)
    try:
        with served.http() as url, ThreadPoolExecutor(AT_ONCE) as pool:
            host, _, port = url.removeprefix("http://").partition(":")
            before = served.run(num_tasks())
            for first in range(0, 100, 25):
                seeds = range(first, first + 25)
                list(pool.map(lambda seed: hang_up((host, int(port)), plugin="echo", seed=seed), seeds))
            served.assert_clean()
            wait_until(lambda: served.run(num_tasks()) <= before, what=lambda: served.run(num_tasks()))
    finally:
        served.close()
