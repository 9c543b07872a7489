"""Several workers' ends as one: what each gets, what the engine hears, what cannot be sent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mstar.ipc.channel import memory_channel
from mstar.ipc.messages import Abort, Begin, Emit, Failed, FromWorker, Open, Ready, Shutdown, ToWorker
from mstar.placement import Group, Placement
from mstar.server.fleet import Fleet
from mstar.server.routing import Routing


class Refusing:
    """An end that takes no walk's inputs, and whose worker ends when told to."""

    def __init__(self) -> None:
        self.sent: list[ToWorker] = []
        self.is_over = asyncio.Event()

    def send(self, message: ToWorker) -> None:
        if isinstance(message, Begin):
            raise TypeError("object cannot cross")
        self.sent.append(message)

    async def receive(self) -> list[FromWorker]:
        await self.is_over.wait()
        raise EOFError

    def close(self) -> None:
        pass


def fleet_of(number: int) -> Fleet:
    placement = Placement(groups=(Group(name="all", nodes=("*",), replicas=number),))
    return Fleet(Routing(placement, max_running_each=4, stall_timeout_s=30, start_timeout_s=100))


def opening(name: str) -> Open:
    return Open(
        request_id=name, task="t", seed=0, arrival=0.0, params={}, fields={}, samplers={}, sampler_prompts={},
        content_keys={},
    )  # fmt: skip


async def heard(fleet: Fleet, kind: type[Any]) -> Any:
    """The next message of a kind."""
    while True:
        for message in await asyncio.wait_for(fleet.receive(), 5):
            if isinstance(message, kind):
                return message


def test_requests_go_to_several_workers_and_answers_come_from_all() -> None:
    async def scenario() -> None:
        fleet, ends = fleet_of(2), [memory_channel(check=True) for _ in range(2)]
        listening = [fleet.attach(worker, end, pid=worker + 1) for worker, (end, _) in enumerate(ends)]
        for _, worker in ends:
            worker.send(Ready(plan=[], max_model_len=8))
        assert (await heard(fleet, Ready)).max_model_len == 8
        for name in "ab":
            fleet.send(opening(name))
        for name, (_, worker) in zip("ab", ends, strict=True):
            assert [message.request_id for message in worker.receive(1)] == [name]
            worker.send(Emit(request_id=name, name="x", path=()))
            assert (await heard(fleet, Emit)).request_id == name
        fleet.send(Shutdown())
        assert all(isinstance(worker.receive(1)[0], Shutdown) for _, worker in ends)
        fleet.close()
        for task in listening:
            task.cancel()

    asyncio.run(scenario())


def test_what_cannot_be_sent_fails_its_request_alone_and_is_taken_back() -> None:
    async def scenario() -> None:
        fleet, end = fleet_of(1), Refusing()
        fleet.attach(0, end, pid=1)
        fleet.routing.from_worker(0, Ready(plan=[], max_model_len=8))
        fleet.send(opening("a"))
        fleet.send(Begin(request_id="a", walks={}, inputs={}))
        failed = await heard(fleet, Failed)
        assert (failed.request_id, failed.status) == ("a", 500) and "object cannot cross" in failed.message
        assert end.sent[1:] == [Abort(request_id="a")]
        assert fleet.routing.status()[0].running == 0
        end.is_over.set()

    asyncio.run(scenario())


@pytest.mark.parametrize("is_restarting", [False, True])
def test_a_request_that_no_worker_can_take_fails(is_restarting: bool) -> None:
    async def scenario() -> None:
        fleet, end = fleet_of(1), Refusing()
        task = fleet.attach(0, end, pid=1)
        if is_restarting:
            fleet.routing.from_worker(0, Ready(plan=[], max_model_len=8))
            end.is_over.set()
            await asyncio.wait_for(task, 5)
            assert fleet.ended(0, "it was killed", age_s=1.0) == 0.25
        fleet.send(opening("a"))
        failed = await heard(fleet, Failed)
        assert (failed.request_id, failed.status, failed.code) == ("a", 503, "worker_lost")
        end.is_over.set()

    asyncio.run(scenario())


def test_the_other_worker_of_a_request_that_fails_is_told() -> None:
    async def scenario() -> None:
        placement = Placement(groups=tuple(Group(name=name, nodes=(name,)) for name in ("lm", "voice")))
        fleet = Fleet(Routing(placement, max_running_each=4, stall_timeout_s=30, start_timeout_s=100))
        ends = [memory_channel(check=True) for _ in range(2)]
        listening = [fleet.attach(worker, end, pid=worker + 1) for worker, (end, _) in enumerate(ends)]
        for _, worker in ends:
            worker.send(Ready(plan=[], max_model_len=8))
        await heard(fleet, Ready)
        fleet.send(opening("a"))
        for _, worker in ends:
            (opened,) = worker.receive(1)
            assert isinstance(opened, Open) and opened.route == (0, 1)
        ends[1][1].send(Failed(request_id="a", message="no"))
        assert (await heard(fleet, Failed)).message == "no"
        assert ends[0][1].receive(1) == [Abort(request_id="a")] and ends[1][1].receive(0) == []
        fleet.close()
        for task in listening:
            task.cancel()

    asyncio.run(scenario())
