from __future__ import annotations

import asyncio
import threading
import time

import pytest

from mstar.ipc.channel import memory_channel
from mstar.ipc.messages import Abort, Dead, Emit


def emit(index: int) -> Emit:
    return Emit(request_id="r", name="x", path=(), value=index)


@pytest.mark.parametrize("check", [False, True])
def test_messages_arrive_in_order_and_together(check: bool) -> None:
    async def scenario() -> None:
        engine, worker = memory_channel(check=check)
        for index in range(3):
            worker.send(emit(index))
        assert [m.value for m in await engine.receive()] == [0, 1, 2]
        engine.send(Abort(request_id="a"))
        engine.send(Abort(request_id="b"))
        assert [m.request_id for m in worker.receive(0)] == ["a", "b"]

    asyncio.run(scenario())


def test_a_message_from_another_thread_wakes_the_loop() -> None:
    async def scenario() -> list[int]:
        engine, worker = memory_channel(check=True)
        thread = threading.Thread(target=lambda: [worker.send(emit(i)) for i in range(1000)])
        got: list[int] = []
        receiving = asyncio.ensure_future(engine.receive())
        await asyncio.sleep(0)
        thread.start()
        got += [m.value for m in await asyncio.wait_for(receiving, 5)]
        while len(got) < 1000:
            got += [m.value for m in await asyncio.wait_for(engine.receive(), 5)]
        thread.join()
        return got

    assert asyncio.run(scenario()) == list(range(1000))


def test_worker_waits_no_longer_than_told() -> None:
    _, worker = memory_channel(check=False)
    started = time.monotonic()
    assert worker.receive(0) == []
    assert worker.receive(0.05) == []
    assert 0.04 < time.monotonic() - started < 1


def test_a_cancelled_receive_loses_nothing() -> None:
    async def scenario() -> None:
        engine, worker = memory_channel(check=False)
        receiving = asyncio.ensure_future(engine.receive())
        await asyncio.sleep(0)
        receiving.cancel()
        await asyncio.sleep(0)
        worker.send(emit(1))
        assert len(await engine.receive()) == 1

    asyncio.run(scenario())


def test_sends_after_the_engine_closed_are_dropped() -> None:
    engine, worker = memory_channel(check=False)

    async def scenario() -> None:
        receiving = asyncio.ensure_future(engine.receive())
        await asyncio.sleep(0)
        engine.close()
        receiving.cancel()

    asyncio.run(scenario())
    worker.send(Dead(reason="late"))
