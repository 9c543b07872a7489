"""What stands before the routes, over real sockets: keys, origins, and clients that are slow, malformed or gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from mstar.config import ServerConfig
from mstar.errors import ConfigError, RequestError
from mstar.launch import Server, _check_certificate
from mstar.server.app import create_app
from mstar.server.guard import Guard, StreamBroken, error_response

KEY = "correct-horse-battery"
ORIGIN = "https://studio.example"
ROUTES = [
    "/v1/generate", "/v1/audio/speech", "/v1/audio/voices", "/v1/models", "/v1/models/tiny", "/v1/sessions/x", "/ready",
    "/version", "/openapi.json", "/metrics",
]  # fmt: skip
NO_ROUTES = [
    "/",
    "/nowhere",
    "/docs",
    "/health/",
    "//health",
    "/HEALTH",
    "/v1/models/",
    "//v1/models",
    "/v1/%2e%2e/health",
]


@contextlib.asynccontextmanager
async def listening(
    serving: Callable[..., Any], *, step_s: float = 0.0, scheme: str = "http", **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    """A client of the server that `mstar serve` would run with these settings."""
    config = ServerConfig(log_level="error", **settings)
    async with serving(step_s=step_s) as served:
        app = create_app(served.engine, root="tiny", config=config, voices=["amy"])
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that little is on its way
            listener.bind(("127.0.0.1", 0))
            server = Server(app, served.engine, config=config)
            server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
            task = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                while not server.started:
                    await asyncio.sleep(0.01)
                url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
                async with httpx.AsyncClient(base_url=url, timeout=10) as client:
                    yield client, served
            finally:
                server.should_exit = True
                await task


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario, 30))


async def raw(client: httpx.AsyncClient, *pieces: bytes, pause_s: float = 0.0) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body of what the server says before it closes, whatever is sent; 0 if it says nothing."""
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    received = b""

    async def read() -> None:
        nonlocal received
        with contextlib.suppress(ConnectionError):
            while block := await reader.read(65536):
                received += block

    reading = asyncio.create_task(read())
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
    await asyncio.wait_for(reading, 10)
    writer.close()
    head, _, body = received.partition(b"\r\n\r\n")
    if not head:
        return 0, {}, b""
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return int(status.split()[1]), headers, body


def error_in(body: bytes | str) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def post(*headers: str, body: bytes = b"", path: str = "/v1/generate") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


# ---- keys ------------------------------------------------------------------------------------------------------


def test_every_route_needs_a_key_but_health(serving: Callable[..., Any]) -> None:
    bad = [
        *({"Authorization": f"Bearer {key}"} for key in ("wrong", f"{KEY}x", KEY[:-1])),
        {}, {"Authorization": "Bearer"}, {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}, {"X-Api-Key": KEY},
        [("Authorization", f"Bearer {KEY}"), ("Authorization", "Bearer wrong")],
    ]  # fmt: skip

    async def scenario() -> None:
        async with listening(serving, api_key=("another-key", KEY)) as (client, served):
            asked = [
                (method, path) for path in ROUTES + NO_ROUTES for method in ("GET", "POST", "HEAD", "OPTIONS", "FOO")
            ]
            for number, (method, path) in enumerate(asked):
                response = await client.request(method, f"{client.base_url}{path}", headers=bad[number % len(bad)])
                assert response.status_code == 401, (method, path)
                assert response.headers["www-authenticate"] == "Bearer" and response.headers["x-request-id"]
                if method != "HEAD":
                    error = error_in(response.text)
                    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
                    assert error["param"] == "Authorization" and KEY not in response.text
            for headers in bad:
                assert (await client.get("/v1/models", headers=headers)).status_code == 401
            for key in ("another-key", KEY):
                right = {"Authorization": f"bearer {key}"}
                assert [(await client.get(path, headers=right)).status_code for path in ROUTES[2:5]] == [200] * 3
                assert {
                    (await client.get(path, headers=right)).status_code for path in NO_ROUTES if path != "/v1/models/"
                } == {404}
            assert [(await client.request(m, "/health")).status_code for m in ("GET", "HEAD", "POST")] == [
                200,
                200,
                405,
            ]
            body = {"inputs": [{"type": "text", "text": "hi"}]}
            assert (await client.post("/v1/generate", json=body)).status_code == 401
            assert not served.worker.seen
            assert (await client.post("/v1/generate", json=body, headers=right)).status_code == 200

    run(scenario())


