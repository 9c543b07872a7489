"""Where requests live between the wire and the worker: admission, queue, the walk state machine, deadlines.

Sans-IO: every method takes `now` (seconds of any monotonic clock) and an event, and returns actions for its caller.
No clock, thread, socket or tensor arithmetic inside. Runs in the server process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mstar.errors import RequestError
from mstar.ipc import messages
from mstar.ipc.messages import FromWorker, ToWorker
from mstar.plugin.graph import Graph
from mstar.plugin.session import SessionTable
from mstar.plugin.states import RequestView
from mstar.types import Emission, Encoded, Path, Request

logger = logging.getLogger(__name__)

# ---- actions: what the caller has to do, in order ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the worker."""

    message: ToWorker


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand a value to the request's decoding, after all earlier ones."""

    request_id: str
    emission: Emission


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


Action = Send | Deliver | RunStep | End

# ---- state ------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """One request that is not over.

    Args:
        lanes: lane -> the walk it runs, or will run after a Processor step.
        stored: named walk outputs that no walk has consumed yet, and what Processor steps returned.
        reasons: (lane, path as "0.2") -> why its last dynamic loop ended.
    """

    request_id: str
    submitted: float
    deadline: float | None
    session: str | None = None
    resumed: bool = False
    session_missing: RequestError | None = None  # what to say if the session had to be open
    is_queued: bool = False
    opened: float | None = None  # on the worker
    # set when the request has been encoded
    request: Request = field(init=False)
    encoded: Encoded = field(init=False)
    view: RequestView = field(init=False)
    lanes: dict[str, str] = field(default_factory=dict)
    stored: dict[str, Any] = field(default_factory=dict)
    reasons: dict[tuple[str, str], str] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def phase(self) -> str:
        return "running" if self.opened is not None else "queued" if self.is_queued else "being encoded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much is admitted.

    Args:
        max_running: requests open on the worker.
        max_queue: further requests that may wait.
        page_tokens: tokens in a page of a KV pool.
        timeout_s: life of a request; None: no limit.
    """

    max_running: int
    max_queue: int
    page_tokens: int = 1
    timeout_s: float | None = None


