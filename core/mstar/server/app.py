"""HTTP to wire types and back: routes, body limits, error shapes, disconnects.

Runs on the server's event loop. A client that goes away cancels its request wherever it is; an error is OpenAI-shaped
on every route, and in the middle of a stream it ends the connection abnormally. Knows the engine by its API only.
"""

from __future__ import annotations

import asyncio
import functools
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mstar.errors import RequestError
from mstar.media import audio
from mstar.server import openai, streams
from mstar.server.engine import Engine, RequestHandle
from mstar.server.native import GenerateRequest, check_model, convert, parse_json
from mstar.server.results import Outputs
from mstar.types import AudioChunk, Chunk, ImageChunk, TensorChunk

Answer = TypeVar("Answer")
JSON = "application/json"


class ClientGone(Exception):
    """The client closed its connection; nobody reads what would be answered."""


class StreamBroken(Exception):
    """A stream failed after its status was sent; the server drops the connection without ending the body."""


def create_app(engine: Engine, *, root: str, max_body_bytes: int) -> Starlette:
    """The HTTP application of one model, whose engine has started.

    Args:
        root: the checkpoint, as the operator named it.
        max_body_bytes: larger bodies are refused with 413.
    """
    surface = Surface(engine, root=root, max_body_bytes=max_body_bytes)
    app = Starlette(
        routes=surface.routes(),
        middleware=[Middleware(RequestIds)],
        exception_handlers={
            RequestError: surface.request_error,
            HTTPException: surface.http_error,
            ClientGone: _nobody,
            ClientDisconnect: _nobody,
            Exception: _internal_error,
        },
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

    def routes(self) -> list[Route]:
        routes = [
            Route("/v1/generate", self.generate, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/v1/sessions/{name:path}", self.close_session, methods=["DELETE"]),
            Route("/health", self.health, methods=["GET"]),
        ]
        if openai.SPEECH in self._engine.spec.endpoints:
            routes.insert(1, Route(openai.SPEECH, self.speech, methods=["POST"]))
        return routes

    # -- generation ------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Any:
        """POST /v1/generate."""
        wire = convert(await self._json(request), GenerateRequest)
        if wire.stream:
            handle, first = await _watched(request, self._begin(wire))
            end = functools.partial(_last_event, handle)
            return StreamedResponse(
                handle, first=first, encode=streams.chunk_event, end=end, media_type="application/x-ndjson"
            )
        is_binary = "application/octet-stream" in request.headers.get("accept", "")
        return await _watched(request, self._generate_whole(wire, is_binary=is_binary))

    async def _generate_whole(self, wire: GenerateRequest, *, is_binary: bool) -> Response:
        handle, outputs = await self._collect(wire)
        assert handle.result is not None
        if is_binary:
            body = await asyncio.to_thread(outputs.as_safetensors, handle.result)
            return Response(body, media_type="application/octet-stream")
        return Response(await asyncio.to_thread(outputs.as_json, handle.result), media_type=JSON)

    async def speech(self, request: Request) -> Any:
        """POST /v1/audio/speech."""
        speech, wire = openai.read_speech(await self._json(request), spec=self._engine.spec)
        try:
            if not speech.is_streamed:
                return await _watched(request, self._speak_whole(wire, response_format=speech.response_format))
            handle, first = await _watched(request, self._begin(wire, kind=AudioChunk))
        except RequestError as error:
            raise openai.speech_error(error) from error
        if first is None:
            raise _no_audio()
        return StreamedResponse(
            handle,
            first=first,
            encode=openai.SpeechEncoder(speech.response_format).encode,
            media_type=openai.AUDIO_TYPES[speech.response_format],
            headers=_speech_headers(handle, sample_rate=first.sample_rate),
        )

    async def _speak_whole(self, wire: GenerateRequest, *, response_format: str) -> Response:
        handle, outputs = await self._collect(wire)
        found = outputs.audio()
        if found is None or not len(found[0]):
            raise _no_audio()
        samples, rate = found
        encode = audio.encode_pcm if response_format == "pcm" else lambda x: audio.encode_wav(x, sample_rate=rate)
        assert handle.result is not None
        headers = _speech_headers(handle, sample_rate=rate) | {"X-Finish-Reason": handle.result.finish_reason}
        body = await asyncio.to_thread(encode, samples)
        return Response(body, headers=headers, media_type=openai.AUDIO_TYPES[response_format])

    async def _begin(self, wire: GenerateRequest, *, kind: type[Any] = object) -> tuple[RequestHandle, Any]:
        """Submit and wait for the first chunk of a kind, so that what fails before it gets its own status."""
        handle = await self._engine.submit(wire)
        try:
            async for chunk in handle:
                if isinstance(chunk, kind):
                    return handle, chunk
            return handle, None
        except asyncio.CancelledError:
            handle.abort()
            raise

    async def _collect(self, wire: GenerateRequest) -> tuple[RequestHandle, Outputs]:
        handle = await self._engine.submit(wire)
        outputs = Outputs(handle.request)
        try:
            async for chunk in handle:
                outputs.add(chunk)
        finally:
            handle.abort()
        return handle, outputs

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

    async def _json(self, request: Request) -> Any:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != JSON:
            raise RequestError(f"Content-Type is {kind[:60]!r}; it must be {JSON}", status=415)
        limit = self._max_body_bytes
        too_large = RequestError(
            f"the body has more than {limit} bytes, which is the limit; send less, or raise --max-body-bytes",
            status=413,
            code="body_too_large",
        )
        if int(request.headers.get("content-length") or 0) > limit:
            raise too_large
        body = bytearray()
        async for block in request.stream():
            body += block
            if len(body) > limit:
                raise too_large
        return parse_json(bytes(body))

    # -- errors ----------------------------------------------------------------------------------------------

    async def request_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        headers = {"Retry-After": str(self._engine.state.retry_after_s)} if error.status in (429, 503) else {}
        return _json_response(openai.error_fields(error), status=error.status, headers=headers)

    async def http_error(self, request: Request, error: Exception) -> Response:
        """What the router refuses: 404 and 405."""
        assert isinstance(error, HTTPException)
        routes = ", ".join(f"{'/'.join(sorted(r.methods or ()))} {r.path}" for r in self.routes())
        message = {
            404: f"there is no route {request.url.path[:200]!r} for model {self._engine.spec.name!r}; routes: {routes}",
            405: f"{request.method} is not allowed on {request.url.path[:200]!r}; routes: {routes}",
        }.get(error.status_code, str(error.detail))
        fields = openai.error_fields(RequestError(message, status=error.status_code))
        return _json_response(fields, status=error.status_code, headers=error.headers)


# ---- streaming --------------------------------------------------------------------------------------------------


def _last_event(handle: RequestHandle, error: RequestError | None) -> bytes:
    if error is not None:
        return streams.event("error", **openai.error_fields(error))
    assert handle.result is not None
    return streams.done_event(handle.request, handle.result)


class StreamedResponse:
    """Sends a request's chunks as they come; aborts it when the client goes, breaks the body when it fails.

    Args:
        first: the first chunk, taken already; None: there is none.
        end: last bytes, given the error the request failed with, or None.
    """

    def __init__(
        self,
        handle: RequestHandle,
        *,
        first: Chunk | None,
        encode: Callable[[Chunk], bytes],
        end: Callable[[RequestError | None], bytes] = lambda error: b"",
        media_type: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._handle = handle
        self._first = first
        self._encode = encode
        self._end = end
        self._head = Response(headers=headers, media_type=media_type)
        del self._head.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        watching = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            self._handle.abort()
            await _cancel(sending, watching)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._head.raw_headers})
        error = None
        try:
            async for chunk in self._chunks():
                await send({"type": "http.response.body", "body": await self._bytes(chunk), "more_body": True})
        except RequestError as failure:
            error = failure
        if last := self._end(error):
            await send({"type": "http.response.body", "body": last, "more_body": True})
        if error is not None:
            raise StreamBroken(f"request {self._handle.id}: {error.message}")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _chunks(self) -> AsyncIterator[Chunk]:
        if self._first is not None:
            yield self._first
        async for chunk in self._handle:
            yield chunk

    async def _bytes(self, chunk: Chunk) -> bytes:
        if isinstance(chunk, ImageChunk | TensorChunk):  # may be large
            return await asyncio.to_thread(self._encode, chunk)
        return self._encode(chunk)


async def _watched(request: Request, work: Coroutine[Any, Any, Answer]) -> Answer:
    """The result of `work`; if the client goes away before, `work` is cancelled and ClientGone is raised."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        await _cancel(working, watching)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# ---- small parts ------------------------------------------------------------------------------------------------


class RequestIds:
    """Echoes X-Request-Id, or gives every response one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        name = given if re.fullmatch(r"[\x21-\x7e]{1,128}", given) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = name
            await send(message)

        await self._app(scope, receive, send_with_id)


def _speech_headers(handle: RequestHandle, *, sample_rate: int) -> dict[str, str]:
    return {"X-Sample-Rate": str(sample_rate), "X-Seed": str(handle.request.seed)}


def _no_audio() -> RequestError:
    return RequestError(
        "the model ended without any audio; try another seed or a longer input", status=500, code="no_audio"
    )


def _json_response(content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, headers=headers, media_type=JSON)


async def _nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _internal_error(request: Request, error: Exception) -> Response:
    hidden = RequestError("internal error; the server's log has more", status=500)
    return _json_response(openai.error_fields(hidden), status=500)
