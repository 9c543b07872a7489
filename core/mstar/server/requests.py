"""Where requests live between the wire and the worker: admission, queue, the walk state machine, deadlines.

Sans-IO: every method takes `now` (seconds of any monotonic clock) and an event, and returns actions for its caller.
No clock, thread, socket or tensor arithmetic inside. Runs in the server process.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mstar.errors import PluginError, RequestError
from mstar.ipc import messages
from mstar.ipc.messages import FromWorker, ToWorker
from mstar.plugin.graph import Graph
from mstar.plugin.session import SessionTable
from mstar.plugin.states import RequestView
from mstar.types import Encoded, Path, Request

logger = logging.getLogger(__name__)

# ---- actions: what the caller has to do, in order ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the worker."""

    message: ToWorker


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run a Processor step once everything delivered before is decoded, then call `step_done`."""

    request_id: str
    lane: str
    step: str
    outputs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class End:
    """The request is over and already forgotten here; without an error its result follows what was delivered."""

    entry: Entry
    error: RequestError | None

    @property
    def request_id(self) -> str:
        return self.entry.request_id


Work = messages.Emit | RunStep | End
"""What a request's decoding does, in order: pass on a value for the client, run a step, or finish."""
Action = Send | Work


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a request is ended, if it is not over then.

    Args:
        remedy: what a client, or the operator, can do about it.
    """

    at: float
    timeout_s: float
    remedy: str

    def error(self, phase: str) -> RequestError:
        """What a request in this phase is ended with."""
        message = f"the request was {phase} when its {self.timeout_s:g} s were over; ask for less, or {self.remedy}"
        return RequestError(message, status=504, code="deadline_exceeded")


# ---- state ------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """One request that is not over.

    Args:
        deadline: None: it may take as long as it likes.
        session_missing: what to say if the session had to be open.
        opened: when it was sent to the worker.
        request, encoded: set when the request has been encoded.
        lanes: lane -> the walk it runs, or will run after a Processor step.
        stored: named walk outputs that no walk has consumed yet, and what Processor steps returned.
        reasons: (lane, path as "0.2") -> why its last dynamic loop ended.
    """

    request_id: str
    submitted: float
    deadline: Deadline | None = None
    session: str | None = None
    resumed: bool = False
    session_missing: RequestError | None = None
    opened: float | None = None
    request: Request = field(init=False)
    encoded: Encoded | None = None
    lanes: dict[str, str] = field(default_factory=dict)
    stored: dict[str, Any] = field(default_factory=dict)
    reasons: dict[tuple[str, str], str] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def phase(self) -> str:
        return "running" if self.opened is not None else "being encoded" if self.encoded is None else "queued"

    @property
    def view(self) -> RequestView:
        """What the model's States see."""
        assert self.encoded is not None
        asked, fields = self.request, self.encoded.fields
        return RequestView(asked.task, asked.outputs, asked.params, fields, asked.session, asked.resumed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much is admitted.

    Args:
        max_running: requests open on the worker.
        max_queue: further requests that may wait.
        page_tokens: tokens in a page of a KV pool.
        timeout_s: most that a request may live; None: no limit.
        stall_timeout_s: how long one step of the worker may take until it counts as stuck.
    """

    max_running: int
    max_queue: int
    page_tokens: int = 1
    timeout_s: float | None = None
    stall_timeout_s: float = math.inf

    def deadline(self, timeout_s: float | None, *, now: float) -> Deadline | None:
        """When a request ends that comes now and gives itself `timeout_s`."""
        limits = ((timeout_s, "give a longer 'timeout_s'"), (self.timeout_s, "raise --request-timeout"))
        given = [Deadline(now + seconds, seconds, remedy) for seconds, remedy in limits if seconds is not None]
        return min(given, key=lambda deadline: deadline.at, default=None)


class EngineState:
    """All requests of one model, and what becomes of them."""

    def __init__(self, *, graph: Graph, limits: Limits, sessions: SessionTable) -> None:
        self._graph = graph
        self.limits = limits
        self._sessions = sessions
        self._entries: dict[str, Entry] = {}  # in order of arrival
        self._kept: dict[str, dict[str, Any]] = {}  # session -> walk outputs its next request starts with
        self._decided: list[Action] = []  # since the last event
        self._mean_s = 1.0  # how long requests take, for Retry-After
        self.most_running = limits.max_running  # less while workers are missing
        self.missing: str | None = None  # why none is there
        self.plan: list[tuple[str, int, int, int]] | None = None  # from Ready
        self.max_model_len = 0  # likewise
        self.compiled = messages.Compiled()  # likewise
        self.stats: messages.Stats | None = None
        self.long_step: messages.Beat | None = None  # the worker's step, if it lasts
        self.num_stalls = 0
        self.dead: str | None = None
        self.draining = False

    # -- what is going on ------------------------------------------------------------------------------------

    @property
    def stuck(self) -> str | None:
        """Which of the worker's steps takes too long, and for how long already; None: none does."""
        step = self.long_step
        if self.plan is None or step is None or step.seconds < self.limits.stall_timeout_s:
            return None
        return f"{step.step} has been running for {step.seconds:.0f} s"

    @property
    def unhealthy(self) -> str | None:
        """Why the model cannot answer now: dead, loading, without a worker or stuck. None: all is well."""
        if self.dead is not None:
            return f"the model's worker has stopped: {self.dead}"
        if self.plan is not None and not self.most_running:
            return self.missing
        return self.stuck if self.plan is not None else self.loading

    @property
    def loading(self) -> str:
        """What is going on before the model can answer."""
        step = self.long_step
        return "the model is loading" + (f": {step.step}, for {step.seconds:.0f} s" if step is not None else "")

    @property
    def unready(self) -> str | None:
        """Why new requests are refused now; None: they are not."""
        return self.unhealthy or ("the server is shutting down" if self.draining else None)

    @property
    def num_running(self) -> int:
        return sum(entry.opened is not None for entry in self._entries.values())

    @property
    def num_waiting(self) -> int:
        return len(self._entries) - self.num_running

    @property
    def retry_after_s(self) -> int:
        """When a refused client should try again, by how long requests took."""
        wait_s = self._mean_s * (self.num_waiting + 1) / self.limits.max_running
        return max(1, min(60, round(wait_s)))

    # -- events ----------------------------------------------------------------------------------------------

    def submit(
        self, request_id: str, *, session: str | None, deadline: Deadline | None = None, now: float
    ) -> list[Action]:
        """Take a request in before it is encoded. Raises RequestError: 503, 429, 409 or 410."""
        if (reason := self.unready) is not None:
            then = "try again later" if self.dead is None else "the server has to be restarted"
            raise RequestError(f"{reason}; {then}", status=503, code="unavailable")
        most = self.limits.max_running + self.limits.max_queue
        if len(self._entries) >= most:
            message = f"{len(self._entries)} requests are running or waiting; the limit is {most}; "
            message += f"try again in {self.retry_after_s} s, or raise --max-queue"
            raise RequestError(message, status=429, code="queue_full")
        entry = Entry(request_id=request_id, submitted=now, deadline=deadline, session=session)
        self._enter_session(entry, now=now)
        self._entries[request_id] = entry
        return self._actions(now=now)

    def is_resumed(self, request_id: str) -> bool:
        """Whether a submitted request goes on with an open session."""
        entry = self._entries.get(request_id)
        return entry is not None and entry.resumed

    def kept(self, request_id: str) -> dict[str, Any]:
        """What a submitted request's session has kept for it, by name."""
        entry = self._entries.get(request_id)
        return dict(entry.stored) if entry is not None else {}

    def encoded(self, request: Request, encoded: Encoded, *, now: float) -> list[Action]:
        """A submitted request has been encoded: queue it, and open it if there is room."""
        if (entry := self._entries.get(request.id)) is not None:
            with self._failing_alone(entry, now=now):
                self._check_memory(encoded)
                entry.request, entry.encoded = request, encoded
                self._drop_sessions(self._sessions.make_room(num_opening=self._num_opening))
        return self._actions(now=now)

    def receive(self, message: FromWorker, *, now: float) -> list[Action]:
        """A message from the worker. Messages for requests that are over are ignored."""
        if isinstance(message, messages.Stats):
            self.stats = message
        elif isinstance(message, messages.Beat):
            self._beat(message)
        elif isinstance(message, messages.Ready):
            self.plan, self.max_model_len, self.compiled = message.plan, message.max_model_len, message.compiled
            self.long_step = None
        elif isinstance(message, messages.Capacity):
            self.most_running, self.missing = message.most_running, message.missing
        elif isinstance(message, messages.SessionLost):
            self._lose_session(message.session, now=now)
        elif isinstance(message, messages.Dead):
            self.dead = self.dead or message.reason  # the first says what went wrong
            error = RequestError(f"the model's worker has stopped: {message.reason}", status=503, code="worker_dead")
            for entry in list(self._entries.values()):
                self._end(entry, error, now=now)
        elif (found := self._entries.get(message.request_id)) is None:
            return []
        elif isinstance(message, messages.Emit):
            return [message]  # by far the most frequent; it changes nothing here
        elif isinstance(message, messages.Failed):
            error = RequestError(message.message, status=message.status, param=message.param, code=message.code)
            self._end(found, error, now=now, is_freed=True)
        else:
            assert isinstance(message, messages.WalkDone), message
            found.stored |= message.outputs
            found.reasons |= {(message.lane, path): reason for path, reason in message.reasons.items()}
            found.counters, found.counts = message.counters, message.counts
            with self._failing_alone(found, now=now):
                self._follow(found, message.lane, message.walk, now=now)
        return self._actions(now=now)

    def step_done(self, request_id: str, lane: str, *, outputs: dict[str, Any], now: float) -> list[Action]:
        """A Processor step has returned `outputs`: begin the walk it was run for."""
        if (entry := self._entries.get(request_id)) is not None:
            entry.stored |= outputs
            with self._failing_alone(entry, now=now):
                self._begin(entry, {lane: entry.lanes[lane]})
        return self._actions(now=now)

    def stop(self, request_id: str, *, path: Path) -> list[Action]:
        """A stop string was found in what item `path` emitted."""
        return [Send(messages.StopAt(request_id=request_id, path=path))] if request_id in self._entries else []

    def fail(self, request_id: str, error: RequestError, *, now: float) -> list[Action]:
        """End a request with an error, wherever it is: a failure on this side, or a client that is gone."""
        if (entry := self._entries.get(request_id)) is not None:
            if error.status == 404 and error.param == "session" and entry.session_missing is not None:
                error = entry.session_missing  # the model cannot know whether it was never open, or has expired
            self._end(entry, error, now=now)
        return self._actions(now=now)

    def close_session(self, name: str, *, now: float) -> list[Action]:
        """Delete a session. Raises RequestError: 404, 409 or 410."""
        self._sessions.close(name, now=now)
        self._drop_sessions([name])
        return self._actions(now=now)

    def tick(self, *, now: float) -> list[Action]:
        """Deadlines and expired sessions."""
        self._drop_sessions(self._sessions.expire(now=now))
        for entry in list(self._entries.values()):
            if entry.deadline is not None and now >= entry.deadline.at:
                self._end(entry, entry.deadline.error(entry.phase), now=now)
        return self._actions(now=now)

    # -- inside: each adds to what is decided ------------------------------------------------------------------

    def _actions(self, *, now: float) -> list[Action]:
        """What the event led to, after opening waiting requests that there is room for now."""
        if self.plan is not None and self.dead is None:
            room = self.most_running - self.num_running
            for entry in [e for e in self._entries.values() if e.phase == "queued"]:
                if room > 0:
                    with self._failing_alone(entry, now=now):
                        self._open(entry, now=now)
                        room -= 1
        decided, self._decided = self._decided, []
        return decided

    def _beat(self, beat: messages.Beat) -> None:
        was_stuck = self.stuck
        self.long_step = beat if beat.seconds else None
        if self.stuck and not was_stuck:
            self.num_stalls += 1
            logger.error("%s; new requests are refused until it ends (--stall-timeout)", self.stuck)
        elif was_stuck and not self.stuck:
            logger.warning("%s, and is over: requests are taken in again", was_stuck)

    def _send(self, message: ToWorker) -> None:
        self._decided.append(Send(message))

    def _failing_alone(self, entry: Entry, *, now: float) -> contextlib.AbstractContextManager[None]:
        doing = f"request {entry.request_id}: what follows"
        return attributed(doing, fail=lambda error: self._end(entry, error, now=now))

    def _check_memory(self, encoded: Encoded) -> None:
        page = self.limits.page_tokens
        needed: Counter[str] = Counter()
        known = [module for module, _, _, capacity in self.plan or () if capacity]
        for name, tokens in encoded.kv_tokens.items():
            module = name.rpartition(".")[0]
            if module not in known:
                raise PluginError(f"kv_tokens names {name!r}; modules with KV are {', '.join(known) or 'none'}")
            if self.max_model_len is not None and tokens > self.max_model_len:
                message = f"the request needs up to {tokens} tokens in {name!r}; the limit is {self.max_model_len}; "
                message += "shorten the input or the output, or raise --max-model-len"
                raise RequestError(message, code="context_length_exceeded")
            needed[module] += -(-tokens // page) * page
        for module, _, _, capacity in self.plan or ():
            if needed[module] > capacity:
                message = f"the request needs up to {needed[module]} tokens of KV cache in {module!r}, which holds "
                message += f"{capacity}; shorten the input or the output, or raise --kv-cache-memory-bytes"
                raise RequestError(message, code="context_length_exceeded")

    def _open(self, entry: Entry, *, now: float) -> None:
        request, encoded = entry.request, entry.encoded
        assert encoded is not None
        starts = self._graph.states.start(entry.view)
        if not starts:
            raise RequestError(f"no walk of the model starts for task {request.task!r} as asked", status=500)
        entry.lanes = {start.lane: start.walk for start in starts}
        entry.opened = now
        params = msgspec.to_builtins(request.params) if request.params is not None else {}
        self._send(
            messages.Open(
                request_id=entry.request_id, task=request.task, seed=request.seed, arrival=entry.submitted,
                params=params, fields=encoded.fields, samplers=encoded.samplers,
                sampler_prompts=encoded.sampler_prompts, content_keys=encoded.content_keys, outputs=request.outputs,
                session=request.session, resumed=entry.resumed,
            )
        )  # fmt: skip
        self._begin(entry, entry.lanes)

    def _begin(self, entry: Entry, walks: dict[str, str]) -> None:
        """Start walks with what they need: stored outputs, which are consumed, or else encoded inputs."""
        assert entry.encoded is not None
        inputs: dict[str, Any] = {}
        for walk in map(self._graph.walk, walks.values()):
            assert walk is not None, f"States name a walk of {walks}, which the graph lacks"
            for name in (name for name in walk.inputs if name not in inputs):
                source = entry.stored if name in entry.stored else entry.encoded.inputs
                if name not in source:
                    raise RequestError(f"walk {walk.name!r} needs {name!r}, which nothing gave", status=500)
                inputs[name] = source[name]
                entry.stored.pop(name, None)
        self._send(messages.Begin(request_id=entry.request_id, walks=dict(walks), inputs=inputs))

    def _follow(self, entry: Entry, lane: str, walk: str, *, now: float) -> None:
        then = self._graph.states.after(walk, entry.view)
        if then is None:
            entry.lanes.pop(lane, None)
            if not entry.lanes:
                self._end(entry, None, now=now)
            return
        entry.lanes[lane] = then.walk
        if then.step is None:
            self._begin(entry, {lane: then.walk})
        else:
            self._decided.append(RunStep(entry.request_id, lane, then.step, dict(entry.stored)))

    def _end(self, entry: Entry, error: RequestError | None, *, now: float, is_freed: bool = False) -> None:
        """Forget a request; `is_freed`: the worker has done so already."""
        if entry.opened is not None and not is_freed and self.dead is None:
            kind = messages.Close if error is None else messages.Abort
            self._send(kind(request_id=entry.request_id))
        if error is None and entry.opened is not None:
            self._mean_s += 0.2 * (now - entry.opened - self._mean_s)
        del self._entries[entry.request_id]
        if entry.session is not None:
            self._leave_session(entry, entry.session, failed=error is not None, now=now)
        self._decided.append(End(entry, error))

    # -- sessions ----------------------------------------------------------------------------------------------

    @property
    def _num_opening(self) -> int:
        """Sessions whose first request is still being encoded."""
        entries = self._entries.values()
        return sum(entry.session is not None and not entry.resumed and entry.encoded is None for entry in entries)

    def _enter_session(self, entry: Entry, *, now: float) -> None:
        """Open the request's session, or go on with it, whichever it can be."""
        name = entry.session
        if name is None:
            return
        if self._sessions.is_open(name, now=now):
            self._sessions.resume(name, now=now)
            entry.resumed, entry.stored = True, dict(self._kept.get(name, {}))
        else:
            entry.session_missing = self._sessions.missing(name)
            self._drop_sessions(self._sessions.open(name, now=now))

    def _leave_session(self, entry: Entry, name: str, *, failed: bool, now: float) -> None:
        if not failed:
            self._kept[name] = entry.stored
        elif entry.opened is not None or not entry.resumed:  # else the session is as it was
            self._sessions.discard(name)
            self._kept.pop(name, None)
            return
        self._sessions.release(name, now=now)

    def _lose_session(self, name: str, *, now: float) -> None:
        """Forget a session that is not there any more, and end the request that was about to go on with it."""
        self._sessions.discard(name)
        self._kept.pop(name, None)
        message = f"the worker that kept session {name!r} has ended; open it anew with all inputs"
        for entry in [e for e in self._entries.values() if e.session == name and e.resumed and e.opened is None]:
            entry.resumed = False
            self._end(entry, RequestError(message, status=410, param="session", code="session_lost"), now=now)

    def _drop_sessions(self, names: Iterable[str]) -> None:
        for name in names:
            self._kept.pop(name, None)
            self._send(messages.DropSession(session=name))


# ---- errors -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def attributed(doing: str, *, fail: Callable[[RequestError], object]) -> Iterator[None]:
    """Give what is raised inside to `fail`. Of an error not meant for a client, it gets the type; the log, the rest."""
    try:
        yield
    except RequestError as error:
        fail(error)
    except Exception as error:
        logger.exception("%s failed", doing)
        fail(RequestError(f"internal error ({type(error).__name__}); the server's log has more", status=500))


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """For a model's code in a thread: what asyncio takes for its own, or for the process's end, is a PluginError."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise
        raise PluginError(f"the model's code raised {type(error).__name__}: {error}") from error
