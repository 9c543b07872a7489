"""Both clients against a server that misbehaves as told: errors, retries, broken and abandoned streams."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

import mstar
from mstar import config
from mstar.client import APIError, AsyncClient, Client, ConnectionFailed, Speech, StreamBroken, Text

Ask = Callable[..., Any]

RESULT = {
    "id": "1", "model": "m", "task": "t", "finish_reason": "stop", "seed": 3, "usage": {"prompt_tokens": 2},
    "timings": {"total_s": 0.5}, "counters": {}, "outputs": [{"type": "text", "text": "hi", "token_ids": [1]}],
}  # fmt: skip
TEXT = b'{"event": "text", "text": "hi", "token_ids": [1], "index": 0}\n'
DONE = json.dumps({name: value for name, value in RESULT.items() if name != "outputs"} | {"event": "done"}).encode()
ERROR = {"error": {"message": "too many", "type": "rate_limit_error", "param": None, "code": "queue_full"}}


def ask_plainly(url: str, method: str, *arguments: Any, options: dict[str, Any] | None = None, **fields: Any) -> Any:
    """What a method of `Client` gives; of streams all items and the answer."""
    with Client(url, **{"timeout": 10, **(options or {})}) as client:
        found = getattr(client, method)(*arguments, **fields)
        if not method.startswith("stream"):
            return found
        with found as stream:
            return list(stream), stream.answer


def ask_with_asyncio(url: str, method: str, *arguments: Any, options: Any = None, **fields: Any) -> Any:
    async def ask() -> Any:
        async with AsyncClient(url, **{"timeout": 10, **(options or {})}) as client:
            found = getattr(client, method)(*arguments, **fields)
            if not method.startswith("stream"):
                return await found
            async with found as stream:
                return [item async for item in stream], stream.answer

    return asyncio.run(ask())


@pytest.fixture(params=[ask_plainly, ask_with_asyncio], ids=["plain", "asyncio"])
def ask(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_both_clients_have_the_same_methods() -> None:
    def surface(kind: type) -> dict[str, list[str]]:
        found = inspect.getmembers(kind, inspect.isfunction)
        return {
            name: list(inspect.signature(f).parameters) for name, f in found if name[0] != "_" or name == "__init__"
        }

    assert surface(Client) == surface(AsyncClient)
    assert {"generate", "stream", "speech", "stream_speech", "voices", "models", "metrics"} <= set(surface(Client))


def test_a_result_is_typed(canned: Any, answer: Any, ask: Ask) -> None:
    canned.answers = [answer(RESULT)]
    result = ask(canned.url, "generate", "hello", task="t", params={"n": 1}, seed=3)
    assert result.texts == ["hi"] and result.usage["prompt_tokens"] == 2 and result.raw["id"] == "1"
    (asked,) = canned.asked
    assert asked.line == "POST /v1/generate" and asked.headers["content-type"] == "application/json"
    assert asked.body == {"inputs": [{"type": "text", "text": "hello"}], "task": "t", "params": {"n": 1}, "seed": 3}


def test_speech_is_bytes_that_know_what_they_are(canned: Any, answer: Any, ask: Ask, tmp_path: Any) -> None:
    more = {"X_Sample_Rate": "24000", "X_Seed": "7", "X_Finish_Reason": "stop", "Content_Type": "audio/mpeg"}
    canned.answers = [answer(b"sound", **more)]
    speech = ask(canned.url, "speech", "Hello.", voice="amy", response_format="mp3", temperature=0.5)
    assert isinstance(speech, Speech) and speech == b"sound" and speech.content_type == "audio/mpeg"
    assert (speech.sample_rate, speech.seed, speech.finish_reason) == (24000, 7, "stop")
    speech.save(tmp_path / "x.mp3")
    assert (tmp_path / "x.mp3").read_bytes() == b"sound"
    assert canned.asked[0].body == {"input": "Hello.", "voice": "amy", "response_format": "mp3", "temperature": 0.5}


def test_the_other_routes(canned: Any, answer: Any, ask: Ask) -> None:
    bodies = {
        "voices": {"voices": ["amy"]}, "models": {"data": [{"id": "m"}]}, "health": {"status": "ok"}, "ready": {},
        "version": {"version": "1.2"}, "metrics": b"# text",
    }  # fmt: skip
    expected = {
        "voices": ["amy"], "models": [{"id": "m"}], "health": {"status": "ok"}, "ready": True, "version": "1.2",
        "metrics": "# text",
    }  # fmt: skip
    canned.answers = [*map(answer, bodies.values()), answer(ERROR, status=503), answer({})]
    assert {method: ask(canned.url, method) for method in bodies} == expected
    assert ask(canned.url, "ready") is False
    ask(canned.url, "close_session", "a b/c")
    assert canned.asked[-1].line == "DELETE /v1/sessions/a%20b/c"


def test_the_key_is_sent_and_found_in_the_environment(
    canned: Any, answer: Any, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    canned.answers = [answer({"data": []})] * 3
    ask(canned.url, "models", options={"api_key": "mine"})
    monkeypatch.setenv("MSTAR_API_KEY", "everybody's")
    config.environment.cache_clear()
    ask(canned.url, "models")
    monkeypatch.delenv("MSTAR_API_KEY")
    config.environment.cache_clear()
    ask(canned.url, "models")
    keys = [asked.headers.get("authorization") for asked in canned.asked]
    assert keys == ["Bearer mine", "Bearer everybody's", None]


# ---- errors -------------------------------------------------------------------------------------------------------


def test_an_error_has_all_that_the_server_says(canned: Any, answer: Any, ask: Ask) -> None:
    canned.answers = [answer(ERROR, status=400, X_Request_Id="abc")]
    with pytest.raises(APIError) as caught:
        ask(canned.url, "generate", "hello")
    error = caught.value
    assert (error.status, error.message, error.type) == (400, "too many", "rate_limit_error")
    assert (error.param, error.code, error.request_id, error.retry_after) == (None, "queue_full", "abc", None)
    assert str(error) == "too many (status 400, code queue_full, request abc)"


def test_an_error_of_a_proxy_is_an_error_too(canned: Any, answer: Any, ask: Ask) -> None:
    canned.answers = [answer(b"<html>no luck", status=502)]
    with pytest.raises(APIError, match="no luck") as caught:
        ask(canned.url, "models")
    assert caught.value.status == 502


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_when_it_says(canned: Any, answer: Any, ask: Ask, status: int) -> None:
    canned.answers = [answer(ERROR, status=status, Retry_After="0.2"), answer(RESULT)]
    began = time.monotonic()
    assert ask(canned.url, "generate", "hello").texts == ["hi"]
    assert time.monotonic() - began >= 0.2


@pytest.mark.parametrize(
    ("options", "headers", "status", "method", "num_asked"),
    [
        ({}, {"Retry_After": "0"}, 429, "models", 3),
        ({"max_retries": 0}, {"Retry_After": "0"}, 429, "models", 1),
        ({}, {}, 429, "models", 1),
        ({}, {"Retry_After": "3600"}, 503, "models", 1),
        ({}, {"Retry_After": "0"}, 500, "models", 1),
        ({}, {"Retry_After": "0"}, 503, "health", 1),
    ],
    ids=["at most twice", "not wanted", "no time given", "too long", "not busy", "health"],
)
def test_other_refusals_are_told(
    canned: Any, answer: Any, ask: Ask, options: Any, headers: Any, status: int, method: str, num_asked: int
) -> None:
    canned.answers = [answer(ERROR, status=status, **headers)] * 4
    with pytest.raises(APIError) as caught:
        ask(canned.url, method, options=options)
    assert caught.value.status == status and len(canned.asked) == num_asked
    if "Retry_After" in headers:
        assert caught.value.retry_after == float(headers["Retry_After"])


def test_no_server_and_a_silent_one_are_connections_that_failed(canned: Any, ask: Ask) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConnectionFailed, match="ReadTimeout"):
            ask(address, "models", options={"timeout": 0.2})
    with pytest.raises(ConnectionFailed, match=f"GET {address}.*ConnectError"):
        ask(address, "models")


def test_a_whole_answer_cut_short_is_broken(canned: Any, answer: Any, ask: Ask) -> None:
    canned.answers = [answer(RESULT)[:-5]]
    with pytest.raises(StreamBroken):
        ask(canned.url, "generate", "hello")
    canned.answers = [answer(b"")]
    with pytest.raises(StreamBroken, match="without any audio"):
        ask(canned.url, "speech", "Hello.")


# ---- streams ------------------------------------------------------------------------------------------------------


def test_a_stream_gives_events_and_then_a_result(canned: Any, answer: Any, ask: Ask) -> None:
    canned.answers = [answer(TEXT + TEXT + DONE + b"\n", chunked=True)]
    events, decoder = ask(canned.url, "stream", "hello")
    assert events == [Text("hi", (1,))] * 2
    assert decoder.result.texts == ["hihi"] and decoder.result.seed == 3
    assert canned.asked[0].body["stream"] is True


def test_a_stream_that_ends_too_early_never_ends_silently(canned: Any, answer: Any, ask: Ask) -> None:
    for body in (answer(TEXT, chunked=True), answer(TEXT, chunked=True, end=False), answer(TEXT + DONE, chunked=True)):
        canned.answers = [body]
        with pytest.raises(StreamBroken):
            ask(canned.url, "stream", "hello")
    canned.answers = [answer(b"abcd", chunked=True, end=False)]
    with pytest.raises(StreamBroken, match="broke off"):
        ask(canned.url, "stream_speech", "hello", stream_format="audio")


def test_a_stream_s_refusal_is_an_error_and_a_begun_one_is_not_asked_for_again(
    canned: Any, answer: Any, ask: Ask
) -> None:
    error = json.dumps({"event": "error", **ERROR}).encode()
    for body in (answer(ERROR, status=429), answer(error + b"\n", chunked=True, end=False, Retry_After="0")):
        canned.answers = [body, answer(DONE, chunked=True)]
        with pytest.raises(APIError, match="too many"):
            ask(canned.url, "stream", "hello")
    assert len(canned.asked) == 2


def test_leaving_a_stream_closes_its_connection(canned: Any, answer: Any) -> None:
    canned.is_held = True
    with Client(canned.url, timeout=10) as client:
        for leave in ("with", "break", "close"):
            canned.answers, held = [answer(TEXT, chunked=True, end=False)], canned.gone
            held.clear()
            if leave == "with":
                with client.stream("hello") as stream:
                    assert next(stream) == Text("hi", (1,))
            elif leave == "break":
                gc.disable()
                for _ in client.stream("hello"):
                    break
                gc.enable()
            else:
                stream = client.stream("hello")
                next(stream)
                stream.close()
                assert list(stream) == []
            assert held.wait(1.0), leave


def test_cancelling_a_task_closes_its_stream(canned: Any, answer: Any) -> None:
    canned.is_held, canned.answers = True, [answer(TEXT, chunked=True, end=False)]

    async def ask() -> None:
        async with AsyncClient(canned.url) as client, asyncio.timeout(0.3):
            async for _ in client.stream("hello"):
                pass

    with pytest.raises(TimeoutError):
        asyncio.run(ask())
    assert canned.gone.wait(1.0)


# ---- imports ------------------------------------------------------------------------------------------------------


def test_the_package_is_light_and_the_client_needs_no_torch() -> None:
    code = (
        "import sys, mstar\nassert not {'torch', 'httpx', 'numpy'} & sys.modules.keys()\n"
        "assert mstar.client.APIError\n"
        "assert mstar.Client.__name__ == 'Client' and mstar.AsyncClient\nassert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
    with pytest.raises(AttributeError, match="Clint"):
        _ = mstar.Clint
