"""One server per model for all tests of this folder, asked over HTTP; each test must leave it as it found it."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from served import Served

MAX_MODEL_LEN = 1024


@dataclass(frozen=True, slots=True)
class Site:
    """A served model, and a client of it."""

    served: Served
    client: httpx.Client

    @property
    def address(self) -> tuple[str, int]:
        return str(self.client.base_url.host), int(self.client.base_url.port or 0)

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def begin(self, path: str, body: Any) -> socket.socket:
        """A connection on which a request has been sent, and nothing read."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
        connection = socket.create_connection(self.address, timeout=30)
        connection.sendall(f"{head}\r\n\r\n".encode() + content)
        return connection


def reset(connection: socket.socket) -> None:
    """Close a connection rudely."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _site(**settings: Any) -> Iterator[Site]:
    served = Served(**settings)
    try:
        with served.http() as url, httpx.Client(base_url=url, timeout=60) as client:
            yield Site(served, client)
    finally:
        served.close()


@pytest.fixture(scope="session")
def _orpheus() -> Iterator[Site]:
    yield from _site(plugin="orpheus", max_model_len=MAX_MODEL_LEN, served_model_name=("orpheus", "speaker"))


@pytest.fixture(scope="session")
def _echo() -> Iterator[Site]:
    yield from _site(plugin="echo")


@pytest.fixture
def orpheus(_orpheus: Site) -> Iterator[Site]:
    yield _orpheus
    _orpheus.served.assert_clean()


@pytest.fixture
def echo(_echo: Site) -> Iterator[Site]:
    yield _echo
    _echo.served.assert_clean()


@pytest.fixture(params=["echo", "orpheus"])
def site(request: pytest.FixtureRequest) -> Site:
    """Each model in turn."""
    found: Site = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def start() -> Callable[..., Any]:
    """`with start(plugin="echo", ...) as site:` — a server of the test's own."""
    return contextlib.contextmanager(_site)


@pytest.fixture(scope="session")
def hang_up() -> Callable[[socket.socket], None]:
    return reset


@pytest.fixture(scope="session")
def error_of() -> Callable[..., dict[str, Any]]:
    """`error_of(response, 400, 404)`: the error of a response with one of these statuses, its shape checked."""

    def get(response: httpx.Response, *statuses: int) -> dict[str, Any]:
        assert response.status_code in statuses, f"{response.status_code}: {response.text[:500]}"
        assert response.headers["content-type"] == "application/json"
        assert set(response.json()) == {"error"}
        error: dict[str, Any] = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "Traceback" not in error["message"] and 'File "' not in error["message"]
        assert 0 < len(error["message"]) < 2000, f"{len(error['message'])} characters"
        return error

    return get
