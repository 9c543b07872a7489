"""The client for plain code. What it sends and what it makes of answers is in `wire`; `aio` is the same with await."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from typing import Any, Generic, Self, Unpack

import httpx

from mstar.client import chat, wire
from mstar.client.chat import Chat, ChatDecoder, Images, Messages
from mstar.client.errors import ConnectionFailed, StreamBroken, translated
from mstar.client.results import Event, Result, Speech
from mstar.client.tasks import Tasks
from mstar.client.wire import EventDecoder, GenerateFields, Item, Reader, SpeechDecoder, Value


class Client(Tasks[Result, "Stream[Event, EventDecoder]"]):
    """Talks to one server.

    Args:
        api_key: absent: that of MSTAR_API_KEY, if any.
        timeout: seconds of silence after which a call fails.
        max_retries: how often a call that a busy server refuses (429 or 503, with Retry-After) is made again; what
            has begun to answer is never asked for again.
    """

    def __init__(
        self, base_url: str = wire.DEFAULT_URL, *, api_key: str | None = None, timeout: float = wire.TIMEOUT_S,
        max_retries: int = 2,
    ) -> None:  # fmt: skip
        self._http = httpx.Client(**wire.http_options(base_url, api_key, timeout))
        self._max_retries = max_retries

    def generate(self, text: str | None = None, **fields: Unpack[GenerateFields]) -> Result:
        """Any task of the model, answered as a whole. Give a text, `inputs` or `messages`."""
        return self._send(wire.generate(text, fields))

    def stream(self, text: str | None = None, **fields: Unpack[GenerateFields]) -> Stream[Event, EventDecoder]:
        """The same as events as they come; after the last one, `.answer.result`."""
        return Stream(self, wire.stream(text, fields))

    def speech(self, input: str, **fields: Any) -> Speech:
        """An audio file. `fields`: voice, response_format, speed, seed, model, and parameters of the model's own."""
        return self._send(wire.speech(input, fields))

    def stream_speech(self, input: str, **fields: Any) -> Stream[bytes, SpeechDecoder]:
        """The bytes of an audio file as they come, pcm unless asked otherwise; `.answer` has rate and seed."""
        return Stream(self, wire.stream_speech(input, fields))

    def chat(self, messages: Messages, **fields: Any) -> Chat:
        """An answer by OpenAI's chat route. `messages`: a text of the user's, or messages, whose parts may be those of
        `generate`. `fields`: modalities, max_tokens, n, seed, and parameters of the model's own.
        """
        return self._send(chat.chat(messages, fields))

    def stream_chat(self, messages: Messages, **fields: Any) -> Stream[Event, ChatDecoder]:
        """The same as events as they come; after the last one, `.answer.result`."""
        return Stream(self, chat.stream_chat(messages, fields))

    def generate_images(self, prompt: str, **fields: Any) -> Images:
        """Pictures. `fields`: n, size, seed, and parameters of the model's own."""
        return self._send(chat.generate_images(prompt, fields))

    def edit_image(self, image: Any, prompt: str, **fields: Any) -> Images:
        """Pictures made of an image, or of a list of them: files, bytes, URLs, PIL images or uint8 (H, W, 3)."""
        return self._send(chat.generate_images(prompt, fields, image=image))

    def voices(self) -> list[str]:
        return self._send(wire.VOICES)

    def models(self) -> list[dict[str, Any]]:
        """The served names, with tasks, modalities and limits."""
        return self._send(wire.MODELS)

    def health(self) -> dict[str, Any]:
        """Raises APIError 503 with the reason while the server is not well."""
        return self._send(wire.HEALTH)

    def ready(self) -> bool:
        """Whether the server takes requests now."""
        return self._send(wire.READY)

    def version(self) -> str:
        return self._send(wire.VERSION)

    def metrics(self) -> str:
        """Prometheus' text."""
        return self._send(wire.METRICS)

    def close_session(self, name: str) -> None:
        """Forget a session and free what it holds."""
        self._send(wire.close_session(name))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- sending ---------------------------------------------------------------------------------------------

    def open(self, call: wire.Call[Any]) -> httpx.Response:
        """An answer, its body unread; whoever opens it closes it."""
        attempt = 0
        while True:
            with translated(ConnectionFailed, f"{call.method} {self._http.base_url}{call.path}"):
                response = self._http.send(call.request(self._http), stream=True)
                if call.is_answered_by(response):
                    return response
                response.read()
            time.sleep(call.pause_s(response, attempt=attempt, max_retries=self._max_retries))
            attempt += 1

    def _send(self, call: wire.Call[Value]) -> Value:
        response = self.open(call)
        with translated(StreamBroken, "the answer broke off"):
            response.read()
        return call.read(response)

    def _stream(self, call: wire.Call[EventDecoder]) -> Stream[Event, EventDecoder]:
        return Stream(self, call)


class Stream(Generic[Item, Reader]):
    """An answer as it comes: an iterator, asked for when entered or first iterated.

    Leaving it, by `with`, `close()` or dropping it, closes the connection, and that cancels the request. It never ends
    early without an error: APIError for what the server reports, StreamBroken for a connection that broke.
    """

    def __init__(self, client: Client, call: wire.Call[Reader]) -> None:
        self._client = client
        self._exchange = wire.Exchange(call)
        self._items = _items(client, self._exchange)  # does not know the stream, so that dropping that ends it at once

    @property
    def answer(self) -> Reader:
        """What is known besides the items: of events the `result`, after the last; of speech rate and seed."""
        return _begun(self._client, self._exchange)[1]

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        return next(self._items)

    def __enter__(self) -> Self:
        _begun(self._client, self._exchange)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading and cancel what is left of the request."""
        self._items.close()
        if self._exchange.opened is not None:
            self._exchange.opened[0].close()


def _begun(client: Client, exchange: wire.Exchange[Reader]) -> tuple[httpx.Response, Reader]:
    return exchange.opened or exchange.begin(client.open(exchange.call))


def _items(client: Client, exchange: wire.Exchange[Any]) -> Generator[Any, None, None]:
    response, answer = _begun(client, exchange)
    try:
        with translated(StreamBroken, "the stream broke off"):
            for data in response.iter_bytes():
                yield from answer.feed(data)
        answer.end()
    finally:
        response.close()
