"""The engine: one model's requests, from validated wire type to chunks. The thin asynchronous shell of `requests`.

Runs on the server's event loop and keeps it free: media, tokenisers and the model's Processor work in thread pools.
Knows the channel to the worker, and nothing about HTTP or where the worker runs.
"""

from __future__ import annotations

import asyncio
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
from mstar.plugin.graph import Graph
from mstar.plugin.processor import Processor
from mstar.plugin.session import SessionTable
from mstar.plugin.spec import Limits as SpecLimits
from mstar.plugin.spec import ModelSpec
from mstar.server.native import GenerateRequest, read_request
from mstar.server.requests import Action, Deliver, End, EngineState, Entry, Limits, RunStep, Send, internal_error
from mstar.server.results import Result
from mstar.server.streams import Decoded, Decoding
from mstar.types import Chunk, Emission, Encoded, Request

logger = logging.getLogger(__name__)

_ENCODE_THREADS = 4
_DECODE_JOBS = 2  # the second goes on while the first is held up by one slow request
_TICK_S = 0.5


class RequestHandle:
    """A request that has been taken in: `async for chunk in handle`, then `handle.result`.

    Iterating raises the RequestError the request failed with, after the chunks that came before it.
    """

    def __init__(self, request_id: str, *, abort: Callable[[str], None], submitted: float) -> None:
        self.id = request_id
        self.result: Result | None = None
        self.error: RequestError | None = None
        self._abort = abort
        self._changed = asyncio.Event()
        self._chunks: deque[Chunk] = deque()
        # Filled by the engine; `request` and `decoding` once the request has been encoded.
        self.submitted = submitted
        self.first_output: float | None = None
        self._request: Request | None = None
        self.decoding: Decoding | None = None
        self.pending: deque[Emission | RunStep | End] = deque()
        self.is_decoding = False

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
        while not self._chunks:
            if self.error is not None:
                raise self.error
            if self.result is not None:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._chunks.popleft()

    def abort(self) -> None:
        """Stop the request and free what it holds, wherever it is; does nothing once it is over."""
        if not self.is_over:
            self._abort(self.id)

    async def encoded(self) -> None:
        """Wait until the request is in the queue. Raises what it failed with before."""
        while self.decoding is None:
            if self.error is not None:
                raise self.error
            self._changed.clear()
            await self._changed.wait()

    def put(self, *chunks: Chunk) -> None:
        self._chunks.extend(chunks)
        self._changed.set()

    def accept(self, request: Request, decoding: Decoding) -> None:
        self._request, self.decoding = request, decoding
        self._changed.set()

    def finish(self, *, result: Result | None = None, error: RequestError | None = None) -> None:
        self.result, self.error = result, error
        self.pending.clear()
        self._changed.set()


