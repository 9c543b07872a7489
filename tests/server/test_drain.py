"""Shutdown over real sockets, with the fake worker: who is answered, who is refused, who is cut."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from mstar.config import ServerConfig
from mstar.launch import Server
from mstar.server.app import create_app

SLOW = "x" * 900  # nine seconds at the pace below


@contextlib.asynccontextmanager
async def listening(
    serving: Callable[..., Any], *, drain_timeout_s: float
) -> AsyncIterator[tuple[httpx.AsyncClient, Server, asyncio.Task[None], Any]]:
    async with serving(step_s=0.01) as served:
        config = ServerConfig(log_level="error", drain_timeout_s=drain_timeout_s)
        app = create_app(served.engine, root="tiny", config=config, voices=None)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            server = Server(app, served.engine, config=config)
            server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
            task = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started:
                await asyncio.sleep(0.01)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=url, timeout=10) as client:
                yield client, server, task, served


def ask(client: httpx.AsyncClient, text: str, **fields: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(client.post("/v1/generate", json={"inputs": [{"type": "text", "text": text}], **fields}))


async def streamed(client: httpx.AsyncClient, text: str) -> list[dict[str, Any]]:
    """The events of a stream, up to where the connection broke."""
    body = {"inputs": [{"type": "text", "text": text}], "stream": True}
    events = []
    with contextlib.suppress(httpx.RemoteProtocolError):
        async with client.stream("POST", "/v1/generate", json=body) as response:
            async for line in response.aiter_lines():
                events.append(json.loads(line))
    return events


async def until_running(served: Any, number: int) -> None:
    while len(served.worker.open) < number:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # first chunks are on their way


@pytest.mark.parametrize("is_forced", [False, True], ids=["timeout", "second signal"])
def test_what_is_cut_is_told_so_and_the_server_knows(serving: Callable[..., Any], is_forced: bool) -> None:
    async def scenario() -> None:
        drain_timeout_s = 60 if is_forced else 0.3
        async with listening(serving, drain_timeout_s=drain_timeout_s) as (client, server, task, served):
            whole, stream = ask(client, SLOW), asyncio.create_task(streamed(client, SLOW))
            await until_running(served, 2)
            for _ in range(1 + is_forced):
                server.handle_exit(signal.SIGTERM, None)
            response, events = await whole, await stream
            assert response.status_code == 503 and "shutting down" in response.json()["error"]["message"]
            assert events[0]["event"] == "text"
            assert events[-1]["event"] == "error" and "shutting down" in events[-1]["error"]["message"]
            await task
            assert server.is_cut

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_new_connections_are_refused_with_503_while_running_requests_end(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with listening(serving, drain_timeout_s=10) as (client, server, task, served):
            running = ask(client, "x" * 60)
            await until_running(served, 1)
            server.handle_exit(signal.SIGTERM, None)
            await asyncio.sleep(0.2)  # uvicorn looks every 0.1 s
            async with httpx.AsyncClient(base_url=client.base_url) as other:
                refused = await ask(other, "new")
                assert refused.status_code == 503 and refused.headers["retry-after"]
                alive, ready = await other.get("/health"), await other.get("/ready")
                assert alive.status_code == 200 and alive.json() == {"status": "draining"}
                assert ready.status_code == 503 and "shutting down" in ready.json()["error"]["message"]
            assert (await running).json()["outputs"][0]["text"] == "x" * 60
            await task
            assert not server.is_cut

    asyncio.run(asyncio.wait_for(scenario(), 20))
