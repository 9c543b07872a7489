"""Workers in processes of their own: started, watched, started again when they end, stopped; `Order` is what each gets.

A process ends with this one, whatever ends it, and leaves nothing: what it shares has no name. Runs on the server's
event loop, and starts processes from its thread, since they die with the thread that started them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from dataclasses import replace
from typing import Any

import msgspec

from mstar.config import EngineConfig
from mstar.ipc.lifetime import command
from mstar.ipc.messages import WorkerStatus
from mstar.ipc.process_channel import Exchange, ProcessEngineEnd, Road
from mstar.placement import Group, Placement, WorkerPlace
from mstar.server.fleet import Fleet
from mstar.server.routing import Routing
from mstar.worker.modules import num_cuda_devices

logger = logging.getLogger(__name__)

STOP_S = 10.0
_WATCH_S = 1.0
_LAST_WORDS_S = 0.1


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's process is told at its start, as JSON on its standard input.

    Args:
        groups: of the placement, in which `worker` is its index.
        config: the fields of its EngineConfig as built-in types.
        parent: the server's process.
    """

    worker: int
    groups: tuple[Group, ...]
    config: dict[str, Any]
    road: Road
    parent: int
    log_level: str

    def engine_config(self) -> EngineConfig:
        """The configuration it was made of."""
        return msgspec.convert(self.config, EngineConfig, dec_hook=lambda kind, value: kind(value))


def worker_config(
    config: EngineConfig, place: WorkerPlace, *, rank: int = 0, threads: int, num_devices: int
) -> EngineConfig:
    """What a process of a worker gets: the device and threads of its place, or else so many threads and, where nothing
    says which, a CUDA device in turn.
    """
    device = place.devices[rank] if place.devices else config.device
    if device in ("auto", "cuda") and num_devices > 1:
        device = f"cuda:{(place.process + rank) % num_devices}"
    return replace(config, threads=place.threads or threads, device=device)


class Processes:
    """The workers of one model.

    Args:
        threads: for each whose place has none.

    Attributes:
        end: for the engine, as if they were one worker.
    """

    def __init__(self, config: EngineConfig, placement: Placement, *, threads: int) -> None:
        self._config = config
        self._placement = placement
        self._threads = threads
        self._routing = Routing(
            placement, max_running_each=config.max_num_seqs, stall_timeout_s=config.stall_timeout_s,
            start_timeout_s=config.start_timeout_s,
        )  # fmt: skip
        self.end = Fleet(self._routing)
        self._alive: dict[int, asyncio.subprocess.Process] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._exchange: Exchange | None = None  # while any runs

    def status(self) -> list[WorkerStatus]:
        """Each worker, for an operator."""
        return self._routing.status()

    def start(self) -> None:
        """Start all; the engine learns when they are ready, or why not."""
        self._exchange = Exchange()
        self._tasks = [asyncio.create_task(self._keep(place)) for place in self._placement.workers]

    async def stop(self, *, at_once: bool) -> None:
        """Wait for those that have been told to end, unless `at_once`, and kill the rest."""
        self.end.closed.set()
        pending = set(self._tasks)
        for worker, process in self._alive.items():
            if not self._routing.replicas[worker].is_ready:  # it would load to the end before it listened
                _kill(process)
        if not at_once:
            _, pending = await asyncio.wait(pending, timeout=STOP_S)
        while pending:
            for process in self._alive.values():
                _kill(process)
            _, pending = await asyncio.wait(pending, timeout=_WATCH_S)  # one may have been about to start
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    async def _keep(self, place: WorkerPlace) -> None:
        """Have one worker run until it is given up or all are stopped."""
        worker = place.index
        delay_s: float | None = 0.0
        while delay_s is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.end.closed.wait(), delay_s)
            if self.end.closed.is_set():
                return
            started = time.monotonic()
            try:
                assert self._exchange is not None
                end = self._exchange.end(worker)
                try:
                    reason = await self._run(place, end)
                finally:
                    end.dispose()
            except Exception as error:
                logger.exception("%s cannot be started", self._routing.replicas[worker].name)
                reason = f"it could not be started ({error})"
            if self.end.closed.is_set():
                return
            delay_s = self.end.ended(worker, reason, age_s=time.monotonic() - started)
            logger.error("%s; %s", self._routing.replicas[worker].reason, self._then(delay_s))

    def _then(self, delay_s: float | None) -> str:
        """What becomes of a worker that has ended."""
        if delay_s is not None:
            return f"it is started again in {delay_s:g} s"
        return "restart the server to have it back" if self._routing.has_started else "the start has failed"

    async def _run(self, place: WorkerPlace, end: ProcessEngineEnd) -> str:
        """Run one process to its end: how it ended."""
        num_devices = num_cuda_devices()
        config = worker_config(self._config, place, threads=self._threads, num_devices=num_devices)
        order = Order(
            worker=place.index, groups=self._placement.groups, config=msgspec.to_builtins(config, enc_hook=str),
            road=end.road, parent=os.getpid(),
            log_level=logging.getLevelName(logging.getLogger("mstar").getEffectiveLevel()).lower(),
        )  # fmt: skip
        try:
            process = await asyncio.create_subprocess_exec(
                *command("mstar.worker_process"), stdin=asyncio.subprocess.PIPE, pass_fds=end.road.files
            )
        finally:
            end.hand_over()
        self._alive[place.index] = process
        role = self._placement.role_of(place.group)
        logger.info("%s: process %d runs %s", self._routing.replicas[place.index].name, process.pid, role)
        try:
            assert process.stdin is not None
            with contextlib.suppress(ConnectionError):  # it has ended already; how is what counts
                process.stdin.write(msgspec.json.encode(order))
                await process.stdin.drain()
            process.stdin.close()
            return await self._watch(place.index, process, end)
        finally:
            _kill(process)
            await process.wait()
            del self._alive[place.index]

    async def _watch(self, worker: int, process: asyncio.subprocess.Process, end: ProcessEngineEnd) -> str:
        """Wait until a process ends, or has to: how it ended, or why it has to."""
        started = time.monotonic()
        replica = self._routing.replicas[worker]
        is_awaited = replica.num_restarts > 0
        listening = self.end.attach(worker, end, pid=process.pid)
        ending = asyncio.create_task(process.wait())
        try:
            while not (listening.done() or ending.done()):
                await asyncio.wait((listening, ending), timeout=_WATCH_S, return_when=asyncio.FIRST_COMPLETED)
                now = time.monotonic()
                if is_awaited and replica.is_ready:
                    is_awaited = False
                    logger.info("%s is ready again after %.0f s", replica.name, now - started)
                why = self._routing.overdue(worker, silent_s=now - end.heard_at, age_s=now - started)
                if why is not None and self._routing.has_started and not self.end.closed.is_set():
                    return f"{why}; its process was killed"
            if not self.end.closed.is_set():  # the other of the two; of a process that was killed nothing may come
                await asyncio.wait((listening, ending), timeout=_LAST_WORDS_S if ending.done() else _WATCH_S)
            return _described(process.returncode) if ending.done() else "its channel is broken"
        finally:
            for task in (listening, ending):
                task.cancel()
            await asyncio.gather(listening, ending, return_exceptions=True)


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


def _described(code: int | None) -> str:
    if code is not None and code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"
