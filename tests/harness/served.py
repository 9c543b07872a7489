"""One engine and its worker in the process of the tests, started as `mstar run` and `mstar serve` start them.

On pytest's path (see `pythonpath` in pyproject.toml), for tests of core and of plugins alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from mstar import launch
from mstar.config import EngineConfig, ServerConfig
from mstar.ipc.channel import WorkerEnd
from mstar.ipc.messages import DropSession, FromWorker, ToWorker
from mstar.server.app import create_app
from mstar.server.engine import Engine
from mstar.worker.worker import Worker

WAIT_S = 100.0
START_S = 400.0  # some compile first


class InspectedEnd:
    """A worker's end that also runs what tests ask of the worker's thread, between two steps."""

    def __init__(self, end: WorkerEnd) -> None:
        self._end = end
        self._looks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()

    def send(self, message: FromWorker) -> None:
        self._end.send(message)

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
        """Run `look` on the worker's thread at its next turn."""
        future: Future[Any] = Future()
        self._looks.put((look, future))
        return future


class Served:
    """An engine and its worker.

    The engine's event loop runs in a thread of its own, so that tests are plain code.
    """

    def __init__(self, **settings: Any) -> None:
        torch.set_num_threads(1)  # several workers share the machine's cores
        self.config = EngineConfig(**settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._stack = contextlib.AsyncExitStack()
        self.model: launch.Model
        self.engine: Engine
        self.worker: Worker
        try:
            self.run(self._start(), timeout_s=START_S)
        except BaseException:
            self._stop_loop()
            raise

    async def _start(self) -> None:
        kept: list[tuple[Worker, InspectedEnd]] = []

        class Kept(Worker):
            def __init__(self, *arguments: Any) -> None:
                end = InspectedEnd(arguments[-1])
                super().__init__(*arguments[:-1], end)  # type: ignore[call-arg]
                kept.append((self, end))

        self.model = launch.find_model(self.config)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "Worker", Kept)
            starting = launch.started_engine(self.config, model=self.model)
            self.engine = await self._stack.enter_async_context(starting)
        ((self.worker, self._worker_end),) = kept

    def close(self) -> None:
        try:
            self.run(self._stack.aclose())
        finally:
            self._stop_loop()
        for module in self.worker.modules.by_name.values():
            if module.pool is not None:  # gigabytes, which cycles would keep
                module.pool._storage.untyped_storage().resize_(0)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, Any], *, timeout_s: float = WAIT_S) -> Any:
        """The result of `work`, run on the engine's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    # ---- HTTP -------------------------------------------------------------------------------------------

    def app(self, **options: Any) -> Any:
        """The HTTP application, as `mstar serve` makes it with these options of `ServerConfig`."""
        config = ServerConfig(**{"max_body_bytes": 2**20} | options)
        version = self.model.plugin.version
        return create_app(
            self.engine, root=self.config.model, config=config, voices=self.model.voices, plugin_version=version
        )

    @contextlib.contextmanager
    def http(self, **options: Any) -> Iterator[str]:
        """Serve over HTTP on a free port of this machine; gives the address."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            config = ServerConfig(log_level="warning", drain_timeout_s=5)
            server = launch.Server(self.app(**options), self.engine, config=config)
            serving = asyncio.run_coroutine_threadsafe(server.serve(sockets=[listener]), self._loop)
            wait_until(lambda: server.started or serving.done())
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                serving.result(20)

    # ---- afterwards -------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """No request on either side, and by the worker's own statistics no page and no slot in use."""
        stats = self.engine.state.stats
        return (
            self.engine.num_active == 0
            and self.engine.state.num_running == 0
            and self.engine.state.num_waiting == 0
            and stats is not None
            and (stats.running, stats.waiting, stats.slots_used, stats.swapped) == (0, 0, 0, 0)
            and all(used == 0 for used, _ in stats.pools.values())
        )

    def on_worker(self, look: Callable[[], Any]) -> Any:
        """The result of `look`, run on the worker's thread when it has read all that was sent to it before."""

        async def send() -> Future[Any]:
            future = self._worker_end.look(look)
            self.engine._end.send(DropSession(session="no such session"))  # wakes the worker
            return future

        return self.run(send()).result(WAIT_S)

    def assert_clean(self) -> None:
        """Nothing is left of any request: pages, slot rows, swapped pages, queues."""
        wait_until(self._is_settled, what=lambda: self.engine.state.stats)
        assert self.engine.state.dead is None
        self.on_worker(self._check_worker)

    def _is_settled(self) -> bool:
        return self.engine.state.dead is not None or (self.is_idle and self.on_worker(self._num_open) == 0)

    def _num_open(self) -> int:
        return len(self.worker.router.requests) + len(list(self.worker.scheduler.works()))

    def _check_worker(self) -> None:
        self.worker.check_integrity()
        assert not list(self.worker.router.holdings.tenants())
        assert self.worker.modules.swap_space.used_bytes == 0


def wait_until(is_true: Callable[[], bool], *, timeout_s: float = 20.0, what: Callable[[], Any] = str) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, f"still waiting after {timeout_s} s: {what()}"
        time.sleep(0.002)
