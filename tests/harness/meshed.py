"""The workers of a placement as threads of the tests' process: in the place of `mstar.processes.Processes`.

Every message crosses as bytes. A group's tensor parallelism takes processes, so that stays with those.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any

from mstar.config import EngineConfig
from mstar.ipc.channel import MemoryWorkerEnd, memory_mesh
from mstar.ipc.messages import DropSession, FromWorker, ToWorker, WorkerStatus
from mstar.model import Model
from mstar.placement import Placement
from mstar.server.fleet import Fleet
from mstar.server.routing import Routing
from mstar.worker.worker import Worker

LOOK_S = 100.0


class InspectedEnd:
    """A worker's end that also runs what tests ask of the worker's thread, between two steps."""

    def __init__(self, end: MemoryWorkerEnd) -> None:
        self._end = end
        self._looks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()

    def send(self, message: FromWorker) -> None:
        self._end.send(message)

    def send_to(self, worker: int, message: ToWorker) -> None:
        self._end.send_to(worker, message)

    def receive(self, timeout_s: float | None = None) -> list[ToWorker]:
        messages = self._end.receive(timeout_s)
        while not self._looks.empty():
            look, future = self._looks.get()
            try:
                future.set_result(look())
            except BaseException as error:  # noqa: BLE001  # the test's thread raises it
                future.set_exception(error)
        return messages

    def look(self, look: Callable[[], Any]) -> Future[Any]:
        """Run `look` on the worker's thread when that has read what was sent to it before."""
        future: Future[Any] = Future()
        self._looks.put((look, future))
        self._end._inbox.put(DropSession(session="no such session"))  # wakes the worker
        return future


def look_at(workers: Iterable[Worker], look: Callable[[Worker], Any]) -> list[Any]:
    """The results of `look` on every worker, each run on its thread. Their ends are inspected ones."""
    futures = [worker.end.look(partial(look, worker)) for worker in workers]  # type: ignore[attr-defined]
    return [future.result(LOOK_S) for future in futures]


class Threads:
    """The workers of one model.

    Attributes:
        end: for the engine, as if they were one worker.
    """

    def __init__(self, model: Model, config: EngineConfig, placement: Placement) -> None:
        assert all(group.tensor_parallel == 1 for group in placement.groups)
        self._routing = Routing(
            placement, max_running_each=config.max_num_seqs, stall_timeout_s=config.stall_timeout_s,
            start_timeout_s=config.start_timeout_s,
        )  # fmt: skip
        self.end = Fleet(self._routing)
        self._mesh = memory_mesh(len(placement.workers), check=True)
        self.workers = [
            Worker(
                model.plugin.spec, model.graph, model.checkpoint, config, InspectedEnd(end),
                placing=placement, worker=place.index, group=place.group,
            )
            for place, (_, end) in zip(placement.workers, self._mesh, strict=True)
        ]  # fmt: skip
        self._threads = [threading.Thread(target=worker.run, daemon=True) for worker in self.workers]
        self._listening: list[asyncio.Task[None]] = []

    def status(self) -> list[WorkerStatus]:
        return self._routing.status()

    def start(self) -> None:
        """Start all, from the engine's event loop."""
        for number, ((end, _), thread) in enumerate(zip(self._mesh, self._threads, strict=True)):
            self._listening.append(self.end.attach(number, end, pid=1))
            thread.start()

    async def stop(self, *, at_once: bool) -> None:
        """Wait for those that have been told to end."""
        for thread in self._threads:
            thread.join(0 if at_once else 10)
            assert at_once or not thread.is_alive()
        for task in self._listening:
            task.cancel()
        await asyncio.gather(*self._listening, return_exceptions=True)


def unfinished(worker: Worker) -> list[str]:
    """What is left to do for requests, to be shown."""
    works = [work.op.target for work in worker.scheduler.works()]
    return works + [f"request {request.info.task}" for request in worker.router.requests.values()]


def check_clean(worker: Worker, *, sessions: int = 0) -> None:
    """Assert that nothing is left of any request but so many sessions."""
    worker.check_integrity()
    router, modules = worker.router, worker.modules
    assert len(router.holdings.sessions) == sessions
    assert not router.strays.early and not router.remote._calls and not router.remote._late
    if sessions:
        return
    assert not list(router.holdings.tenants())
    assert modules.swap_space.used_bytes == 0
    for module in modules.by_name.values():
        assert module.slots.num_used == 0, f"{module.name} has {module.slots.num_used} rows left"
        assert module.pool is None or module.pool.num_used == 0, f"{module.name} has pages left"
        for name, sampler in module.slots.samplers.items():
            assert not any(sampler._users.values()), f"sampler {name} remembers rows"
            assert not int(sampler.step[1:].abs().sum()), f"sampler {name} has counted draws"
