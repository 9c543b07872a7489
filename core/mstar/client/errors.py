"""What can go wrong for a client: an error that the server answered, or a connection that failed.

Knows HTTP responses, not sockets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from mstar.errors import MstarError

NO_AUDIO = "the server answered without any audio"


class ClientError(MstarError):
    """A call failed; the base of the others."""


class APIError(ClientError):
    """The server refused or failed a request and said why.

    Args:
        status: HTTP status; None for an error in the middle of a stream.
        type, param, code: as in OpenAI's errors.
        retry_after: seconds the server asks to wait.
        request_id: of X-Request-Id, as in the server's log.
    """

    def __init__(
        self, message: str, *, status: int | None = None, type: str | None = None, param: str | None = None,
        code: str | int | None = None, retry_after: float | None = None, request_id: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.message, self.status, self.type, self.param, self.code = message, status, type, param, code
        self.retry_after, self.request_id = retry_after, request_id

    def __str__(self) -> str:
        known = {"status": self.status, "param": self.param, "code": self.code, "request": self.request_id}
        return f"{self.message} ({', '.join(f'{name} {value}' for name, value in known.items() if value is not None)})"


class ConnectionFailed(ClientError):
    """The server cannot be reached, or was silent for longer than `timeout`."""


class StreamBroken(ConnectionFailed):
    """An answer began and did not end as it should; what came of it is not the whole."""


@contextlib.contextmanager
def translated(kind: type[ConnectionFailed], what: str) -> Iterator[None]:
    """Raise httpx's errors as ours."""
    try:
        yield
    except (httpx.RequestError, httpx.StreamError) as error:
        raise kind(f"{what}: {type(error).__name__}: {error}".removesuffix(": ")) from error


def of_response(response: httpx.Response) -> APIError:
    """The error that a response, read to its end, stands for."""
    try:
        given = from_fields(response.json()["error"])
    except (ValueError, KeyError, TypeError):  # not from a server of ours: a proxy's page
        given = {"message": f"{response.reason_phrase or 'error'}: {response.text[:200]}"}
    own = {"retry_after": retry_after(response.headers), "request_id": response.headers.get("x-request-id")}
    return APIError(**given, **own, status=response.status_code)


def from_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of APIError from the "error" object of a body or an event."""
    return {"message": str(fields["message"])} | {name: fields.get(name) for name in ("type", "param", "code")}


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds of a Retry-After header; a date counts as absent."""
    try:
        return max(0.0, float(headers["retry-after"]))
    except (KeyError, ValueError):
        return None