def test_a_websocket_needs_a_key_too(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with listening(serving, api_key=(KEY,)) as (client, _):
            upgrade = {
                "Connection": "Upgrade",
                "Upgrade": "websocket",
                "Sec-WebSocket-Key": "eA==",
                "Sec-WebSocket-Version": "13",
            }
            assert (await client.get("/v1/realtime", headers=upgrade)).status_code == 401
            response = await client.get("/v1/realtime", headers=upgrade | {"Authorization": f"Bearer {KEY}"})
            assert response.status_code == 404 and error_in(response.text)

    run(scenario())
    reached = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    async def said(scope: dict[str, Any]) -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message)

        guard = Guard(inner, keys=[KEY], refuse=lambda scope, error: error_response(error))  # type: ignore[arg-type]
        await guard({"type": "websocket", "path": "/health", "headers": []} | scope, receive, send)
        return sent

    assert asyncio.run(said({}))[0] == {"type": "websocket.close", "code": 1008, "reason": "no valid API key"}
    answered = asyncio.run(said({"extensions": {"websocket.http.response": {}}}))
    assert answered[0]["type"] == "websocket.http.response.start" and answered[0]["status"] == 401
    assert not reached
    asyncio.run(said({"headers": [(b"authorization", f"Bearer {KEY}".encode())]}))
    assert reached == ["websocket"]


# ---- origins ---------------------------------------------------------------------------------------------------


def test_only_allowed_origins_may_call_and_their_preflight_needs_no_key(serving: Callable[..., Any]) -> None:
    ask = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}

    async def scenario() -> None:
        async with listening(serving, api_key=(KEY,), allowed_origins=(ORIGIN,)) as (client, _):
            response = await client.options("/v1/generate", headers=ask)
            assert response.status_code == 200 and response.text == "OK"
            assert response.headers["access-control-allow-origin"] == ORIGIN
            assert response.headers["access-control-allow-headers"] == "authorization"
            assert "POST" in response.headers["access-control-allow-methods"]
            for change in ({"Origin": "https://evil.example"}, {"Access-Control-Request-Method": "BREW"}):
                response = await client.options("/v1/generate", headers=ask | change)
                assert response.status_code == 403 and error_in(response.text)["param"] in change
            response = await client.options("/v1/generate", headers={"Origin": "https://evil.example"} | ask)
            # A plain OPTIONS is no preflight.
            assert (await client.options("/v1/generate", headers={"Origin": ORIGIN})).status_code == 401
            response = await client.get("/v1/models", headers={"Origin": ORIGIN})
            assert response.status_code == 401 and response.headers["access-control-allow-origin"] == ORIGIN
            right = {"Authorization": f"Bearer {KEY}"}
            response = await client.get("/v1/models", headers={"Origin": ORIGIN} | right)
            assert response.headers["access-control-allow-origin"] == ORIGIN
            assert "X-Request-Id" in response.headers["access-control-expose-headers"]
            response = await client.get("/v1/models", headers={"Origin": "https://evil.example"} | right)
            assert "access-control-allow-origin" not in response.headers
        async with listening(serving) as (client, _):
            response = await client.options("/v1/generate", headers=ask)
            assert response.status_code == 405 and "access-control-allow-origin" not in response.headers

    run(scenario())


