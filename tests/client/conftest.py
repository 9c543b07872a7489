"""A server that answers with the bytes it is given, and remembers what it was asked."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass
class Asked:
    """One request as it came."""

    line: str
    headers: dict[str, str]
    body: Any


def answer(
    body: bytes | Any = b"", *, status: int = 200, chunked: bool = False, end: bool = True, **headers: str
) -> bytes:
    """The bytes of a response; `end` False: a chunked body whose last chunk never comes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
    fields = {"Content-Type": kind, "Connection": "close"} | {k.replace("_", "-"): v for k, v in headers.items()}
    if chunked:
        fields["Transfer-Encoding"] = "chunked"
        pieces = [content[at : at + 7] for at in range(0, len(content), 7)]
        content = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n" * end
    else:
        fields["Content-Length"] = str(len(content))
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status} X\r\n{head}\r\n".encode() + content


@dataclass
class Canned:
    """Give it `answers`, one for each request; with `is_held` silence follows until the client is `gone`."""

    listener: socket.socket
    answers: list[bytes] = field(default_factory=list)
    is_held: bool = False
    asked: list[Asked] = field(default_factory=list)
    gone: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as file:
                connection.settimeout(20)
                line = file.readline().decode().strip()
                if not line:
                    continue
                headers = {}
                while row := file.readline().decode().strip():
                    name, _, value = row.partition(": ")
                    headers[name.lower()] = value
                body = file.read(int(headers.get("content-length", 0)))
                self.asked.append(Asked(line.removesuffix(" HTTP/1.1"), headers, json.loads(body) if body else None))
                connection.sendall(self.answers.pop(0))
                if self.is_held:
                    with contextlib.suppress(ConnectionError):
                        connection.recv(1)
                    self.gone.set()


@pytest.fixture
def canned() -> Iterator[Canned]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Canned(listener)
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
        yield server
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        assert not thread.is_alive()


@pytest.fixture(name="answer")
def answer_fixture() -> Any:
    return answer
