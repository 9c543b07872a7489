"""What the benchmark programs share: a worker driven directly, and JSON lines. Not a benchmark itself."""

from __future__ import annotations

import gc
import json
import os
import platform
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from mstar.config import EngineConfig
from mstar.ipc.messages import Begin, Close, Emit, Failed, Open, WalkDone
from mstar.plugin import checkpoint, loader
from mstar.plugin.spec import Limits, load_object
from mstar.types import Request
from mstar.worker.finish import Step
from mstar.worker.worker import Worker

SAMPLING = {"temperature": 0.8, "top_p": 0.9, "top_k": 0, "repetition_penalty": 1.1}  # as people ask for speech


class DirectEnd:
    """A worker's end of a channel that is two lists: no thread, no engine."""

    def __init__(self) -> None:
        self.inbox: list[Any] = []
        self.outbox: list[Any] = []

    def send(self, message: Any) -> None:
        self.outbox.append(message)

    def receive(self, timeout_s: float | None) -> list[Any]:
        messages, self.inbox = self.inbox, []
        return messages


class DirectWorker:
    """A loaded worker, its plugin's processor, and the engine's part done by hand."""

    def __init__(self, config: EngineConfig) -> None:
        spec = loader.load(config.plugin).spec
        found = checkpoint.resolve(spec, config.model, parts=config.parts)
        self.graph = spec.graph(found.config)
        self.end = DirectEnd()
        self.worker = Worker(spec, self.graph, found, config, self.end)  # type: ignore[arg-type]
        self.worker.load()
        limits = Limits(max_model_len=self.worker.modules.max_model_len)
        self.processor = load_object(spec.processor, plugin=spec.name)(found, limits)
        self.spec = spec
        self.pending: Step | None = None  # with overlap, the step that still runs
        gc.collect()
        gc.freeze()  # as servers do: full collections do not walk again what is loaded

    def step(self) -> None:
        """One turn of the worker's loop, as `Worker.run` takes it."""
        if self.worker.config.overlap:
            self.pending = self.worker.overlapped_step(self.pending)
        else:
            self.worker.step()

    @property
    def is_idle(self) -> bool:
        """Nothing is left to run or to read."""
        return not (self.worker.router.requests or self.pending or self.end.inbox)

    @property
    def is_decoding(self) -> bool:
        """All that was submitted has been read, and nothing but `decode` is running or ready."""
        keys = {work.key[1] for work in self.worker.scheduler.works()}
        keys |= {self.pending.batch.key[1]} if self.pending else set()
        return not self.end.inbox and keys == {"decode"}

    def submit(self, request: Request, *, arrival: float) -> None:
        """Open a request and begin its first walks."""
        from mstar.plugin.states import RequestView

        encoded = self.processor.encode(request)
        view = RequestView(request.task, request.outputs, request.params, encoded.fields)
        starts = self.graph.states.start(view)
        self.end.inbox += [
            Open(
                request_id=request.id,
                task=request.task,
                seed=request.seed,
                arrival=arrival,
                params=msgspec.to_builtins(request.params),
                fields=encoded.fields,
                samplers=encoded.samplers,
                sampler_prompts=encoded.sampler_prompts,
                content_keys=encoded.content_keys,
                outputs=request.outputs,
            ),
            Begin(request_id=request.id, walks={start.lane: start.walk for start in starts}, inputs=encoded.inputs),
        ]

    def drain(self) -> Iterator[Emit]:
        """What has come out since the last call; closes requests whose lanes have all ended, raises on failures."""
        messages, self.end.outbox = self.end.outbox, []
        for message in messages:
            if isinstance(message, Failed):
                raise RuntimeError(message.message)
            if isinstance(message, WalkDone):
                request = self.worker.router.requests.get(message.request_id)
                if request is not None and all(lane.is_over for lane in request.lanes.values()):
                    self.end.inbox.append(Close(request_id=message.request_id))
            if isinstance(message, Emit):
                yield message


def machine() -> dict[str, Any]:
    """What a number depends on besides the code."""
    return {
        "cpu": platform.processor() or platform.machine(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 2),
    }


def report(**row: Any) -> None:
    """One JSON line on stdout."""
    json.dump(row, sys.stdout)
    sys.stdout.write("\n")
    sys.stdout.flush()
