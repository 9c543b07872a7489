"""Calls that cross workers: a walk's in another worker, and those of walks elsewhere that run here.

The caller keeps the walk; whoever runs the call keeps what it has on the device: sequences, rows, host states, in a
guest scope that forks and ends as its walk says. A sequence whose next call is elsewhere moves there first (`moves`).
Owned by the worker's thread.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from mstar.ipc.messages import Between, Call, Feed, Pages, Parcel, Returned, ScopeStep, Want
from mstar.ipc.tensors import INLINE_BYTES
from mstar.plugin.graph import Alias, Drop, Fork
from mstar.plugin.nodes import StreamChunk
from mstar.plugin.program import Join, Program, Run
from mstar.types import Path
from mstar.worker.holdings import Holdings
from mstar.worker.moves import Moves
from mstar.worker.output import Output, to_device, to_host
from mstar.worker.places import Places
from mstar.worker.scheduler import Scheduler
from mstar.worker.state import Batched, Cursor, Lane, Leaving, Parceled, RequestState, Row, Scope, Work, settled

ELSEWHERE = Program("", (Join(),), (), (), frozenset(), frozenset(), frozenset(), frozenset())
"""What cursors of calls for other workers' walks are in."""


class Remote:
    """A worker's calls to others, and theirs to it.

    Args:
        complete: brings what a call gave to its walk.
        fail: ends a request.
    """

    def __init__(
        self, places: Places, *, holdings: Holdings, scheduler: Scheduler, output: Output,
        complete: Callable[[Work, Mapping[str, Any]], None], fail: Callable[[RequestState, Exception], None],
    ) -> None:  # fmt: skip
        self._places = places
        self._holdings = holdings
        self._scheduler = scheduler
        self._output = output
        self._complete = complete
        self._fail = fail
        self._device = holdings.modules.device
        self.moves = Moves(places, holdings=holdings, output=output)
        self._numbers = itertools.count()
        self._calls: dict[int, Work] = {}  # sent, not returned
        self._late: dict[str, deque[Between]] = {}  # request -> messages behind one that waits for what is on the host

    def runs_here(self, cursor: Cursor, op: Run) -> bool:
        """Whether a cursor's next call runs in this worker, and on what is here already."""
        if self._places.is_alone:
            return True
        return self._places.of(cursor.lane.request, op) is None and self.moves.has(cursor.scope, op)

    # ---- the walk's side ------------------------------------------------------------------------------------

    def call(self, work: Work, worker: int) -> None:
        """Have a call of a walk run in another worker."""
        scope, op = work.scope, work.op
        walk, at = self._places.origin(op)
        number = next(self._numbers)
        self._calls[number] = work
        self._guest(scope, worker)
        awaits = self.moves.before(work, worker)
        chunks = {port: (to_host(c.items), c.num_new, c.first, c.final, c.start) for port, c in work.chunks.items()}
        given = {port: value for port, value in work.inputs.items() if port not in work.chunks}
        self._output.post(
            worker,
            Call(
                request_id=work.request_id, caller=self._places.worker, number=number, walk=walk, at=at,
                lane=scope.lane, path=scope.path, ordinal=scope.ordinal, iteration=work.iteration,
                inputs=to_host(settled(given)), chunks=chunks, content_key=work.content_key,
                awaits=awaits, is_ahead=self.moves.ahead.is_wanted(work),
            ),
        )  # fmt: skip

    def returned(self, message: Returned) -> None:
        """A call has run. Answers to calls of requests that have ended meanwhile are ignored."""
        work = self._calls.pop(message.number, None)
        if work is None or work.request.is_dead or work.is_cancelled:
            return
        work.stop_reason, work.counts, work.is_cached = message.stop_reason, message.counts, message.is_cached
        values = to_device(message.values, self._device)
        for port in message.rows:
            values[port] = Row(Batched(values[port][None]), 0)
        values |= {port: Parceled(*parcel) for port, parcel in message.parcels.items()}
        self._complete(work, values)

    def forget(self, request: RequestState) -> Iterable[Between]:
        """A request has ended: what of it was still waiting."""
        for scope in (scope for tenant in request.tenants.values() for scope in tenant.scopes):
            self.moves.ahead.drop(scope, list(scope.coming))
        for number in [number for number, work in self._calls.items() if work.request is request]:
            del self._calls[number]
        return self._late.pop(request.info.request_id, ())

    def fork(self, parent: Scope, label: str, child: Scope) -> None:
        """An item begins with forks of its parent's sequences, wherever those are."""
        for worker in parent.guests:
            self._guest(child, worker)
            self._step(worker, child, "fork", new=label, source=label, parent=parent)
        self.moves.forked(parent, label, child, label)

    def kv_step(self, scope: Scope, step: Fork | Alias | Drop, *, at: Any) -> None:
        """Do a walk's Fork, Alias or Drop wherever its scope has something."""
        kind: Any = type(step).__name__.lower()
        new, source = (step.label, "") if isinstance(step, Drop) else (step.new, step.source)
        for worker in scope.guests:
            self._step(worker, scope, kind, new=new, source=source, at=at)
        if isinstance(step, Drop):
            self.moves.dropped(scope, new)
        elif isinstance(step, Alias):
            self.moves.aliased(scope, source, new)
        else:
            self.moves.forked(scope, source, scope, new)

    def free(self, scope: Scope) -> None:
        """A scope has ended."""
        self.moves.ahead.drop(scope, list(scope.coming))
        for worker in scope.guests:
            self._step(worker, scope, "free")

    def _guest(self, scope: Scope, worker: int) -> None:
        if worker not in scope.guests:
            scope.guests.append(worker)

    def _step(
        self, worker: int, scope: Scope, step: Any, *, new: str = "", source: str = "", at: Any = None,
        parent: Scope | None = None,
    ) -> None:  # fmt: skip
        self._output.post(
            worker,
            ScopeStep(
                request_id=scope.request.info.request_id, step=step, lane=scope.lane, path=scope.path,
                ordinal=scope.ordinal, new=new, source=source, at=to_host(settled(at)),
                source_path=None if parent is None else parent.path,
                source_ordinal=0 if parent is None else parent.ordinal,
            ),
        )  # fmt: skip

    # ---- the guest's side -----------------------------------------------------------------------------------

    def handle(self, request: RequestState, message: Between) -> None:
        """What another worker asks for, or sends; in the order it came, also while sequences are on the host.

        What concerns other tenants does not wait for those: it may give back the very pages that they need.
        """
        if isinstance(message, Returned):
            self.returned(message)
            return
        waiting = self._late.get(request.info.request_id, ())
        if any(_items(message) & _items(other) for other in waiting) or not self._do(request, message):
            self._late.setdefault(request.info.request_id, deque()).append(message)

    def resume(self, request: RequestState) -> None:
        """Go on with what waited for sequences to come back from the host."""
        waiting, left, late = self._late.pop(request.info.request_id, deque()), deque[Between](), set[int]()
        for message in waiting:
            if late & _items(message) or not self._do(request, message):
                left.append(message)
                late |= _items(message)
        if left and not request.is_dead:
            self._late[request.info.request_id] = left

    def _do(self, request: RequestState, message: Between) -> bool:
        """False, with nothing done, if it has to wait."""
        if isinstance(message, Call):
            self._run(request, message)
        elif isinstance(message, ScopeStep):
            return self._take_step(request, message)
        else:
            assert not isinstance(message, Feed | Returned)
            if isinstance(message, Pages | Want) and not request.scope(message.lane, message.path, message.ordinal):
                return True  # what it was about has ended
            scope = self._scope(request, message.lane, message.path, message.ordinal)
            return self.moves.handle(scope, message) or self._wait(request, scope)
        return True

    def _wait(self, request: RequestState, scope: Scope) -> bool:
        waiting = (c for c in self._scheduler.suspended if c.lane.program is ELSEWHERE)
        if not any(cursor.scope.tenant is scope.tenant for cursor in waiting):
            self._scheduler.suspend(Cursor(Lane(request, "", ELSEWHERE, scope), scope, (), 0, {}))
        return False

    def _take_step(self, request: RequestState, message: ScopeStep) -> bool:
        scope = self._scope(request, message.lane, message.path, message.ordinal)
        if message.step == "free":
            self._holdings.free(scope)
            return True
        if message.module is not None:
            self.moves.relabel(scope, message)
            return True
        parent = scope
        if message.source_path is not None:
            parent = self._scope(request, message.lane, message.source_path, message.source_ordinal)
        if any(s.tenant.is_swapped or s.tenant.num_rebuilding for s in (scope, parent)):
            return self._wait(request, parent if parent.tenant.is_swapped or parent.tenant.num_rebuilding else scope)
        if message.step == "fork":
            self._holdings.fork(parent, message.source, scope, message.new, at=message.at)
        elif message.step == "alias":
            self._holdings.kv_step(scope, Alias(message.new, message.source), at=None)
        else:
            self._holdings.kv_step(scope, Drop(message.new), at=None)
        return True

    def _run(self, request: RequestState, message: Call) -> None:
        op = self._places.op(message.walk, message.at)
        scope = self._scope(request, message.lane, message.path, message.ordinal)
        inputs = to_device(message.inputs, self._device)
        chunks = {port: StreamChunk(*chunk) for port, chunk in message.chunks.items()}
        for port, chunk in chunks.items():
            inputs[port] = chunk.items
        for port, _ in op.receives:
            inputs.setdefault(port, None)
        env = {} if op.cache is None else {op.cache: message.content_key}
        lane = Lane(request, message.lane, ELSEWHERE, scope)
        cursor = Cursor(lane, scope, (), 0, env, iteration=message.iteration)
        work = self._scheduler.make_work(cursor, op, inputs=inputs, chunks=chunks)
        work.reply = message.caller, message.number
        self.moves.expect(work, awaits=message.awaits)
        if message.is_ahead:
            work.leaving = scope.leaving[(work.key[0], work.label)] = Leaving(message.caller, work)
        self._scheduler.add(work)

    def answer(self, work: Work, values: Mapping[str, Any]) -> None:
        """A call of another worker's walk has run."""
        assert work.reply is not None
        if work.error is not None:
            self._fail(work.request, work.error)
            return
        if work.leaving is not None:
            self.moves.ahead.finish(work)
        op = work.op
        ports = {port for port, _ in (*op.outputs, *op.emits, *op.sends)}
        given = {port: value for port, value in values.items() if port in ports}
        parcels = self._send_parcels(work, given)
        caller, number = work.reply
        self._output.post(
            caller,
            Returned(
                request_id=work.request_id, number=number, values={p: to_host(v) for p, v in given.items()},
                rows=tuple(port for port, value in given.items() if type(value) is Row),
                counts=dict(work.counts), stop_reason=work.stop_reason, is_cached=work.is_cached, parcels=parcels,
            ),
        )  # fmt: skip

    def _send_parcels(self, work: Work, given: dict[str, Any]) -> dict[str, tuple[int, int]]:
        """Take what is large, and for the client alone, out of what a call gave: the engine gets it from here."""
        op, parcels = work.op, dict[str, tuple[int, int]]()
        for port in {port for port, _ in op.emits} - {port for port, _ in op.sends}:
            if dict(op.outputs).get(port) in self._places.read:
                continue
            value = to_host(given.get(port))
            if isinstance(value, Tensor) and value.nbytes >= INLINE_BYTES:
                del given[port]
                parcels[port] = self._places.worker, next(self._numbers)
                parcel = Parcel(request_id=work.request_id, number=parcels[port][1], value=value)
                self._output.messages.append(parcel)
        return parcels

    def _scope(self, request: RequestState, lane: str, path: Path, ordinal: int) -> Scope:
        found = request.scope(lane, path, ordinal)
        return found if found is not None else self._holdings.guest_scope(request, lane, path, ordinal)


def _items(message: Any) -> set[int]:
    """Which tenants of its request a message is about."""
    paths = [message.path]
    if isinstance(message, ScopeStep) and message.source_path is not None:
        paths.append(message.source_path)
    return {path[0] if path else -1 for path in paths}
