"""Servers in processes of their own: how they start when they cannot, and how they stop while busy."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve_process import ServeProcess

NUM_STREAMS = 8

# ---- case 52: SIGTERM while busy ------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[ServeProcess]:
    flags = ("--plugin", "orpheus", "--max-model-len", "2048", "--drain-timeout", "40")
    with ServeProcess(*flags) as server:
        yield server


def stream(url: str, *, max_tokens: int | None, begun: Future[None]) -> int | str:
    """Bytes of a stream that ended well, or the name of the error that ended it."""
    body: dict[str, Any] = {
        "input": "On and on.",
        "response_format": "pcm",
        "stream": True,
        "ignore_eos": True,
        "seed": 1,
    }
    try:
        with httpx.stream(
            "POST", f"{url}/v1/audio/speech", json=body | {"max_tokens": max_tokens}, timeout=60
        ) as found:
            if found.status_code != 200:
                return f"{found.status_code}"
            blocks = found.iter_raw()
            size = len(next(blocks))
            begun.set_result(None)
            return size + sum(map(len, blocks))
    except httpx.HTTPError as error:
        return type(error).__name__
    finally:
        if not begun.done():
            begun.set_result(None)


def streams(server: ServeProcess, pool: ThreadPoolExecutor, *, max_tokens: int | None) -> list[Future[int | str]]:
    """Streams that have all given their first sound."""
    begun: list[Future[None]] = [Future() for _ in range(NUM_STREAMS)]
    running = [pool.submit(stream, server.url, max_tokens=max_tokens, begun=each) for each in begun]
    for each in begun:
        each.result(60)
    return running


def test_streams_in_flight_end_well_after_sigterm(server: ServeProcess) -> None:
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        running = streams(server, pool, max_tokens=280)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        if any(not each.done() for each in running):
            try:
                refused = httpx.post(f"{server.url}/v1/audio/speech", json={"input": "More."}, timeout=10)
                assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
            except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
                pass
        sizes = [each.result(60) for each in running]
    assert len(set(sizes)) == 1 and isinstance(sizes[0], int) and sizes[0] > 30 * 4096, sizes
    assert server.process.wait(10) == 0


def test_a_second_signal_ends_streams_at_once(server: ServeProcess) -> None:
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        running = streams(server, pool, max_tokens=None)
        for number in (signal.SIGTERM, signal.SIGINT):
            server.process.send_signal(number)
            time.sleep(0.2)
        signalled = time.monotonic()
        assert server.process.wait(15) == 1
        assert time.monotonic() - signalled < 10
        ends = [each.result(10) for each in running]
    assert all(isinstance(end, str) for end in ends), ends  # none looks as if it had ended well


# ---- case 75: what cannot start says so, soon -----------------------------------------------------------------------


def test_a_server_that_cannot_start_says_why_within_seconds(tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("max-num-seq: 4\n")
    misspelt, odd = tmp_path / "misspelt.yaml", tmp_path / "odd.yaml"
    misspelt.write_text("groups: [{nodes: ['*'], replica: 2}]")
    odd.write_text("groups: [{nodes: [lm], tensor_parallel: 3, threads: 1}, {nodes: ['*'], threads: 1}]")
    empty = tmp_path / "empty"
    empty.mkdir()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        cases = {
            "port busy": (["--port", port], [port, "--port"]),
            "no weights": (
                ["--port", "0", "--model", str(empty), "--set", f"snac_24khz={empty}"],
                [str(empty), "config.json"],
            ),
            "a typo in the file": (["--port", "0", "--config", str(settings)], ["max-num-seq", "max-num-seqs"]),
            "an unknown flag": (["--port", "0", "--frobnicate"], ["--frobnicate"]),
            "a typo in the placement": (["--placement", str(misspelt)], ["replica", "replicas", "groups[0]"]),
            "heads that three do not divide": (
                ["--placement", str(odd)],
                ["groups[0].tensor_parallel is 3", "4 query heads", "3 ranks"],
            ),
            "too little memory": (["--port", "0", "--kv-cache-memory-bytes", "1"], ["kv-cache-memory-bytes"]),
        }
        started = {
            name: subprocess.Popen(
                [sys.executable, "-m", "mstar", "serve", "--plugin", "orpheus", *flags],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for name, (flags, _) in cases.items()
        }  # fmt: skip
        deadline = time.monotonic() + 100  # seconds, but for what else the machine does
        try:
            for name, (_, words) in cases.items():
                output, _ = started[name].communicate(timeout=max(1, deadline - time.monotonic()))
                assert started[name].returncode not in (0, None), name
                assert all(word in output for word in words), f"{name}: {output}"
                assert "Traceback" not in output, f"{name}: {output}"
        finally:
            for process in started.values():
                process.kill()
                process.communicate()
