"""The protocol without sockets: calls to requests, responses to results, streamed bytes to events.

The clients of `sync` and `aio` send what this module makes and give it what comes back.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypedDict, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from mstar import __version__, config
from mstar.client import errors
from mstar.client.errors import NO_AUDIO, APIError, ClientError, StreamBroken
from mstar.client.results import Event, Outputs, Result, Speech, header_number, read_output, read_result

Value = TypeVar("Value")
Item = TypeVar("Item")
Reader = TypeVar("Reader", bound="Decoder")
Fields = Mapping[str, Any]

GENERATE = "/v1/generate"
DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 5.0
MAX_PAUSE_S = 60.0  # a server that asks for a longer wait is not waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[Value]):
    """One HTTP exchange.

    Args:
        read: what an answer means; of a stream, which decoder reads its body.
        accept: the media type that the answer is to have; None: the route's own.
        answers: statuses that are answers too.
        may_retry: whether a busy server (429, 503) is worth asking again.
    """

    method: str = "GET"
    path: str
    read: Callable[[httpx.Response], Value]
    body: Fields | None = None
    accept: str | None = None
    answers: tuple[int, ...] = ()
    may_retry: bool = True

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """The request as httpx sends it."""
        if self.body is None:
            return http.build_request(self.method, self.path)
        content, headers = msgspec.json.encode(self.body), {"Content-Type": "application/json"}
        headers |= {"Accept": self.accept} if self.accept else {}
        return http.build_request(self.method, self.path, content=content, headers=headers)

    def is_answered_by(self, response: httpx.Response) -> bool:
        return response.is_success or response.status_code in self.answers

    def pause_s(self, response: httpx.Response, *, attempt: int, max_retries: int) -> float:
        """How long to wait before asking again. Raises the error that the response is, if not again."""
        error = errors.of_response(response)
        is_busy = error.status in (429, 503) and self.may_retry
        if not is_busy or attempt >= max_retries or error.retry_after is None or error.retry_after > MAX_PAUSE_S:
            raise error
        return error.retry_after


def http_options(base_url: str, api_key: str | None, timeout: float) -> dict[str, Any]:
    """Arguments of httpx's clients. An absent key is that of MSTAR_API_KEY."""
    key = config.environment().api_key if api_key is None else api_key
    headers = {"User-Agent": f"mstar/{__version__}", "Accept-Encoding": "identity"}
    return {
        "base_url": base_url.rstrip("/").removesuffix("/v1"),
        "headers": headers | ({"Authorization": f"Bearer {key}"} if key else {}),
        "timeout": httpx.Timeout(timeout, connect=min(timeout, CONNECT_TIMEOUT_S)),
        "verify": not base_url.startswith("http://"),  # without TLS, loading certificates is time lost
        "limits": httpx.Limits(max_connections=None, max_keepalive_connections=100),
    }


# ---- calls ------------------------------------------------------------------------------------------------------


class GenerateFields(TypedDict, total=False):
    """What `generate` and `stream` take: fields of `POST /v1/generate`; strings in `inputs` are text parts."""

    inputs: Sequence[str | Fields]
    messages: Sequence[Fields]
    model: str
    task: str
    outputs: Sequence[str]
    params: Fields
    seed: int
    session: str
    timeout_s: float


def generate(text: str | None, fields: GenerateFields) -> Call[Result]:
    """A whole answer."""
    body = _native(text, fields)
    return Call(
        method="POST", path=GENERATE, body=body, read=lambda response: read_result(decode_object(response.content))
    )


def stream(text: str | None, fields: GenerateFields) -> Call[EventDecoder]:
    """An answer in events."""
    body = _native(text, fields) | {"stream": True}
    return Call(method="POST", path=GENERATE, body=body, read=EventDecoder)


def _native(text: str | None, fields: GenerateFields) -> dict[str, Any]:
    body: dict[str, Any] = dict(fields)
    if unknown := body.keys() - GenerateFields.__annotations__.keys():
        known = ", ".join(GenerateFields.__annotations__)
        raise TypeError(f"unknown: {', '.join(sorted(unknown))}; known: {known}; a task's parameters go in params=")
    if (text is not None) + ("inputs" in body) + ("messages" in body) != 1:
        raise TypeError("give exactly one of a text, inputs= and messages=")
    if "messages" not in body:
        parts = [text] if text is not None else body["inputs"]
        body["inputs"] = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return body


def speech(input: str, fields: Fields) -> Call[Speech]:
    """A whole audio file. What only streams take is refused: what came would be no file."""
    if fields.get("stream") or fields.get("stream_format"):
        raise TypeError("stream and stream_format are for stream_speech; speech gives a whole file")
    return Call(method="POST", path="/v1/audio/speech", body={"input": input, **fields}, read=Speech.make)


def stream_speech(input: str, fields: Fields) -> Call[SpeechDecoder]:
    """An audio file in pieces."""
    body = {"input": input, "response_format": "pcm", "stream_format": "sse", **fields}
    return Call(method="POST", path="/v1/audio/speech", body=body, read=SpeechDecoder)