# ---- malformed and slow clients --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GARBAGE\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \x00secret\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 1_000_000 + b"\r\n\r\n", 431),
        (b"GET /health?" + b"q" * 1_000_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (post("Content-Length: -1"), 400),
        (post("Content-Length: 1", "Content-Length: 2"), 400),
        (post("Transfer-Encoding: gzip"), 501),
        (post("Transfer-Encoding: chunked", body=b"zz\r\n{}\r\n0\r\n\r\n"), 400),
    ],
)
def test_what_is_no_http_is_refused_in_the_shape_of_all_errors(
    serving: Callable[..., Any], request_bytes: bytes, status: int
) -> None:
    async def scenario() -> None:
        async with listening(serving) as (client, served):
            found, headers, body = await raw(client, request_bytes)
            assert found == status and headers["content-type"] == "application/json", body
            assert error_in(body)["message"] and headers["x-request-id"] and b"secret" not in body
            assert status != 501 or "'chunked'" in error_in(body)["message"]
            assert (await client.get("/health")).status_code == 200
            await served.settled()

    run(scenario())


def test_a_client_that_never_ends_its_request_is_sent_away(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with listening(serving, client_timeout_s=0.4) as (client, served):
            started = time.monotonic()
            drip = [b"X: y\r\n"] * 20  # each byte in time, the whole not
            answers = await asyncio.gather(
                raw(client, b""),
                raw(client, b"POST /v1/generate HTTP/1.1\r\nHost: x\r\n", *drip, pause_s=0.1),
                raw(client, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + b"GET /hea"),
                raw(client, post("Content-Length: 100")),
                raw(client, post("Content-Length: 100"), *[b" "] * 20, pause_s=0.1),
                raw(client, post("Transfer-Encoding: chunked", body=b"2\r\n{ \r\n")),
                raw(client, post("Content-Length: 100", path="/nowhere"), *[b" "] * 20, pause_s=0.1),
                raw(client, post("Content-Length: 9", path="/nowhere"), b"too late.", pause_s=0.1),
            )
            assert time.monotonic() - started < 8
            silent, head, pipelined, *bodies, nowhere, late = answers
            assert silent[0] == 0
            assert head[0] in (0, 408) and pipelined[0] == 200 and b" 408 " in pipelined[2]
            assert [answer[0] for answer in bodies] == [408, 408, 408] and nowhere[0] == late[0] == 404
            error = error_in(bodies[0][2])
            assert error["code"] == "body_timeout" and "--client-timeout" in error["message"]
            assert (await client.get("/health")).status_code == 200
            await served.settled()

    run(scenario())


def test_a_refused_body_is_not_read_to_its_end(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with listening(serving, max_body_bytes=4096, client_timeout_s=0.5) as (client, _):
            status, _, body = await raw(client, post(f"Content-Length: {10**12}"), b" " * 9000)
            assert status == 413 and error_in(body)["code"] == "body_too_large"
            chunks = [b"400\r\n" + b" " * 1024 + b"\r\n"] * 8
            status, _, body = await raw(client, post("Transfer-Encoding: chunked"), *chunks, pause_s=0.05)
            assert status == 413 and error_in(body)

    run(scenario())


def test_a_client_that_stops_reading_is_sent_away_and_its_request_ended(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with listening(serving, client_timeout_s=0.5, step_s=0.0005) as (client, served):
            texts = [{"type": "text", "text": "y" * 900}]
            body = json.dumps({"inputs": texts, "stream": True, "params": {"n": 4}})
            with socket.socket() as reader:
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                reader.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_connect(reader, (client.base_url.host, client.base_url.port))
                await loop.sock_sendall(reader, post(f"Content-Length: {len(body)}", body=body.encode()))
                while not served.worker.open:
                    await asyncio.sleep(0.01)
                await served.settled()
                await asyncio.sleep(1)
                received = b""
                with contextlib.suppress(ConnectionError):
                    while block := await asyncio.wait_for(loop.sock_recv(reader, 65536), 5):
                        received += block
                assert b" 200 OK" in received and b'"event":"done"' not in received
            assert (await client.get("/health")).status_code == 200

    run(scenario())


# ---- the last answer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("error", [ZeroDivisionError("password=sesame"), StreamBroken("it broke")])
def test_whatever_is_raised_is_answered_once(
    error: Exception, has_begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[dict[str, Any]] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        if has_begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise error

    async def send(message: Any) -> None:
        sent.append(message)

    async def scenario() -> None:
        answer = error_response(RequestError("internal error", status=500))
        guard = Guard(inner, keys=(), refuse=lambda scope, error: answer)
        await guard({"type": "http", "path": "/", "headers": [], "method": "GET"}, None, send)  # type: ignore[arg-type]

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    if has_begun or isinstance(error, StreamBroken):
        assert all(message["type"] == "http.response.start" for message in sent)
    else:
        assert sent[0]["status"] == 500 and b"sesame" not in sent[1]["body"]
    assert ("Traceback" in caplog.text) == (not isinstance(error, StreamBroken))


# ---- TLS -------------------------------------------------------------------------------------------------------


def certificate(folder: Path, name: str) -> tuple[str, str]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    paths = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    command += ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-out", paths[0], "-keyout", paths[1]]
    subprocess.run(command, check=True, capture_output=True, timeout=20)
    return paths


def test_https_with_and_without_client_certificates(serving: Callable[..., Any], tmp_path: Path) -> None:
    (cert, key), (client_cert, client_key) = certificate(tmp_path, "server"), certificate(tmp_path, "client")

    async def scenario() -> None:
        files = {"ssl_certfile": cert, "ssl_keyfile": key}
        trusting = ssl.create_default_context(cafile=cert)
        async with listening(serving, scheme="https", **files) as (client, _):
            async with httpx.AsyncClient(base_url=client.base_url, verify=trusting) as other:
                assert (await other.get("/health")).json() == {"status": "ok"}
            with pytest.raises(httpx.ConnectError):
                await client.get("/health")  # does not know who signed it
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get(str(client.base_url).replace("https", "http"))
        async with listening(serving, scheme="https", **files, ssl_ca_certs=client_cert) as (client, _):
            async with httpx.AsyncClient(base_url=client.base_url, verify=trusting) as other:
                with pytest.raises(httpx.TransportError):
                    await other.get("/health")
            known = ssl.create_default_context(cafile=cert)
            known.load_cert_chain(client_cert, client_key)
            async with httpx.AsyncClient(base_url=client.base_url, verify=known) as other:
                assert (await other.get("/health")).status_code == 200

    run(scenario())


def test_files_that_tls_cannot_use_are_named_at_start(tmp_path: Path) -> None:
    (cert, key), (_, other_key) = certificate(tmp_path, "server"), certificate(tmp_path, "other")
    (tmp_path / "junk").write_text("junk")
    locked = tmp_path / "locked.key"
    command = ["openssl", "ec", "-in", key, "-aes128", "-passout", "pass:sesame", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True, timeout=20)
    junk, absent = str(tmp_path / "junk"), str(tmp_path / "absent")
    _check_certificate(ServerConfig(ssl_certfile=cert, ssl_keyfile=key, ssl_ca_certs=cert))
    for files, words in (
        ({"ssl_certfile": absent, "ssl_keyfile": key}, "--ssl-certfile .*absent: No such file"),
        ({"ssl_certfile": cert, "ssl_keyfile": absent}, "--ssl-keyfile .*absent: No such file"),
        ({"ssl_certfile": junk, "ssl_keyfile": key}, "--ssl-certfile .*junk"),
        ({"ssl_certfile": cert}, "--ssl-certfile .*own, unencrypted key"),
        ({"ssl_certfile": cert, "ssl_keyfile": other_key}, "--ssl-certfile .*own, unencrypted key"),
        ({"ssl_certfile": cert, "ssl_keyfile": str(locked)}, "--ssl-certfile .*unencrypted key"),
        ({"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ca_certs": junk}, "--ssl-ca-certs .*junk"),
    ):
        with pytest.raises(ConfigError, match=words):
            _check_certificate(ServerConfig(**files))  # type: ignore[arg-type]
