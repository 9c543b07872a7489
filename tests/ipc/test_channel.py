"""Every channel keeps the same promises: in memory, in memory with messages encoded, and between processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
import pytest
import torch
from msgspec import structs

from mstar.ipc import process_channel
from mstar.ipc.arena import ArenaError
from mstar.ipc.channel import EngineEnd, WorkerEnd, memory_channel
from mstar.ipc.messages import Abort, Begin, Dead, Emit
from mstar.ipc.process_channel import Exchange, ProcessEngineEnd, ProcessWorkerEnd
from mstar.ipc.tensors import INLINE_BYTES

KINDS = ("memory", "memory, checked", "processes")
ARENA_BYTES = 1 << 18


def emit(value: Any) -> Emit:
    return Emit(request_id="r", name="x", path=(), value=value)


def begin(value: Any) -> Begin:
    return Begin(request_id="r", walks={"main": "w"}, inputs={"x": value})


class Channels:
    """A server's exchange, and ends of workers that are all in this process."""

    def __init__(self) -> None:
        self.exchange = Exchange(arena_bytes=ARENA_BYTES)
        self.pairs: list[tuple[ProcessEngineEnd, ProcessWorkerEnd]] = []

    def open(self, worker: int = 0, *, on_lost: Callable[[], None] = lambda: None) -> tuple[Any, Any]:
        engine = self.exchange.end(worker)
        road = engine.road
        own = dict(zip(("inbox", "arena", "lifeline"), map(os.dup, road.files), strict=True))  # as a process inherits
        engine.hand_over()
        engine.send(Abort(request_id="first"))  # before anybody listens
        # An arena is known by its number in the server, which is this process.
        found = ProcessWorkerEnd(structs.replace(road, **own), server=os.getpid(), on_lost=on_lost)
        self.pairs.append((engine, found))
        return engine, found

    def end(self, engine: ProcessEngineEnd) -> None:
        """As when a worker's process ends."""
        (pair,) = [pair for pair in self.pairs if pair[0] is engine]
        self.pairs.remove(pair)
        pair[1].close()
        engine.dispose()

    def close(self) -> None:
        for engine, _ in self.pairs.copy():
            self.end(engine)
        self.exchange.close()


@contextlib.asynccontextmanager
async def exchange() -> AsyncIterator[Channels]:
    channels = Channels()
    try:
        yield channels
    finally:
        channels.close()


@contextlib.asynccontextmanager
async def opened(kind: str, *, on_lost: Callable[[], None] = lambda: None) -> AsyncIterator[tuple[Any, Any]]:
    """Both ends of a channel, connected."""
    if kind != "processes":
        yield memory_channel(check=kind == "memory, checked")
        return
    async with exchange() as channels:
        engine, worker = channels.open(on_lost=on_lost)
        assert [m.request_id for m in await received(worker)] == ["first"]
        yield engine, worker


async def received(worker: WorkerEnd, timeout_s: float = 5.0) -> list[Any]:
    return await asyncio.to_thread(worker.receive, timeout_s)


