"""A worker's parts without its loop: requests go in as messages, batches run when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from mstar_plugin_echo.oracle import make_request
from mstar_plugin_echo.processing import EchoProcessor

from mstar.config import EngineConfig
from mstar.ipc.messages import Begin, Open
from mstar.plugin import checkpoint, loader
from mstar.plugin.spec import Limits
from mstar.plugin.states import RequestView
from mstar.worker.modules import Modules
from mstar.worker.router import Router
from mstar.worker.runner import Runner
from mstar.worker.scheduler import Batch, Scheduler


class Parts:
    """Modules, scheduler, router and runner of the echo model; time is what the test says it is."""

    def __init__(self, **settings: Any) -> None:
        config = EngineConfig(plugin="echo", kv_cache_memory_bytes=2**20, **settings)
        spec = loader.load("echo").spec
        self.found = checkpoint.resolve(spec, "tiny", parts={})
        self.graph = spec.graph(self.found.config)
        self.modules = Modules(spec, self.graph, checkpoint=self.found, config=config)
        self.scheduler = Scheduler(self.modules, config=config)
        self.router = Router(spec, self.graph, modules=self.modules, scheduler=self.scheduler)
        self.runner = Runner(self.modules, config=config)
        self._processor = EchoProcessor(self.found, Limits(max_model_len=self.modules.max_model_len))
        self._num_opened = 0

    def open(self, task: str, *inputs: Any, seed: int = 0, **params: Any) -> str:
        """Open a request and begin its walks, as the engine does; its id."""
        request = make_request(task, *inputs, seed=seed, **params)
        encoded = self._processor.encode(request)
        self._num_opened += 1
        name = f"{task}-{self._num_opened}"
        self.router.handle(
            Open(
                request_id=name, task=task, seed=seed, arrival=float(self._num_opened),
                params=msgspec.to_builtins(request.params), fields=encoded.fields, samplers=encoded.samplers,
                sampler_prompts=encoded.sampler_prompts, content_keys=encoded.content_keys, outputs=request.outputs,
            )
        )  # fmt: skip
        view = RequestView(task, request.outputs, request.params, encoded.fields)
        walks = {start.lane: start.walk for start in self.graph.states.start(view)}
        self.router.handle(Begin(request_id=name, walks=walks, inputs=encoded.inputs))
        return name

    def step(self, seconds: float | Callable[[Batch], float] = 1.0) -> Batch | None:
        """Run the next batch; it takes `seconds`."""
        batch = self.scheduler.next_batch()
        if batch is None:
            return None
        finished = self.runner.run(batch)
        self.scheduler.record(batch, seconds(batch) if callable(seconds) else seconds)
        for work in finished.unfinished:
            self.scheduler.add(work)
        for work, error in finished.failed:
            self.router.fail(work.request, error)
        for work, values in finished.done:
            if not work.request.is_dead:
                self.router.complete(work, values)
        return batch

    def messages(self, kind: type[Any]) -> list[Any]:
        """The router's messages of a kind, so far."""
        return [message for message in self.router.output.messages if isinstance(message, kind)]

    def is_open(self, name: str) -> bool:
        """Whether some walk of a request has not ended."""
        request = self.router.requests.get(name)
        return request is not None and not all(lane.is_over for lane in request.lanes.values())


@pytest.fixture
def parts() -> Iterator[Callable[..., Parts]]:
    """`parts(**settings)`: a worker's parts."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Parts
    torch.set_num_threads(before)
