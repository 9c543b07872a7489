"""HTTP to wire types and back: routes, body limits, error shapes, disconnects. What stands before them is in `guard`.

Runs on the server's event loop. A client that goes away cancels its request wherever it is; an error is OpenAI-shaped
on every route, and in the middle of a stream it ends the connection abnormally. Knows the engine by its API only.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar
from urllib.parse import unquote_plus

import msgspec
import torch
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

import mstar
from mstar.config import ServerConfig, did_you_mean
from mstar.errors import RequestError
from mstar.server import chat, images, openai
from mstar.server.convert import convert
from mstar.server.engine import Engine, RequestHandle
from mstar.server.guard import Guard, Origins, Reported, StreamBroken, error_response
from mstar.server.multipart import FORM
from mstar.server.native import GenerateRequest, check_model, parse_json
from mstar.server.results import JSON, NDJSON, SAFETENSORS, Form, NativeForm, Outputs
from mstar.server.schema import openapi_document
from mstar.types import Chunk, ImageChunk, TensorChunk

Answer = TypeVar("Answer")

_OFFERED = {
    openai.SPEECH: "read text aloud", chat.CHAT: "chat", images.GENERATIONS: "draw", images.EDITS: "change images",
}  # fmt: skip
"""Routes that models may have -> what a model without one does not do."""
_LARGE_BYTES = 1 << 16  # bodies from here on are read in a thread


def create_app(
    engine: Engine, *, root: str, config: ServerConfig, voices: list[str] | None, plugin_version: str | None = None
) -> Starlette:
    """The HTTP application of one model, whose engine has started.

    Args:
        root: the checkpoint, as the operator named it.
        voices: what `/v1/audio/voices` lists; None: the model has no such route.
        plugin_version: what `/version` says beside the plugin's name.
    """
    surface = Surface(engine, root=root, config=config, voices=voices, plugin_version=plugin_version)
    layers = [Middleware(Reported, report=engine.metrics.record_response)]
    if config.allowed_origins:
        layers.append(Middleware(Origins, allowed=config.allowed_origins))
    layers.append(Middleware(Guard, keys=config.api_key, refuse=surface.refusal))
    kinds = (RequestError, HTTPException, ClientDisconnect)
    app = Starlette(
        routes=surface.routes, middleware=layers, exception_handlers=dict.fromkeys(kinds, surface.handle_error)
    )
    app.router.redirect_slashes = False
    return app


class ExactRoute(Route):
    """A route that refuses what it would not read: query parameters, and a body where it takes none."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request whose path has matched."""
        scope["mstar.route"] = self.path
        if scope["method"] in (self.methods or ()):
            if scope["query_string"]:
                name = unquote_plus(re.split("[&=]", scope["query_string"].decode("latin-1"))[0])[:60] or None
                message = f"{self.path_format} takes no query parameters; leave everything from '?' on out"
                raise RequestError(message, param=name, code="unknown_parameter")
            headers = Headers(scope=scope)
            has_body = headers.get("content-length", "0").strip("0") or "transfer-encoding" in headers
            if has_body and scope["method"] != "POST":
                raise RequestError(f"{scope['method']} {self.path} takes no body; leave it out", param="Content-Length")
        await super().handle(scope, receive, send)


