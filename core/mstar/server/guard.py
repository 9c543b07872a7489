"""What stands before the routes: limits on slow and malformed clients, request ids, API keys, origins, the last answer.

Runs on the server's event loop, before any body is read. Knows one route, that of health, and nothing of the engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import sys
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any

import h11
import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from mstar.errors import RequestError
from mstar.server.results import JSON, error_fields

logger = logging.getLogger(__name__)

OPEN_ROUTE = "/health"  # needs no key
EXPOSED = ("X-Request-Id", "X-Sample-Rate", "X-Seed", "X-Finish-Reason", "Retry-After")
_METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS")
_LINGER_S = 5.0  # how long a client may go on sending a body that has been refused


class StreamBroken(Exception):
    """A stream failed after its status was sent; the connection is dropped without ending the body."""


def error_response(
    error: RequestError, *, headers: Mapping[str, str] | None = None, more: Mapping[str, Any] | None = None
) -> Response:
    """An error as OpenAI words it; `more` stands beside it."""
    body = msgspec.json.encode({**error_fields(error), **(more or {})})
    return Response(body, status_code=error.status, headers=headers, media_type=JSON)


# ---- the application's outer layers -----------------------------------------------------------------------------


class Reported:
    """Gives every response an id, the client's X-Request-Id if it is one, and reports its status.

    Args:
        report: called as `report(route, method=..., status=...)`; the route is a template, "" where none fits.
    """

    def __init__(self, app: ASGIApp, *, report: Callable[..., None]) -> None:
        self._app = app
        self._report = report

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("x-request-id", "") if "headers" in scope else ""
        name = given if re.fullmatch(r"[\x21-\x7e]{1,128}", given) else uuid.uuid4().hex
        scope["mstar.request_id"] = name

        async def send_with_id(message: Message) -> None:
            if message["type"].endswith("http.response.start"):
                MutableHeaders(scope=message)["X-Request-Id"] = name
                self._report(
                    scope.get("mstar.route", ""), method=scope.get("method", "WEBSOCKET"), status=message["status"]
                )
            await send(message)

        await self._app(scope, receive, send_with_id)


class Origins(CORSMiddleware):
    """Lets the pages of some origins call (CORS). Browsers send no key with a preflight, so it needs none."""

    def __init__(self, app: ASGIApp, *, allowed: Collection[str]) -> None:
        super().__init__(
            app, allow_origins=allowed, allow_methods=_METHODS, allow_headers=("*",), expose_headers=EXPOSED
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """Starlette's; a refusal in the shape of all errors."""
        answer = super().preflight_response(request_headers)
        if answer.status_code < 400:
            return answer
        headers = {name: value for name, value in answer.headers.items() if not name.startswith("content-")}
        problem = bytes(answer.body).decode()
        param = "Origin" if "origin" in problem else "Access-Control-Request-Method"
        return error_response(RequestError(problem, param=param, status=403), headers=headers)


class Guard:
    """Asks for an API key, and answers what nothing inside has answered.

    Args:
        keys: any of them opens every route; none: there is no lock.
        refuse: the response to an error.
    """

    def __init__(self, app: ASGIApp, *, keys: Collection[str], refuse: Callable[[Scope, Exception], Response]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif self._admits(scope):
            await self._contained(scope, receive, send)
        elif scope["type"] == "websocket" and "websocket.http.response" not in scope.get("extensions", {}):
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "no valid API key"})
        else:
            message = "the request has no valid API key; send the header 'Authorization: Bearer KEY'"
            error = RequestError(message, status=401, param="Authorization", code="invalid_api_key")
            await self._refuse(scope, error)(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        if not self._digests or (scope["type"] == "http" and scope["path"] == OPEN_ROUTE):
            return True
        given = Headers(scope=scope).getlist("authorization")
        scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()
        # All are compared, and of equal length, so that time tells nothing.
        found = [hmac.compare_digest(digest, one) for one in self._digests]
        return any(found) and scheme.lower() == "bearer"

    async def _contained(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Whatever is raised becomes an answer; once one has begun, it stays unfinished and the connection ends."""
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = has_begun or message["type"].endswith("response.start")
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except StreamBroken as error:
            logger.warning("a stream broke: %s (request id %s)", error, scope.get("mstar.request_id"))
        except Exception as error:
            logger.exception("%s failed (request id %s)", scope.get("mstar.route"), scope.get("mstar.request_id"))
            if not has_begun:
                await self._refuse(scope, error)(scope, receive, send)


# ---- connections ------------------------------------------------------------------------------------------------


class Connection(H11Protocol):
    """Uvicorn's HTTP/1.1 for clients that are slow, or speak something else.

    Args:
        client_timeout_s: for how long a client may take to send the lines before a body, or to read what is sent.
    """

    def __init__(self, *arguments: Any, client_timeout_s: float, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._client_timeout_s = client_timeout_s
        self._sending: asyncio.TimerHandle | None = None  # the client is sending what nobody else waits for
        self._reading: asyncio.TimerHandle | None = None  # the client has not read what was sent
        self._is_over = False  # nothing more is heard

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._is_over = True  # a response that ends later must not start a timer, which would keep all of this
        self._stop_waiting()
        if self._reading is not None:
            self._reading.cancel()

    def data_received(self, data: bytes) -> None:
        if not self._is_over:
            super().data_received(data)
            self._watch()

    def shutdown(self) -> None:
        if self._is_over:
            self.transport.close()
        else:
            super().shutdown()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def _should_upgrade(self) -> bool:
        return False  # no route speaks anything else; it is answered as any request, without uvicorn's advice

    def _watch(self) -> None:
        """Start a timer, once, while the head of a request, or the rest of a refused body, is to come."""
        # Uvicorn has a timer of its own between two requests, but drops it at the first byte of anything.
        is_unwatched = self.timeout_keep_alive_task is None or bool(self.conn.trailing_data[0])
        is_head = self.conn.their_state is h11.IDLE and is_unwatched
        is_rest = self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete
        if self._is_over:
            return
        if not (is_head or is_rest):
            self._stop_waiting()
        elif self._sending is None:
            seconds = self._client_timeout_s if is_head else min(_LINGER_S, self._client_timeout_s)
            self._sending = self.loop.call_later(seconds, self._give_up)

    def _stop_waiting(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
        self._sending = None

    def _give_up(self) -> None:
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            message = f"the request's headers took longer than {self._client_timeout_s:g} s; "
            self._end_with(RequestError(message + "send them faster, or raise --client-timeout", status=408))
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading = self.loop.call_later(self._client_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()

    def send_400_response(self, msg: str) -> None:
        """Answer what h11 refuses; uvicorn calls this where it is raised."""
        error = sys.exception()
        status = getattr(error, "error_status_hint", 400)
        reason = str(error or msg).partition(":")[0]  # what follows is the client's own text
        known = {431: "the request line and headers are too long", 501: "the only Transfer-Encoding read is 'chunked'"}
        message = known.get(status, f"this is no valid HTTP/1.1: {reason}")
        self._end_with(RequestError(message, status=status))

    def _end_with(self, error: RequestError) -> None:
        """Answer if nothing has been answered yet, and close; not at once, or the answer might be lost."""
        self._is_over = True
        self._stop_waiting()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = error_response(error, headers={"X-Request-Id": uuid.uuid4().hex, "Connection": "close"})
            response = h11.Response(status_code=error.status, headers=answer.raw_headers)
            for event in (response, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._sending = self.loop.call_later(min(_LINGER_S, self._client_timeout_s), self.transport.close)
