"""Scenarios on the echo plugin: the real engine and worker in this process, every message encoded on its way.

One engine per setting, shared by all tests; each test must leave it as it found it (`Served.assert_clean`). What a
request must give is the oracle's word (`mstar_plugin_echo.oracle`), never another run's.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from meshed import InspectedEnd, Threads, check_clean, look_at, unfinished
from mstar_plugin_echo.oracle import Expected, SessionMemory, expected, make_request
from mstar_plugin_echo.reference import Model
from torch import Tensor

from mstar import launch
from mstar.client import Client
from mstar.config import EngineConfig
from mstar.errors import RequestError
from mstar.ipc.channel import memory_channel
from mstar.ipc.messages import DropSession
from mstar.ipc.tensors import tensor_bytes
from mstar.placement import Group, Placement
from mstar.plugin import checkpoint, loader
from mstar.plugin.processor import Processor
from mstar.plugin.spec import Limits, ModelSpec, load_object
from mstar.plugin.validate import validate
from mstar.server.engine import Engine, RequestHandle
from mstar.server.native import GenerateRequest, Input, TensorInput, TensorValue, TextInput, TokensInput
from mstar.types import AudioChunk, Chunk, Request, TensorChunk, TextChunk
from mstar.worker.worker import Worker

KV_TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # keys and values, 2 layers, 2 heads of 8, float32


def kv_tokens(count: int) -> int:
    return count * KV_TOKEN_BYTES


# Room for one of the longest requests of these tests, or for two or three usual ones.
SMALL: dict[str, Any] = {"block_size": 4, "max_model_len": 64, "kv_cache_memory_bytes": kv_tokens(64)}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "chunked": {"max_num_batched_tokens": 7, "block_size": 4},
    "no_prefix_cache": {"enable_prefix_caching": False},
    "batch_invariant": {"batch_invariant": True},
    "few_rows": {"max_num_seqs": 3, "max_queue": 1000},
    "swap": SMALL,
    "recompute": {**SMALL, "swap_space_bytes": 0},
    "overlap": {"overlap": True},
    "overlap_chunked": {"overlap": True, "max_num_batched_tokens": 7, "block_size": 4},
    "overlap_swap": {**SMALL, "overlap": True},
}
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "fused": {},
    "compiled": {"compile": True},
    "overlapped": {"overlap": True},
    "compiled_overlapped": {"compile": True, "overlap": True},
}
POOLS: dict[str, dict[str, Any]] = {"large": {}, "swap": SMALL, "recompute": {**SMALL, "swap_space_bytes": 0}}
SETTINGS_BY_NAME = SETTINGS | {f"{mode}, {pool} pool": MODES[mode] | POOLS[pool] for mode in MODES for pool in POOLS}
WAIT_S = 60.0
START_S = 1800.0  # some compile first


# ---- requests and answers -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: what the client sends, and what the oracle is asked."""

    task: str
    inputs: tuple[Any, ...]
    params: dict[str, Any] = field(default_factory=dict)
    seed: int | None = 0  # None: the engine draws one
    session: str | None = None

    def wire(self) -> GenerateRequest:
        inputs = [_wire_input(value) for value in self.inputs]
        return GenerateRequest(task=self.task, inputs=inputs, params=self.params, seed=self.seed, session=self.session)

    def request(self, *, resumed: bool = False) -> Request:
        more = {"seed": self.seed, "session": self.session, "resumed": resumed}
        return make_request(self.task, *self.inputs, **more, **self.params)

    def __str__(self) -> str:
        return f"{self.task}({', '.join(map(_short, self.inputs))}, seed={self.seed}, {self.params})"


def ask_over_http(client: Client, ask: Ask, *, is_streamed: bool) -> Answer:
    """The answer that a client gets. Raises what the client does, after a stream's events at once."""
    wire = ask.wire()
    fields: dict[str, Any] = {"task": ask.task, "inputs": msgspec.to_builtins(wire.inputs), "params": ask.params}
    fields |= {"seed": ask.seed, "session": ask.session} if ask.session is not None else {"seed": ask.seed}
    if is_streamed:
        with client.stream(**fields) as stream:
            events = list(stream)
        result = stream.answer.result
    else:
        result = client.generate(**fields)
        events = list(result.outputs)
    chunks: list[Any] = []
    for event in events:
        if isinstance(event, TensorChunk):  # a result's names have their index
            name = event.name if is_streamed else event.name.removesuffix(f"-{event.index}")
            event = TensorChunk(name, torch.from_numpy(event.tensor.copy()), event.index)
        chunks.append(event)
    reasons = result.raw.get("finish_reasons", [result.finish_reason])
    facts = SimpleNamespace(indices=dict(enumerate(reasons)), usage=result.usage, counters=result.counters)
    return Answer(chunks, facts, sample_error=1e-4)  # of steps of 16 bits


