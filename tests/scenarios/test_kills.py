"""Processes that are killed again and again, under load: no client is lost, nothing is wrong, and nothing is left."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from serve_process import (
    ServeProcess,
    abstract_sockets,
    children,
    is_alive,
    num_abstract_sockets,
    num_files,
    resident_bytes,
)
from served import wait_until

from mstar.client import APIError, Client, ClientError, ConnectionFailed, StreamBroken

NUM_CLIENTS = 5
LOST_S = 5.0  # from a kill until all that it costs have been told
RESTART_S = 150.0
# "loading": of whoever has just been killed, the process that takes its place, before it is ready.
VICTIMS = (
    "prefill", "decode", "loading", "server", "decode", "streams", "prefill", "decode", "streams", "decode",
    "prefill", "loading", "decode", "streams", "decode", "prefill", "decode", "loading", "streams", "decode",
)  # fmt: skip
WARM = 5  # victims until numbers are taken
FILES_OF_A_PEER = 3  # its connection to here, and zmq's two of one to it

pytestmark = pytest.mark.slow


@dataclass(slots=True)
class Load:
    """Clients that ask on and on, and what became of each request."""

    url: str
    asks: list[Any]
    over_http: Callable[..., Any]
    check: Callable[[Any, Any], None]
    counted: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    killed_at: float = 0.0  # the last time
    is_server_gone: bool = False
    is_over: bool = False

    def run(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self.is_over:
            with Client(self.url, timeout=RESTART_S, max_retries=0) as client:
                for _ in range(20):
                    if self.is_over or not self._one(client, draw.choice(self.asks), is_streamed=draw.random() < 0.7):
                        break

    def _one(self, client: Client, ask: Any, *, is_streamed: bool) -> bool:
        started = time.monotonic()
        try:
            self.check(ask, self.over_http(client, ask, is_streamed=is_streamed))
            self.counted["right"] += 1
        except ClientError as error:
            ended = time.monotonic()
            is_told = isinstance(error, APIError) and (error.status == 503 or error.code == "worker_lost")
            if not is_told and not (self.is_server_gone and isinstance(error, ConnectionFailed | StreamBroken)):
                self.wrong.append(f"{ask}: {error!r}")
            elif ended - max(self.killed_at, started) > LOST_S:
                self.wrong.append(f"{ask}: told {ended - self.killed_at:.1f} s after a kill: {error!r}")
            self.counted["told"] += 1
            time.sleep(0.3)
            return is_told
        except AssertionError as error:
            self.wrong.append(str(error))
        return True


@dataclass(slots=True)
class Numbers:
    """What must not grow: of the server and each worker, and of all."""

    files: dict[int, int]
    resident: dict[int, int]
    num_sockets: int
    num_children: int

    @classmethod
    def of(cls, server: ServeProcess, prefix: str) -> Numbers:
        pids = {-1: server.process.pid} | {worker["worker"]: worker["pid"] for worker in server.workers()}
        for pid in pids.values():
            assert "/dev/shm/" not in Path(f"/proc/{pid}/maps").read_text()
        return cls(
            {worker: num_files(pid) for worker, pid in pids.items()},
            {worker: resident_bytes(pid) for worker, pid in pids.items()},
            num_abstract_sockets(prefix),
            len(children(server.process.pid)),
        )


@pytest.fixture
def start(decoding_twice: str) -> Iterator[Callable[..., ServeProcess]]:
    """`start(port=0)`: a server of three groups, one of them twice."""
    started: list[ServeProcess] = []

    def begin(*, port: int = 0) -> ServeProcess:
        flags = ("--placement", decoding_twice, "--threads", "1")
        started.append(ServeProcess("--plugin", "echo", "--port", str(port), *flags, start_s=200).__enter__())
        return started[-1]

    yield begin
    for one in started:
        one.kill()


def all_ready(server: ServeProcess) -> bool:
    return [worker["state"] for worker in server.workers()] == ["ready"] * 4


def prefix_of(server: ServeProcess) -> str:
    """What names of its sockets begin with."""
    (name,) = [name for name in abstract_sockets(server.process.pid) if name.endswith("-server-1")]
    return name.removesuffix("server-1")


def those_of(server: ServeProcess, role: str) -> list[int]:
    """Processes of a role, once there are any."""
    found: list[int] = []

    def are_there() -> bool:
        there = [worker for worker in server.workers() if worker["pid"] is not None]
        key = "state" if role == "loading" else "group"
        found[:] = [w["pid"] for w in there if w[key] == role and (key == "state" or w["state"] == "ready")]
        return bool(found)

    wait_until(are_there, timeout_s=RESTART_S, what=server.workers)
    return found


@pytest.mark.timeout(900)
def test_twenty_kills_of_all_roles_lose_no_client_and_leave_nothing(
    start: Callable[..., ServeProcess], oracle: Any, make: Callable[..., Any], cases: Callable[..., Any],
    over_http: Callable[..., Any],
) -> None:  # fmt: skip
    draw = random.Random(3)
    asks = cases("generate", "nested", "branches", "fanout", "spans", "chunks", "states")
    asks += [make("trouble", "slow", kind="sleep", sleep_s=0.02, steps=15, watch=True, seed=seed) for seed in range(6)]
    for ask in asks:
        oracle.expected(ask)
    server = start()
    load, before = Load(server.url, asks, over_http, oracle.check), None
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(load.run, seed) for seed in range(NUM_CLIENTS)]
        try:
            for number, role in enumerate(VICTIMS):
                right = load.counted["right"]
                if role != "loading":
                    wait_until(lambda: load.counted["right"] >= right + NUM_CLIENTS, timeout_s=RESTART_S)  # noqa: B023
                    time.sleep(0.5 * draw.random())
                assert not load.wrong, load.wrong
                if role == "server":
                    server = restarted(server, start, load)
                else:
                    victim = draw.choice(those_of(server, role))
                    load.killed_at = time.monotonic()
                    os.kill(victim, signal.SIGKILL)
                if number == WARM:
                    wait_until(lambda: all_ready(server), timeout_s=RESTART_S, what=server.workers)  # noqa: B023
                    prefix = prefix_of(server)
                    before = Numbers.of(server, prefix)
        finally:
            load.is_over = True
        for client in clients:
            client.result(RESTART_S)
    assert not load.wrong, load.wrong
    assert load.counted["told"] >= 10 and load.counted["right"] >= 100, load.counted
    wait_until(lambda: all_ready(server), timeout_s=RESTART_S, what=server.workers)
    with Client(server.url, max_retries=0) as client:
        for ask in asks:
            oracle.check(ask, over_http(client, ask, is_streamed=True))
    assert_nothing_grew(server, prefix, before)
    server.process.kill()
    wait_until(lambda: num_abstract_sockets(prefix) == 0, timeout_s=10)


def restarted(server: ServeProcess, start: Callable[..., ServeProcess], load: Load) -> ServeProcess:
    """Kill the server; when it is seen to have left nothing, another on the same port."""
    pids, prefix = children(server.process.pid), prefix_of(server)
    assert len(pids) >= 3  # one may be about to be started again
    load.is_server_gone = True
    server.process.kill()
    wait_until(lambda: not any(map(is_alive, pids)) and not num_abstract_sockets(prefix), timeout_s=10)
    found = start(port=int(server.url.rpartition(":")[2]))
    load.is_server_gone, load.killed_at = False, time.monotonic()
    return found


def assert_nothing_grew(server: ServeProcess, prefix: str, before: Numbers | None) -> None:
    """In no process, and by no worker's account."""
    gauges = ("running", "waiting", "kv_pages_used", "slot_rows_used", "kv_swapped")

    def held() -> dict[str, float]:
        metrics = server.metrics()
        return {name: metrics[f"mstar_{name}"] for name in gauges if metrics.get(f"mstar_{name}")}

    wait_until(lambda: not held(), what=held)
    after = Numbers.of(server, prefix)
    assert before is not None
    assert after.num_children == before.num_children == 4
    num_processes = 1 + after.num_children
    assert after.num_sockets <= num_processes**2, after  # an inbox each, and what the others have opened to it
    for worker, files in after.files.items():
        # Connections of the last clients may still be open; workers open those to each other at their first use.
        most = 2 + (NUM_CLIENTS if worker < 0 else FILES_OF_A_PEER * (after.num_children - 1))
        assert files <= before.files[worker] + most, (worker, before, after)
        assert after.resident[worker] < before.resident[worker] + 48 * 2**20, (worker, before, after)