def close_session(name: str) -> Call[Any]:
    """Forget a session."""
    return Call(method="DELETE", path=f"/v1/sessions/{quote(name)}", read=lambda response: None)


def decode_object(data: bytes) -> dict[str, Any]:
    """A body as JSON."""
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise StreamBroken(f"the server sent what is not a JSON object ({error}): {data[:100]!r}") from error


VOICES: Call[list[str]] = Call(path="/v1/audio/voices", read=lambda response: decode_object(response.content)["voices"])
MODELS: Call[list[dict[str, Any]]] = Call(
    path="/v1/models", read=lambda response: decode_object(response.content)["data"]
)
# Why the server is not well is told at once.
HEALTH = Call(path="/health", read=lambda response: decode_object(response.content), may_retry=False)
READY = Call(path="/ready", read=lambda response: response.is_success, answers=(503,))
VERSION: Call[str] = Call(path="/version", read=lambda response: decode_object(response.content)["version"])
METRICS = Call(path="/metrics", read=lambda response: response.text)


# ---- streamed bodies --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Exchange(Generic[Value]):
    """A streamed call, and once it has been made its response and what reads that. A stream and its items share it."""

    call: Call[Value]
    opened: tuple[httpx.Response, Value] | None = None

    def begin(self, response: httpx.Response) -> tuple[httpx.Response, Value]:
        self.opened = response, self.call.read(response)
        return self.opened


class Decoder(Protocol):
    """Reads a streamed body: `feed` gives what has come, and `end` raises if that is not the whole."""

    def feed(self, data: bytes) -> Iterator[Any]: ...

    def end(self) -> None: ...


class Lines:
    """Bytes to lines, whole ones alone."""

    def __init__(self) -> None:
        self._rest = bytearray()  # of a line whose end has not come

    def feed(self, data: bytes) -> Iterable[bytes]:
        head, newline, tail = data.rpartition(b"\n")
        lines = bytes(self._rest + head).split(b"\n") if newline else []
        self._rest = bytearray(tail) if newline else self._rest + tail
        return filter(None, lines)


class EventDecoder:
    """NDJSON to events; `result` is there once the stream has ended. Raises APIError for an error event."""

    def __init__(self, response: httpx.Response, *, as_torch: bool = False) -> None:
        self._as_torch = as_torch
        self._headers = response.headers
        self._lines = Lines()
        self._outputs = Outputs()
        self._result: Result | None = None

    @property
    def result(self) -> Result:
        if self._result is None:
            raise ClientError("the stream has not ended yet; the result comes after its last event")
        return self._result

    def feed(self, data: bytes) -> Iterator[Event]:
        for line in self._lines.feed(data):
            fields = read_event(line, headers=self._headers)
            kind = fields.pop("event")
            if kind == "done":
                self._result = read_result(fields, outputs=self._outputs.joined())
            else:
                event: Event = read_output(fields, kind=kind, as_torch=self._as_torch)
                self._outputs.add(event)
                yield event

    def end(self) -> None:
        if self._result is None:
            raise StreamBroken("the stream ended without its 'done' event; what came of it is not the whole")


class SpeechDecoder:
    """The bytes of an audio file as they come, bare or in server-sent events, and what is said of them.

    Attributes:
        content_type, sample_rate, seed: as the headers say.
        finish_reason: known at the end of server-sent events.
    """

    def __init__(self, response: httpx.Response) -> None:
        self._headers = response.headers
        self.content_type: str = self._headers.get("content-type", "")
        self.sample_rate = header_number(self._headers, "x-sample-rate")
        self.seed = header_number(self._headers, "x-seed")
        self.finish_reason: str | None = None
        self._lines = Lines() if self.content_type.startswith("text/event-stream") else None
        self._num_bytes = 0
        self._is_done = self._lines is None

    def feed(self, data: bytes) -> Iterator[bytes]:
        for piece in (data,) if self._lines is None else map(self._delta, self._lines.feed(data)):
            self._num_bytes += len(piece)
            if piece:
                yield piece

    def end(self) -> None:
        if not self._is_done:
            raise StreamBroken("the stream ended without its 'speech.audio.done' event; the audio is not the whole")
        if not self._num_bytes:
            raise StreamBroken(NO_AUDIO)

    def _delta(self, line: bytes) -> bytes:
        fields = read_event(line.removeprefix(b"data:"), headers=self._headers) if line.startswith(b"data:") else {}
        if fields.get("type") == "speech.audio.done":
            self._is_done, self.finish_reason = True, fields.get("finish_reason")
        return base64.b64decode(fields.get("audio", b""), validate=True)


def read_event(line: bytes, *, headers: Fields) -> dict[str, Any]:
    """The fields of an event. Raises APIError for one that reports an error."""
    fields = decode_object(line)
    if "error" in fields:
        raise APIError(**errors.from_fields(fields["error"]), request_id=headers.get("x-request-id"))
    return fields
