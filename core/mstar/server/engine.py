"""The engine: one model's requests, from validated wire type to chunks. The thin asynchronous shell of `requests`.

Runs on the server's event loop and keeps it free: media, tokenisers and the model's Processor work in thread pools.
Knows the channel to the worker, and nothing about HTTP or where the worker runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import time
import uuid
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mstar.config import EngineConfig
from mstar.errors import ConfigError, RequestError
from mstar.ipc import messages
from mstar.ipc.channel import EngineEnd
from mstar.media.policy import MediaPolicy
from mstar.plugin.graph import Graph
from mstar.plugin.processor import Processor
from mstar.plugin.session import SessionTable
from mstar.plugin.spec import Limits as SpecLimits
from mstar.plugin.spec import ModelSpec
from mstar.server.metrics import Metrics, Timeline
from mstar.server.native import GenerateRequest, has_media, read_request
from mstar.server.requests import Action, Deadline, End, EngineState, Limits, RunStep, Send, Work, attributed, contained
from mstar.server.results import Result
from mstar.server.streams import Decoded, Decoding
from mstar.types import Chunk, Encoded, Request

logger = logging.getLogger(__name__)

_ENCODE_THREADS = 4
_MEDIA_THREADS = 8  # most of them wait, for other hosts or their turn to decode
_DECODE_THREADS = 2  # the second goes on while the first is held up by one slow request
_TICK_S = 0.05


class RequestHandle:
    """A request that has been taken in: `async for chunk in handle`, then `handle.result`.

    Iterating raises the RequestError the request failed with, after the chunks that came before it. What is not read
    yet is kept here; the worker holds nothing for it.
    """

    def __init__(
        self, request_id: str, *, timeline: Timeline, deadline: Deadline | None, abort: Callable[[RequestHandle], None]
    ) -> None:
        self.id = request_id
        self.timeline = timeline
        self.deadline = deadline
        self.result: Result | None = None
        self.error: RequestError | None = None
        self._abort = abort
        self._chunks: deque[Chunk] = deque()
        self._changed = asyncio.Event()
        # Filled by the engine.
        self.encoding: asyncio.Task[None] | None = None
        self._request: Request | None = None  # once it is encoded, as is `decoding`
        self.decoding: Decoding | None = None
        self.work: list[Work] = []  # for `decoding`
        self.is_decoding = False  # or about to

    @property
    def request(self) -> Request:
        assert self._request is not None, "not encoded yet"
        return self._request

    @property
    def is_over(self) -> bool:
        return self.result is not None or self.error is not None

    def __aiter__(self) -> RequestHandle:
        return self

    async def __anext__(self) -> Chunk:
        await self._until(lambda: bool(self._chunks) or self.result is not None)
        if not self._chunks:
            raise StopAsyncIteration
        return self._chunks.popleft()

    async def encoded(self) -> None:
        """Wait until the request is in the queue. Raises what it failed with before."""
        await self._until(lambda: self._request is not None)

    def abort(self) -> None:
        """Stop the request and free what it holds, wherever it is; does nothing once it is over."""
        self._abort(self)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            if self.error is not None:
                raise self.error
            self._changed.clear()
            await self._changed.wait()

    # -- for the engine --------------------------------------------------------------------------------------

    def accept(self, request: Request, decoding: Decoding) -> None:
        self._request, self.decoding = request, decoding
        self._changed.set()

    def put(self, chunks: list[Chunk]) -> None:
        self._chunks.extend(chunks)
        self._changed.set()

    def finish(self, *, result: Result | None, error: RequestError | None) -> None:
        self.result, self.error, self.work = result, error, []
        self._changed.set()


def served_names(config: EngineConfig, spec: ModelSpec) -> tuple[str, ...]:
    """Names under which clients ask for the model; the first is reported."""
    return config.served_model_name or tuple(dict.fromkeys((config.model, spec.name)))


class Engine:
    """Serves one model over one channel to its worker.

    Example:
        handle = await engine.submit(GenerateRequest(inputs=[TextInput(text="hello")]))
        async for chunk in handle: ...
        print(handle.result.finish_reason)
    """

    def __init__(
        self, *, spec: ModelSpec, graph: Graph, make_processor: Callable[[SpecLimits], Processor],
        config: EngineConfig, end: EngineEnd, base: Path | None = None,
        workers: Callable[[], list[messages.WorkerStatus]] = list, num_replicas: int = 1,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.graph = graph
        self.model_names = served_names(config, spec)
        limits = Limits(
            max_running=config.max_num_seqs * num_replicas, max_queue=config.max_queue,
            page_tokens=config.block_size, timeout_s=config.request_timeout_s, stall_timeout_s=config.stall_timeout_s,
        )  # fmt: skip
        sessions = SessionTable(ttl_s=config.session_ttl_s, max_sessions=config.max_sessions)
        self.state = EngineState(graph=graph, limits=limits, sessions=sessions)
        self.workers = workers  # those in processes of their own
        self.metrics = Metrics(self.state, spec=spec, model=self.model_names[0], workers=workers)
        self._make_processor = make_processor
        self._processor: Processor | None = None  # made when the worker has said what fits
        self._end = end
        media = MediaPolicy.of(config, is_offline=base is not None)
        self._read_request = functools.partial(
            read_request, spec=spec, model_names=self.model_names, base=base, media=media
        )
        self._seeds: random.Random = random.SystemRandom() if config.seed is None else random.Random(config.seed)
        self._handles: dict[str, RequestHandle] = {}
        self._encode_pool = ThreadPoolExecutor(_ENCODE_THREADS, thread_name_prefix="mstar-encode")
        self._media_pool = ThreadPoolExecutor(_MEDIA_THREADS, thread_name_prefix="mstar-media")
        self._decode_pool = ThreadPoolExecutor(_DECODE_THREADS, thread_name_prefix="mstar-decode")
        self._to_decode: list[RequestHandle] = []
        self._num_trips = 0
        self.is_abandoned = False  # whoever stops it does not wait for a step that runs
        self._tasks: set[asyncio.Task[None]] = set()

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Wait until the worker can answer, then make the model's Processor. Raises ConfigError if it cannot."""
        while self.state.plan is None and self.state.dead is None:
            await self._receive()
        if self.state.dead is not None:
            raise ConfigError(f"the model could not be started: {self.state.dead}")
        limits = SpecLimits(max_model_len=self.state.max_model_len)
        self._processor = await _in_thread(self._encode_pool, self._make_processor, limits)
        self._spawn(self._forever(self._receive))
        self._spawn(self._forever(self._tick))

    def drain(self) -> None:
        """Refuse new requests from now on; those running go on."""
        self.state.draining = True

    def cut(self) -> None:
        """End what is left with 503."""
        error = RequestError("the server is shutting down; try again later", status=503, code="unavailable")
        for handle in list(self._handles.values()):
            self._fail(handle, error)

    async def close(self) -> None:
        """End what is left with 503, tell the worker to stop, and free all threads."""
        self.drain()
        self.cut()
        self._end.send(messages.Shutdown())
        self._end.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._encode_pool.shutdown(wait=False, cancel_futures=True)
        self._media_pool.shutdown(wait=False, cancel_futures=True)
        self._decode_pool.shutdown(wait=False, cancel_futures=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _forever(self, turn: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            while True:
                await turn()
        except Exception as error:  # a fault of ours: what runs can never end, so say so instead of hanging
            logger.exception("the engine failed")
            reason = f"the engine failed ({type(error).__name__}: {error})"
            self._apply(self.state.receive(messages.Dead(reason=reason), now=time.monotonic()))

    async def _receive(self) -> None:
        for message in await self._end.receive():
            self._apply(self.state.receive(message, now=time.monotonic()))

    async def _tick(self) -> None:
        """Deadlines and sessions; and, since it wakes so often anyway, how late the event loop is."""
        asleep = time.monotonic()
        await asyncio.sleep(_TICK_S)
        now = time.monotonic()
        self.metrics.record_lag(now - asleep - _TICK_S)
        self._apply(self.state.tick(now=now))
        for handle in list(self._handles.values()):  # those left past their deadline are over on the worker
            if handle.deadline is not None and now >= handle.deadline.at:
                self._fail(handle, handle.deadline.error("being decoded"))

    # -- requests --------------------------------------------------------------------------------------------

    @property
    def num_active(self) -> int:
        """Requests that have not been decoded to their end."""
        return len(self._handles)

    async def submit(self, wire: GenerateRequest) -> RequestHandle:
        """Take a request in and encode it. Raises RequestError if it is refused; cancelling aborts it."""
        now, name = time.monotonic(), f"gen-{uuid.uuid4().hex}"
        task = wire.task if wire.task is not None and wire.task in self.spec.tasks else "unknown"
        timeline = Timeline(task=task, is_stream=wire.stream, submitted=now)
        deadline = self.state.limits.deadline(wire.timeout_s, now=now)
        try:
            self._apply(self.state.submit(name, session=wire.session, deadline=deadline, now=now))
        except RequestError as error:
            self.metrics.record_end(timeline, now=now, error=error)
            raise
        handle = self._handles[name] = RequestHandle(name, timeline=timeline, deadline=deadline, abort=self._abort)
        handle.encoding = self._spawn(self._take_in(handle, wire))
        try:
            await handle.encoded()
        except asyncio.CancelledError:
            handle.abort()
            raise
        return handle

    def close_session(self, name: str) -> None:
        """Delete a session. Raises RequestError: 404, 409 or 410."""
        self._apply(self.state.close_session(name, now=time.monotonic()))

    async def _take_in(self, handle: RequestHandle, wire: GenerateRequest) -> None:
        """Encode a request and queue it. Cancelled if the request is over before."""
        with attributed(f"request {handle.id}: taking it in", fail=lambda error: self._fail(handle, error)):
            seed, resumed = self._seeds.getrandbits(63), self.state.is_resumed(handle.id)
            pool = self._media_pool if has_media(wire) else self._encode_pool  # the others do not wait for media
            deadline = None if handle.deadline is None else handle.deadline.at
            request, encoded, decoding = await _in_thread(
                pool, self._encode, wire, self.state.kept(handle.id),
                request_id=handle.id, seed=seed, resumed=resumed, deadline=deadline,
            )  # fmt: skip
            handle.timeline.task = request.task
            self._apply(self.state.encoded(request, encoded, now=time.monotonic()))
            if not handle.is_over:
                handle.accept(request, decoding)

    def _encode(
        self, wire: GenerateRequest, kept: dict[str, Any], *, request_id: str, seed: int, resumed: bool,
        deadline: float | None,
    ) -> tuple[Request, Encoded, Decoding]:  # fmt: skip
        request = self._read_request(wire, request_id=request_id, seed=seed, resumed=resumed, deadline=deadline)
        request.kept = kept
        assert self._processor is not None
        encoded = self._processor.encode(request)
        tensors = self.spec.tasks[request.task].tensors_out
        return request, encoded, Decoding(self._processor, request=request, encoded=encoded, tensors_out=tensors)

    # -- decoding --------------------------------------------------------------------------------------------

    def _decode_soon(self, handle: RequestHandle) -> None:
        """Put a request that has work on the list for the next trip, unless it is there or away already."""
        if handle.work and not handle.is_decoding:
            handle.is_decoding = True
            self._to_decode.append(handle)
            if self._num_trips < _DECODE_THREADS:
                self._num_trips += 1
                self._spawn(self._decode())

    async def _decode(self) -> None:
        """Decode what has gathered, of all requests together: a trip to a thread costs more than most decoding."""
        try:
            while self._to_decode:
                handles, self._to_decode = self._to_decode, []
                slow = [handle for handle in handles if any(isinstance(item, RunStep) for item in handle.work)]
                for handle in slow:  # the others do not wait for it
                    self._spawn(self._trip([handle], self._encode_pool))
                await self._trip([handle for handle in handles if handle not in slow], self._decode_pool)
        finally:
            self._num_trips -= 1

    async def _trip(self, handles: list[RequestHandle], pool: ThreadPoolExecutor) -> None:
        batch = [(handle.decoding, handle.work) for handle in handles if handle.decoding is not None]
        for handle in handles:
            handle.work = []
        found = await _in_thread(pool, lambda: [decoding.run(work) for decoding, work in batch])
        for handle, decoded in zip(handles, found, strict=True):
            handle.is_decoding = False
            if not handle.is_over:
                # What a model's Processor put into a result may fail here, and must not hold up the others.
                with attributed(f"request {handle.id}: delivering", fail=functools.partial(self._fail, handle)):
                    self._deliver(handle, decoded)
                    self._decode_soon(handle)

    def _deliver(self, handle: RequestHandle, decoded: Decoded) -> None:
        now = time.monotonic()
        if decoded.chunks:
            self.metrics.record_chunks(handle.timeline, decoded.chunks, now=now)
            handle.put(decoded.chunks)
        for path in decoded.stops:
            self._apply(self.state.stop(handle.id, path=path))
        for lane, outputs in decoded.steps.items():
            self._apply(self.state.step_done(handle.id, lane, outputs=outputs, now=now))
        if decoded.error is not None:
            self._fail(handle, decoded.error)
        elif decoded.result is not None:
            times = {"first_output_s": handle.timeline.first_output or now, "total_s": now}
            decoded.result.timings |= {name: round(at - handle.timeline.submitted, 6) for name, at in times.items()}
            self._forget(handle, result=decoded.result)

    # -- what the state decided, and the end ------------------------------------------------------------------

    def _apply(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._end.send(action.message)
                if isinstance(action.message, messages.Open):
                    queued_s = time.monotonic() - action.message.arrival
                    self.metrics.record_start(action.message.task, queued_s=queued_s)
            elif (handle := self._handles.get(action.request_id)) is None:
                continue
            elif isinstance(action, End) and action.error is not None:
                self._forget(handle, error=action.error)
            else:
                handle.work.append(action)
                self._decode_soon(handle)

    def _abort(self, handle: RequestHandle) -> None:
        self._fail(handle, RequestError("the request was aborted", status=499, code="aborted"))

    def _fail(self, handle: RequestHandle, error: RequestError) -> None:
        """End a request with an error, wherever it is; the state may know better what the error is."""
        if not handle.is_over:
            self._apply(self.state.fail(handle.id, error, now=time.monotonic()))
        if not handle.is_over:  # it is over on the worker, and not decoded to the end
            self._forget(handle, error=error)
            if handle.request.session is not None:  # which has gone on, by what its client does not know
                with contextlib.suppress(RequestError):  # busy again, or gone
                    self.close_session(handle.request.session)

    def _forget(
        self, handle: RequestHandle, *, result: Result | None = None, error: RequestError | None = None
    ) -> None:
        if handle.is_over:
            return
        handle.finish(result=result, error=error)
        del self._handles[handle.id]
        if handle.encoding is not None:
            handle.encoding.cancel()
        self.metrics.record_end(handle.timeline, now=time.monotonic(), result=result, error=error)


async def _in_thread(pool: ThreadPoolExecutor, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    call = functools.partial(contained()(function), *arguments, **named)
    return await asyncio.get_running_loop().run_in_executor(pool, call)
