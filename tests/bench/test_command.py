"""`mstar bench speech` against a server that does nothing but answer: output, files, exit codes, refusals."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mstar.cli import main

SECOND = 48000  # bytes of pcm


class Silence(BaseHTTPRequestHandler):
    """Answers whatever it is asked with the same two seconds of silence."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        for name, value in (("Content-Type", "audio/pcm"), ("Content-Length", str(2 * SECOND))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(bytes(2 * SECOND))

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Silence.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Silence) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def bench(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "speech", *arguments])
    return end.value.code


def test_a_closed_loop_is_reported_as_a_table_and_as_json(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.json"
    options = ["--url", url, "--concurrency", "3", "--num-requests", "9", "--api-key", "secret-key", "--seed", "4"]
    assert bench(*options, "--out", str(out)) == 0
    shown = capsys.readouterr()
    assert all(word in shown.out for word in ("first_audio_s", "underrun_s", "client null_latency_s", "num_failed 0"))
    assert "9/9" in shown.err
    report = json.loads(out.read_text())
    assert report["arguments"] | {"concurrency": 3, "num_requests": 9, "seed": 4} == report["arguments"]
    assert "secret-key" not in out.read_text() and len(report["arguments"]["texts"]) == 4
    assert [sample["number"] for sample in report["samples"]] == list(range(9))
    assert all(sample["audio_s"] == pytest.approx(2) for sample in report["samples"])
    assert report["summary"]["num_requests"] == 9 and report["summary"]["num_unfinished"] == 0
    client, first = report["client"], report["summary"]["first_audio_s"]
    assert client["null_first_audio_s"]["p50"] > 0 and client["cpu_s"] > 0 and client["event_loop_lag_s"]["p99"] >= 0
    assert 0 < first["min"] <= first["p50"] <= first["max"]
    assert report["server"]["event_loop_lag_s"] == {}  # this server does not say
    assert report["machine"]["num_cores"] == os.cpu_count()


def test_an_open_loop_keeps_its_rate_whatever_the_answers_do(url: str, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    goal = ["--slo-ttfa", "30", "--slo-rtf", "30"]
    assert bench("--url", url, "--rate", "50", "--duration", "0.5", "--warmup", "0", *goal, "--out", str(out)) == 0
    report = json.loads(out.read_text())
    starts = [sample["start_s"] for sample in report["samples"]]
    assert 10 <= len(starts) <= 45 and max(starts) < 0.6
    assert report["arguments"]["num_requests"] is None
    assert report["summary"]["goodput_per_s"] == pytest.approx(report["summary"]["requests_per_s"])


def test_failures_are_told_and_change_the_exit_code(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    # This server sends bare samples whatever it is asked for.
    assert bench("--url", url, "--format", "wav", "--num-requests", "2", "--warmup", "0") == 1
    assert "failed: 2 x" in capsys.readouterr().out


def test_a_port_where_nobody_listens_is_told_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--url", "http://127.0.0.1:9", "--num-requests", "2", "--warmup", "1") == 2
    shown = capsys.readouterr()
    assert "Error: no server answers at http://127.0.0.1:9" in shown.err and "--url" in shown.err
    assert not shown.out


def test_a_server_that_cannot_work_is_not_measured(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Silence, "do_GET", lambda self: self.send_error(503), raising=False)
    assert bench("--url", url) == 2
    assert "cannot work now" in capsys.readouterr().err
    assert not Silence.asked


def test_a_server_that_does_not_read_aloud_is_not_measured(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body = json.dumps({"object": "list", "data": [{"id": "m", "endpoints": ["/v1/chat/completions"]}]}).encode()

    def models(self: Silence) -> None:
        self.send_response(200)
        for name, value in (("Content-Type", "application/json"), ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    monkeypatch.setattr(Silence, "do_GET", models, raising=False)
    assert bench("--url", url) == 2
    assert "has no /v1/audio/speech; it has /v1/chat/completions" in capsys.readouterr().err
    assert not Silence.asked


def test_progress_is_told_in_lines_where_there_is_no_terminal(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mstar.cli.progress.LINE_INTERVAL_S", 0.2)
    assert bench("--url", url, "--rate", "10", "--duration", "1", "--warmup", "0") == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 3
    counts = [int(line.partition(" requests, 0 failed, after ")[0]) for line in lines]
    assert counts == sorted(counts) and counts[-1] > counts[0]


def test_texts_come_from_a_file(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("\nOne.\n\nTwo.\n")
    assert bench("--url", url, "--text", str(path), "--num-requests", "2") == 0
    assert sorted(asked["input"] for asked in Silence.asked) == ["One.", "One.", "Two.", "Two."]  # and a warm-up each
    path.write_text(" \n")
    assert bench("--url", url, "--text", str(path)) == 2
    assert "holds no text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rate", "1", "--concurrency", "2"], "give one of them"),
        (["--format", "mp3"], "--no-stream"),
        (["--rate", "0"], "--rate"),
        (["--slo-rtf", "0"], "--slo-rtf"),
        (["--slo-ttfa", "0"], "--slo-ttfa"),
        (["--concurrency", "0"], "--concurrency"),
        (["--format", "ogg"], "'pcm', 'wav', 'mp3'"),
        (["--param", "x"], "KEY=VALUE"),
        (["--param", "response_format=mp3"], "response_format is set by --format"),
        (["--no-stream", "--param", "stream_format=sse"], "stream_format is set by --format and --stream"),
        (["--out", "/nowhere/at/all/x.json"], "no folder '/nowhere/at/all'"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*options) == 2
    assert words in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "matplotlib" else find(name))
    assert bench("--plot", "x.png") == 2
    assert "pip install 'mstar-core[plot]'" in capsys.readouterr().err


def test_an_interrupted_run_reports_what_there_is(url: str, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    command = [sys.executable, "-m", "mstar", "bench", "speech", "--url", url, "--rate", "5", "--duration", "600"]
    process = subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(Silence.asked) < 4:  # more than the warm-up
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    shown = process.communicate(timeout=60)
    assert process.returncode == 130, shown
    report = json.loads(out.read_text())
    assert report["is_interrupted"] and "num_requests" in shown[0]
    assert report["summary"]["num_requests"] == len(report["samples"]) >= 1
