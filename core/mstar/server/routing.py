"""Which workers serve which request, and what the engine is told of them. Sans-IO.

Stands between the engine, which takes them for one worker, and workers that come and go: a request gets a route, in
each group of the placement the replica with the fewest, everything about it goes to all of them, and a session stays
where it was opened. Requests whose route leads over a worker that has ended fail, others never notice. Runs in the
server process; no clock, process or socket inside.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mstar.ipc import messages
from mstar.ipc.messages import FromWorker, ToWorker, WorkerStatus
from mstar.placement import Placement

_MOST_RESTARTS = 5
_FIRST_DELAY_S = 0.25
_SOUND_S = 60.0


@dataclass(slots=True, kw_only=True)
class Replica:
    """One worker: what its process has said, and what it serves.

    Args:
        name: for people.
        group: its group in the placement.
        requests: those whose route leads over it.
        num_finished: requests that it has finished since its process started.
        failures: its processes that ended one after the other without having finished a request, or lived long.
    """

    name: str
    group: int
    pid: int | None = None
    ready: messages.Ready | None = None
    stats: messages.Stats | None = None
    long_step: messages.Beat | None = None
    reason: str | None = None  # its own word on why it ends, or ours on how its last process did
    is_given_up: bool = False
    requests: set[str] = field(default_factory=set)
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


@dataclass(slots=True, kw_only=True)
class Routed:
    """A request that runs.

    Args:
        route: the worker that serves it in each group.
        counted: worker -> (counters, counts) of the whole request so far, as it last told them.
        parcels: (worker, number) -> values that have come and have not been named.
        held: what waits, in order, for the parcel that the first of it names.
    """

    route: tuple[int, ...]
    session: str | None
    counted: dict[int, tuple[Mapping[str, int], Mapping[str, int]]] = field(default_factory=dict)
    parcels: dict[tuple[int, int], Any] = field(default_factory=dict)
    held: deque[FromWorker] = field(default_factory=deque)

    def release(self) -> list[FromWorker]:
        """What waits no longer, with what it was waiting for."""
        released: list[FromWorker] = []
        while self.held:
            message = self.held[0]
            if isinstance(message, messages.Emit) and message.parcel is not None:
                if message.parcel not in self.parcels:
                    break
                value = self.parcels.pop(message.parcel)
                message = msgspec.structs.replace(message, value=value, parcel=None)
            self.held.popleft()
            released.append(message)
        return released


class Routing:
    """The workers of one model.

    Args:
        placement: which workers there are; they are told apart by their index.
        max_running_each: requests that each may run at once.
        stall_timeout_s: how long one step may take, or a process be silent.
        start_timeout_s: how long a process may take to be ready.
    """

    def __init__(
        self, placement: Placement, *, max_running_each: int, stall_timeout_s: float, start_timeout_s: float
    ) -> None:
        self._placement, self._groups = placement, placement.groups
        is_one = len(self._groups) == 1
        self.replicas = [
            Replica(name=f"worker {place.index}" + ("" if is_one else f" ({place.name})"), group=place.group)
            for place in placement.workers
        ]
        self._max_running_each = max_running_each
        self._stall_timeout_s = stall_timeout_s
        self._start_timeout_s = start_timeout_s
        self._routed: dict[str, Routed] = {}
        self._sessions: dict[str, tuple[int, ...]] = {}  # session -> its route, while it is open
        self._sends: list[tuple[int, ToWorker]] = []
        self._num_chosen = 0
        self.has_started = False  # all have been ready once

    def status(self) -> list[WorkerStatus]:
        """Each worker, for an operator."""
        return [
            WorkerStatus(
                worker=index, state=replica.state, pid=replica.pid, running=len(replica.requests),
                restarts=replica.num_restarts, group=self._groups[replica.group].name,
                role=self._placement.role_of(replica.group), detail=_detail(replica),
            )
            for index, replica in enumerate(self.replicas)
        ]  # fmt: skip

    # -- messages --------------------------------------------------------------------------------------------

    def to_workers(self, message: ToWorker) -> list[tuple[int, ToWorker]]:
        """Where a message of the engine's goes. What concerns nothing that runs goes nowhere."""
        if isinstance(message, messages.Shutdown):
            return [(worker, message) for worker, replica in enumerate(self.replicas) if replica.pid is not None]
        if isinstance(message, messages.Open):
            route = self._open(message.request_id, message.session)
            message = msgspec.structs.replace(message, route=route)
        elif isinstance(message, messages.DropSession):
            route = self._sessions.pop(message.session, ())
        elif isinstance(message, messages.Close | messages.Abort):
            is_good = isinstance(message, messages.Close)
            route = self._forget(message.request_id, keeps_session=is_good)
            for worker in route:
                self.replicas[worker].num_finished += is_good
        else:
            assert not isinstance(message, messages.AskSteps | messages.Steps), "workers say that to each other"
            found = self._routed.get(message.request_id)
            route = () if found is None else found.route
        if isinstance(message, messages.Begin) and len(route) > 1:
            return self._begin(message, route)
        return [(worker, message) for worker in route]

    def from_worker(self, worker: int, message: FromWorker) -> list[FromWorker]:
        """What the engine is told when a worker says `message`; see also `take_sends`."""
        replica = self.replicas[worker]
        if isinstance(message, messages.Emit | messages.WalkDone | messages.Parcel):
            return self._result(worker, message)
        if isinstance(message, messages.Failed):
            self.abort(message.request_id, but=worker)
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

    def abort(self, request_id: str, *, but: int | None = None) -> None:
        """Forget a request, and have all its workers do so `but` the one that has."""
        route = self._forget(request_id, keeps_session=False)
        self._sends += [(w, messages.Abort(request_id=request_id)) for w in route if w != but]

    def take_sends(self) -> list[tuple[int, ToWorker]]:
        """What is to be sent to workers because of what was heard of others, each once."""
        sends, self._sends = self._sends, []
        return [(worker, message) for worker, message in sends if self.replicas[worker].pid is not None]

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
        """A worker's process has ended; see also `take_sends`.

        Args:
            reason: how, unless it has said so itself.
            age_s: for how long it was there.

        Returns what the engine is told, and in how many seconds another is to be started; None: never.
        """
        replica = self.replicas[worker]
        is_sound = replica.is_ready and (replica.num_finished > 0 or age_s >= _SOUND_S)
        replica.failures = 1 if is_sound else replica.failures + 1
        replica.reason = f"{replica.name} has ended: {replica.reason or reason}"
        replica.pid = replica.ready = replica.long_step = replica.stats = None
        replica.is_given_up = not self.has_started or replica.failures > _MOST_RESTARTS
        if replica.is_given_up and self.has_started:
            replica.reason += f"; given up after {_MOST_RESTARTS} restarts in a row: restart the server"
        if not self.has_started or all(other.is_given_up for other in self._group(replica.group)):
            return [messages.Dead(reason=replica.reason)], None
        told: list[FromWorker] = [self._capacity()]  # first, so that what is failed makes no room for others
        for name in list(replica.requests):
            self.abort(name, but=worker)
            told.append(messages.Failed(request_id=name, message=replica.reason, status=503, code="worker_lost"))
        for session in [name for name, route in self._sessions.items() if worker in route]:
            drop = messages.DropSession(session=session)
            self._sends += [(other, drop) for other in self._sessions.pop(session) if other != worker]
            told.append(messages.SessionLost(session=session))
        told.append(self._stats())
        if replica.is_given_up:
            return told, None
        replica.num_restarts += 1
        return told, _FIRST_DELAY_S * 2 ** (replica.failures - 1)

    # -- inside ----------------------------------------------------------------------------------------------

    def _group(self, group: int) -> list[Replica]:
        return [replica for replica in self.replicas if replica.group == group]

    def _open(self, request_id: str, session: str | None) -> tuple[int, ...]:
        """A route for a new request; empty if a group has nobody for it."""
        route = self._sessions.get(session, ()) if session is not None else ()
        if not route:
            route = self._choose()
        if route:
            self._routed[request_id] = Routed(route=route, session=session)
            for worker in route:
                self.replicas[worker].requests.add(request_id)
            if session is not None:
                self._sessions[session] = route
        return route

    def _choose(self) -> tuple[int, ...]:
        """In each group the ready replica with the fewest requests, in turn among equals."""
        route: list[int] = []
        for group in range(len(self._groups)):
            ready = [
                (len(r.requests), r.turn, w) for w, r in enumerate(self.replicas) if r.group == group and r.is_ready
            ]
            if not ready:
                return ()
            route.append(min(ready)[2])
        self._num_chosen += 1
        for worker in route:
            self.replicas[worker].turn = self._num_chosen
        return tuple(route)

    def _begin(self, message: messages.Begin, route: tuple[int, ...]) -> list[tuple[int, ToWorker]]:
        """All hear which walks begin, and those that go through one also what it begins with."""
        homes = {self._placement.homes.get(walk) for walk in message.walks.values()}
        bare = msgspec.structs.replace(message, inputs={})
        return [(worker, message if self.replicas[worker].group in homes else bare) for worker in route]

    def _forget(self, request_id: str, *, keeps_session: bool) -> tuple[int, ...]:
        """The route of a request that is over."""
        if (found := self._routed.pop(request_id, None)) is None:
            return ()
        for worker in found.route:
            self.replicas[worker].requests.discard(request_id)
        if found.session is not None and not keeps_session:
            self._sessions.pop(found.session, None)
        return found.route

    def _result(self, worker: int, message: messages.Emit | messages.WalkDone | messages.Parcel) -> list[FromWorker]:
        """What the engine is told of a result."""
        found = self._routed.get(message.request_id)
        if found is None:  # it is over
            return [] if isinstance(message, messages.Parcel) else [message]
        if isinstance(message, messages.Parcel):
            found.parcels[worker, message.number] = message.value
        else:
            found.held.append(self._counted(worker, message) if isinstance(message, messages.WalkDone) else message)
        return found.release()

    def _counted(self, worker: int, message: messages.WalkDone) -> messages.WalkDone:
        """The same with what all workers of the request have counted."""
        found = self._routed.get(message.request_id)
        if found is None or len(found.route) == 1:
            return message
        found.counted[worker] = message.counters, message.counts
        counters, counts = (_added(part) for part in zip(*found.counted.values(), strict=True))
        return msgspec.structs.replace(message, counters=counters, counts=counts)

    def _ready(self, replica: Replica, message: messages.Ready) -> list[FromWorker]:
        replica.ready, replica.long_step = message, None
        if self.has_started:
            return [self._capacity()]
        found = [other.ready for other in self.replicas if other.ready is not None]
        if len(found) < len(self.replicas):
            return [self._loading()]
        self.has_started = True
        compiled = messages.Compiled(
            num_methods=sum(
                min(r.ready.compiled.num_methods for r in self._group(group) if r.ready is not None)
                for group in range(len(self._groups))
            ),
            num_built=sum(one.compiled.num_built for one in found),
            seconds=max(one.compiled.seconds for one in found),
        )
        most = min(one.max_model_len for one in found)
        return [self._capacity(), messages.Ready(plan=self._plan(), max_model_len=most, compiled=compiled)]

    def _plan(self) -> list[tuple[str, int, int, int]]:
        """The lines of each group: those of its replica that holds the fewest tokens."""
        groups = [[r.ready.plan for r in self._group(g) if r.ready is not None] for g in range(len(self._groups))]
        return [line for plans in groups for line in min(plans, key=lambda plan: sum(one[3] for one in plan))]

    def _loading(self) -> messages.Beat:
        """What the worker that loads longest is at."""
        steps = [(replica.long_step, replica.name) for replica in self.replicas if replica.long_step is not None]
        if not steps:
            return messages.Beat(step="", seconds=0.0)
        step, name = max(steps, key=lambda pair: pair[0].seconds)
        return messages.Beat(step=f"{name}: {step.step}", seconds=step.seconds)

    def _stats(self) -> messages.Stats:
        return _sum_of([replica.stats for replica in self.replicas if replica.stats is not None])

    def _capacity(self) -> messages.Capacity:
        """What the group can take that can take least; the reason, where that is nothing."""
        groups = [self._group(group) for group in range(len(self._groups))]
        num_ready = min(sum(replica.is_ready for replica in group) for group in groups)
        lost = [r for group in groups if not any(r.is_ready for r in group) for r in group if r.reason is not None]
        missing = f"{'; '.join(r.reason or '' for r in lost)}; it is being started again" if not num_ready else None
        return messages.Capacity(most_running=num_ready * self._max_running_each, missing=missing)


def _detail(replica: Replica) -> str | None:
    if replica.long_step is not None:
        return f"{replica.long_step.step} for {replica.long_step.seconds:.0f} s"
    return replica.reason


def _added(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


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