class Engine:
    """Serves one model over one channel to its worker.

    Example:
        handle = await engine.submit(GenerateRequest(inputs=[TextInput(text="hello")]))
        async for chunk in handle: ...
        print(handle.result.finish_reason)
    """

    def __init__(
        self,
        *,
        spec: ModelSpec,
        graph: Graph,
        make_processor: Callable[[SpecLimits], Processor],
        config: EngineConfig,
        end: EngineEnd,
        base: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self.graph = graph
        self.model_names = config.served_model_name or tuple(dict.fromkeys((*config.model_names, spec.name)))
        limits = Limits(
            max_running=config.max_num_seqs, max_queue=config.max_queue, page_tokens=config.block_size,
            timeout_s=config.request_timeout_s,
        )  # fmt: skip
        sessions = SessionTable(ttl_s=config.session_ttl_s, max_sessions=config.max_sessions)
        self.state = EngineState(graph=graph, limits=limits, sessions=sessions)
        self._make_processor = make_processor
        self._processor: Processor | None = None  # made when the worker has said what fits
        self._end = end
        self._base = base
        self._clock = clock
        self._seeds: random.Random = random.SystemRandom() if config.seed is None else random.Random(config.seed)
        self._handles: dict[str, RequestHandle] = {}
        self._to_decode: dict[str, RequestHandle] = {}
        self._num_decode_jobs = 0
        self._encode_pool = ThreadPoolExecutor(_ENCODE_THREADS, thread_name_prefix="mstar-encode")
        self._decode_pool = ThreadPoolExecutor(_DECODE_JOBS, thread_name_prefix="mstar-decode")
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Wait until the worker can answer, then make the model's Processor. Raises ConfigError if it cannot."""
        self._spawn(self._read())
        self._spawn(self._tick())
        while self.state.plan is None and self.state.dead is None:
            self._changed.clear()
            await self._changed.wait()
        if self.state.dead is not None:
            raise ConfigError(f"the model could not be started: {self.state.dead}")
        limits = SpecLimits(max_model_len=self.state.max_model_len)
        loop = asyncio.get_running_loop()
        self._processor = await loop.run_in_executor(self._encode_pool, self._make_processor, limits)

    def drain(self) -> None:
        """Refuse new requests from now on; those running go on."""
        self.state.draining = True

    async def close(self) -> None:
        """End what is left with 503, tell the worker to stop, and free all threads."""
        self.drain()
        error = RequestError("the server is shutting down; try again later", status=503, code="unavailable")
        for request_id in list(self._handles):
            self._apply(self.state.fail(request_id, error, now=self._clock()))
        for handle in list(self._handles.values()):  # ended, but not decoded to the end
            self._forget(handle, error=error)
        self._end.send(messages.Shutdown())
        self._end.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._encode_pool.shutdown(wait=False, cancel_futures=True)
        self._decode_pool.shutdown(wait=False, cancel_futures=True)

    # -- requests --------------------------------------------------------------------------------------------

    @property
    def num_active(self) -> int:
        """Requests that have not been decoded to their end."""
        return len(self._handles)

    async def submit(self, wire: GenerateRequest) -> RequestHandle:
        """Take a request in and encode it. Raises RequestError if it is refused; cancelling aborts it."""
        now = self._clock()
        handle = RequestHandle(f"gen-{uuid.uuid4().hex}", abort=self._abort, submitted=now)
        self._apply(self.state.submit(handle.id, session=wire.session, now=now))
        self._handles[handle.id] = handle
        self._spawn(self._encode(handle, wire))
        try:
            await handle.encoded()
        except asyncio.CancelledError:
            handle.abort()
            raise
        return handle

    def close_session(self, name: str) -> None:
        """Delete a session. Raises RequestError: 404, 409 or 410."""
        self._apply(self.state.close_session(name, now=self._clock()))

    def _abort(self, request_id: str) -> None:
        error = RequestError("the request was aborted", status=499, code="aborted")
        actions = self.state.fail(request_id, error, now=self._clock())
        self._apply(actions)
        if not actions and (handle := self._handles.get(request_id)) is not None:
            self._forget(handle, error=error)  # over on the worker; not decoded to the end

    # -- tasks -----------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self) -> None:
        try:
            while True:
                for message in await self._end.receive():
                    self._apply(self.state.receive(message, now=self._clock()))
                if self.state.plan is not None or self.state.dead is not None:
                    self._changed.set()
        except Exception as error:  # a fault of ours: what runs can never end, so say so instead of hanging
            logger.exception("the engine failed")
            reason = f"the engine failed ({type(error).__name__}: {error})"
            self._apply(self.state.receive(messages.Dead(reason=reason), now=self._clock()))
            self._changed.set()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._apply(self.state.tick(now=self._clock()))

    async def _encode(self, handle: RequestHandle, wire: GenerateRequest) -> None:
        seed, resumed = self._seeds.getrandbits(63), self.state.is_resumed(handle.id)
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._encode_pool, self._read_and_encode, handle, wire, seed, resumed)
        if handle.is_over:
            return
        if isinstance(found, RequestError):
            self._apply(self.state.fail(handle.id, found, now=self._clock()))
            return
        request, encoded, decoding = found
        actions = self.state.encoded(request, encoded, now=self._clock())
        if not any(isinstance(action, End) and action.entry.request_id == handle.id for action in actions):
            handle.accept(request, decoding)
        self._apply(actions)

    def _read_and_encode(
        self, handle: RequestHandle, wire: GenerateRequest, seed: int, resumed: bool
    ) -> tuple[Request, Encoded, Decoding] | RequestError:
        try:
            request = read_request(
                wire,
                spec=self.spec,
                model_names=self.model_names,
                request_id=handle.id,
                seed=seed,
                resumed=resumed,
                base=self._base,
            )
            assert self._processor is not None
            encoded = self._processor.encode(request)
            tensors = self.spec.tasks[request.task].tensors_out
            decoding = Decoding(self._processor, request=request, encoded=encoded, tensors_out=tensors)
            return request, encoded, decoding
        except RequestError as error:
            return error
        except Exception as error:
            logger.exception("request %s: the model's processor failed to encode it", handle.id)
            return internal_error(error)

    # -- what the state decided ------------------------------------------------------------------------------

    def _apply(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._end.send(action.message)
            elif isinstance(action, Deliver):
                self._decode_later(self._handles.get(action.request_id), action.emission)
            elif isinstance(action, RunStep):
                self._decode_later(self._handles.get(action.request_id), action)
            elif action.error is not None:
                handle = self._handles.get(action.entry.request_id)
                if handle is not None:
                    self._forget(handle, error=action.error)
            else:
                self._decode_later(self._handles.get(action.entry.request_id), action)

    def _decode_later(self, handle: RequestHandle | None, work: Emission | RunStep | End) -> None:
        if handle is not None:
            handle.pending.append(work)
            self._schedule_decoding(handle)

    def _schedule_decoding(self, handle: RequestHandle) -> None:
        if handle.is_decoding or not handle.pending:
            return
        self._to_decode[handle.id] = handle
        if self._num_decode_jobs < _DECODE_JOBS:
            self._num_decode_jobs += 1
            self._spawn(self._decode())

    async def _decode(self) -> None:
        """Decode what is pending, all requests in one trip to a thread; at most one trip at a time for each."""
        loop = asyncio.get_running_loop()
        try:
            while self._to_decode:
                handles, self._to_decode = list(self._to_decode.values()), {}
                batch = []
                for handle in handles:
                    handle.is_decoding = True
                    if isinstance(handle.pending[0], RunStep):
                        self._spawn(self._step(handle, handle.pending.popleft()))  # type: ignore[arg-type]
                    else:
                        batch.append((handle, *_take_pending(handle)))
                if batch:
                    done = await loop.run_in_executor(self._decode_pool, _decode_all, batch)
                    for (handle, _, end), decoded in zip(batch, done, strict=True):
                        self._deliver(handle, decoded, end)
        finally:
            self._num_decode_jobs -= 1

    async def _step(self, handle: RequestHandle, step: RunStep) -> None:
        assert handle.decoding is not None
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._encode_pool, handle.decoding.step, step.step, step.outputs)
        self._release(handle)
        now = self._clock()
        if isinstance(found, RequestError):
            self._apply(self.state.fail(handle.id, found, now=now))
        else:
            self._apply(self.state.step_done(handle.id, step.lane, outputs=found, now=now))

    def _deliver(self, handle: RequestHandle, decoded: Decoded, end: End | None) -> None:
        if handle.is_over:
            return
        now = self._clock()
        if decoded.chunks:
            if handle.first_output is None:
                handle.first_output = now
            handle.put(*decoded.chunks)
        for path in decoded.stops:
            self._apply(self.state.stop(handle.id, path=path))
        if decoded.error is not None:
            self._apply(self.state.fail(handle.id, decoded.error, now=now))
            self._forget(handle, error=decoded.error)
        elif decoded.result is not None:
            assert end is not None
            decoded.result.timings = _timings(end.entry, first_output=handle.first_output, now=now)
            self._forget(handle, result=decoded.result)
        else:
            self._release(handle)

    def _release(self, handle: RequestHandle) -> None:
        handle.is_decoding = False
        self._schedule_decoding(handle)

    def _forget(
        self, handle: RequestHandle, *, result: Result | None = None, error: RequestError | None = None
    ) -> None:
        if not handle.is_over:
            handle.finish(result=result, error=error)
        self._handles.pop(handle.id, None)
        self._to_decode.pop(handle.id, None)


def _take_pending(handle: RequestHandle) -> tuple[list[Emission], End | None]:
    """What a request's next trip decodes: all up to a step, or up to its end."""
    emissions: list[Emission] = []
    while handle.pending and isinstance(handle.pending[0], Emission):
        emissions.append(handle.pending.popleft())  # type: ignore[arg-type]
    end = handle.pending.popleft() if handle.pending and isinstance(handle.pending[0], End) else None
    return emissions, end  # type: ignore[return-value]


def _decode_all(batch: list[tuple[RequestHandle, list[Emission], End | None]]) -> list[Decoded]:
    done = []
    for handle, emissions, end in batch:
        assert handle.decoding is not None
        done.append(handle.decoding.run(emissions, end=None if end is None else end.entry))
    return done


def _timings(entry: Entry, *, first_output: float | None, now: float) -> dict[str, float]:
    assert entry.opened is not None
    times = {"queued_s": entry.opened, "first_output_s": now if first_output is None else first_output, "total_s": now}
    return {name: round(at - entry.submitted, 6) for name, at in times.items()}
