"""`serve` and `run` from start to end, with the echo plugin and the real worker."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from mstar import config, launch
from mstar.config import EngineConfig, ServerConfig
from mstar.errors import ConfigError, RequestError
from mstar.observe import printable

KV = 16 * 2**20


def engine_config(**settings: Any) -> EngineConfig:
    return EngineConfig(**{"plugin": "echo", "kv_cache_memory_bytes": KV} | settings)


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"inputs": [{"type": "text", "text": value}], **fields}


def test_run_writes_result_and_tensors(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert launch.run(engine_config(), text("hello", task="chunks", seed=3), out=out, base=tmp_path) == 0
    result = json.loads((out / "result.json").read_text())
    assert result["task"] == "chunks" and result["seed"] == 3 and result["counters"]
    tensors = load_file(out / "tensors.safetensors")
    assert {o["name"] for o in result["outputs"] if o["type"] == "tensor"} == set(tensors)


def test_run_prints_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = text("hello", task="generate", seed=3, params={"max_tokens": 4})
    assert launch.run(engine_config(), asked, out=tmp_path, base=tmp_path) == 0
    (answer,) = json.loads((tmp_path / "result.json").read_text())["outputs"]
    assert answer["text"] and capsys.readouterr().out == printable(answer["text"]) + "\n"


def test_run_reports_mistakes_by_name(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="known: "):
        launch.run(engine_config(), text("hello", task="sing"), out=tmp_path, base=tmp_path)
    with pytest.raises(RequestError, match="'colour' is unknown"):
        launch.run(engine_config(), text("hello", colour=1), out=tmp_path, base=tmp_path)
    with pytest.raises(ConfigError, match="no plugin 'nobody'"):
        launch.run(engine_config(plugin="nobody"), text("hello"), out=tmp_path, base=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (text("a", task="generate", params={"colour": 1}), "'params.colour' is unknown; known: "),
        (text("a", task="generate", params={"max_tokens": "many"}), "params.max_tokens is 'many': must be int"),
        (text("a", params={"voice": "nobody"}), "voice"),
        ({"inputs": [{"type": "token_ids", "ids": [1]}], "task": "chunks"}, "takes no token_ids part"),
    ],
)
def test_a_request_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(launch, "started_engine", lambda *_, **__: pytest.fail("the model is loaded"))
    with pytest.raises(RequestError, match=words):
        launch.run(engine_config(), request_, out=tmp_path, base=tmp_path)


def test_a_voice_the_checkpoint_lacks_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "started_engine", lambda *_, **__: pytest.fail("the model is loaded"))
    monkeypatch.setattr(launch.Model, "voices", ["plain"])
    request = text("a", task="nested", params={"voice": "loud"})
    with pytest.raises(RequestError, match="voice 'loud' is unknown; known: plain"):
        launch.run(engine_config(), request, out=tmp_path, base=tmp_path)


def test_settings_that_cannot_work_are_told_without_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = engine_config(device="cuda:77")
    with pytest.raises(ConfigError, match=r"^--device cuda:77"):
        launch.run(settings, text("hello"), out=tmp_path, base=tmp_path)
    assert "Traceback" not in caplog.text


def test_a_busy_port_is_known_before_anything_is_loaded() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*--port"):
            launch.serve(engine_config(plugin="nobody"), ServerConfig(port=port))


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("wanted", "variables", "usual", "cores", "chosen"),
    [
        (None, {}, 1, 1, (1, "torch's default")),
        (None, {}, 2, 2, (1, "one core is left to the server")),
        (None, {}, 8, 8, (7, "one core is left to the server")),
        (None, {}, 4, 8, (4, "torch's default")),  # as on hyperthreads
        (None, {}, 64, 2, (1, "one core is left to the server")),  # a control group gives less than there is
        (None, {"OMP_NUM_THREADS": "8"}, 8, 8, (8, "OMP_NUM_THREADS")),
        (None, {"OMP_NUM_THREADS": "3"}, 3, 8, (3, "OMP_NUM_THREADS")),
        (None, {"OMP_NUM_THREADS": "16"}, 16, 8, (8, "OMP_NUM_THREADS asks for 16")),
        (8, {"OMP_NUM_THREADS": "3"}, 3, 8, (8, "--threads")),
    ],
)
def test_threads_are_those_asked_for_or_leave_a_core_to_the_server(
    wanted: int | None, variables: dict[str, str], usual: int, cores: int, chosen: tuple[int, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(config, "environment", lambda: config.read_environment(variables))
    monkeypatch.setattr(config, "num_cores", lambda: cores)
    assert config.choose_threads(wanted, usual=usual) == chosen


def test_cores_are_those_that_this_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config.os, "sched_getaffinity", lambda _: set(range(8)))
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(config, "_CPU_QUOTA", quota)
    found = [config.num_cores()]
    for text in ("max 100000", "250000 100000", "10000 100000", "1600000 100000"):
        quota.write_text(text + "\n")
        found.append(config.num_cores())
    assert found == [8, 8, 3, 1, 8]


def test_more_threads_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "num_cores", lambda: 4)
    assert engine_config(threads=4).threads == 4
    for threads, words in ((5, "--threads is 5; it must be at most 4"), (0, "--threads is 0; it must be at least 1")):
        with pytest.raises(ConfigError, match=words):
            engine_config(threads=threads)


@pytest.mark.usefixtures("torch_threads")
def test_threads_are_set_once_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(config, "num_cores", lambda: 3)
    monkeypatch.setattr(launch, "num_cores", lambda: 3)
    caplog.set_level("INFO", logger="mstar.launch")
    assert launch.run(engine_config(threads=3), text("hello", task="chunks"), out=tmp_path, base=tmp_path) == 0
    assert caplog.messages.count("threads: 3 of 3 cores (--threads)") == 1
    found: list[int] = []
    worker = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    worker.start()
    worker.join()
    assert found == [3]


KEY = "correct-horse-battery"


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A server in its own process, its address, and what it logged before it answered. It listens everywhere."""
    command = [sys.executable, "-m", "mstar", "serve", "--plugin", "echo", "--port", "0", "--host", "0.0.0.0"]
    command += ["--kv-cache-memory-bytes", str(KV), "--drain-timeout", "5"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MSTAR_API_KEY": KEY}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    lines: list[str] = []
    assert process.stderr is not None
    try:
        for line in process.stderr:
            lines.append(line)
            if "Starting mstar server on" in line:
                break
        found = re.search(r"Starting mstar server on (http://\S+)", "".join(lines))
        assert found is not None, "".join(lines)
        url = found[1].replace("0.0.0.0", "127.0.0.1")
        wait_until_healthy(url)
        yield process, url, lines
    finally:
        process.kill()
        process.communicate()


def wait_until_healthy(url: str) -> None:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.ConnectError:
            time.sleep(0.02)
    raise AssertionError("the server does not answer")


def test_a_server_says_what_it_does_answers_and_drains(server: Any) -> None:
    process, url, lines = server
    log = "".join(lines)
    order = [
        "mstar 0.",
        "plugin: echo",
        "plugin echo 0.1",
        "lm: weights",
        "Available routes:",
        "POST /v1/generate",
        "Starting mstar server",
    ]
    assert [log.find(words) for words in order] == sorted(log.find(words) for words in order), log
    assert all(words in log for words in order)
    assert "max_body_bytes" not in log  # only settings that are not the default
    assert "api_key: '***'" in log and "anyone who can reach" not in log
    assert httpx.get(f"{url}/v1/models").status_code == 401
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=10) as client:
        answer = client.post("/v1/generate", json=text("hello", task="chunks"))
        assert answer.status_code == 200 and answer.json()["outputs"]
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        spoken = client.post("/v1/audio/speech", json={"input": "hello"})
        assert spoken.content.startswith(b"RIFF") and len(spoken.content) > 44
        assert client.get("/v1/audio/voices").json()["voices"] == ["plain", "loud"]
        assert client.get("/version").json()["plugin"]["version"]
        client.get(f"/v1/models/{KEY}?api_key={KEY}")
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert process.stderr is not None and KEY not in log + process.stderr.read()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_a_second_signal_ends_it_at_once_without_a_traceback(server: Any) -> None:
    process, _, _ = server
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 1
    assert process.stderr is not None and "Traceback" not in process.stderr.read()


def test_an_open_door_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for host, keys, is_warned in (
        ("0.0.0.0", (), True),
        ("::", (), True),
        ("127.0.0.1", (), False),
        ("0.0.0.0", (KEY,), False),
    ):
        caplog.clear()
        with pytest.raises(ConfigError, match="no plugin 'nobody'"):
            launch.serve(engine_config(plugin="nobody"), ServerConfig(host=host, port=0, api_key=keys))
        assert ("set --api-key or MSTAR_API_KEY" in caplog.text) == is_warned, host


def test_certificates_are_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    settings = ServerConfig(port=0, ssl_certfile=str(tmp_path / "absent.pem"))
    with pytest.raises(ConfigError, match=r"--ssl-certfile .*absent\.pem: No such file"):
        launch.serve(engine_config(plugin="nobody"), settings)
