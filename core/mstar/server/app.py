"""HTTP to wire types and back: routes, body limits, error shapes, disconnects.

Runs on the server's event loop. A client that goes away cancels its request wherever it is; an error is OpenAI-shaped
on every route, and in the middle of a stream it ends the connection abnormally. Knows the engine by its API only.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mstar.errors import RequestError
from mstar.server import openai
from mstar.server.engine import Engine, RequestHandle
from mstar.server.native import GenerateRequest, check_model, convert, parse_json
from mstar.server.results import JSON, NDJSON, SAFETENSORS, Form, NativeForm, Outputs, error_fields
from mstar.types import Chunk, ImageChunk, TensorChunk

Answer = TypeVar("Answer")


class StreamBroken(Exception):
    """A stream failed after its status was sent; the server drops the connection without ending the body."""


def create_app(engine: Engine, *, root: str, max_body_bytes: int) -> Starlette:
    """The HTTP application of one model, whose engine has started.

    Args:
        root: the checkpoint, as the operator named it.
        max_body_bytes: larger bodies are refused with 413.
    """
    surface = Surface(engine, root=root, max_body_bytes=max_body_bytes)
    kinds = (RequestError, HTTPException, ClientDisconnect, Exception)
    app = Starlette(
        routes=surface.routes,
        middleware=[Middleware(RequestIds)],
        exception_handlers=dict.fromkeys(kinds, surface.refuse),
    )
    app.router.redirect_slashes = False
    return app


class Surface:
    """The handlers of all routes."""

    def __init__(self, engine: Engine, *, root: str, max_body_bytes: int) -> None:
        self._engine = engine
        self._max_body_bytes = max_body_bytes
        self._models = openai.list_models(
            engine.spec, names=engine.model_names, root=root, created=int(time.time()),
            max_model_len=engine.state.max_model_len,
        )  # fmt: skip
        self.routes = [
            Route("/v1/generate", self.generate, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/v1/sessions/{name:path}", self.close_session, methods=["DELETE"]),
            Route("/health", self.health, methods=["GET"]),
        ]
        if openai.SPEECH in engine.spec.endpoints:
            self.routes.insert(1, Route(openai.SPEECH, self.speech, methods=["POST"]))

    # -- generation ------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Any:
        """POST /v1/generate."""
        wire = convert(await self._json(request), GenerateRequest)
        whole = SAFETENSORS if SAFETENSORS in request.headers.get("accept", "") else JSON
        return await _watched(request.receive, self._answer(wire, NativeForm(NDJSON if wire.stream else whole)))

    async def speech(self, request: Request) -> Any:
        """POST /v1/audio/speech."""
        speech, wire = openai.read_speech(await self._json(request), spec=self._engine.spec)
        try:
            return await _watched(request.receive, self._answer(wire, openai.SpeechForm(speech.response_format)))
        except RequestError as error:
            raise openai.speech_error(error) from error

    async def _answer(self, wire: GenerateRequest, form: Form) -> Any:
        """A whole response, or one that streams on from its first chunk. Cancelling aborts the request."""
        handle = await self._engine.submit(wire)
        try:
            if wire.stream:
                # What fails before the first chunk gets a status of its own.
                return StreamedResponse(handle, form=form, first=await _first(handle, form))
            outputs = Outputs(handle.request)
            async for chunk in handle:
                outputs.add(chunk)
            assert handle.result is not None
            body, headers = await asyncio.to_thread(form.whole, outputs, handle.result)
            return Response(body, headers=headers, media_type=form.media_type)
        except BaseException:
            handle.abort()
            raise

    async def _json(self, request: Request) -> Any:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != JSON:
            raise RequestError(f"Content-Type is {kind[:60]!r}; it must be {JSON}", status=415)
        body = bytearray()
        async for block in request.stream():
            body += block
            if len(body) > self._max_body_bytes:
                message = f"the body has more than {self._max_body_bytes} bytes, which is the limit; "
                message += "send less, or raise --max-body-bytes"
                raise RequestError(message, status=413, code="body_too_large")
        return parse_json(bytes(body))

    # -- the rest --------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return _json_response({"object": "list", "data": self._models})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        name = request.path_params["name"]
        check_model(name, names=self._engine.model_names)
        return _json_response(next(model for model in self._models if model["id"] == name))

    async def close_session(self, request: Request) -> Response:
        """DELETE /v1/sessions/{name}."""
        name = request.path_params["name"]
        self._engine.close_session(name)
        return _json_response({"session": name, "deleted": True})

    async def health(self, request: Request) -> Response:
        """GET /health: 200 only while requests can be answered."""
        if (reason := self._engine.state.unready) is not None:
            raise RequestError(reason, status=503, code="unavailable")
        return _json_response({"status": "ok"})

    async def refuse(self, request: Request, error: Exception) -> Response:
        """The answer to every error, whatever raised it."""
        headers: dict[str, str] = {}
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)  # nobody reads it
        if isinstance(error, HTTPException):  # the router's 404 and 405
            headers |= error.headers or {}
            problem = "is not allowed on" if error.status_code == 405 else "finds no route at"
            routes = ", ".join(route_names(self.routes))
            message = f"{request.method} {problem} {request.url.path[:200]!r}; routes: {routes}"
            error = RequestError(message, status=error.status_code)
        elif not isinstance(error, RequestError):
            error = RequestError("internal error; the server's log has more", status=500)
        if error.status in (429, 503):
            headers["Retry-After"] = str(self._engine.state.retry_after_s)
        return _json_response(error_fields(error), status=error.status, headers=headers)


# ---- streaming --------------------------------------------------------------------------------------------------


async def _first(handle: RequestHandle, form: Form) -> Chunk | None:
    async for chunk in handle:
        if form.begins(chunk):
            return chunk
    return None


class StreamedResponse(StreamingResponse):
    """Sends a request's chunks as they come; aborts it when the client goes, breaks the body when it fails.

    Args:
        first: the first chunk, taken already; None: there is none.
    """

    def __init__(self, handle: RequestHandle, *, form: Form, first: Chunk | None) -> None:
        headers = form.headers(handle.request, first=first, result=handle.result)
        super().__init__(_bodies(handle, form=form, first=first), headers=headers, media_type=form.media_type)
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientDisconnect):
                await _watched(receive, self.stream_response(send))
        finally:
            self._handle.abort()


async def _bodies(handle: RequestHandle, *, form: Form, first: Chunk | None) -> AsyncIterator[bytes]:
    error: RequestError | None = None
    try:
        if first is not None:
            yield form.piece(first)
        async for chunk in handle:
            is_large = isinstance(chunk, ImageChunk | TensorChunk)
            yield await asyncio.to_thread(form.piece, chunk) if is_large else form.piece(chunk)
    except RequestError as failure:
        error = failure
    yield form.end(handle.request, result=handle.result, error=error)
    if error is not None:
        raise StreamBroken(f"request {handle.id}: {error.message}")


async def _watched(receive: Receive, work: Coroutine[Any, Any, Answer]) -> Answer:
    """The result of `work`; if the client goes away before, `work` is cancelled and ClientDisconnect raised."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# ---- small parts ------------------------------------------------------------------------------------------------


class RequestIds:
    """Echoes X-Request-Id, or gives every response one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"x-request-id", b"").decode("latin-1")
        name = given if re.fullmatch(r"[\x21-\x7e]{1,128}", given) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = name
            await send(message)

        await self._app(scope, receive, send_with_id)


def route_names(routes: Iterable[BaseRoute]) -> list[str]:
    """Routes as "METHOD /path"."""
    return [f"{', '.join(sorted(r.methods - {'HEAD'}))} {r.path}" for r in routes if isinstance(r, Route) and r.methods]


def _json_response(content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, headers=headers, media_type=JSON)
