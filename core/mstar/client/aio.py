"""The client for asyncio. What it sends and what it makes of answers is in `wire`; `sync` is the same without await."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, Generic, Self, Unpack

import httpx

from mstar.client import chat, wire
from mstar.client.chat import Chat, ChatDecoder, Images, Messages
from mstar.client.errors import ClientError, ConnectionFailed, StreamBroken, translated
from mstar.client.results import Event, Result, Speech
from mstar.client.tasks import Tasks
from mstar.client.wire import EventDecoder, GenerateFields, Item, Reader, SpeechDecoder, Value


class AsyncClient(Tasks[Coroutine[Any, Any, Result], "AsyncStream[Event, EventDecoder]"]):
    """`Client` for asyncio: the same arguments and methods; see there."""

    def __init__(
        self, base_url: str = wire.DEFAULT_URL, *, api_key: str | None = None, timeout: float = wire.TIMEOUT_S,
        max_retries: int = 2,
    ) -> None:  # fmt: skip
        self._http = httpx.AsyncClient(**wire.http_options(base_url, api_key, timeout))
        self._max_retries = max_retries

    async def generate(self, text: str | None = None, **fields: Unpack[GenerateFields]) -> Result:
        return await self._send(wire.generate(text, fields))

    def stream(self, text: str | None = None, **fields: Unpack[GenerateFields]) -> AsyncStream[Event, EventDecoder]:
        return AsyncStream(self, wire.stream(text, fields))

    async def speech(self, input: str, **fields: Any) -> Speech:
        return await self._send(wire.speech(input, fields))

    def stream_speech(self, input: str, **fields: Any) -> AsyncStream[bytes, SpeechDecoder]:
        return AsyncStream(self, wire.stream_speech(input, fields))

    async def chat(self, messages: Messages, **fields: Any) -> Chat:
        return await self._send(chat.chat(messages, fields))

    def stream_chat(self, messages: Messages, **fields: Any) -> AsyncStream[Event, ChatDecoder]:
        return AsyncStream(self, chat.stream_chat(messages, fields))

    async def generate_images(self, prompt: str, **fields: Any) -> Images:
        return await self._send(chat.generate_images(prompt, fields))

    async def edit_image(self, image: Any, prompt: str, **fields: Any) -> Images:
        return await self._send(chat.generate_images(prompt, fields, image=image))

    async def voices(self) -> list[str]:
        return await self._send(wire.VOICES)

    async def models(self) -> list[dict[str, Any]]:
        return await self._send(wire.MODELS)

    async def health(self) -> dict[str, Any]:
        return await self._send(wire.HEALTH)

    async def ready(self) -> bool:
        return await self._send(wire.READY)

    async def version(self) -> str:
        return await self._send(wire.VERSION)

    async def metrics(self) -> str:
        return await self._send(wire.METRICS)

    async def close_session(self, name: str) -> None:
        await self._send(wire.close_session(name))

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # -- sending ---------------------------------------------------------------------------------------------

    async def open(self, call: wire.Call[Any]) -> httpx.Response:
        """An answer, its body unread; whoever opens it closes it."""
        attempt = 0
        while True:
            with translated(ConnectionFailed, f"{call.method} {self._http.base_url}{call.path}"):
                response = await self._http.send(call.request(self._http), stream=True)
                if call.is_answered_by(response):
                    return response
                await response.aread()
            await asyncio.sleep(call.pause_s(response, attempt=attempt, max_retries=self._max_retries))
            attempt += 1

    async def _send(self, call: wire.Call[Value]) -> Value:
        response = await self.open(call)
        with translated(StreamBroken, "the answer broke off"):
            await response.aread()
        return call.read(response)

    def _stream(self, call: wire.Call[EventDecoder]) -> AsyncStream[Event, EventDecoder]:
        return AsyncStream(self, call)


class AsyncStream(Generic[Item, Reader]):
    """`Stream` for asyncio. Leave it by `async with` or `close()`; a dropped one ends when the loop comes to it."""

    def __init__(self, client: AsyncClient, call: wire.Call[Reader]) -> None:
        self._client = client
        self._exchange = wire.Exchange(call)
        self._items = _items(client, self._exchange)

    @property
    def answer(self) -> Reader:
        """What is known besides the items: of events the `result`, after the last; of speech rate and seed."""
        if self._exchange.opened is None:
            raise ClientError("the stream has not begun; enter it with 'async with', or iterate first")
        return self._exchange.opened[1]

    def __aiter__(self) -> AsyncIterator[Item]:
        return self

    async def __anext__(self) -> Item:
        return await anext(self._items)

    async def __aenter__(self) -> Self:
        await _begun(self._client, self._exchange)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop reading and cancel what is left of the request."""
        await self._items.aclose()
        if self._exchange.opened is not None:
            await self._exchange.opened[0].aclose()


async def _begun(client: AsyncClient, exchange: wire.Exchange[Reader]) -> tuple[httpx.Response, Reader]:
    return exchange.opened or exchange.begin(await client.open(exchange.call))


async def _items(client: AsyncClient, exchange: wire.Exchange[Any]) -> AsyncGenerator[Any, None]:
    response, answer = await _begun(client, exchange)
    try:
        with translated(StreamBroken, "the stream broke off"):
            async for data in response.aiter_bytes():
                for item in answer.feed(data):
                    yield item
        answer.end()
    finally:
        await response.aclose()
