"""A small real model of text and sound, and a worker that speaks the protocol without torch."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Annotated, Any

import httpx
import openai
import pytest
import torch
from msgspec import Meta, Struct
from served import Served as ServedModel

from mstar.config import EngineConfig
from mstar.errors import RequestError
from mstar.ipc.channel import WorkerEnd, memory_channel
from mstar.ipc.messages import (
    Abort,
    Begin,
    Close,
    Dead,
    DropSession,
    Emit,
    Failed,
    Open,
    Ready,
    Shutdown,
    StopAt,
    WalkDone,
)
from mstar.plugin.graph import Call, Graph, Walk
from mstar.plugin.processor import Processor
from mstar.plugin.spec import Checkpoint, Limits, ModelSpec, Task
from mstar.plugin.states import Start, States, Then
from mstar.server.engine import Engine
from mstar.types import AudioChunk, Chunk, Emission, Encoded, Request, TextChunk

RATE = 8000


class ChatParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    again: bool = False
    n: Annotated[int, Meta(ge=1, le=4)] = 1


class SpeechParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    voice: str | None = "amy"
    n: int = 1


GRAPH = Graph(
    nodes=(),
    walks=(
        Walk(name="chat", section=Call("lm.decode"), inputs=("ids",), outputs=("said",)),
        Walk(name="again", section=Call("lm.decode"), inputs=("ids2",)),
        Walk(name="speak", section=Call("lm.decode"), inputs=("ids",)),
        Walk(name="hum", section=Call("voice.decode")),
    ),
    states=States(
        starts=(
            Start(walk="chat", task="chat"),
            Start(walk="speak", task="speech"),
            Start(walk="hum", lane="voice", task="speech"),
        ),
        thens=(Then(after="chat", walk="again", when=lambda r: r.params.again, step="reread"),),
    ),
)

SPEC = ModelSpec(
    name="parrot",
    graph=lambda config: GRAPH,
    config="json:loads",
    checkpoint="nobody/parrot",
    processor="json:loads",
    nodes={},
    tasks={
        "chat": Task(
            params=ChatParams, inputs=("text", "token_ids", "tensor", "audio"), outputs=("text", "tensors"),
            tensors_in=("bias",), tensors_out=("said",), messages=True, sessions=True,
        ),
        "speech": Task(params=SpeechParams, inputs=("text",), outputs=("audio", "tensors"), tensors_out=("audio",)),
    },
    endpoints=("/v1/audio/speech",),
)  # fmt: skip


class Parrot(Processor):
    """Says back what it hears, a byte a token. "BOOM" anywhere is a fault of the plugin, "~" one in the result."""

    def encode(self, request: Request) -> Encoded:
        first = request.parts[0] if request.parts else request.messages[-1].parts[0]
        data = first.text.encode() if hasattr(first, "text") else bytes(getattr(first, "ids", b"?"))
        if b"BOOM" in data:
            raise ZeroDivisionError("a fault in the processor")
        if b"EXIT" in data:
            raise SystemExit(3)
        if b"slow encode" in data:
            time.sleep(0.4)
        if request.session is not None and b"continue" in data and not request.resumed:
            raise RequestError("the session is not open", status=404, param="session")
        if getattr(request.params, "voice", "amy") not in ("amy", None):
            raise RequestError("params.voice is unknown; known: amy", param="params.voice")
        return Encoded(
            inputs={"ids": torch.tensor(list(data))},
            kv_tokens={"lm.main": len(data)},
            prompt_token_ids=list(data),
            usage={"prompt_tokens": len(data)},
        )

    def decode(self, state: Any, emission: Emission) -> Iterable[Chunk]:
        if emission.final:
            return
        if emission.name == "wave":
            yield AudioChunk(emission.value.numpy(), RATE)
        elif emission.value == ord("!"):
            raise ZeroDivisionError("a fault in decode")
        elif emission.value == ord("%"):
            raise KeyboardInterrupt
        else:
            index = emission.path[0] if emission.path else 0
            yield TextChunk(chr(int(emission.value)), (int(emission.value),), index=index)

    def step(self, name: str, request: Request, outputs: dict[str, Any]) -> dict[str, Any]:
        assert name == "reread"
        return {"ids2": outputs["said"].flip(0)}

    def finish(self, state: Any, result: dict[str, Any]) -> None:
        result["parrot"] = True
        if ord("~") in result["prompt_token_ids"]:
            result["timings"] = None


class FakeWorker:
    """Runs all open requests a token at a time. Special texts: "fail", "die", and "forever"."""

    def __init__(self, end: WorkerEnd, *, step_s: float = 0.0) -> None:
        self.end = end
        self.step_s = step_s
        self.open: dict[str, Open] = {}
        self.most_open = 0
        self.running: dict[tuple[str, str], tuple[str, Any]] = {}
        self.counts: dict[str, int] = {}
        self.seen: list[Any] = []
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.is_stopped = False

    def run(self) -> None:
        self.end.send(Ready(plan=[("lm", 0, 0, 1000)], max_model_len=2000))
        while not self.is_stopped:
            for message in self.end.receive(0.0 if self.running else 0.5):
                self.handle(message)
            for (request_id, lane), (walk, tokens) in list(self.running.items()):
                if (request_id, lane) in self.running:
                    self.step(request_id, lane, walk=walk, tokens=tokens)
            time.sleep(self.step_s)

    def handle(self, message: Any) -> None:
        self.seen.append(message)
        if isinstance(message, Shutdown):
            self.is_stopped = True
        elif isinstance(message, Open):
            self.open[message.request_id] = message
            self.counts[message.request_id] = 0
            self.most_open = max(self.most_open, len(self.open))
        elif isinstance(message, Begin):
            ids = next((v for v in message.inputs.values()), torch.tensor([]))
            for lane, walk in message.walks.items():
                self.running[message.request_id, lane] = (walk, iter([int(i) for i in ids]) if walk != "hum" else None)
                if walk == "chat":
                    self.said = ids
        elif isinstance(message, StopAt):
            if (message.request_id, "main") in self.running:
                self.end_walk(message.request_id, "main", reason=message.reason)
        elif isinstance(message, Abort | Close):
            self.forget(message.request_id)
        else:
            assert isinstance(message, DropSession)

    def forget(self, request_id: str) -> None:
        self.open.pop(request_id, None)
        for key in [key for key in self.running if key[0] == request_id]:
            del self.running[key]

    def step(self, request_id: str, lane: str, *, walk: str, tokens: Any) -> None:
        if walk == "hum":
            if (request_id, "main") not in self.running:
                self.end_walk(request_id, lane, reason=None)
            return
        params = self.open[request_id].params
        token = next(tokens, None)
        limit = params.get("max_tokens")
        if token is None or (limit is not None and self.counts[request_id] >= limit):
            self.end_walk(request_id, lane, reason="stop" if token is None else "length")
            return
        self.counts[request_id] += 1
        if token == ord("#"):
            self.end.send(Failed(request_id=request_id, message="the node failed", status=500))
            self.forget(request_id)
        elif token == ord("^"):
            self.end.send(Dead(reason="the device is gone"))
        elif walk == "speak":
            wave = torch.full((80,), token / 256)
            self.end.send(Emit(request_id=request_id, name="wave", path=(), value=wave))
        else:
            for index in range(params.get("n", 1)):
                path = (index,) if params.get("n", 1) > 1 else ()
                self.end.send(Emit(request_id=request_id, name="id", path=path, value=token))

    def end_walk(self, request_id: str, lane: str, *, reason: str | None) -> None:
        walk, _ = self.running.pop((request_id, lane))
        num = self.open[request_id].params.get("n", 1)
        paths = {"": reason} if num == 1 else {str(i): reason for i in range(num)}
        self.end.send(Emit(request_id=request_id, name="id", path=(), final=True, reason=reason))
        self.end.send(
            WalkDone(
                request_id=request_id, lane=lane, walk=walk,
                outputs={"said": self.said} if walk == "chat" else {},
                reasons=paths if reason else {},
                counters={"lm.decode": self.counts[request_id]},
                counts={"completion_tokens": self.counts[request_id], "squawks": 1},
            )
        )  # fmt: skip


class Served:
    """An engine and its worker."""

    def __init__(self, engine: Engine, worker: FakeWorker) -> None:
        self.engine = engine
        self.worker = worker

    async def settled(self) -> None:
        """Wait until nothing is left on either side."""
        deadline = time.monotonic() + 5
        while self.worker.open or self.engine.num_active or self.engine.state.num_running:
            assert time.monotonic() < deadline, "requests are left over"
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def serving(*, step_s: float = 0.0, **settings: Any) -> AsyncIterator[Served]:
    config = EngineConfig(plugin="parrot", **settings)
    engine_end, worker_end = memory_channel(check=True)
    worker = FakeWorker(worker_end, step_s=step_s)

    def make_processor(limits: Limits) -> Processor:
        return Parrot(Checkpoint(model="tiny", folder=None), limits)  # type: ignore[arg-type]

    engine = Engine(spec=SPEC, graph=GRAPH, make_processor=make_processor, config=config, end=engine_end)
    worker.thread.start()
    try:
        await engine.start()
        yield Served(engine, worker)
    finally:
        await engine.close()
        await asyncio.to_thread(worker.thread.join, 5)


@pytest.fixture(name="serving")
def serving_fixture() -> Callable[..., Any]:
    return serving


@pytest.fixture
def parrot_spec() -> ModelSpec:
    return SPEC


# ---- clients of what a module serves --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(served: ServedModel) -> Iterator[str]:
    with served.http() as found:
        yield found


@pytest.fixture
def client(url: str, served: ServedModel) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as found:
        yield found
    served.assert_clean()


@pytest.fixture
def official(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found
