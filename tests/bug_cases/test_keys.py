"""Case 73: with an API key set, every path asks for it, however it is spelt; only `/health` is open."""

from __future__ import annotations

import http.client
import json
import logging
import socket
from collections.abc import Iterator

import pytest
from served import Served

KEYS = ("key-of-the-operator", "another-key")
SESSION = "a-session"


@pytest.fixture(scope="module")
def locked() -> Iterator[tuple[Served, tuple[str, int]]]:
    served = Served(plugin="echo")
    try:
        with served.http(api_key=KEYS, allowed_origins=("https://page.example",)) as url:
            host, _, port = url.removeprefix("http://").partition(":")
            yield served, (host, int(port))
    finally:
        served.close()


def spellings(served: Served) -> list[str]:
    """Every route of the application and what clients, proxies and attackers make of one."""
    paths = [route.path.replace("{name:path}", SESSION) for route in served.app().routes]
    assert "/v1/generate" in paths and "/metrics" in paths and "/openapi.json" in paths and len(paths) >= 10
    made = ["/", "//", "/docs", "/v1", "/nowhere", "/v1/models/tiny", "/invocations", "*", "/.%2fhealth", "/%68ealth/x"]
    for path in paths:
        made += [path, path + "/", "/" + path, path + "//", path + "?x=1", path + "%2f", "/." + path, path.upper()]
        made += ["/health/.." + path, "/health" + path, path + "/health", path + ";/health", path + "%00"]
    return sorted(set(made) - {"/health", "/health?x=1"})


def asked(address: tuple[str, int], method: str, path: str, headers: dict[str, str]) -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection(*address, timeout=20)
    try:
        body = b'{"inputs": [{"type": "text", "text": "hi"}], "input": "hi"}' if method in ("POST", "PUT") else None
        kind = {"Content-Type": "application/json"} if body else {}
        connection.putrequest(method, path, skip_accept_encoding=True)
        for name, value in {**kind, "Content-Length": str(len(body or b""))}.items():
            connection.putheader(name, value)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        response = connection.getresponse()
        return response.status, response.headers.get("Content-Type", ""), response.read()
    finally:
        connection.close()


WRONG: dict[str, dict[str, str]] = {
    "none": {},
    "empty": {"Authorization": ""},
    "no key": {"Authorization": "Bearer "},
    "wrong": {"Authorization": "Bearer wrong"},
    "a part": {"Authorization": f"Bearer {KEYS[0][:-1]}"},
    "more": {"Authorization": f"Bearer {KEYS[0]}x"},
    "both": {"Authorization": f"Bearer {KEYS[0]} {KEYS[1]}"},
    "upper case": {"Authorization": f"Bearer {KEYS[0].upper()}"},
    "another scheme": {"Authorization": f"Basic {KEYS[0]}"},
    "no scheme": {"Authorization": KEYS[0]},
    "another header": {"X-Api-Key": KEYS[0], "Cookie": f"api_key={KEYS[0]}"},
    "not ASCII": {"Authorization": "Bearer k\u00eby"},
}


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"])
def test_no_spelling_of_a_route_answers_without_a_key(
    locked: tuple[Served, tuple[str, int]], caplog: pytest.LogCaptureFixture, method: str
) -> None:
    served, address = locked
    open_to_all = []
    with caplog.at_level(logging.DEBUG):
        for path in spellings(served):
            for headers in ({}, WRONG["wrong"]):
                status, kind, body = asked(address, method, path, headers)
                if status != 401:
                    open_to_all.append((path, status))
                elif method != "HEAD":
                    assert kind == "application/json"
                    assert json.loads(body)["error"]["code"] == "invalid_api_key"
    # A target with a NUL, or '*' outside OPTIONS, is no HTTP, and said to be so before anybody looks at keys.
    assert [found for found in open_to_all if found[1] != 400] == []
    assert not any(key in caplog.text for key in KEYS)


def test_keys_that_are_nearly_right_open_nothing_and_right_ones_everything(
    locked: tuple[Served, tuple[str, int]], caplog: pytest.LogCaptureFixture
) -> None:
    _, address = locked
    with caplog.at_level(logging.DEBUG):
        for name, headers in WRONG.items():
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/generate"), ("GET", "/metrics")):
                status, _, body = asked(address, method, path, headers)
                assert status == 401, f"{name}: {method} {path}"
                assert not any(key.encode() in body for key in KEYS)
        for key in KEYS:
            for scheme in ("Bearer", "bearer"):
                headers = {"Authorization": f"{scheme} {key}"}
                for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/ready", "/v1/audio/voices"):
                    assert asked(address, "GET", path, headers)[0] == 200, path
                assert asked(address, "POST", "/v1/generate", headers)[0] == 400  # of its own: 'input' is unknown
                assert asked(address, "GET", "/nowhere", headers)[0] == 404
        twice = socket.create_connection(address, timeout=20)
        with twice:
            lines = [f"Authorization: Bearer {key}" for key in ("wrong", KEYS[0])]
            twice.sendall("\r\n".join(["GET /v1/models HTTP/1.1", "Host: x", *lines, "", ""]).encode())
            assert twice.recv(100).startswith(b"HTTP/1.1 401")
    assert not any(key in caplog.text for key in KEYS)


def test_health_alone_is_open(locked: tuple[Served, tuple[str, int]]) -> None:
    _, address = locked
    for method in ("GET", "HEAD"):
        assert asked(address, method, "/health", {})[0] == 200
    for method in ("POST", "PUT", "DELETE"):
        assert asked(address, method, "/health", {})[0] in (401, 405)


@pytest.mark.parametrize("path", ["/health", "/v1/realtime", "/v1/generate", "/v1/audio/speech", "/nowhere"])
def test_a_websocket_needs_a_key_too(locked: tuple[Served, tuple[str, int]], path: str) -> None:
    _, address = locked
    upgrade = {
        "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }  # fmt: skip
    status, kind, _ = asked(address, "GET", path, upgrade)
    assert status == (200 if path == "/health" else 401) and kind == "application/json"
    status, _, _ = asked(address, "GET", path, upgrade | {"Authorization": f"Bearer {KEYS[0]}"})
    assert status in (200, 404, 405)


def test_a_preflight_of_a_page_gives_nothing_but_headers(locked: tuple[Served, tuple[str, int]]) -> None:
    _, address = locked
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    status, _, body = asked(address, "OPTIONS", "/v1/generate", {"Origin": "https://page.example"} | asks)
    assert status == 200 and body == b"OK"
    status, _, _ = asked(address, "OPTIONS", "/v1/generate", {"Origin": "https://other.example"} | asks)
    assert status == 403
    status, _, _ = asked(address, "POST", "/v1/generate", {"Origin": "https://page.example"})
    assert status == 401