class Surface:
    """The handlers of all routes. Arguments are those of `create_app`."""

    def __init__(
        self, engine: Engine, *, root: str, config: ServerConfig, voices: list[str] | None, plugin_version: str | None
    ) -> None:
        self._engine = engine
        self._config = config
        self._voices = voices
        plugin = {"name": engine.spec.name, "version": plugin_version}
        versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
        self._version = {"version": mstar.__version__, "plugin": plugin} | versions
        limits = engine.state.limits
        models = openai.list_models(
            engine.spec, names=engine.model_names, root=root, created=int(time.time()),
            max_model_len=engine.state.max_model_len,
        )  # fmt: skip
        more = {
            "max_model_len": engine.state.max_model_len, "max_body_bytes": config.max_body_bytes,
            "max_num_seqs": limits.max_running, "max_queue": limits.max_queue, "request_timeout_s": limits.timeout_s,
        }  # fmt: skip
        self._models = [model | {"limits": more} for model in models]
        self.routes = [
            ExactRoute("/v1/generate", self.generate, methods=["POST"]),
            ExactRoute("/v1/models", self.models, methods=["GET"]),
            ExactRoute("/v1/models/{name:path}", self.model, methods=["GET"]),
            ExactRoute("/v1/sessions/{name:path}", self.close_session, methods=["DELETE"]),
            ExactRoute("/health", self.health, methods=["GET"]),
            ExactRoute("/ready", self.ready, methods=["GET"]),
            ExactRoute("/version", self.version, methods=["GET"]),
            ExactRoute("/openapi.json", self.openapi, methods=["GET"]),
        ]
        if voices is not None:
            self.routes.insert(1, ExactRoute("/v1/audio/voices", self.voices, methods=["GET"]))
        if images.EDITS in engine.spec.endpoints:
            self.routes.insert(1, ExactRoute("/v1/images/edits", self.edit, methods=["POST"]))
        if images.GENERATIONS in engine.spec.endpoints:
            self.routes.insert(1, ExactRoute("/v1/images/generations", self.draw, methods=["POST"]))
        if chat.CHAT in engine.spec.endpoints:
            self.routes.insert(1, ExactRoute("/v1/chat/completions", self.chat, methods=["POST"]))
        if openai.SPEECH in engine.spec.endpoints:
            self.routes.insert(1, ExactRoute("/v1/audio/speech", self.speech, methods=["POST"]))
        if config.enable_metrics:
            self.routes.append(ExactRoute("/metrics", self.metrics, methods=["GET"]))
        self._openapi = openapi_document(
            engine.spec, names=engine.model_names, voices=voices, has_keys=bool(config.api_key),
            paths=[route.path for route in self.routes],
        )  # fmt: skip

    # -- generation ------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Any:
        """POST /v1/generate."""
        wire = await self._read(request, lambda body: convert(body, GenerateRequest))
        whole = SAFETENSORS if SAFETENSORS in request.headers.get("accept", "") else JSON
        return await self._respond(request, wire, NativeForm(NDJSON if wire.stream else whole))

    async def speech(self, request: Request) -> Any:
        """POST /v1/audio/speech."""
        spec = self._engine.spec
        speech, wire = await self._read(request, lambda body: openai.read_speech(body, spec=spec))
        return await self._respond(request, wire, openai.speech_form(speech))

    async def chat(self, request: Request) -> Any:
        """POST /v1/chat/completions."""
        spec = self._engine.spec
        return await self._respond(request, *await self._read(request, lambda body: chat.read_chat(body, spec=spec)))

    async def draw(self, request: Request) -> Any:
        """POST /v1/images/generations."""
        return await self._respond(request, *await self._read(request, self._read_image(images.GENERATIONS)))

    async def edit(self, request: Request) -> Any:
        """POST /v1/images/edits."""
        read = self._read_image(images.EDITS)
        return await self._respond(request, *await self._read(request, read, form=images.read_edit_form))

    def _read_image(self, path: str) -> Callable[[Any], tuple[GenerateRequest, Form]]:
        return lambda body: images.read_image(body, spec=self._engine.spec, path=path)

    async def _respond(self, request: Request, wire: GenerateRequest, form: Form) -> Any:
        """The answer, or an error in the words of the route. A client that goes away aborts the request."""
        try:
            return await _watched(request.receive, self._answer(wire, form))
        except RequestError as error:
            raise form.worded(error) from error

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

    async def _read(
        self, request: Request, read: Callable[[Any], Answer], *, form: Callable[..., Any] | None = None
    ) -> Answer:
        """What `read` makes of the body's JSON. Large bodies do not keep the event loop.

        Args:
            form: what makes JSON of a multipart form; None: the route takes none.
        """
        content_type = request.headers.get("content-type", "")
        kind, _, charset = content_type.lower().partition(";")
        is_form = form is not None and kind.strip() == FORM
        if not is_form and (kind.strip() != JSON or charset.strip() not in ("", "charset=utf-8", 'charset="utf-8"')):
            message = f"Content-Type is {content_type[:60]!r}; it must be {JSON}, in UTF-8"
            message += f", or {FORM}" if form is not None else ""
            raise RequestError(message, status=415, param="Content-Type")
        body = await self._body(request)

        def parse() -> Answer:
            return read(form(body, content_type=content_type) if form is not None and is_form else parse_json(body))

        return parse() if len(body) < _LARGE_BYTES else await asyncio.to_thread(parse)

    async def _body(self, request: Request) -> bytes:
        if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
            message = f"Content-Encoding is {encoding[:60]!r}; send the body as it is"
            raise RequestError(message, status=415, param="Content-Encoding")
        body, seconds = bytearray(), self._config.client_timeout_s
        self._check_size(int(request.headers.get("content-length", 0)))
        try:
            async with asyncio.timeout(seconds):
                async for block in request.stream():
                    body += block
                    self._check_size(len(body))
        except TimeoutError as error:
            message = f"the body took longer than {seconds:g} s, and {len(body)} bytes of it came; "
            message += "send it faster, or raise --client-timeout"
            raise RequestError(message, status=408, code="body_timeout") from error
        return bytes(body)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > (limit := self._config.max_body_bytes):
            message = f"the body has more than {limit} bytes, which is the limit; "
            raise RequestError(message + "send less, or raise --max-body-bytes", status=413, code="body_too_large")

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

    async def voices(self, request: Request) -> Response:
        """GET /v1/audio/voices."""
        return _json_response(openai.list_voices(self._voices or ()))

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while the model can work, even if new requests are refused, or some workers are missing."""
        state, workers = self._engine.state, self._engine.workers()
        shown = {"workers": msgspec.to_builtins(workers)} if workers else {}
        if state.unhealthy is not None:
            error = RequestError(state.unhealthy, status=503, code="unavailable")
            return self.refusal(request.scope, error, more=shown)
        status = "ok" if all(worker.state == "ready" for worker in workers) else "degraded"
        return _json_response({"status": "draining" if state.draining else status} | shown)

    async def ready(self, request: Request) -> Response:
        """GET /ready: 200 while a new request would be taken in."""
        state, limits = self._engine.state, self._engine.state.limits
        is_full = state.num_running + state.num_waiting >= limits.max_running + limits.max_queue
        _require(state.unready or ("the queue is full" if is_full else None))
        return _json_response({"status": "ready"})

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return _json_response(self._version)

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json."""
        return _json_response(self._openapi)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        body, kind = self._engine.metrics.render()
        return Response(body, headers={"Content-Type": kind})

    async def handle_error(self, request: Request, error: Exception) -> Response:
        """`refusal`, as Starlette calls it."""
        return self.refusal(request.scope, error)

    def refusal(self, scope: Scope, error: Exception, *, more: Mapping[str, Any] | None = None) -> Response:
        """The answer to every error, whatever raised it, with what `more` there is to say."""
        headers: dict[str, str] = {}
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)  # nobody reads it
        if isinstance(error, HTTPException):  # the router's 404 and 405
            headers |= error.headers or {}
            problem = "is not allowed on" if error.status_code == 405 else "finds no route at"
            routes, does = ", ".join(route_names(self.routes)), _OFFERED.get(scope["path"])
            paths = [route.path_format for route in self.routes] if error.status_code == 404 else []
            hint = did_you_mean(scope["path"], paths) or ";"
            message, code = f"{scope['method'][:20]} {problem} {scope['path'][:200]!r}{hint} routes: {routes}", None
            if error.status_code == 404 and does is not None:
                message = f"this model, {self._engine.spec.name!r}, does not {does}, so there is no {scope['path']}; "
                if scope["path"] == openai.SPEECH and chat.speaks(self._engine.spec):
                    message += f"it answers aloud: POST {chat.CHAT} with modalities text and audio; "
                message, code = f"{message}routes: {routes}", "unsupported_endpoint"
            error = RequestError(message, status=error.status_code, code=code)
        elif not isinstance(error, RequestError):
            error = RequestError("internal error; the server's log has more", status=500)
        if error.status in (429, 503) and self._engine.state.dead is None:
            headers["Retry-After"] = str(self._engine.state.retry_after_s)
        if error.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return error_response(error, headers=headers, more=more)


def _require(reason: str | None) -> None:
    if reason is not None:
        raise RequestError(reason, status=503, code="unavailable")


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
    async def piece(chunk: Chunk) -> bytes:
        is_slow = form.runs_in_thread or isinstance(chunk, ImageChunk | TensorChunk)
        return await asyncio.to_thread(form.piece, chunk) if is_slow else form.piece(chunk)

    error: RequestError | None = None
    try:
        if first is not None:
            yield await piece(first)
        async for chunk in handle:
            yield await piece(chunk)
        last = form.end(handle.request, result=handle.result, error=None)
    except RequestError as failure:
        error, last = failure, form.end(handle.request, result=handle.result, error=failure)
    yield last
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


def route_names(routes: Iterable[BaseRoute]) -> list[str]:
    """Routes as "METHOD /path"."""
    found = [route for route in routes if isinstance(route, Route) and route.methods]
    return [f"{', '.join(sorted((route.methods or set()) - {'HEAD'}))} {route.path_format}" for route in found]


def _json_response(content: Mapping[str, Any]) -> Response:
    return Response(msgspec.json.encode(content), media_type=JSON)
