"""Which of several equal workers serves which request, and what the engine is told of them. Sans-IO.

Stands between the engine, which takes it for one worker, and workers that come and go: a request goes to the one with
the fewest, everything about it follows, and a session stays where it was opened. Requests of a worker that has ended
fail, others never notice. Runs in the server process; no clock, process or socket inside.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from mstar.ipc import messages
from mstar.ipc.messages import FromWorker, ToWorker, WorkerStatus

_MOST_RESTARTS = 5
_FIRST_DELAY_S = 0.25
_SOUND_S = 60.0


@dataclass(slots=True, kw_only=True)
class Replica:
    """One worker: what its process has said, and what it serves.

    Args:
        requests: request -> its session, of those that run there.
        num_finished: requests that it has finished since its process started.
        failures: its processes that ended one after the other without having finished a request, or lived long.
    """

    pid: int | None = None
    ready: messages.Ready | None = None
    stats: messages.Stats | None = None
    long_step: messages.Beat | None = None
    reason: str | None = None  # its own word on why it ends, or ours on how its last process did
    is_given_up: bool = False
    requests: dict[str, str | None] = field(default_factory=dict)
    num_finished: int = 0
    num_restarts: int = 0
    failures: int = 0
    turn: int = 0  # when it was last chosen

    @property
    def is_ready(self) -> bool:
        return self.ready is not None

    @property
    def state(self) -> str:
        if self.is_given_up:
            return "dead"
        return "ready" if self.is_ready else "loading" if self.pid is not None else "restarting"


class Routing:
    """The workers of one model.

    Args:
        num_workers: how many there are; they are told apart by their index.
        max_running_each: requests that each may run at once.
        stall_timeout_s: how long one step may take, or a process be silent.
        start_timeout_s: how long a process may take to be ready.
    """

    def __init__(
        self, num_workers: int, *, max_running_each: int, stall_timeout_s: float, start_timeout_s: float
    ) -> None:
        self.replicas = [Replica() for _ in range(num_workers)]
        self._max_running_each = max_running_each
        self._stall_timeout_s = stall_timeout_s
        self._start_timeout_s = start_timeout_s
        self._placed: dict[str, int] = {}  # request -> worker
        self._sessions: dict[str, int] = {}  # session -> worker, while it is open
        self._num_chosen = 0
        self.has_started = False  # all have been ready once

    def status(self) -> list[WorkerStatus]:
        """Each worker, for an operator."""
        return [
            WorkerStatus(
                worker=index, state=replica.state, pid=replica.pid, running=len(replica.requests),
                restarts=replica.num_restarts, detail=_detail(replica),
            )
            for index, replica in enumerate(self.replicas)
        ]  # fmt: skip

    # -- messages --------------------------------------------------------------------------------------------

    def to_workers(self, message: ToWorker) -> list[tuple[int, ToWorker]]:
        """Where a message of the engine's goes. What concerns nothing that runs goes nowhere."""
        if isinstance(message, messages.Open):
            if (worker := self._choose(message.session)) is None:
                return []
            self._placed[message.request_id] = worker
            self.replicas[worker].requests[message.request_id] = message.session
            if message.session is not None:
                self._sessions[message.session] = worker
            return [(worker, message)]
        if isinstance(message, messages.Shutdown):
            return [(worker, message) for worker, replica in enumerate(self.replicas) if replica.pid is not None]
        if isinstance(message, messages.DropSession):
            keeper = self._sessions.pop(message.session, None)
            return [] if keeper is None else [(keeper, message)]
        found = self._placed.get(message.request_id)
        if found is not None and isinstance(message, messages.Close | messages.Abort):
            self.replicas[found].num_finished += isinstance(message, messages.Close)
            self._forget(message.request_id, keeps_session=isinstance(message, messages.Close))
        return [] if found is None else [(found, message)]

    def from_worker(self, worker: int, message: FromWorker) -> list[FromWorker]:
        """What the engine is told when a worker says `message`."""
        replica = self.replicas[worker]
        if isinstance(message, messages.Emit | messages.WalkDone):
            return [message]
        if isinstance(message, messages.Failed):
            self._forget(message.request_id, keeps_session=False)
            return [message]
        if isinstance(message, messages.Stats):
            replica.stats = message
            return [self._stats()]
        if isinstance(message, messages.Beat):
            replica.long_step = message if message.seconds else None
            return [] if self.has_started else [self._loading()]
        if isinstance(message, messages.Ready):
            return self._ready(replica, message)
        if isinstance(message, messages.Dead):
            replica.reason = message.reason  # its process ends now, and how that ends says less
        return []

    # -- processes -------------------------------------------------------------------------------------------

    def started(self, worker: int, *, pid: int) -> None:
        """A process has been started for a worker."""
        replica = self.replicas[worker]
        replica.pid, replica.num_finished, replica.reason, replica.long_step = pid, 0, None, None

    def overdue(self, worker: int, *, silent_s: float, age_s: float) -> str | None:
        """Why a worker's process has to be killed; None: it has not.

        Args:
            silent_s: since it was last heard.
            age_s: since it was started.
        """
        replica = self.replicas[worker]
        step = replica.long_step
        if not replica.is_ready:
            if age_s < self._start_timeout_s:
                return None
            at = f" ({step.step} for {step.seconds:.0f} s)" if step is not None else ""
            return f"it was not ready after {self._start_timeout_s:g} s{at}; raise --start-timeout"
        if step is not None and step.seconds >= self._stall_timeout_s:
            return f"{step.step} had been running for {step.seconds:.0f} s (--stall-timeout)"
        if silent_s >= self._stall_timeout_s:
            return f"it had not been heard of for {silent_s:.0f} s (--stall-timeout)"
        return None

    def ended(self, worker: int, reason: str, *, age_s: float) -> tuple[list[FromWorker], float | None]:
        """A worker's process has ended.

        Args:
            reason: how, unless it has said so itself.
            age_s: for how long it was there.

        Returns what the engine is told, and in how many seconds another is to be started; None: never.
        """
        replica = self.replicas[worker]
        is_sound = replica.is_ready and (replica.num_finished > 0 or age_s >= _SOUND_S)
        replica.failures = 1 if is_sound else replica.failures + 1
        replica.reason = f"worker {worker} has ended: {replica.reason or reason}"
        replica.pid = replica.ready = replica.long_step = replica.stats = None
        replica.is_given_up = not self.has_started or replica.failures > _MOST_RESTARTS
        if not self.has_started or all(other.is_given_up for other in self.replicas):
            return [messages.Dead(reason=replica.reason)], None
        told: list[FromWorker] = [self._capacity()]  # first, so that what is failed makes no room for others
        for name in list(replica.requests):
            self._forget(name, keeps_session=True)
            told.append(messages.Failed(request_id=name, message=replica.reason, status=503, code="worker_lost"))
        for session in [name for name, keeper in self._sessions.items() if keeper == worker]:
            del self._sessions[session]
            told.append(messages.SessionLost(session=session))
        told.append(self._stats())
        if replica.is_given_up:
            replica.reason += f"; given up after {_MOST_RESTARTS} restarts in a row"
            return told, None
        replica.num_restarts += 1
        return told, _FIRST_DELAY_S * 2 ** (replica.failures - 1)

    # -- inside ----------------------------------------------------------------------------------------------

    def _choose(self, session: str | None) -> int | None:
        if session is not None and session in self._sessions:
            return self._sessions[session]
        ready = [worker for worker, replica in enumerate(self.replicas) if replica.is_ready]
        if not ready:
            return None
        worker = min(ready, key=lambda index: (len(self.replicas[index].requests), self.replicas[index].turn))
        self._num_chosen += 1
        self.replicas[worker].turn = self._num_chosen
        return worker

    def _forget(self, request_id: str, *, keeps_session: bool) -> None:
        worker = self._placed.pop(request_id, None)
        if worker is not None:
            session = self.replicas[worker].requests.pop(request_id)
            if session is not None and not keeps_session:
                self._sessions.pop(session, None)

    def _ready(self, replica: Replica, message: messages.Ready) -> list[FromWorker]:
        replica.ready, replica.long_step = message, None
        found = [other.ready for other in self.replicas if other.ready is not None]
        if self.has_started:
            return [self._capacity()]
        if len(found) < len(self.replicas):
            return [self._loading()]
        self.has_started = True
        compiled = messages.Compiled(
            num_methods=min(one.compiled.num_methods for one in found),
            num_built=sum(one.compiled.num_built for one in found),
            seconds=max(one.compiled.seconds for one in found),
        )
        most = min(one.max_model_len for one in found)
        return [self._capacity(), messages.Ready(plan=found[0].plan, max_model_len=most, compiled=compiled)]

    def _loading(self) -> messages.Beat:
        """What the worker that loads longest is at."""
        steps = [(r.long_step, index) for index, r in enumerate(self.replicas) if r.long_step is not None]
        if not steps:
            return messages.Beat(step="", seconds=0.0)
        step, worker = max(steps, key=lambda pair: pair[0].seconds)
        return messages.Beat(step=f"worker {worker}: {step.step}", seconds=step.seconds)

    def _stats(self) -> messages.Stats:
        return _sum_of([replica.stats for replica in self.replicas if replica.stats is not None])

    def _capacity(self) -> messages.Capacity:
        num_ready = sum(replica.is_ready for replica in self.replicas)
        missing = "; ".join(replica.reason for replica in self.replicas if replica.reason is not None)
        suffix = "" if num_ready else f"{missing}; it is being started again"
        return messages.Capacity(most_running=num_ready * self._max_running_each, missing=suffix or None)


