"""Every channel keeps the same promises: in memory, in memory with messages encoded, and between processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import torch

from mstar.ipc import process_channel
from mstar.ipc.arena import ArenaError
from mstar.ipc.channel import EngineEnd, WorkerEnd, memory_channel
from mstar.ipc.messages import Abort, Begin, Dead, Emit
from mstar.ipc.process_channel import ProcessEngineEnd, ProcessWorkerEnd
from mstar.ipc.tensors import INLINE_BYTES

KINDS = ("memory", "memory, checked", "processes")
ARENA_BYTES = 1 << 18


def emit(value: Any) -> Emit:
    return Emit(request_id="r", name="x", path=(), value=value)


def begin(value: Any) -> Begin:
    return Begin(request_id="r", walks={"main": "w"}, inputs={"x": value})


@contextlib.asynccontextmanager
async def opened(kind: str, *, on_lost: Callable[[], None] = lambda: None) -> AsyncIterator[tuple[Any, Any]]:
    """Both ends of a channel, connected."""
    if kind != "processes":
        yield memory_channel(check=kind == "memory, checked")
        return
    engine = ProcessEngineEnd(arena_bytes=ARENA_BYTES)
    worker = ProcessWorkerEnd(engine.road, on_lost=on_lost)
    engine.send(Abort(request_id="first"))  # before it is connected
    assert [m.request_id for m in await received(worker)] == ["first"]
    try:
        yield engine, worker
    finally:
        for end, stop in ((worker, worker.close), (engine, engine.dispose)):
            if end._lifeline.fileno() >= 0:
                stop()


async def received(worker: WorkerEnd, timeout_s: float = 5.0) -> list[Any]:
    return await asyncio.to_thread(worker.receive, timeout_s)


async def gathered(engine: EngineEnd, number: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < number:
        found += await asyncio.wait_for(engine.receive(), 5)
    return found


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 30))


@pytest.mark.parametrize("kind", KINDS)
def test_messages_arrive_in_order(kind: str) -> None:
    async def scenario() -> None:
        async with opened(kind) as (engine, worker):
            for index in range(3):
                worker.send(emit(index))
            assert [m.value for m in await gathered(engine, 3)] == [0, 1, 2]
            for name in "ab":
                engine.send(Abort(request_id=name))
            found: list[Any] = []
            while len(found) < 2:
                found += await received(worker)
            assert [m.request_id for m in found] == ["a", "b"]

    run(scenario())


@pytest.mark.parametrize("check", [False, True])
def test_messages_in_memory_arrive_together(check: bool) -> None:
    async def scenario() -> None:
        engine, worker = memory_channel(check=check)
        for index in range(3):
            worker.send(emit(index))
        assert [m.value for m in await engine.receive()] == [0, 1, 2]
        engine.send(Abort(request_id="a"))
        engine.send(Abort(request_id="b"))
        assert [m.request_id for m in worker.receive(0)] == ["a", "b"]

    run(scenario())


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_from_another_thread_wakes_the_loop(kind: str) -> None:
    async def scenario() -> None:
        async with opened(kind) as (engine, worker):
            receiving = asyncio.ensure_future(engine.receive())
            await asyncio.sleep(0)
            thread = threading.Thread(target=lambda: [worker.send(emit(i)) for i in range(1000)])
            thread.start()
            first = [m.value for m in await asyncio.wait_for(receiving, 5)]
            rest = [m.value for m in await gathered(engine, 1000 - len(first))]
            thread.join()
            assert first + rest == list(range(1000))

    run(scenario())


@pytest.mark.parametrize("kind", KINDS)
def test_messages_of_several_threads_all_arrive_each_threads_in_order(kind: str) -> None:
    async def scenario() -> None:
        async with opened(kind) as (engine, worker):
            large = torch.zeros(INLINE_BYTES, dtype=torch.uint8)

            def send(thread: int) -> None:
                for number in range(40):
                    worker.send(emit([thread, number, large if number % 3 else None]))

            threads = [threading.Thread(target=send, args=(number,)) for number in range(3)]
            for thread in threads:
                thread.start()
            found = [m.value[:2] for m in await gathered(engine, 120)]
            for number in range(3):
                assert [pair[1] for pair in found if pair[0] == number] == list(range(40))

    run(scenario())


@pytest.mark.parametrize("kind", KINDS)
def test_worker_waits_no_longer_than_told(kind: str) -> None:
    async def scenario() -> None:
        async with opened(kind) as (_, worker):
            started = time.monotonic()
            assert worker.receive(0) == []
            assert worker.receive(0.05) == []
            assert 0.04 < time.monotonic() - started < 1

    run(scenario())


@pytest.mark.parametrize("kind", KINDS)
def test_a_cancelled_receive_loses_nothing(kind: str) -> None:
    async def scenario() -> None:
        async with opened(kind) as (engine, worker):
            receiving = asyncio.ensure_future(engine.receive())
            await asyncio.sleep(0)
            receiving.cancel()
            await asyncio.sleep(0)
            worker.send(emit(1))
            assert len(await engine.receive()) == 1

    run(scenario())


@pytest.mark.parametrize("kind", KINDS)
def test_sends_after_the_engine_closed_are_dropped(kind: str) -> None:
    async def scenario() -> None:
        async with opened(kind) as (engine, worker):
            receiving = asyncio.ensure_future(engine.receive())
            await asyncio.sleep(0)
            engine.close()
            receiving.cancel()
            worker.send(Dead(reason="late"))
            engine.send(Abort(request_id="late"))

    run(scenario())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_bytes", [INLINE_BYTES - 1, INLINE_BYTES, ARENA_BYTES // 4, ARENA_BYTES * 3 + 5])
def test_tensors_of_any_size_cross_both_ways(kind: str, num_bytes: int) -> None:
    async def scenario() -> None:
        async with opened(kind) as (engine, worker):
            for number in range(5):
                tensor = torch.randint(-128, 127, (num_bytes,), dtype=torch.int8)
                sending = asyncio.ensure_future(asyncio.to_thread(worker.send, emit({"t": [tensor, number]})))
                (message,) = await gathered(engine, 1)
                await sending
                assert torch.equal(message.value["t"][0], tensor) and message.value["t"][1] == number
                engine.send(begin(tensor))
                (message,) = await received(worker)
                assert torch.equal(message.inputs["x"], tensor)

    run(scenario())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(80, 90).to(torch.bfloat16),
        torch.randn(100, 70).t(),
        torch.arange(9000)[::3],
        torch.rand(150, 150) > 0.5,
        torch.ones(1, requires_grad=True).expand(70, 80),
        torch.empty(0, 3),
    ],
    ids=lambda t: f"{t.dtype}-{tuple(t.shape)}",
)
def test_a_tensor_crosses_between_processes_unchanged_and_owns_what_comes(tensor: torch.Tensor) -> None:
    async def scenario() -> None:
        async with opened("processes") as (engine, worker):
            worker.send(emit([tensor, tensor]))
            ((first, second),) = [m.value for m in await gathered(engine, 1)]
            first.zero_()
            assert second.dtype == tensor.dtype and second.shape == tensor.shape
            assert torch.equal(second, tensor.detach())

    run(scenario())


def test_a_worker_waits_for_room_and_an_engine_does_not() -> None:
    async def scenario() -> None:
        async with opened("processes") as (engine, worker):
            tensors = [torch.full((ARENA_BYTES // 5,), number, dtype=torch.uint8) for number in range(20)]
            for tensor in tensors:
                engine.send(begin(tensor))  # no one reads
            found: list[Any] = []
            while len(found) < 20:
                found += await received(worker)
            assert [int(m.inputs["x"][0]) for m in found] == list(range(20))

            def send() -> None:
                for tensor in tensors:
                    worker.send(emit(tensor))

            thread = threading.Thread(target=send)
            thread.start()
            time.sleep(0.3)  # the event loop does nothing meanwhile
            assert thread.is_alive()
            assert [int(m.value[0]) for m in await gathered(engine, 20)] == list(range(20))
            thread.join(5)
            assert not thread.is_alive()

    run(scenario())


def test_what_may_not_cross_is_refused_and_the_next_message_crosses() -> None:
    async def scenario() -> None:
        async with opened("processes") as (engine, worker):
            large = torch.zeros(INLINE_BYTES, dtype=torch.uint8)
            with pytest.raises(TypeError, match="object cannot cross"):
                worker.send(emit([large, object()]))
            with pytest.raises(TypeError, match="complex64"):
                engine.send(begin([large, torch.zeros(9000, dtype=torch.complex64)]))
            worker.send(emit(large + 1))
            engine.send(begin(large + 2))
            assert int((await gathered(engine, 1))[0].value[0]) == 1
            assert int((await received(worker))[0].inputs["x"][0]) == 2

    run(scenario())


def test_a_lost_engine_wakes_a_worker_that_waits_for_room_and_is_told() -> None:
    async def scenario() -> None:
        lost = threading.Event()
        async with opened("processes", on_lost=lost.set) as (engine, worker):
            thread = threading.Thread(target=worker.send, args=(emit(torch.zeros(3 * ARENA_BYTES)),))
            thread.start()
            time.sleep(0.1)
            engine.dispose()
            assert await asyncio.to_thread(lost.wait, 5)
            thread.join(5)
            assert not thread.is_alive()

    run(scenario())


def test_a_worker_that_lives_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_channel, "HEARTBEAT_S", 0.05)

    async def scenario() -> None:
        async with opened("processes") as (engine, _):
            before = engine.heard_at
            await asyncio.sleep(0.3)
            assert engine.heard_at > before + 0.1

    run(scenario())


def test_a_channel_out_of_step_is_an_error_of_whoever_receives() -> None:
    async def scenario() -> None:
        async with opened("processes") as (engine, worker):
            worker._outlet.arena._position += 64
            worker.send(emit(torch.zeros(INLINE_BYTES)))
            with pytest.raises(ArenaError, match="out of step"):
                await asyncio.wait_for(engine.receive(), 5)

    run(scenario())


def test_long_messages_cross_both_ways() -> None:
    async def scenario() -> None:
        async with opened("processes") as (engine, worker):
            ids, large = list(range(200_000)), torch.arange(9000)
            sending = asyncio.ensure_future(asyncio.to_thread(worker.send, emit([large, ids, large + 1])))
            first, found, second = (await gathered(engine, 1))[0].value
            await sending
            assert found == ids and torch.equal(first, large) and torch.equal(second, large + 1)
            engine.send(begin([ids, large]))
            assert (await received(worker))[0].inputs["x"][0] == ids

    run(scenario())


def test_an_engine_sends_on_when_a_full_socket_has_been_read() -> None:
    async def scenario() -> None:
        async with opened("processes") as (engine, worker):
            for number in range(3000):
                engine.send(begin([number, "x" * 1000]))
            found: list[Any] = []
            while len(found) < 3000:
                found += await received(worker)
            assert [m.inputs["x"][0] for m in found] == list(range(3000))

    run(scenario())


def test_what_a_worker_sent_before_it_ended_is_received_first() -> None:
    async def scenario() -> None:
        async with opened("processes") as (engine, worker):
            worker.send(Dead(reason="this is why"))
            worker.close()
            assert [m.reason for m in await gathered(engine, 1)] == ["this is why"]
            with pytest.raises(EOFError):
                await asyncio.wait_for(engine.receive(), 5)
            engine.send(Abort(request_id="late"))

    run(scenario())


def test_nothing_is_left_of_a_channel() -> None:
    async def use() -> None:
        async with opened("processes") as (engine, worker):
            worker.send(emit(torch.zeros(INLINE_BYTES)))
            await gathered(engine, 1)

    async def scenario() -> None:
        await use()  # threads and files that are made at first use
        files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        for _ in range(5):
            await use()
        assert len(os.listdir("/proc/self/fd")) == files
        assert threading.active_count() == threads

    run(scenario())
