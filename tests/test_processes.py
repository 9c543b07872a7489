"""What a worker's process is told, and a server with two as operators run it: health, kills, orphans, its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from serve_process import ServeProcess, abstract_sockets, children, is_alive, num_abstract_sockets

from mstar.config import EngineConfig
from mstar.ipc.process_channel import Road
from mstar.placement import Group, Placement, WorkerPlace
from mstar.processes import Order, worker_config

ROAD = Road(number=2, address="ipc://@a", inbox=3, arena=4, lifeline=5, server_address="ipc://@b", server_arena=6)


def test_an_order_brings_every_setting_across(tmp_path: Path) -> None:
    config = EngineConfig(
        plugin="echo", parts={"voice": tmp_path}, served_model_name=("a", "b"), kv_cache_memory_bytes=1 << 20, seed=7,
        allowed_media_domains=("example.org",), workers=2, threads=1,
    )  # fmt: skip
    order = Order(
        worker=1, groups=(Group(nodes=("*",), replicas=2, devices=("cpu",)),), road=ROAD, parent=1,
        config=msgspec.to_builtins(config, enc_hook=str), log_level="info",
    )  # fmt: skip
    arrived = msgspec.json.decode(msgspec.json.encode(order), type=Order)
    assert arrived.groups == order.groups and arrived.engine_config() == config


@pytest.mark.parametrize(
    ("device", "num_devices", "expected"),
    [
        ("auto", 0, ["auto", "auto", "auto"]),
        ("auto", 1, ["auto", "auto", "auto"]),
        ("auto", 2, ["cuda:0", "cuda:1", "cuda:0"]),
        ("cuda", 2, ["cuda:0", "cuda:1", "cuda:0"]),
        ("cuda:1", 2, ["cuda:1", "cuda:1", "cuda:1"]),
        ("cpu", 2, ["cpu", "cpu", "cpu"]),
    ],
)
def test_workers_take_devices_in_turn_where_nothing_says_which(
    device: str, num_devices: int, expected: list[str]
) -> None:
    config = EngineConfig(plugin="echo", workers=3, device=device)
    places = Placement(groups=(Group(nodes=("*",), replicas=3),)).workers
    found = [worker_config(config, place, threads=1, num_devices=num_devices) for place in places]
    assert [one.device for one in found] == expected and all(one.threads == 1 for one in found)


def test_a_place_says_which_device_and_how_many_threads() -> None:
    place = WorkerPlace(index=1, process=2, group=0, name="lm", replica=1, devices=("cuda:3", "cuda:1"), threads=1)
    config = EngineConfig(plugin="echo", device="cpu")
    found = [worker_config(config, place, rank=rank, threads=2, num_devices=4) for rank in range(2)]
    assert [(one.device, one.threads) for one in found] == [("cuda:3", 1), ("cuda:1", 1)]
    places = Placement(groups=(Group(nodes=("lm",), tensor_parallel=2), Group(nodes=("*",)))).workers
    config = EngineConfig(plugin="echo")
    assert worker_config(config, places[0], rank=1, threads=2, num_devices=3).device == "cuda:1"
    assert worker_config(config, places[1], threads=2, num_devices=3).device == "cuda:2"


# ---- a server --------------------------------------------------------------------------------------------------


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"inputs": [{"type": "text", "text": words}], **fields}


SLOW = text("t", task="trouble", params={"kind": "sleep", "sleep_s": 0.1, "steps": 40})


def wait(condition: Callable[[], Any], *, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.05)


PLACINGS = {"two": ("--workers", "2"), "three": ("--placement", "three")}


@pytest.fixture(params=PLACINGS)
def server(request: pytest.FixtureRequest) -> Iterator[ServeProcess]:
    with ServeProcess("--plugin", "echo", *PLACINGS[request.param], "--threads", "1", start_s=110) as found:
        yield found


@pytest.mark.slow
def test_health_shows_each_worker_and_a_signal_ends_all(server: ServeProcess) -> None:
    found = server.workers()
    assert [(worker["worker"], worker["state"], worker["restarts"]) for worker in found] == [
        (number, "ready", 0) for number in range(len(found))
    ]
    groups = [worker["group"] for worker in found]
    assert groups in (["all", "all"], ["prefill", "decode", "streams"]) and all(worker["role"] for worker in found)
    assert server.metrics()["mstar_worker_ready"] == len(found)
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(httpx.post, f"{server.url}/v1/generate", json=SLOW, timeout=60) for _ in range(4)]
        wait(lambda: sum(worker["running"] for worker in server.workers()) == 4 * len(set(groups)), within_s=20)
        for worker in found:
            os.kill(worker["pid"], signal.SIGTERM)  # as a service manager does, to the whole group
        server.process.send_signal(signal.SIGTERM)
        assert [ask.result().status_code for ask in asking] == [200] * 4, "running requests end well"
    assert server.process.wait(20) == 0
    wait(lambda: not any(is_alive(worker["pid"]) for worker in found), within_s=5)
    assert "Traceback" not in "".join(server.log)


@pytest.mark.slow
def test_a_second_signal_ends_all_at_once(server: ServeProcess) -> None:
    found = server.workers()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(httpx.post, f"{server.url}/v1/generate", json=SLOW, timeout=60)
        wait(lambda: any(worker["running"] for worker in server.workers()), within_s=20)
        for number in (signal.SIGTERM, signal.SIGINT):
            server.process.send_signal(number)
            time.sleep(0.2)
        assert server.process.wait(10) == 1 and asking.result().status_code == 503
    wait(lambda: not any(is_alive(worker["pid"]) for worker in found), within_s=5)


@pytest.mark.slow
@pytest.mark.parametrize("server", ["two"], indirect=True)
def test_streams_of_a_killed_worker_end_with_an_error_and_others_well(server: ServeProcess) -> None:
    def events(number: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        body = SLOW | {"stream": True, "seed": number}
        with (
            contextlib.suppress(httpx.RemoteProtocolError),
            httpx.stream("POST", f"{server.url}/v1/generate", json=body, timeout=60) as response,
        ):
            found.extend(json.loads(line) for line in response.iter_lines())
        return found

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(events, number) for number in range(2)]
        wait(lambda: [worker["running"] for worker in server.workers()] == [1, 1], within_s=20)
        time.sleep(0.5)
        os.kill(server.workers()[1]["pid"], signal.SIGKILL)
        killed = time.monotonic()
        wait(lambda: any(ask.done() for ask in asking), within_s=5)
        health = httpx.get(f"{server.url}/health", timeout=10).json()
        assert time.monotonic() - killed < 5 and health["status"] == "degraded"
        ends = sorted((ask.result() for ask in asking), key=len)
    assert ends[0][0]["event"] == "tensor" and ends[0][-1]["event"] == "error"
    assert ends[0][-1]["error"]["code"] == "worker_lost" and "SIGKILL" in ends[0][-1]["error"]["message"]
    assert ends[1][-1]["event"] == "done"


@pytest.mark.slow
def test_nothing_outlives_a_server_that_is_killed(server: ServeProcess) -> None:
    found = server.workers()
    (name,) = {name for name in abstract_sockets(server.process.pid) if name.endswith("-server-1")}
    os.kill(found[0]["pid"], signal.SIGSTOP)  # even if it can do nothing itself
    os.kill(found[1]["pid"], signal.SIGKILL)
    before = {worker["pid"] for worker in found}
    wait(lambda: children(server.process.pid) - before, within_s=10)  # one more, which has hardly begun
    pids = before | children(server.process.pid)
    server.process.kill()
    wait(lambda: not any(map(is_alive, pids)), within_s=10)
    wait(lambda: not num_abstract_sockets(name.removesuffix("server-1")), within_s=5)  # closed on zmq's threads
