"""A served Orpheus as clients meet it: ours, the openai package, curl, a raw socket, and the load generator."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

import mstar
from mstar.cli import main
from mstar.client import APIError, Audio, Client, StreamBroken, Tensor, tensor
from mstar.server.convert import convert
from mstar.server.native import GenerateRequest

ROOT = Path(__file__).parents[3]
FRAME = 2048
ASKED = {"input": "Hello there.", "voice": "tara", "seed": 5, "max_tokens": 31}
ENDLESS = {"input": "On and on.", "voice": "tara", "seed": 1, "ignore_eos": True}
ENDLESS_NATIVE = {"inputs": [{"type": "text", "text": "On and on."}], "params": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def served(serving: Any, tiny_folder: Path) -> Iterator[Any]:
    names = ("orpheus", "tts-1")
    with serving(tiny_folder, max_model_len=1024, served_model_name=names, max_num_seqs=2, max_queue=2) as served:
        yield served


@pytest.fixture(scope="module")
def url(served: Any) -> Iterator[str]:
    with served.http() as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Client]:
    with Client(url, timeout=60, max_retries=0) as client:
        yield client


@pytest.fixture(autouse=True)
def _left_clean(served: Any) -> Iterator[None]:
    yield
    served.assert_clean()


@pytest.fixture(scope="module")
def pcm(client: Client) -> bytes:
    """The samples of ASKED."""
    fields = {name: value for name, value in ASKED.items() if name != "input"}
    return bytes(client.speech("Hello there.", response_format="pcm", **fields))


def assert_idle_soon(served: Any) -> None:
    """Whoever went away has left nothing behind after a second."""
    gone = time.monotonic()
    while not served.is_idle:
        assert time.monotonic() < gone + 1.0, served.engine.state.stats
        time.sleep(0.01)


def fail_what_runs(served: Any) -> None:
    """End all requests with an error, wherever they are."""

    async def cut() -> None:
        served.engine.cut()

    served.run(cut())


# ---- our own ----------------------------------------------------------------------------------------------------


def test_speech_whole_and_streamed(client: Client, pcm: bytes, tmp_path: Path) -> None:
    assert len(pcm) == 4 * FRAME * 2
    wav = client.speech("Hello there.", voice="tara", seed=5, max_tokens=31)
    assert (wav.content_type, wav.sample_rate, wav.finish_reason, wav.seed) == ("audio/wav", 24000, "length", 5)
    assert wav[44:] == pcm
    for stream_format in ("sse", "audio"):
        fields = {"voice": "tara", "seed": 5, "max_tokens": 31, "stream_format": stream_format}
        with client.stream_speech("Hello there.", **fields) as stream:
            assert (stream.answer.sample_rate, stream.answer.seed) == (24000, 5)
            pieces = list(stream)
        assert b"".join(pieces) == pcm and len(pieces) >= 2
        assert stream.answer.finish_reason == ("length" if stream_format == "sse" else None)


def test_a_result_and_a_stream_hold_the_same(client: Client, pcm: bytes, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"outputs": ["audio", "tensor:codes"], "params": {"max_tokens": 31}, "seed": 5}
    whole = client.generate("Hello there.", task="speech", **asked)
    with client.stream("Hello there.", **asked) as stream:
        events = list(stream)
    assert {Audio, Tensor} <= {type(event) for event in events} and len(events) >= 6
    for result in (whole, stream.answer.result):
        (audio,) = result.audio
        assert audio.samples.dtype == np.float32 and audio.sample_rate == 24000
        assert (audio.samples * 32767).round().astype("<i2").tobytes() == pcm
        assert result.tensors["codes"].shape == (28,) and result.tensors["codes"].dtype == np.int64
        assert (result.task, result.finish_reason, result.seed) == ("speech", "length", 5)
        assert result.usage["completion_tokens"] == 31 and result.counters["lm.decode"] == 31
        assert result.timings["total_s"] >= result.timings["first_output_s"] > 0
    assert (whole.tensors["codes"] == stream.answer.result.tensors["codes"]).all()


def test_tensors_go_both_ways(client: Client) -> None:
    codes = tensor("codes", np.arange(28, dtype=np.int64))
    result = client.generate(inputs=[codes], task="vocode", outputs=["tensor:audio"], params={"codec_noise": False})
    assert result.tensors["audio"].shape == (4 * FRAME,) and result.tensors["audio"].dtype == np.float32


def test_the_server_is_asked_about_itself(client: Client) -> None:
    assert client.ready() and client.health()["status"] == "ok"
    assert client.version() == mstar.__version__
    assert [model["id"] for model in client.models()] == ["orpheus", "tts-1"]
    assert client.voices()[:3] == ["tara", "zoe", "zac"]
    assert "mstar_requests_total" in client.metrics()


def test_mistakes_come_with_parameter_and_status(client: Client) -> None:
    for call, status, param in (
        (lambda: client.speech("Hello.", voice="nobody"), 400, "voice"),
        (lambda: client.speech("Hello.", colour="red"), 400, "colour"),
        (lambda: client.generate("Hello.", model="gpt"), 404, "model"),
        (lambda: next(client.stream("Hello.", params={"volume": 1})), 400, "params.volume"),
        (lambda: client.close_session("a b"), 404, None),
    ):
        with pytest.raises(APIError) as caught:
            call()
        assert caught.value.status == status and param in (None, caught.value.param), caught.value
        assert caught.value.request_id


def test_a_failure_in_the_middle_of_a_stream_is_told(client: Client, served: Any) -> None:
    more = {name: value for name, value in ENDLESS.items() if name != "input"}
    with client.stream_speech("On and on.", **more) as stream:
        next(stream)
        fail_what_runs(served)
        with pytest.raises(APIError, match="shutting down"):
            list(stream)
    with client.stream_speech("On and on.", **more, stream_format="audio") as stream:
        next(stream)
        fail_what_runs(served)
        with pytest.raises(StreamBroken):
            list(stream)
    with client.stream("On and on.", params={"ignore_eos": True}) as events:
        next(events)
        fail_what_runs(served)
        with pytest.raises(APIError, match="shutting down") as caught:
            list(events)
        assert caught.value.status is None and caught.value.code == "unavailable"


def test_leaving_a_stream_cancels_its_request(client: Client, served: Any) -> None:
    for _ in client.stream("On and on.", params={"ignore_eos": True}):
        break
    assert_idle_soon(served)


def test_asyncio_asks_for_many_at_once(url: str, pcm: bytes) -> None:
    fields = {"voice": "tara", "seed": 5, "max_tokens": 31, "response_format": "pcm"}

    async def ask() -> None:
        async with mstar.AsyncClient(url, timeout=60) as client:
            both = await asyncio.gather(*(client.speech("Hello there.", **fields) for _ in range(2)))
            for samples in (
                np.frombuffer(speech, dtype="<i2").astype(int) for speech in both
            ):  # batches may round apart
                assert np.abs(samples - np.frombuffer(pcm, dtype="<i2")).max() <= 2
            async with client.stream("Hello there.", params={"max_tokens": 31}, seed=5) as stream:
                assert sum([len(event.samples) async for event in stream if isinstance(event, Audio)]) * 2 == len(pcm)
            assert stream.answer.result.seed == 5

    asyncio.run(ask())


def test_the_documented_client_runs(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "client.md").read_text()
    assert len(text.splitlines()) <= 120
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5 and "http://127.0.0.1:8000" in blocks[0]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "docs"}
    for block in blocks:
        exec(compile(block.replace("http://127.0.0.1:8000", url), "docs/client.md", "exec"), names)
    assert (tmp_path / "hello.wav").read_bytes()[:4] == (tmp_path / "again.wav").read_bytes()[:4] == b"RIFF"
    names["client"].close()


# ---- the openai package -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def official(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as official:
        yield official


def test_openai_speaks_whole_and_streamed(official: openai.OpenAI, pcm: bytes) -> None:
    asked: dict[str, Any] = {"model": "tts-1", "voice": "tara", "input": "Hello there.", "response_format": "pcm"}
    extra = {"seed": 5, "max_tokens": 31}
    assert official.audio.speech.create(**asked, extra_body=extra).content == pcm
    speaking = official.audio.speech.with_streaming_response.create(**asked, stream_format="audio", extra_body=extra)
    with speaking as response:
        assert response.headers["x-sample-rate"] == "24000"
        assert b"".join(response.iter_bytes()) == pcm
    with official.audio.speech.with_streaming_response.create(
        **asked, stream_format="sse", extra_body=extra
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [event["type"] for event in events] == ["speech.audio.delta"] * (len(events) - 1) + ["speech.audio.done"]
    assert b"".join(base64.b64decode(event["audio"]) for event in events[:-1]) == pcm


def test_openai_lists_models(official: openai.OpenAI) -> None:
    assert [model.id for model in official.models.list()] == ["orpheus", "tts-1"]
    assert official.models.retrieve("tts-1").object == "model"


def test_openai_raises_its_own_errors(official: openai.OpenAI, served: Any) -> None:
    create = official.audio.speech.create
    with pytest.raises(openai.BadRequestError) as bad:
        create(model="tts-1", voice="nobody", input="Hello.")
    assert bad.value.param == "voice" and "tara" in bad.value.message
    with pytest.raises(openai.BadRequestError):
        create(model="tts-1", voice="tara", input="Hello.", instructions="Whisper.")
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt-4o-mini-tts", voice="tara", input="Hello.")
    assert missing.value.code == "model_not_found" and missing.value.type == "not_found_error"
    with served.http(api_key=("right",)) as locked:
        stranger = openai.OpenAI(base_url=f"{locked}/v1", api_key="wrong", max_retries=0)
        with stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        with Client(locked, api_key="right") as friend:
            assert friend.models()
        with Client(locked, api_key="wrong") as stranger_too, pytest.raises(APIError) as caught:
            stranger_too.voices()
        assert caught.value.status == 401


def test_openai_meets_a_full_queue(official: openai.OpenAI, client: Client, served: Any) -> None:
    handles = []
    for running in (1, 2, 2, 2):
        handles.append(served.run(served.engine.submit(convert(ENDLESS_NATIVE, GenerateRequest))))
        deadline = time.monotonic() + 20
        while served.engine.state.num_running < running:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    with pytest.raises(openai.RateLimitError) as full:
        official.audio.speech.create(model="tts-1", voice="tara", input="Hello.")
    assert int(full.value.response.headers["retry-after"]) >= 1
    with pytest.raises(APIError) as caught:
        client.speech("Hello.")
    assert caught.value.status == 429 and caught.value.retry_after is not None

    async def abort() -> None:
        for handle in handles:
            handle.abort()

    served.run(abort())
    assert_idle_soon(served)


# ---- curl -----------------------------------------------------------------------------------------------------------

with_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def curl(url: str, body: dict[str, Any], *options: str) -> list[str]:
    return ["curl", "-sS", "--max-time", "60", url, "--json", json.dumps(body), *options]


@with_curl
def test_curl_writes_a_file(url: str, pcm: bytes, tmp_path: Path) -> None:
    command = curl(f"{url}/v1/audio/speech", ASKED, "-o", str(tmp_path / "x.wav"), "-w", "%{http_code} %{content_type}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=70, check=True)
    assert done.stdout == "200 audio/wav"
    assert (tmp_path / "x.wav").read_bytes()[44:] == pcm


@with_curl
def test_curl_streams_and_sees_errors(url: str, pcm: bytes) -> None:
    streamed = ASKED | {"response_format": "pcm", "stream": True}
    done = subprocess.run(curl(f"{url}/v1/audio/speech", streamed, "-N"), capture_output=True, timeout=70, check=True)
    assert done.stdout == pcm
    wrong = curl(f"{url}/v1/audio/speech", ASKED | {"voice": "nobody"}, "--fail-with-body")
    refused = subprocess.run(wrong, capture_output=True, text=True, timeout=70, check=False)
    assert refused.returncode == 22 and json.loads(refused.stdout)["error"]["param"] == "voice"


@with_curl
def test_curl_fails_when_a_stream_does(url: str, served: Any, tmp_path: Path) -> None:
    out = tmp_path / "x.pcm"
    body = ENDLESS | {"response_format": "pcm", "stream": True}
    process = subprocess.Popen(curl(f"{url}/v1/audio/speech", body, "-N", "-o", str(out)), stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not (out.exists() and out.stat().st_size):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    fail_what_runs(served)
    process.communicate(timeout=20)
    assert process.returncode in (18, 56)  # a body cut off, or a connection reset


# ---- a raw socket ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        yield connection


def post(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def read_until_closed(connection: socket.socket) -> bytes:
    data = bytearray()
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65536):
            data += piece
    return bytes(data)


def chunks_of(body: bytes) -> tuple[list[bytes], bool]:
    """The chunks of a chunked body, and whether it has its end."""
    chunks = []
    while (found := re.match(rb"([0-9a-f]+)\r\n", body)) is not None:
        size = int(found[1], 16)
        if not size:
            return chunks, body == b"0\r\n\r\n"
        chunks.append(body[found.end() : found.end() + size])
        assert body[found.end() + size :][:2] in (b"\r\n", b"")
        body = body[found.end() + size + 2 :]
    return chunks, False


def test_a_stream_s_bytes_are_chunks_with_an_end(url: str, pcm: bytes) -> None:
    body = ASKED | {"response_format": "pcm", "stream": True}
    with connected(url) as connection:
        request = post("/v1/audio/speech", body).replace(b"Host: x", b"Host: x\r\nConnection: close")
        connection.sendall(request)
        head, _, rest = read_until_closed(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"transfer-encoding: chunked" in head.lower()
    chunks, is_ended = chunks_of(rest)
    assert is_ended and b"".join(chunks) == pcm and len(chunks) >= 2


@pytest.mark.parametrize("path", ["/v1/generate", "/v1/audio/speech"])
def test_a_failure_in_a_stream_ends_it_abnormally(url: str, served: Any, path: str) -> None:
    body = {**ENDLESS_NATIVE, "stream": True} if "generate" in path else ENDLESS | {"stream_format": "sse"}
    with connected(url) as connection:
        connection.sendall(post(path, body))
        begun = connection.recv(65536)
        while begun.count(b"\r\n") < 8:
            begun += connection.recv(65536)
        fail_what_runs(served)
        _, _, rest = (begun + read_until_closed(connection)).partition(b"\r\n\r\n")
    chunks, is_ended = chunks_of(rest)
    assert not is_ended and b"shutting down" in chunks[-1] and b'"error"' in chunks[-1]


def test_a_client_that_closes_its_half_is_gone(url: str, served: Any) -> None:
    with connected(url) as connection:
        connection.sendall(post("/v1/generate", {**ENDLESS_NATIVE, "stream": True}))
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.shutdown(socket.SHUT_WR)
        assert_idle_soon(served)
        _, is_ended = chunks_of(read_until_closed(connection).partition(b"\r\n\r\n")[2])
        assert not is_ended


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET /\r\n\r\n", b"\r\n\r\n \r\n\r\n"])
def test_garbage_behind_a_request_spoils_nothing_but_its_connection(url: str, garbage: bytes) -> None:
    with connected(url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + garbage)
        answers = read_until_closed(connection)
    assert answers.startswith(b"HTTP/1.1 200") and answers.count(b"HTTP/1.1 400") == 1
    assert b"Traceback" not in answers
    assert httpx.get(f"{url}/health", timeout=10).status_code == 200


def test_pipelined_requests_are_answered_in_order(url: str, pcm: bytes) -> None:
    with connected(url) as connection:
        last = b"GET /nowhere HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        connection.sendall(post("/v1/audio/speech", ASKED | {"response_format": "pcm"}) + last)
        answers = read_until_closed(connection)
    first, second = answers.index(b"HTTP/1.1 200"), answers.index(b"HTTP/1.1 404")
    assert first == 0 and pcm in answers[first:second]


# ---- mstar bench speech ---------------------------------------------------------------------------------------------


def test_the_load_generator_measures_a_server(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.json"
    arguments = ["--url", url, "--concurrency", "2", "--num-requests", "4", "--warmup", "1", "--voice", "tara"]
    with pytest.raises(SystemExit) as end:
        main(
            ["bench", "speech", *arguments, "--param", "max_tokens=31", "--param", "ignore_eos=true", "--out", str(out)]
        )
    report = json.loads(out.read_text())
    assert end.value.code == 0, report["summary"]
    samples = report["samples"]
    assert len(samples) == 4 and all(sample["audio_s"] == pytest.approx(4 * FRAME / 24000) for sample in samples)
    assert all(0 < sample["first_audio_s"] < sample["latency_s"] and sample["num_chunks"] >= 2 for sample in samples)
    assert report["summary"]["rtf"]["p50"] * report["summary"]["audio_s_per_wall_s"]["p50"] == pytest.approx(1, rel=0.5)
    assert report["server"]["event_loop_lag_s"]["p50"] >= 0.001  # of mstar_event_loop_lag_seconds
    assert "server event_loop_lag_s" in capsys.readouterr().out


def test_the_load_generator_reads_compressed_files_and_counts_refusals(url: str, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    common = ["bench", "speech", "--url", url, "--num-requests", "1", "--warmup", "0", "--out", str(out)]
    for more, code, failures in (
        (["--format", "mp3", "--no-stream", "--param", "max_tokens=31"], 0, {}),
        (["--param", "stream_format=sse", "--param", "max_tokens=31", "--format", "wav"], 0, {}),
        (["--voice", "nobody"], 1, {"http_400": 1}),
        (["--param", "max_tokens=6"], 1, {"http_400": 1}),
        (["--param", "ignore_eos=true", "--timeout", "0.2"], 1, {"timeout": 1}),
    ):
        with pytest.raises(SystemExit) as end:
            main([*common, *more])
        report = json.loads(out.read_text())
        assert (end.value.code, report["summary"]["failures"]) == (code, failures), report["samples"]