class EngineState:
    """All requests of one model, and what becomes of them."""

    def __init__(self, *, graph: Graph, limits: Limits, sessions: SessionTable) -> None:
        self._graph = graph
        self._limits = limits
        self._sessions = sessions
        self._entries: dict[str, Entry] = {}  # in order of arrival
        self._kept: dict[str, dict[str, Any]] = {}  # session -> walk outputs its next request starts with
        self._mean_s = 1.0  # how long requests take, for Retry-After
        self.plan: list[tuple[str, int, int, int]] | None = None  # from Ready
        self.max_model_len = 0  # likewise
        self.stats: messages.Stats | None = None
        self.dead: str | None = None
        self.draining = False

    # -- what is going on ------------------------------------------------------------------------------------

    @property
    def unready(self) -> str | None:
        """Why nothing can be served now; None: all is well."""
        if self.dead is not None:
            return f"the model's worker has stopped: {self.dead}"
        if self.plan is None:
            return "the model is loading"
        return "the server is shutting down" if self.draining else None

    @property
    def num_running(self) -> int:
        return sum(entry.opened is not None for entry in self._entries.values())

    @property
    def num_waiting(self) -> int:
        return len(self._entries) - self.num_running

    @property
    def retry_after_s(self) -> int:
        """When a refused client should try again, by how long requests took."""
        wait_s = self._mean_s * (self.num_waiting + 1) / self._limits.max_running
        return max(1, min(60, round(wait_s)))

    # -- events ----------------------------------------------------------------------------------------------

    def submit(self, request_id: str, *, session: str | None, now: float) -> list[Action]:
        """Take a request in before it is encoded. Raises RequestError: 503, 429, 409 or 410."""
        if (reason := self.unready) is not None:
            raise RequestError(f"{reason}; try again later", status=503, code="unavailable")
        most = self._limits.max_running + self._limits.max_queue
        if len(self._entries) >= most:
            message = f"{len(self._entries)} requests are running or waiting; the limit is {most}; "
            message += f"try again in {self.retry_after_s} s, or raise --max-queue"
            raise RequestError(message, status=429, code="queue_full")
        timeout_s = self._limits.timeout_s
        deadline = None if timeout_s is None else now + timeout_s
        entry = Entry(request_id=request_id, submitted=now, deadline=deadline, session=session)
        actions = self._enter_session(entry, now=now)
        self._entries[request_id] = entry
        return actions

    def is_resumed(self, request_id: str) -> bool:
        """Whether a submitted request goes on with an open session."""
        entry = self._entries.get(request_id)
        return entry is not None and entry.resumed

    def encoded(self, request: Request, encoded: Encoded, *, now: float) -> list[Action]:
        """A submitted request has been encoded: queue it, and open it if there is room."""
        entry = self._entries.get(request.id)
        if entry is None:
            return []
        try:
            self._check_memory(encoded)
        except RequestError as error:
            return self._end(entry, error, now=now)  # it was not open: no room has come free
        entry.request, entry.encoded, entry.is_queued = request, encoded, True
        entry.view = RequestView(
            request.task, request.outputs, request.params, encoded.fields, request.session, request.resumed
        )
        return self._open_waiting(now=now)

    def receive(self, message: FromWorker, *, now: float) -> list[Action]:
        """A message from the worker. Messages for requests that are over are ignored."""
        if isinstance(message, messages.Stats):
            self.stats = message
            return []
        if isinstance(message, messages.Ready):
            self.plan, self.max_model_len = message.plan, message.max_model_len
            return self._open_waiting(now=now)
        if isinstance(message, messages.Dead):
            self.dead = self.dead or message.reason  # the first says what went wrong
            error = RequestError(f"the model's worker has stopped: {message.reason}", status=503, code="worker_dead")
            return [action for entry in list(self._entries.values()) for action in self._end(entry, error, now=now)]
        entry = self._entries.get(message.request_id)
        if entry is None:
            return []
        if isinstance(message, messages.Emit):
            emission = Emission(message.name, message.path, message.value, message.final, message.reason)
            return [Deliver(entry.request_id, emission)]
        if isinstance(message, messages.Failed):
            error = RequestError(message.message, status=message.status, param=message.param, code=message.code)
            return self._settle(self._end(entry, error, now=now, is_freed=True), now=now)
        entry.stored |= message.outputs
        entry.reasons |= {(message.lane, path): reason for path, reason in message.reasons.items()}
        entry.counters, entry.counts = message.counters, message.counts
        return self._settle(self._guarded(self._follow, entry, message.lane, message.walk, now=now), now=now)

    def step_done(self, request_id: str, lane: str, *, outputs: dict[str, Any], now: float) -> list[Action]:
        """A Processor step has returned `outputs`: begin the walk it was run for."""
        entry = self._entries.get(request_id)
        if entry is None:
            return []
        entry.stored |= outputs
        return self._settle(self._guarded(self._begin, entry, {lane: entry.lanes[lane]}, now=now), now=now)

    def stop(self, request_id: str, *, path: Path) -> list[Action]:
        """A stop string was found in what item `path` emitted."""
        return [Send(messages.StopAt(request_id=request_id, path=path))] if request_id in self._entries else []

    def fail(self, request_id: str, error: RequestError, *, now: float) -> list[Action]:
        """End a request with an error, wherever it is: a failure on this side, or a client that is gone."""
        entry = self._entries.get(request_id)
        if entry is None:
            return []
        if error.status == 404 and error.param == "session" and entry.session_missing is not None:
            error = entry.session_missing  # the model cannot know whether it was never open, or has expired
        return self._settle(self._end(entry, error, now=now), now=now)

    def close_session(self, name: str, *, now: float) -> list[Action]:
        """Delete a session. Raises RequestError: 404, 409 or 410."""
        self._sessions.close(name, now=now)
        return self._drop_sessions([name])

    def tick(self, *, now: float) -> list[Action]:
        """Deadlines and expired sessions."""
        actions: list[Action] = self._drop_sessions(self._sessions.expire(now=now))
        for entry in list(self._entries.values()):
            if entry.deadline is not None and now >= entry.deadline:
                message = f"the request was {entry.phase} when its {self._limits.timeout_s:g} s were over; "
                message += "ask for less, or raise --request-timeout"
                error = RequestError(message, status=504, code="deadline_exceeded")
                actions += self._end(entry, error, now=now)
        return self._settle(actions, now=now)

    # -- inside ----------------------------------------------------------------------------------------------

    def _check_memory(self, encoded: Encoded) -> None:
        page = self._limits.page_tokens
        needed: dict[str, int] = {}
        for name, tokens in encoded.kv_tokens.items():
            module = name.rpartition(".")[0]
            needed[module] = needed.get(module, 0) + -(-tokens // page) * page
        for module, _, _, capacity in self.plan or ():
            if needed.get(module, 0) > capacity:
                message = f"the request needs up to {needed[module]} tokens of KV cache in {module!r}, which holds "
                message += f"{capacity}; shorten the input or the output, or raise --kv-cache-memory-bytes"
                raise RequestError(message, code="context_length_exceeded")

    def _enter_session(self, entry: Entry, *, now: float) -> list[Action]:
        """Open the request's session, or go on with it, whichever it can be."""
        name = entry.session
        if name is None:
            return []
        if self._sessions.is_open(name, now=now):
            self._sessions.resume(name, now=now)
            entry.resumed, entry.stored = True, dict(self._kept.get(name, {}))
            return []
        entry.session_missing = self._sessions.missing(name)
        return self._drop_sessions(self._sessions.open(name, now=now))

    def _leave_session(self, entry: Entry, *, is_kept: bool, now: float) -> None:
        if entry.session is None:
            return
        if not is_kept:
            self._sessions.discard(entry.session)
            self._kept.pop(entry.session, None)
            return
        self._sessions.release(entry.session, now=now)
        if entry.opened is not None:
            self._kept[entry.session] = entry.stored

    def _drop_sessions(self, names: Iterable[str]) -> list[Action]:
        for name in names:
            self._kept.pop(name, None)
        return [Send(messages.DropSession(session=name)) for name in names]

    def _settle(self, actions: list[Action], *, now: float) -> list[Action]:
        """The actions, and the opening of requests that wait for the room of one that ended."""
        if any(isinstance(action, End) for action in actions):
            return actions + self._open_waiting(now=now)
        return actions

    def _open_waiting(self, *, now: float) -> list[Action]:
        actions: list[Action] = []
        if self.plan is not None and self.dead is None:
            room = self._limits.max_running - self.num_running
            for entry in [e for e in self._entries.values() if e.is_queued and e.opened is None]:
                if room > 0:
                    actions += self._guarded(self._open, entry, now=now)
                    room -= entry.opened is not None
        return actions

    def _open(self, entry: Entry, *, now: float) -> list[Action]:
        request, encoded = entry.request, entry.encoded
        starts = self._graph.states.start(entry.view)
        if not starts:
            raise RequestError(f"no walk of the model starts for task {request.task!r} as asked", status=500)
        entry.lanes = {start.lane: start.walk for start in starts}
        begin = self._begin(entry, entry.lanes)
        entry.opened = now
        opening = messages.Open(
            request_id=entry.request_id, task=request.task, seed=request.seed, arrival=entry.submitted,
            params=msgspec.to_builtins(request.params) if request.params is not None else {}, fields=encoded.fields,
            samplers=encoded.samplers, sampler_prompts=encoded.sampler_prompts, content_keys=encoded.content_keys,
            outputs=request.outputs, session=request.session,
        )  # fmt: skip
        return [Send(opening), *begin]

    def _begin(self, entry: Entry, walks: dict[str, str], *, now: float = 0) -> list[Action]:
        """Start walks with what they need: stored outputs, which are consumed, or else encoded inputs."""
        names = dict.fromkeys(name for walk in walks.values() for name in self._inputs_of(walk))
        inputs: dict[str, Any] = {}
        for name in names:
            if name in entry.stored:
                inputs[name] = entry.stored.pop(name)
            elif name in entry.encoded.inputs:
                inputs[name] = entry.encoded.inputs[name]
            else:
                started = " and ".join(walks.values())
                raise RequestError(f"walk {started!r} needs {name!r}, which nothing gave", status=500)
        return [Send(messages.Begin(request_id=entry.request_id, walks=dict(walks), inputs=inputs))]

    def _inputs_of(self, walk: str) -> tuple[str, ...]:
        found = self._graph.walk(walk)
        assert found is not None, f"States name walk {walk!r}, which the graph lacks"
        return found.inputs

    def _follow(self, entry: Entry, lane: str, walk: str, *, now: float) -> list[Action]:
        then = self._graph.states.after(walk, entry.view)
        if then is None:
            entry.lanes.pop(lane, None)
            return [] if entry.lanes else self._end(entry, None, now=now)
        entry.lanes[lane] = then.walk
        if then.step is not None:
            return [RunStep(entry.request_id, lane, then.step, dict(entry.stored))]
        return self._begin(entry, {lane: then.walk}, now=now)

    def _guarded(self, act: Callable[..., list[Action]], entry: Entry, *arguments: Any, now: float) -> list[Action]:
        """Run a transition that asks the model's States; what they raise fails this request only."""
        try:
            return act(entry, *arguments, now=now)
        except RequestError as error:
            return self._end(entry, error, now=now)
        except Exception as error:
            logger.exception("request %s: the model's state machine failed", entry.request_id)
            return self._end(entry, internal_error(error), now=now)

    def _end(self, entry: Entry, error: RequestError | None, *, now: float, is_freed: bool = False) -> list[Action]:
        """Forget a request; `is_freed`: the worker has done so already."""
        actions: list[Action] = []
        if entry.opened is not None and not is_freed and self.dead is None:
            kind = messages.Close if error is None else messages.Abort
            actions.append(Send(kind(request_id=entry.request_id)))
        del self._entries[entry.request_id]
        self._leave_session(entry, is_kept=error is None or (entry.resumed and entry.opened is None), now=now)
        if error is None and entry.opened is not None:
            self._mean_s += 0.2 * (now - entry.opened - self._mean_s)
        return [*actions, End(entry, error)]


def internal_error(error: Exception) -> RequestError:
    """What a client sees of an error that was not meant for it."""
    return RequestError(f"internal error ({type(error).__name__}); the server's log has more", status=500)