async def gathered(engine: EngineEnd, number: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < number:
        found += await asyncio.wait_for(engine.receive(), 5)
    return found


def run(scenario: Coroutine[Any, Any, None], *, within_s: float = 30) -> None:
    asyncio.run(asyncio.wait_for(scenario, within_s))


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


def test_nobody_waits_for_room_and_what_there_was_none_for_arrives_in_its_place() -> None:
    async def scenario() -> None:
        async with opened("processes") as (engine, worker):
            tensors = [torch.full((ARENA_BYTES // 5,), number, dtype=torch.uint8) for number in range(20)]
            for tensor in tensors:
                engine.send(begin([tensor, tensor + 1]))  # no one reads
                worker.send(emit([tensor, tensor + 1]))  # nor does the event loop
            found: list[Any] = []
            while len(found) < 20:
                found += await received(worker)
            assert [[int(t[-1]) for t in m.inputs["x"]] for m in found] == [[n, n + 1] for n in range(20)]
            assert [[int(t[-1]) for t in m.value] for m in await gathered(engine, 20)] == [
                [n, n + 1] for n in range(20)
            ]
            worker.send(emit(tensors[3]))
            assert worker._post.arena.num_taken == 1, "all others have come back"
            assert torch.equal((await gathered(engine, 1))[0].value, tensors[3])

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


def test_a_worker_whose_server_is_lost_is_told() -> None:
    async def scenario() -> None:
        lost = threading.Event()
        async with exchange() as channels:
            channels.open(on_lost=lost.set)
            os.close(channels.exchange._held)
            channels.exchange._held = os.dup(channels.exchange.lifeline)
            assert await asyncio.to_thread(lost.wait, 5)

    run(scenario())


def test_a_worker_that_lives_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_channel, "HEARTBEAT_S", 0.05)

    async def scenario() -> None:
        async with opened("processes") as (engine, _):
            before = engine.heard_at
            await asyncio.sleep(0.3)
            assert engine.heard_at > before + 0.1

    run(scenario())


def test_memory_that_does_not_hold_what_was_sent_is_an_error_of_whoever_receives() -> None:
    async def scenario() -> None:
        async with exchange() as channels:
            (engine, worker), (other, fine) = channels.open(0), channels.open(1)
            worker.send(emit(1))
            worker.send(emit(torch.zeros(INLINE_BYTES)))
            worker.send(emit(2))
            fine.send(emit(3))
            worker._post.arena.give_back(64)
            assert [m.value for m in await gathered(engine, 1)] == [1]
            with pytest.raises(ArenaError, match="announced"):
                await asyncio.wait_for(engine.receive(), 5)
            assert [m.value for m in await gathered(other, 1)] == [3]

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
            worker.send(emit(torch.ones(INLINE_BYTES)))
            worker.send(Dead(reason="this is why"))
            worker.close()
            worker.send(Dead(reason="late"))
            assert [m.reason for m in (await gathered(engine, 2))[1:]] == ["this is why"]
            with pytest.raises(EOFError):
                await asyncio.wait_for(engine.receive(), 5)
            engine.send(Abort(request_id="late"))

    run(scenario())


# ---- workers among themselves -----------------------------------------------------------------------------------


async def ids(worker: WorkerEnd, number: int) -> list[str]:
    found: list[Any] = []
    while len(found) < number:
        found += await received(worker)
    return [message.request_id for message in found]


def test_workers_send_to_each_other_and_each_sender_keeps_its_order() -> None:
    async def scenario() -> None:
        async with exchange() as channels:
            engines, workers = zip(*(channels.open(number) for number in range(3)), strict=True)
            for worker in workers:
                assert await ids(worker, 1) == ["first"]
            for number in range(60):
                large = torch.full((INLINE_BYTES,), number, dtype=torch.uint8)
                workers[1].send_to(0, Begin(request_id=f"1 {number}", walks={}, inputs={"x": large}))
                workers[2].send_to(0, Begin(request_id=f"2 {number}", walks={}, inputs={"x": large}))
                engines[0].send(Abort(request_id=f"s {number}"))
            found: list[Any] = []
            while len(found) < 180:
                found += await received(workers[0])
            for sender in "12s":
                numbers = [m.request_id.split()[1] for m in found if m.request_id[0] == sender]
                assert numbers == [str(n) for n in range(60)]
            assert all(m.request_id.split()[1] == str(int(m.inputs["x"][7])) for m in found if isinstance(m, Begin))

    run(scenario())


def test_a_worker_that_starts_again_is_somebody_else() -> None:
    async def scenario() -> None:
        async with exchange() as channels:
            (_, first), (gone, dead) = channels.open(0), channels.open(1)
            assert await ids(first, 1) == ["first"]
            large = Begin(request_id="l", walks={}, inputs={"x": torch.zeros(INLINE_BYTES)})
            dead.send_to(0, large)  # unknown to it yet: it has not looked
            assert await ids(dead, 1) == ["first"]
            for _ in range(9):
                first.send_to(1, large)
            dead.send_to(0, large)
            channels.end(gone)
            first.send_to(1, large)
            assert await received(first, 0.2) == [], "what its memory was needed for is gone with it"
            assert first._post.arena.num_taken == 0 and gone.road.address not in first._post._outlets
            first.send_to(1, large)
            _, again = channels.open(1)
            assert await received(first, 0.2) == []
            first.send_to(1, Abort(request_id="new"))
            assert sorted(await ids(again, 2)) == ["first", "new"]
            again.send_to(0, large)
            assert await ids(first, 1) == ["l"]

    run(scenario())


SENDER = """
import os, sys, msgspec, torch
from mstar.ipc.messages import Begin, Emit
from mstar.ipc.process_channel import ProcessWorkerEnd, Road
road = msgspec.json.decode(sys.argv[1], type=Road)
end = ProcessWorkerEnd(road, server=int(sys.argv[2]), on_lost=lambda: os._exit(1))
end.receive(1)
number = 0
while True:
    large = torch.full((1 + number * 7919 % 150_000,), number % 251, dtype=torch.uint8)
    end.send(Emit(request_id="r", name="x", path=(number,), value=large))
    end.send_to(0, Begin(request_id=str(number), walks={}, inputs={"x": large}))
    number += 1
"""


@pytest.mark.slow
def test_whoever_is_killed_while_it_sends_leaves_whole_messages_and_no_block_taken() -> None:
    def check(found: list[Any], *, at: int) -> int:
        for message in found:
            number, value = (
                (message.path[0], message.value) if isinstance(message, Emit)
                else (int(message.request_id), message.inputs["x"])
            )  # fmt: skip
            assert number == at and len(value) == 1 + number * 7919 % 150_000 and (value == number % 251).all()
            at += 1
        return at

    async def scenario() -> None:
        async with exchange() as channels:
            _, worker = channels.open(0)
            assert await ids(worker, 1) == ["first"]
            for _ in range(2):
                engine = channels.exchange.end(1)
                road = msgspec.json.encode(engine.road).decode()
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-c", SENDER, road, str(os.getpid()), pass_fds=engine.road.files
                )
                engine.hand_over()
                at, there, until = 0, 0, None
                while until is None or time.monotonic() < until:
                    at = check(await asyncio.wait_for(engine.receive(), 30), at=at)
                    there = check(await received(worker, 0), at=there)
                    until = until or time.monotonic() + 0.3
                    for _ in range(20):
                        engine.send(begin(torch.zeros(INLINE_BYTES)))  # which it never reads
                process.kill()
                await process.wait()
                assert at > 0 and there > 0
                engine.dispose()
                while left := await received(worker, 0.5):
                    there = check(left, at=there)
                assert channels.exchange.post.arena.num_taken == 0

    run(scenario(), within_s=100)


def test_only_processes_of_the_same_user_reach_an_inbox() -> None:
    async def scenario() -> None:
        async with opened("processes") as (engine, worker):
            intruder = (
                "import os, sys, time, zmq; os.setuid(12345); s = zmq.Context().socket(zmq.PUSH);"
                "s.connect(sys.argv[1]); s.send(b'x'); time.sleep(0.5); os._exit(0)"
            )
            address = engine.road.server_address
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", intruder, address)
            assert await process.wait() == 0
            worker.send(emit(1))
            assert [m.value for m in await gathered(engine, 1)] == [1]

    if os.getuid() != 0:
        pytest.skip("needs to become another user")
    run(scenario())


def test_nothing_is_left_of_a_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_channel, "HEARTBEAT_S", 0.05)

    async def use() -> None:
        async with opened("processes") as (engine, worker):
            worker.send(emit(torch.zeros(INLINE_BYTES)))
            await gathered(engine, 1)
        await asyncio.sleep(0.2)  # its lifeline's thread ends

    async def scenario() -> None:
        await use()  # threads and files that are made at first use
        files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        for _ in range(5):
            await use()
        assert len(os.listdir("/proc/self/fd")) <= files
        assert threading.active_count() <= threads

    run(scenario())