def _wire_input(value: Any) -> Input:
    if isinstance(value, str):
        return TextInput(text=value)
    if isinstance(value, list):
        return TokensInput(ids=value)
    name, tensor = value
    data = binascii.b2a_base64(tensor_bytes(tensor), newline=False).decode()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorInput(name=name, tensor=TensorValue(dtype=dtype, shape=list(tensor.shape), data=data))


def _short(value: Any) -> str:
    return repr(value)[:30] if isinstance(value, str | list) else value[0]


@dataclass(slots=True)
class Answer:
    """What a request gave, as far as it came."""

    chunks: list[Chunk] = field(default_factory=list)
    result: Any = None
    sample_error: float = 1e-5  # of samples, as they came

    def token_ids(self, index: int = 0) -> list[int]:
        return [i for c in self.chunks if isinstance(c, TextChunk) and c.index == index for i in c.token_ids]

    def text(self, index: int = 0) -> str:
        return "".join(c.text for c in self.chunks if isinstance(c, TextChunk) and c.index == index)

    @property
    def tensors(self) -> dict[str, Tensor]:
        parts: dict[str, list[Tensor]] = {}
        for chunk in self.chunks:
            if isinstance(chunk, TensorChunk):
                parts.setdefault(f"{chunk.name}-{chunk.index}" if chunk.index else chunk.name, []).append(chunk.tensor)
        return {name: torch.cat(found) if len(found) > 1 else found[0] for name, found in parts.items()}

    @property
    def samples(self) -> Tensor:
        waves = [torch.from_numpy(chunk.samples) for chunk in self.chunks if isinstance(chunk, AudioChunk)]
        return torch.cat(waves) if waves else torch.zeros(0)

    def everything(self) -> dict[str, Any]:
        """All that must not depend on settings, in comparable form (chunk borders left out)."""
        indices = sorted({chunk.index for chunk in self.chunks if isinstance(chunk, TextChunk)})
        return {
            "ids": {index: self.token_ids(index) for index in indices},
            "texts": {index: self.text(index) for index in indices},
            "tensors": {
                name: tensor.tolist()
                if not tensor.is_floating_point()
                else [round(v, 3) for v in tensor.flatten().tolist()]
                for name, tensor in self.tensors.items()
            },
            "samples": [round(value, 6) for value in self.samples.tolist()],
            "reasons": dict(self.result.indices),
            "usage": dict(self.result.usage),
            "counts": dict(self.result.counts),
            "counters": dict(self.result.counters),
        }


def differences(answer: Answer, right: Expected, request: Request) -> list[str]:
    """How an answer differs from the oracle's; empty if it is right."""
    found: list[str] = []

    def compare(what: str, got: Any, wanted: Any) -> None:
        if got != wanted:
            found.append(f"{what}: {got!r}, expected {wanted!r}")

    if "text" in request.outputs:
        for index, ids in right.texts.items():
            compare(f"ids {index}", answer.token_ids(index), ids)
            compare(f"text {index}", answer.text(index), right.text(index))
    if "tensors" in request.outputs:
        compare("tensors", sorted(answer.tensors), sorted(right.tensors))
        for name, wanted in right.tensors.items():
            got = answer.tensors.get(name)
            if got is None or got.shape != wanted.shape or not torch.allclose(got.float(), wanted.float(), atol=1e-4):
                found.append(f"tensor {name}: {got}, expected {wanted}")
    if right.audio is not None:
        got, wanted = answer.samples, right.audio
        if got.shape != wanted.shape or not torch.allclose(got, wanted, atol=answer.sample_error):
            found.append(f"samples: {got}, expected {wanted}")
    if right.reasons:
        compare("finish reasons", answer.result.indices, right.reasons)
    compare("counters", dict(answer.result.counters), dict(right.counters))
    if request.task == "generate":
        compare("completion_tokens", answer.result.usage["completion_tokens"], sum(map(len, right.texts.values())))
    return found


