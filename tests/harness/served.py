"""One engine and its worker in the process of the tests, started as `mstar run` and `mstar serve` start them.

On pytest's path (see `pythonpath` in pyproject.toml), for tests of core and of plugins alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch
from meshed import InspectedEnd, Threads, check_clean, look_at, unfinished

from mstar import launch
from mstar.config import EngineConfig, ServerConfig
from mstar.placement import Placement
from mstar.server.app import create_app
from mstar.server.engine import Engine
from mstar.worker.worker import Worker

WAIT_S = 100.0
START_S = 400.0  # some compile first


class Served:
    """An engine and its worker.

    The engine's event loop runs in a thread of its own, so that tests are plain code. Workers in processes of their own
    are seen by their statistics alone.

    Args:
        in_threads: the workers of a placement are threads of this process, so that tests can look at them.

    Attributes:
        workers: those of this process; `worker` is the first.
    """

    def __init__(self, *, in_threads: bool = False, **settings: Any) -> None:
        torch.set_num_threads(1)  # several workers share the machine's cores
        self.config = EngineConfig(**settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._stack = contextlib.AsyncExitStack()
        self.model: launch.Model
        self.engine: Engine
        self.workers: list[Worker] = []
        try:
            self.run(self._start(in_threads), timeout_s=START_S)
        except BaseException:
            self._stop_loop()
            raise

    async def _start(self, in_threads: bool) -> None:
        workers = self.workers

        class Kept(Worker):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments[:-1], InspectedEnd(arguments[-1]))  # type: ignore[call-arg]
                workers.append(self)

        def in_place_of_processes(config: EngineConfig, placement: Placement, *, threads: int) -> Threads:
            made = Threads(self.model, config, placement)
            workers.extend(made.workers)
            return made

        self.model = launch.find_model(self.config)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "Worker", Kept)
            if in_threads:
                patch.setattr(launch, "Processes", in_place_of_processes)
            starting = launch.started_engine(self.config, model=self.model)
            self.engine = await self._stack.enter_async_context(starting)

    @property
    def worker(self) -> Worker:
        return self.workers[0]

    def close(self) -> None:
        try:
            self.run(self._stack.aclose())
        finally:
            self._stop_loop()
        for module in (module for worker in self.workers for module in worker.modules.by_name.values()):
            if module.pool is not None:  # gigabytes, which cycles would keep
                module.pool.storage.tensor.untyped_storage().resize_(0)

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
        """The result of `look`, run on the only worker's thread when it has read all that was sent to it before."""
        (found,) = self.on_each(lambda _: look())
        return found

    def on_each(self, look: Callable[[Worker], Any]) -> list[Any]:
        """The same of every worker of this process."""
        return look_at(self.workers, look)

    def assert_clean(self) -> None:
        """Nothing is left of any request: pages, slot rows, swapped pages, queues, messages."""
        wait_until(self._is_settled, what=lambda: self.engine.state.stats)
        assert self.engine.state.dead is None
        self.on_each(check_clean)

    def _is_settled(self) -> bool:
        return self.engine.state.dead is not None or (self.is_idle and not any(self.on_each(unfinished)))


def wait_until(is_true: Callable[[], bool], *, timeout_s: float = 20.0, what: Callable[[], Any] = str) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, f"still waiting after {timeout_s} s: {what()}"
        time.sleep(0.002)