def _detail(replica: Replica) -> str | None:
    if replica.long_step is not None:
        return f"{replica.long_step.step} for {replica.long_step.seconds:.0f} s"
    return replica.reason


def _sum_of(parts: list[messages.Stats]) -> messages.Stats:
    pools: Counter[str] = Counter()
    pages: Counter[str] = Counter()
    method_s: dict[str, tuple[int, int, float]] = {}
    for part in parts:
        pools.update({name: used for name, (used, _) in part.pools.items()})
        pages.update({name: total for name, (_, total) in part.pools.items()})
        for name, (calls, rows, seconds) in part.method_s.items():
            before = method_s.get(name, (0, 0, 0.0))
            method_s[name] = (before[0] + calls, before[1] + rows, before[2] + seconds)
    return messages.Stats(
        running=sum(part.running for part in parts),
        waiting=sum(part.waiting for part in parts),
        steps=sum(part.steps for part in parts),
        pools={name: (pools[name], pages[name]) for name in pages},
        slots_used=sum(part.slots_used for part in parts),
        swapped=sum(part.swapped for part in parts),
        swaps=sum(part.swaps for part in parts),
        cache_hit_tokens=sum(part.cache_hit_tokens for part in parts),
        cache_queried_tokens=sum(part.cache_queried_tokens for part in parts),
        encoder_cache=(
            sum(part.encoder_cache[0] for part in parts),
            sum(part.encoder_cache[1] for part in parts),
            sum(part.encoder_cache[2] for part in parts),
        ),
        method_s=method_s,
    )