class Oracle:
    """The right answers, worked out once."""

    def __init__(self) -> None:
        self.model = Model()
        self._known: dict[str, Expected] = {}

    def expected(self, ask: Ask, *, memory: SessionMemory | None = None, resumed: bool = False) -> Expected:
        if memory is not None:
            return expected(ask.request(resumed=resumed), model=self.model, session=memory)
        key = f"{ask.task} {ask.inputs} {ask.seed} {ask.params}"
        if key not in self._known:
            self._known[key] = expected(ask.request(), model=self.model)
        return self._known[key]

    def check(self, ask: Ask, answer: Answer) -> None:
        wrong = differences(answer, self.expected(ask), ask.request())
        assert not wrong, f"{ask}: " + "; ".join(wrong)


# ---- the cases of every task ----------------------------------------------------------------------------------------


def _tensor(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


IMAGE, SECOND, LATENTS = ("image", _tensor(5, 1)), ("image2", _tensor(3, 2)), ("latents", _tensor(7, 3))

CASES: dict[str, list[tuple[Any, ...]]] = {
    "generate": [
        ("hello world",),
        ("hello", {"eos_at": 5}),
        ("ignored", {"eos_at": 2, "ignore_eos": True, "max_tokens": 8}),
        ("h", {"n": 3, "temperature": 0.9, "max_tokens": 12}),
        (
            "sampled in every way",
            {
                "temperature": 1.2, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3,
                "presence_penalty": 0.4, "frequency_penalty": 0.3, "logit_bias": {"101": 2.0}, "max_tokens": 30,
            },
        ),
        ([256, 104, 105], {"repetition_penalty": 1.5, "max_tokens": 20}),
        ("é" * 20, {"n": 2, "max_tokens": 5, "temperature": 1.0}),
        ("once", {"max_tokens": 1}),
    ],
    "nested": [
        ("frames please",),
        ("loud", {"voice": "loud", "max_frames": 7}),
        ("frames", {"end_at": 2, "max_frames": 6}),
        ("none", {"end_at": 0}),
        ("sampled", {"temperature": 0.8, "depth_temperature": 1.1, "depth_top_k": 10, "max_frames": 9}),
    ],
    "branches": [
        ("ab",),
        ("abc", {"steps": 5, "rounds": 3, "third": True, "first_step": 0, "end_step": 9}),
        ("no steps", {"steps": 0}),
        ("no right", {"first_step": 9, "end_step": 9}),
    ],
    "fanout": [
        ("one|two", "three"),
        ("one|two|x", "three", "four|five", {"reply_tokens": [5, 1, 3], "laps": [6, 0, 2]}),
        ("a|b", "c", {"ordered": True, "max_tokens": 7}),
    ],
    "spans": [
        ("look ", IMAGE, " and ", SECOND, " say"),
        ("only text",),
        (IMAGE, {"scale": 1.0}),
        ("a ", IMAGE, SECOND, LATENTS, {"first_step": 1, "end_step": 2, "steps": 4}),
    ],
    "chunks": [
        ("x",),
        ("xy", {"counts": [[0, 3, 0, 2, 0]], "window": 3, "stride": 1, "size": 2, "context": 2, "follow_steps": 9}),
        ("nothing", {"counts": [[0, 0]]}),
        ("one chunk", {"counts": [[4]], "size": 4, "follow_steps": 2}),
        ("some", {"counts": [[1, 2, 3, 4]], "consumers": ["left", "follow"]}),
        ("nobody listens", {"counts": [[2]], "consumers": []}),
    ],
    "chunks_each": [("x", {"counts": [[1, 2], [0], [3, 0, 1, 1]]}), ("y", {"counts": [[2, 2]], "stride": 4})],
    "trouble": [("ok",), ("ok", {"watch": True}), ("ok", {"kind": "sleep", "sleep_s": 0.01})],
    "states": [
        ("draft this",),
        ("draft this", {"revise": False}),
        ("draft that", {"tally": False}),
        ("draft", {"revise": False, "tally": False}),
    ],
}  # fmt: skip


def asks_of(*tasks: str) -> list[Ask]:
    """The cases of some tasks (none named: of all), each with a seed of its own."""
    found: list[Ask] = []
    for task in tasks or tuple(CASES):
        for case in CASES[task]:
            params = case[-1] if isinstance(case[-1], dict) else {}
            inputs = case[:-1] if params else case
            found.append(Ask(task, inputs, params, seed=100 * len(found) + len(task)))
    return found


# ---- the engine -----------------------------------------------------------------------------------------------


class Served:
    """An engine and its worker; the engine's event loop runs in a thread of its own, so that tests are plain code."""

    def __init__(
        self, oracle: Oracle, settings: dict[str, Any], *, change: Callable[[ModelSpec], ModelSpec] | None = None
    ) -> None:
        self.oracle = oracle
        self._change = change
        self.config = EngineConfig(plugin="echo", **settings)
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._loop_thread.start()
        self.worker, self.engine = self._build()
        self.run(self.engine.start(), timeout_s=START_S)

    def _build(self) -> tuple[Worker, Engine]:
        spec = loader.load("echo").spec
        spec = self._change(spec) if self._change is not None else spec
        found = checkpoint.resolve(spec, self.config.model, parts={})
        graph = spec.graph(found.config)
        validate(graph, spec)
        self._engine_end, worker_end = memory_channel(check=True)
        self._worker_end = InspectedEnd(worker_end)

        def make_processor(limits: Limits) -> Processor:
            made: Processor = load_object(spec.processor, plugin=spec.name)(found, limits)
            return made

        async def make_engine() -> Engine:
            return Engine(
                spec=spec, graph=graph, make_processor=make_processor, config=self.config, end=self._engine_end
            )

        worker = Worker(spec, graph, found, self.config, self._worker_end)
        self._worker_thread = threading.Thread(target=worker.run, daemon=True)
        self._worker_thread.start()
        return worker, self.run(make_engine())

    def close(self) -> None:
        self.run(self.engine.close())
        self._worker_thread.join(10)
        assert not self._worker_thread.is_alive()
        self._stop_loop()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join(10)
        assert not self._loop_thread.is_alive()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, Any], *, timeout_s: float = WAIT_S) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    # ---- asking ---------------------------------------------------------------------------------------------

    async def answer(self, ask: Ask, *, after_s: float = 0.0, abort_after: int | None = None) -> Answer:
        """Send a request and wait for its end. `abort_after`: hang up after so many chunks (0: at once)."""
        await asyncio.sleep(after_s)
        handle = await self.engine.submit(ask.wire())
        answer = Answer()
        if abort_after == 0:
            handle.abort()
        async for chunk in handle:
            answer.chunks.append(chunk)
            if len(answer.chunks) == abort_after:
                handle.abort()
        answer.result = handle.result
        return answer

    async def submit(self, ask: Ask) -> RequestHandle:
        return await self.engine.submit(ask.wire())

    def ask(self, ask: Ask, **how: Any) -> Answer:
        return self.run(self.answer(ask, **how))

    def ask_all(self, asks: list[Ask], *, stagger_s: float = 0.0, timeout_s: float = WAIT_S) -> list[Any]:
        """Ask all at once, or one every `stagger_s`; answers, and errors in their place."""

        async def gather() -> list[Any]:
            works = [self.answer(ask, after_s=stagger_s * number) for number, ask in enumerate(asks)]
            return await asyncio.gather(*works, return_exceptions=True)

        return self.run(gather(), timeout_s=timeout_s)

    def check_all(self, asks: list[Ask], *, stagger_s: float = 0.0) -> None:
        """Ask all together; every answer must be the oracle's.

        Frames and spans cannot be recomputed from ids. Without swap space several that grow together may lock up, and
        the youngest fails, as it says; alone it must be right.
        """
        for ask, answer in zip(asks, self.ask_all(asks, stagger_s=stagger_s), strict=True):
            may_lock_up = self.config.swap_space_bytes == 0 and ask.task in ("nested", "spans")
            if may_lock_up and getattr(answer, "code", None) == "kv_cache_exhausted":
                answer = self.ask(ask)
            assert isinstance(answer, Answer), f"{ask}: {answer!r}"
            self.oracle.check(ask, answer)

    def drop_session(self, name: str) -> None:
        """Delete a session, as its client may."""

        async def drop() -> None:
            self.engine.close_session(name)

        self.run(drop())

    # ---- afterwards -----------------------------------------------------------------------------------------

    def settle(self, *, timeout_s: float = 20.0) -> None:
        """Wait until no request is left on either side and the worker has nothing to do."""
        deadline = time.monotonic() + timeout_s
        while self.engine.num_active or self.engine.state.num_running or self.on_worker(self._unfinished):
            assert time.monotonic() < deadline, f"left over: {self.on_worker(self._unfinished)}"
            assert self.engine.state.dead is None, self.engine.state.dead
            time.sleep(0.001)

    def on_worker(self, look: Callable[[], Any]) -> Any:
        """The result of `look`, run on the worker's thread between two steps."""
        future = self._worker_end.look(look)
        self._engine_end.send(DropSession(session="no such session"))  # wakes the worker
        return future.result(WAIT_S)

    def _unfinished(self) -> list[str]:
        return unfinished(self.worker)

    def assert_clean(self, *, sessions: int = 0) -> None:
        """Nothing is left of any request: pages, slot rows, swapped images, queues, sessions."""
        self.settle()
        self.on_worker(lambda: check_clean(self.worker, sessions=sessions))
        assert self.engine.state.dead is None
        assert self.engine.num_active == 0


