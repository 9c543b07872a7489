"""The HTTP surface over real sockets, with the fake worker behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import uvicorn
from safetensors.torch import load

import mstar
from mstar.config import ServerConfig
from mstar.ipc.messages import Abort, Beat, Ready
from mstar.server.app import create_app


@contextlib.asynccontextmanager
async def listening(
    serving: Callable[..., Any], *, app: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    """A client of a server on a free port, and what is served. `app` is for `create_app`, the rest for the engine."""
    async with serving(**settings) as served:
        usual = {"root": "tiny", "config": ServerConfig(max_body_bytes=4096), "voices": ["amy"]}
        app = create_app(served.engine, **usual | (app or {}))
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            server = uvicorn.Server(
                uvicorn.Config(app, log_config=None, log_level="critical", timeout_graceful_shutdown=1)
            )
            server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
            task = asyncio.create_task(server.serve(sockets=[listener]))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            try:
                while not server.started:
                    await asyncio.sleep(0.01)
                async with httpx.AsyncClient(base_url=url, timeout=10) as client:
                    yield client, served
            finally:
                server.should_exit = True
                await task


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario, 30))


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"inputs": [{"type": "text", "text": value}], **fields}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json" and response.headers["x-request-id"]
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and "Traceback" not in error["message"]
    return error


def test_generate_whole(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with listening(serving) as (client, _):
            response = await client.post("/v1/generate", json=text("hello", seed=5), headers={"X-Request-Id": "mine"})
            assert response.status_code == 200 and response.headers["x-request-id"] == "mine"
            body = response.json()
            assert body["outputs"] == [{"type": "text", "text": "hello", "token_ids": list(b"hello")}]
            assert body["seed"] == 5 and body["finish_reason"] == "stop" and body["counts"] == {"squawks": 1}
            response = await client.post(
                "/v1/generate",
                json=text("hi", task="speech", outputs=["audio"]),
                headers={"Accept": "application/octet-stream"},
            )
            assert load(response.content)["audio"].shape == (160,)

    run(scenario())


def test_generate_streams_ndjson(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with listening(serving) as (client, _):
            response = await client.post("/v1/generate", json=text("hey", stream=True, outputs=["text", "tensors"]))
            assert response.headers["content-type"] == "application/x-ndjson"
            events = [json.loads(line) for line in response.text.splitlines()]
            assert [event["event"] for event in events] == ["text", "text", "text", "tensor", "done"]
            assert "".join(event["text"] for event in events[:3]) == "hey" and events[3]["name"] == "said"
            assert events[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 3}

    run(scenario())


def test_speech_whole_and_streamed_hold_the_same_samples(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with listening(serving) as (client, _):
            whole = await client.post("/v1/audio/speech", json={"input": "hello", "seed": 1})
            assert whole.headers["content-type"] == "audio/wav"
            assert whole.headers["x-finish-reason"] == "stop" and whole.headers["x-seed"] == "1"
            assert struct.unpack_from("<I", whole.content, 40)[0] == len(whole.content) - 44 == 2 * 80 * 5
            streamed = await client.post("/v1/audio/speech", json={"input": "hello", "stream": True})
            assert streamed.content.count(b"RIFF") == 1 and streamed.content[44:] == whole.content[44:]
            assert streamed.headers["transfer-encoding"] == "chunked"
            pcm = await client.post("/v1/audio/speech", json={"input": "hello", "response_format": "pcm"})
            assert pcm.content == whole.content[44:] and pcm.headers["x-sample-rate"] == "8000"
            assert np.frombuffer(pcm.content, "<i2")[0] == int(ord("h") / 256 * 32767)
            cut = await client.post("/v1/audio/speech", json={"input": "hello", "max_tokens": 2})
            assert cut.headers["x-finish-reason"] == "length"

    run(scenario())


def test_errors_are_openai_shaped_on_every_route(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with listening(serving) as (client, served):
            assert "routes: POST /v1/generate" in error_of(await client.get("/nowhere"), 404)["message"]
            message = error_of(await client.post("/v1/generates"), 404)["message"]
            assert "did you mean /v1/generate? routes: " in message
            assert error_of(await client.get("/v1/generate/"), 404)["type"] == "not_found_error"
            response = await client.get("/v1/generate")
            assert "GET is not allowed" in error_of(response, 405)["message"] and response.headers["allow"] == "POST"
            assert error_of(await client.post("/v1/generate", data={"a": "b"}), 415)["type"] == "invalid_request_error"
            error_of(await client.post("/v1/generate", json=text("x" * 5000)), 413)
            bad = {"content": b"{", "headers": {"Content-Type": "application/json"}}
            assert "not valid JSON" in error_of(await client.post("/v1/generate", **bad), 400)["message"]
            assert error_of(await client.post("/v1/generate", json=text("a", seed=-1)), 400)["param"] == "seed"
            response = await client.post("/v1/audio/speech", json={"input": "a", "model": "gpt"})
            assert error_of(response, 404)["code"] == "model_not_found"
            response = await client.post("/v1/audio/speech", json={"input": "a", "voice": "nobody"})
            assert error_of(response, 400)["param"] == "voice"
            assert "ZeroDivisionError" in error_of(await client.post("/v1/generate", json=text("BOOM")), 500)["message"]
            for stream in (False, True):
                assert error_of(await client.post("/v1/generate", json=text("#", stream=stream)), 500)
            assert error_of(await client.post("/v1/audio/speech", json={"input": "#", "stream": True}), 500)
            error_of(await client.delete("/v1/sessions/none"), 404)
            assert (await client.post("/v1/generate", json=text("fine"))).status_code == 200
            await served.settled()

    run(scenario())


def test_models_give_their_limits(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with listening(serving, served_model_name=("one", "two"), max_queue=9) as (client, _):
            models = (await client.get("/v1/models")).json()
            assert models["object"] == "list" and [m["id"] for m in models["data"]] == ["one", "two"]
            model = (await client.get("/v1/models/two")).json()
            assert model["max_model_len"] == 2000 and model in models["data"]
            assert model["limits"] == {
                "max_model_len": 2000, "max_body_bytes": 4096, "max_num_seqs": 32, "max_queue": 9,
                "request_timeout_s": None,
            }  # fmt: skip
            for name in ("three", "%2e%2e/%2e%2e/etc/passwd", "%2e%2e%2f", "\u00e9", "%ff", "x" * 9000):
                error = error_of(await client.get(f"{client.base_url}/v1/models/{name}"), 404)
                assert error["param"] == "model" and len(error["message"]) < 500

    run(scenario())


def test_routes_are_told_as_clients_write_them(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with listening(serving) as (client, _):
            message = error_of(await client.get("/nowhere"), 404)["message"]
            assert "GET /v1/models/{name}," in message and ":path" not in message
            message = error_of(await client.get("/v1/models/tiny?x=1"), 400)["message"]
            assert message.startswith("/v1/models/{name} takes no query parameters")

    run(scenario())


def test_health_is_about_the_model_and_ready_about_the_next_request(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with listening(serving, max_num_seqs=1, max_queue=0, step_s=0.02) as (client, served):

            async def statuses() -> list[int]:
                return [(await client.get(path)).status_code for path in ("/health", "/ready")]

            assert (await client.get("/health")).json() == {"status": "ok"}
            assert (await client.get("/ready")).json() == {"status": "ready"}
            running = asyncio.ensure_future(client.post("/v1/generate", json=text("x" * 20)))
            await asyncio.sleep(0.2)
            assert await statuses() == [200, 503]
            response = await client.get("/ready")
            assert "queue is full" in error_of(response, 503)["message"] and int(response.headers["retry-after"]) > 0
            await running
            await served.settled()
            assert await statuses() == [200, 200]
            assert (await client.post("/v1/generate", json=text("a^"))).status_code == 503
            assert await statuses() == [503, 503]
            response = await client.get("/health")
            assert "device is gone" in error_of(response, 503)["message"] and "retry-after" not in response.headers

    run(scenario())


def test_a_model_that_loads_is_not_ready_and_says_what_it_is_at(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with listening(serving) as (client, served):
            state = served.engine.state
            plan, state.plan = state.plan, None
            state.receive(Beat(step="compiling lm.decode, 3 of 7", seconds=9), now=0)
            for path in ("/health", "/ready"):
                message = error_of(await client.get(path), 503)["message"]
                assert "the model is loading: compiling lm.decode, 3 of 7, for 9 s" in message
            state.receive(Ready(plan=plan, max_model_len=2000), now=0)
            assert (await client.get("/ready")).status_code == 200

    run(scenario())


def test_version_voices_and_metrics(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with listening(serving, app={"plugin_version": "1.2"}) as (client, _):
            version = (await client.get("/version")).json()
            assert version["version"] == mstar.__version__ and version["torch"]
            assert version["plugin"] == {"name": "parrot", "version": "1.2"}
            voices = (await client.get("/v1/audio/voices")).json()
            assert voices["voices"] == ["amy"]
            await client.get("/secret/nowhere")
            await client.get("/v1/models/tiny")
            await client.request("BREW", "/health")
            await client.post("/v1/generate", json=text("a"))
            response = await client.get("/metrics")
            assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
            lines = [line for line in response.text.splitlines() if line.startswith("mstar_http_responses_total")]
            labels = [dict(re.findall(r'(\w+)="([^"]*)"', line)) for line in lines]
            for route, method, status in (
                ("none", "GET", "404"),
                ("/v1/models/{name:path}", "GET", "200"),
                ("/health", "other", "405"),
                ("/v1/generate", "POST", "200"),
            ):
                assert {"route": route, "method": method, "status": status} in labels, lines
            assert "secret" not in response.text
        bare = {"config": ServerConfig(enable_metrics=False), "voices": None}
        async with listening(serving, app=bare) as (client, _):
            error_of(await client.get("/metrics"), 404)
            error_of(await client.get("/v1/audio/voices"), 404)

    run(scenario())


def test_head_is_answered_like_get_without_a_body(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with listening(serving) as (client, _):
            for path in (
                "/health",
                "/ready",
                "/version",
                "/v1/models",
                "/v1/audio/voices",
                "/openapi.json",
                "/metrics",
            ):
                head, get = await client.head(path), await client.get(path)
                assert (head.status_code, head.content) == (200, b"")
                assert head.headers["content-type"] == get.headers["content-type"]
            error = await client.head("/v1/generate")
            assert error.status_code == 405 and error.headers["allow"] == "POST"

    run(scenario())


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "param"),
    [
        ("GET", "/health?verbose=1", {}, 400, "verbose"),
        ("GET", "/v1/models?" + "&".join(f"k{i}=%ff" for i in range(3000)), {}, 400, "k0"),
        ("POST", "/v1/generate?api_key=sesame", {"json": {}}, 400, "api_key"),
        ("GET", "/health", {"content": b"{}"}, 400, "Content-Length"),
        ("DELETE", "/v1/sessions/x", {"content": b"{}"}, 400, "Content-Length"),
        ("POST", "/v1/generate", {"content": b"{}", "headers": {"Content-Type": "text/plain"}}, 415, "Content-Type"),
        ("POST", "/v1/generate", {"content": b"{}"}, 415, "Content-Type"),
        (
            "POST", "/v1/generate",
            {"content": b"{}", "headers": {"Content-Type": "application/json; charset=utf-16"}}, 415, "Content-Type",
        ),
        ("POST", "/v1/audio/speech", {"files": {"input": b"x"}}, 415, "Content-Type"),
        (
            "POST", "/v1/generate",
            {"json": {}, "headers": {"Content-Encoding": "gzip"}}, 415, "Content-Encoding",
        ),
        ("POST", "/health", {}, 405, None),
        ("PATCH", "/v1/models", {}, 405, None),
        ("GET", "//v1/models", {}, 404, None),
        ("GET", "/v1/models/", {}, 404, None),
        ("POST", "/v1/generate/", {"json": {}}, 404, None),
        ("POST", "/v1/images/generations", {"json": {}}, 404, None),
        ("GET", "/static/%2e%2e/%2e%2e/etc/passwd", {}, 404, None),
    ],
)  # fmt: skip
def test_what_would_be_ignored_is_refused(
    serving: Callable[..., Any], method: str, path: str, options: dict[str, Any], status: int, param: str | None
) -> None:
    async def scenario() -> None:
        async with listening(serving) as (client, served):
            response = await client.request(method, f"{client.base_url}{path}", **options)
            error = error_of(response, status)
            # "/v1/models/" names a model without a name
            assert error["param"] == ("model" if path == "/v1/models/" else param)
            assert "sesame" not in response.text and len(response.text) < 2000
            assert ("allow" in response.headers) == (status == 405)
            assert not served.worker.seen

    run(scenario())


@pytest.mark.parametrize(
    ("body", "words", "param"),
    [
        (b"", "not valid JSON", None),
        (b'{"inputs": [], "inputs": []}', "'inputs' is given twice", "inputs"),
        (b'{"params": {"top_k": 1, "top_k": 2}}', "'top_k' is given twice", "top_k"),
        (b'{"seed": NaN}', "not valid JSON", None),
        (b'{"seed": -Infinity}', "not valid JSON", None),
        (b'{"params": {"temperature": 1e999}}', "not valid JSON", None),
        (b'{"model": "\xff"}', "byte 11 is not UTF-8", None),
        (b"\xff\xfe{\x00}\x00", "not UTF-8", None),
        (b'{"model": "\\ud800"}', "valid Unicode", "model"),
        (b'{"seed": 1' + b"0" * 3000 + b"}", "64 bits", "seed"),
        (b'{"params":' * 300 + b"1" + b"}" * 300, "", ...),
        (b"[" * 4000, "nested too deeply", None),
        (b"[]", "must be object", None),
        (b'"text"', "must be object", None),
        (b"null", "must be object", None),
    ],
)
def test_bodies_that_cannot_be_read_are_a_400(serving: Callable[..., Any], body: bytes, words: str, param: Any) -> None:
    async def scenario() -> None:
        async with listening(serving) as (client, served):
            kind = {"Content-Type": "application/json; charset=UTF-8"}
            error = error_of(await client.post("/v1/generate", content=body, headers=kind), 400)
            assert words in error["message"] and param in (..., error["param"]) and len(error["message"]) < 300
            error_of(await client.post("/v1/audio/speech", content=body, headers=kind), 400)
            await served.settled()

    run(scenario())


@pytest.mark.parametrize("value", ["", "   ", "\n", None, 7, ["a"], {"a": 1}])
def test_blank_or_missing_input_is_refused_before_any_work(serving: Callable[..., Any], value: Any) -> None:
    async def scenario() -> None:
        async with listening(serving) as (client, served):
            body = {} if value is None else {"input": value}
            for fields in (body, {"input": value}):
                assert error_of(await client.post("/v1/audio/speech", json=fields), 400)["param"] == "input"
            for voice in ("", "nobody", "x" * 2000, "../../x", 7):
                response = await client.post("/v1/audio/speech", json={"input": "a", "voice": voice})
                assert error_of(response, 400)["param"] == "voice"
            assert not served.worker.seen and (await client.get("/health")).status_code == 200

    run(scenario())


def test_large_bodies_leave_the_event_loop_to_others(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with listening(serving, app={"config": ServerConfig(max_body_bytes=2**24)}) as (client, _):
            ids = {"inputs": [{"type": "token_ids", "ids": [7] * 1_000_000}]}
            body = json.dumps(ids).encode()
            posting = asyncio.ensure_future(
                client.post("/v1/generate", content=body, headers={"Content-Type": "application/json"})
            )
            longest, began = 0.0, time.perf_counter()
            while not posting.done():
                asleep = time.perf_counter()
                await asyncio.sleep(0.001)
                longest = max(longest, time.perf_counter() - asleep)
            error_of(await posting, 400)  # more than the model takes
            assert longest < (time.perf_counter() - began) / 3, longest
            many = b"[" + b"1," * 2_200_000 + b"1]"
            response = await client.post("/v1/generate", content=many, headers={"Content-Type": "application/json"})
            assert "commas" in error_of(response, 413)["message"]

    run(scenario())


def test_a_full_queue_says_when_to_come_back(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with listening(serving, max_num_seqs=1, max_queue=0, step_s=0.02) as (client, _):
            first = asyncio.ensure_future(client.post("/v1/generate", json=text("x" * 30)))
            await asyncio.sleep(0.2)
            response = await client.post("/v1/generate", json=text("second"))
            assert error_of(response, 429)["type"] == "rate_limit_error" and int(response.headers["retry-after"]) >= 1
            assert (await first).status_code == 200

    run(scenario())


@pytest.mark.parametrize("path", ["/v1/generate", "/v1/audio/speech"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_request(serving: Callable[..., Any], path: str, stream: bool) -> None:
    async def scenario() -> None:
        async with listening(serving, step_s=0.01) as (client, served):
            value = "y" * 900
            body = {"input": value, "stream": stream} if "speech" in path else text(value, stream=stream)
            _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
            data = msgspec.json.encode(body)
            kind = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
            writer.write(f"POST {path} HTTP/1.1\r\n{kind}\r\n\r\n".encode() + data)
            await writer.drain()
            while not served.worker.open:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            writer.close()
            await asyncio.wait_for(served.settled(), 1)
            assert isinstance(served.worker.seen[-1], Abort)

    run(scenario())


def test_a_failure_in_the_middle_ends_the_stream_abnormally(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with listening(serving, step_s=0.03) as (client, served):
            received = b""
            with pytest.raises(httpx.RemoteProtocolError):
                async with client.stream("POST", "/v1/generate", json=text("ab#", stream=True)) as response:
                    assert response.status_code == 200
                    async for block in response.aiter_bytes():
                        received += block
            events = [json.loads(line) for line in received.splitlines()]
            assert [event["event"] for event in events] == ["text", "text", "error"]
            assert events[-1]["error"]["message"] == "the node failed"
            with pytest.raises(httpx.RemoteProtocolError):
                await client.post("/v1/audio/speech", json={"input": "ab#", "stream": True})
            assert (await client.post("/v1/generate", json=text("fine"))).status_code == 200
            await served.settled()

    run(scenario())


def test_many_clients_get_their_own_answers(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with listening(serving, max_num_seqs=4) as (client, served):
            texts = [f"client {i} says {i * i}" for i in range(24)]
            bodies = [text(value, stream=i % 2 == 0) for i, value in enumerate(texts)]
            responses = await asyncio.gather(*(client.post("/v1/generate", json=body) for body in bodies))
            for i, (value, response) in enumerate(zip(texts, responses, strict=True)):
                if i % 2:
                    assert response.json()["outputs"][0]["text"] == value
                else:
                    events = [json.loads(line) for line in response.text.splitlines()]
                    assert "".join(e["text"] for e in events if e["event"] == "text") == value
            await served.settled()

    run(scenario())
