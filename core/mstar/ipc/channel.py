"""The two ends of the road between the server's engine and a worker, and the in-memory channel.

The engine's end belongs to an event loop, the worker's to a thread (or a process: `process_channel`). Order is kept in
each direction. Knows nothing of what messages mean.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Sequence
from typing import Protocol, cast

from mstar.ipc.messages import FromWorker, ToWorker
from mstar.ipc.tensors import decode, encode


class WorkerEnd(Protocol):
    """What a worker holds: `receive` is for one thread, `send` for any."""

    def send(self, message: FromWorker) -> None:
        """Waits only while the engine has yet to read more than the channel holds; does nothing once it has closed.

        Raises TypeError for values that may not cross, where they have to.
        """

    def send_to(self, worker: int, message: ToWorker) -> None:
        """Never blocks; does nothing once that worker is gone."""

    def receive(self, timeout_s: float | None = None) -> list[ToWorker]:
        """All messages there are, each sender's in order, waiting up to `timeout_s` (None: for ever) for the first.

        Empty on time-out.
        """


class EngineEnd(Protocol):
    """What an engine holds: used on its event loop only."""

    def send(self, message: ToWorker) -> None:
        """Never blocks. Raises TypeError for values that may not cross, where they have to."""

    async def receive(self) -> list[FromWorker]:
        """All messages there are, waiting for the first."""

    def close(self) -> None:
        """Stop listening: what the worker sends from now on is dropped."""


class MemoryWorkerEnd:
    """A worker's end in the engine's own process."""

    def __init__(
        self, inbox: queue.SimpleQueue[ToWorker], peer: MemoryEngineEnd, *, check: bool,
        others: Sequence[queue.SimpleQueue[ToWorker]] = (),
    ) -> None:  # fmt: skip
        self._inbox = inbox
        self._peer = peer
        self._check = check
        self._others = others

    def send(self, message: FromWorker) -> None:
        self._peer.put(cast(FromWorker, decode(encode(message))) if self._check else message)

    def send_to(self, worker: int, message: ToWorker) -> None:
        self._others[worker].put(cast(ToWorker, decode(encode(message))) if self._check else message)

    def receive(self, timeout_s: float | None = None) -> list[ToWorker]:
        messages = []
        try:
            messages.append(self._inbox.get(block=timeout_s != 0, timeout=timeout_s))
            while True:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            return messages


class MemoryEngineEnd:
    """The engine's end; a message wakes the event loop once, however many follow before it looks."""

    def __init__(self, outbox: queue.SimpleQueue[ToWorker], *, check: bool) -> None:
        self._outbox = outbox
        self._check = check
        self._lock = threading.Lock()  # guards all below: `put` runs on the worker's thread
        self._inbox: list[FromWorker] | None = []  # None: closed
        self._waiter: asyncio.Future[None] | None = None

    def send(self, message: ToWorker) -> None:
        self._outbox.put(cast(ToWorker, decode(encode(message))) if self._check else message)

    def put(self, message: FromWorker) -> None:
        with self._lock:
            if self._inbox is not None:
                self._inbox.append(message)
                waiter, self._waiter = self._waiter, None
                # Inside the lock: `close` cannot let the loop end between the look and the call.
                if waiter is not None:
                    waiter.get_loop().call_soon_threadsafe(_wake, waiter)

    async def receive(self) -> list[FromWorker]:
        while True:
            with self._lock:
                if self._inbox:
                    messages, self._inbox = self._inbox, []
                    return messages
                waiter = self._waiter = asyncio.get_running_loop().create_future()
            await waiter

    def close(self) -> None:
        with self._lock:
            self._inbox = self._waiter = None


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def memory_channel(*, check: bool = False) -> tuple[MemoryEngineEnd, MemoryWorkerEnd]:
    """Both ends of a channel inside one process.

    Args:
        check: encode and decode every message, so that nothing that could not cross processes creeps in.
    """
    return memory_mesh(1, check=check)[0]


def memory_mesh(num_workers: int, *, check: bool = False) -> list[tuple[MemoryEngineEnd, MemoryWorkerEnd]]:
    """The same for several workers that also send to each other."""
    inboxes: list[queue.SimpleQueue[ToWorker]] = [queue.SimpleQueue() for _ in range(num_workers)]
    engines = [MemoryEngineEnd(inbox, check=check) for inbox in inboxes]
    return [
        (engine, MemoryWorkerEnd(inbox, engine, check=check, others=inboxes))
        for engine, inbox in zip(engines, inboxes, strict=True)
    ]