class Meshed(Served):
    """The same with one worker for each group of nodes, all in threads of this process; messages cross as bytes.

    Args:
        groups: what each group's `nodes` are.
    """

    def __init__(
        self, oracle: Oracle, groups: Sequence[Sequence[str]], settings: dict[str, Any], *,
        change: Callable[[ModelSpec], ModelSpec] | None = None,
    ) -> None:  # fmt: skip
        self.groups = [Group(nodes=tuple(nodes)) for nodes in groups]
        super().__init__(oracle, settings, change=change)
        assert all(worker.places.group == n for n, worker in enumerate(w.modules for w in self.workers))

    def _build(self) -> tuple[Worker, Engine]:
        model = launch.find_model(self.config)
        if self._change is not None:
            model = replace(model, plugin=replace(model.plugin, spec=self._change(model.plugin.spec)))
        self.threads = Threads(
            model, self.config, Placement.of(self.groups, model.graph, tasks=model.plugin.spec.tasks)
        )
        self.workers = self.threads.workers

        async def make_engine() -> Engine:
            self.threads.start()
            spec, end = model.plugin.spec, self.threads.end
            return Engine(
                spec=spec, graph=model.graph, make_processor=model.make_processor, config=self.config, end=end
            )

        return self.workers[0], self.run(make_engine())

    def close(self) -> None:
        self.run(self.engine.close())
        self.run(self.threads.stop(at_once=False))
        self._stop_loop()

    def on_each(self, look: Callable[[Worker], Any]) -> list[Any]:
        """The results of `look` on every worker, run on its thread."""
        return look_at(self.workers, look)

    def settle(self, *, timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self.engine.num_active or any(self.on_each(unfinished)):
            assert time.monotonic() < deadline, f"left over: {self.on_each(unfinished)}"
            assert self.engine.state.dead is None, self.engine.state.dead
            time.sleep(0.001)

    def assert_clean(self, *, sessions: int = 0) -> None:
        self.settle()
        self.on_each(partial(check_clean, sessions=sessions))
        assert self.engine.state.dead is None and self.engine.num_active == 0


class Spread(Served):
    """The same with the workers where `mstar serve` puts them: a thread of this process, or processes."""

    def __init__(self, oracle: Oracle, **settings: Any) -> None:
        self.oracle = oracle
        self.config = EngineConfig(plugin="echo", **settings)
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._loop_thread.start()
        self._stack = contextlib.AsyncExitStack()
        try:
            self.engine = self.run(self._enter(), timeout_s=START_S)
        except BaseException:
            self._stop_loop()
            raise

    async def _enter(self) -> Engine:
        return await self._stack.enter_async_context(launch.started_engine(self.config))

    def close(self) -> None:
        try:
            self.run(self._stack.aclose())
        finally:
            self._stop_loop()

    def settle(self, *, timeout_s: float = 20.0) -> None:
        """Wait until no request is left on the engine's side, nor on the workers' by their own statistics."""
        deadline = time.monotonic() + timeout_s
        while self.engine.num_active or self.engine.state.num_running or not self.is_idle:
            assert time.monotonic() < deadline, f"left over: {self.engine.state.stats}"
            assert self.engine.state.dead is None, self.engine.state.dead
            time.sleep(0.01)

    @property
    def is_idle(self) -> bool:
        stats = self.engine.state.stats
        return stats is not None and (stats.running, stats.waiting) == (0, 0)

    def assert_clean(self, *, sessions: int = 0) -> None:
        """Nothing is left of any request, as the workers say; they log it themselves if their pools say otherwise."""
        self.settle()
        if not sessions:
            self.assert_nothing_held()
        assert self.engine.state.dead is None and self.engine.num_active == 0
        assert all(worker.state == "ready" for worker in self.engine.workers())

    def assert_nothing_held(self) -> None:
        """No worker that is there holds anything."""
        deadline = time.monotonic() + 5
        while (stats := self.engine.state.stats) is not None:
            held = stats.running, stats.waiting, stats.slots_used, stats.swapped, *(n for n, _ in stats.pools.values())
            if not any(held):
                break
            assert time.monotonic() < deadline, f"left over: {stats}"
            time.sleep(0.01)

    @property
    def most_running(self) -> int:
        """While no worker is missing."""
        return self.engine.state.limits.max_running

    def wait_for_workers(self, *, timeout_s: float = 60.0) -> None:
        """Wait until every worker is ready."""
        deadline = time.monotonic() + timeout_s
        while not all(worker.state == "ready" for worker in self.engine.workers()):
            assert time.monotonic() < deadline, self.engine.workers()
            time.sleep(0.02)


# ---- fixtures -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Faults are provoked here by the hundred. Set back after every test: other folders' tests read the log."""
    logger = logging.getLogger("mstar")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@pytest.fixture(scope="session")
def engines(oracle: Oracle) -> Iterator[Callable[[str], Served]]:
    """Engines by the name of their setting, started at first use and kept to the end."""
    started: dict[str, Served] = {}

    def get(name: str) -> Served:
        if name not in started:
            started[name] = Served(oracle, SETTINGS_BY_NAME[name])
        return started[name]

    yield get
    for served in started.values():
        served.close()


@pytest.fixture(params=list(SETTINGS))
def served(engines: Callable[[str], Served], request: pytest.FixtureRequest) -> Iterator[Served]:
    """An engine of every setting in turn, clean before and after."""
    found = engines(request.param)
    yield found
    found.assert_clean()


@pytest.fixture(params=["default", "overlap"])
def both(engines: Callable[[str], Served], request: pytest.FixtureRequest) -> Iterator[Served]:
    """The plain and the overlapped engine."""
    found = engines(request.param)
    yield found
    found.assert_clean()


PLACES: dict[str, dict[str, Any]] = {
    "embedded": {}, "one process": {"workers": 1}, "two processes": {"workers": 2}, "three": {"placement": "three"},
}  # fmt: skip


@pytest.fixture(scope="module")
def places(oracle: Oracle) -> Iterator[Callable[[str], Spread]]:
    """Engines by where their workers are, started at first use."""
    started: dict[str, Spread] = {}

    def get(name: str) -> Spread:
        if name not in started:
            started[name] = Spread(oracle, **PLACES[name])
        return started[name]

    yield get
    for served in started.values():
        served.close()


@pytest.fixture(params=list(PLACES))
def placed(places: Callable[[str], Spread], request: pytest.FixtureRequest) -> Iterator[Spread]:
    """An engine with its workers in each place in turn, clean before and after."""
    found = places(request.param)
    yield found
    found.assert_clean()


DECODING_TWICE = """
groups:
  - {name: prefill, nodes: [lm.prefill, lm.read, right, lm_text]}
  - {name: decode, nodes: ["*"], replicas: 2}
  - {name: streams, nodes: [voice, sink, trouble.watch, join, depth]}
"""


@pytest.fixture(scope="session")
def decoding_twice(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A placement like the plugin's `three`, where one group has two replicas: four workers."""
    path = tmp_path_factory.mktemp("placements") / "decoding_twice.yaml"
    path.write_text(DECODING_TWICE)
    return str(path)


def _spreads(oracle: Oracle) -> Iterator[Callable[..., Spread]]:
    started: list[Spread] = []

    def start(**settings: Any) -> Spread:
        started.append(Spread(oracle, **settings))
        return started[-1]

    yield start
    for served in started:
        served.close()


@pytest.fixture
def spread(oracle: Oracle) -> Iterator[Callable[..., Spread]]:
    """`spread(workers=2, **settings)`: an engine of the test's own."""
    yield from _spreads(oracle)


@pytest.fixture(scope="module")
def spread_once(oracle: Oracle) -> Iterator[Callable[..., Spread]]:
    """The same for all tests of a file."""
    yield from _spreads(oracle)


SPLITS: dict[str, list[list[str]]] = {
    "components": [["lm", "lm_text", "lm_draft", "lm_view"], ["*"]],
    "three": [["*"], ["lm", "lm_text", "lm_draft", "lm_view"], ["voice", "depth", "sink", "left", "join"]],
    "prefill apart": [["*"], ["lm.prefill", "lm.read"]],
    "decode apart": [["lm.decode", "lm_draft", "lm_view", "lm.say", "lm.frame"], ["*"]],
    "branches apart": [["*"], ["lm_text", "right", "lm_draft"], ["third", "lm_view"]],
}
MESHED = {
    "default": {}, "swap": SMALL, "overlap": {"overlap": True}, "chunked": SETTINGS["chunked"],
    "by chunks": {**SETTINGS["chunked"], "kv_transfer": "chunks"}, "at the end": {"kv_transfer": "end"},
}  # fmt: skip


@pytest.fixture(scope="module")
def meshes(oracle: Oracle) -> Iterator[Callable[[str, str], Meshed]]:
    """Engines by how the echo model is split between workers, and their setting."""
    started: dict[tuple[str, str], Meshed] = {}

    def get(split: str, setting: str) -> Meshed:
        if (split, setting) not in started:
            started[split, setting] = Meshed(oracle, SPLITS[split], MESHED[setting])
        return started[split, setting]

    yield get
    for served in started.values():
        served.close()


@pytest.fixture(params=[(split, setting) for split in SPLITS for setting in MESHED], ids="-".join)
def meshed(meshes: Callable[[str, str], Meshed], request: pytest.FixtureRequest) -> Iterator[Meshed]:
    """An engine of every split and setting in turn, clean before and after."""
    found = meshes(*request.param)
    yield found
    found.assert_clean()


@pytest.fixture(scope="module")
def make_mesh(oracle: Oracle) -> Callable[..., Meshed]:
    """`make_mesh(groups, settings, change=None)`: an engine of the test's own, to be closed by it."""
    return partial(Meshed, oracle)


@pytest.fixture(scope="session")
def small_pool() -> dict[str, Any]:
    """Settings with room for one of the longest requests, or for two or three usual ones."""
    return SMALL


@pytest.fixture
def fresh(oracle: Oracle) -> Iterator[Callable[..., Served]]:
    """`fresh(**settings)`: an engine of the test's own; `change` makes another model of the echo plugin's spec."""
    started: list[Served] = []

    def start(*, change: Callable[[ModelSpec], ModelSpec] | None = None, **settings: Any) -> Served:
        started.append(Served(oracle, settings, change=change))
        return started[-1]

    yield start
    for served in started:
        served.close()


@pytest.fixture(scope="session")
def make() -> Callable[..., Ask]:
    """`make(task, *inputs, seed=0, session=None, **params)`: an `Ask`."""

    def build(task: str, *inputs: Any, seed: int | None = 0, session: str | None = None, **params: Any) -> Ask:
        return Ask(task, inputs, params, seed, session)

    return build


@pytest.fixture(scope="session")
def over_http() -> Callable[..., Answer]:
    """`over_http(client, ask, is_streamed=True)`: the answer that a client gets."""
    return ask_over_http


@pytest.fixture(scope="session")
def error_of() -> Callable[[Any], RequestError]:
    """The RequestError an answer turned out to be."""

    def get(answer: Any) -> RequestError:
        assert isinstance(answer, RequestError), f"expected an error, got {answer!r}"
        return answer

    return get


@pytest.fixture(scope="session")
def cases() -> Callable[..., list[Ask]]:
    """`cases("generate", ...)`: what to ask of these tasks; `cases()`: of all."""
    return asks_of
