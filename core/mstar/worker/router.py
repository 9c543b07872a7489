"""Moves requests through their programs: advances cursors, feeds streams, brings results back.

Between two runs of a method everything here is host work on small objects. It never runs a model, and knows no
clock; what is ready goes to the scheduler's queues, what the client's side must know to `Output`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from mstar.errors import PluginError, RequestError
from mstar.ipc.messages import Abort, Begin, Between, Close, DropSession, Failed, Feed, Open, StopAt, WalkDone
from mstar.plugin.graph import Graph
from mstar.plugin.program import Join, KVStep, LoopEnd, LoopStart, Run, Skip, Spawn, Split
from mstar.plugin.spec import ModelSpec
from mstar.types import Path
from mstar.worker.ahead import adopts
from mstar.worker.feeds import Feeds
from mstar.worker.finish import described, explain
from mstar.worker.holdings import Holdings
from mstar.worker.loops import end_iteration, fork_length, leave_loop, mark_ends, short_turns, start_loop, turn
from mstar.worker.modules import Modules
from mstar.worker.output import Output, to_device, to_host
from mstar.worker.remote import ELSEWHERE, Remote
from mstar.worker.scheduler import Scheduler
from mstar.worker.state import Cursor, EachGroup, Groups, Lane, RequestState, Work, add_counts, plain
from mstar.worker.strays import Strays

log = logging.getLogger("mstar.worker")

MOST_OPS = 100_000  # between two methods; more is a loop that runs none


class Router:
    """Interprets programs for all requests of one worker."""

    def __init__(self, spec: ModelSpec, graph: Graph, *, modules: Modules, scheduler: Scheduler) -> None:
        self.spec = spec
        self.graph = graph
        self.modules = modules
        self.scheduler = scheduler
        self.places = modules.places
        self.programs = modules.compile(graph)
        turning = [(walk, op) for walk, program in self.programs.items() for op in short_turns(program)]
        self.short_turns = {op for walk, op in turning if not self.places.is_away(walk, op)}
        self.holdings = Holdings(spec, modules=modules, scheduler=scheduler)
        self.requests = self.holdings.requests
        self.output = Output()
        self.feeds = Feeds(graph, self.programs, output=self.output, places=self.places, lanes=self)
        self.remote = Remote(
            self.places, holdings=self.holdings, scheduler=scheduler, output=self.output,
            complete=self.complete, fail=self.fail,
        )  # fmt: skip
        self.strays = Strays(self.requests, is_alone=self.places.is_alone)
        scheduler.fail = self.fail
        scheduler.admit = self.remote.moves.admit
        scheduler.runs_here = self.remote.runs_here
        scheduler.give_up = self.remote.moves.give_up

    # ---- messages ---------------------------------------------------------------------------------------

    def handle(self, message: Any) -> None:
        """One message from the engine. Messages about requests that have ended meanwhile are ignored."""
        if isinstance(message, Open):
            try:
                self.holdings.open(message)
            except Exception as error:  # attributed to the request
                log.exception("request %s cannot be opened", message.request_id)
                self.output.messages.append(Failed(request_id=message.request_id, message=described(error)))
                self.strays.ended(message.request_id)
            self._handle_all(self.strays.opened(message))
        elif isinstance(message, DropSession):
            self.strays.dropped(message.session)
            self.holdings.drop_session(message.session)
        elif (request := self.requests.get(message.request_id)) is None:
            if isinstance(message, Between) and (placed := self.strays.place(message)) is not None:
                self.handle(placed)
        elif isinstance(message, Begin):
            self._guard(request, self._begin, message)
            self._handle_all(self.strays.begun(message.request_id))
        elif isinstance(message, StopAt):
            self._guard(request, self._stop_at, message)
        elif isinstance(message, Abort):
            self._remove(request)
        elif isinstance(message, Close):
            self._remove(request, is_well=True)
        elif isinstance(message, Feed):
            if self.feeds.has_begun(request, message.stream):
                self._guard(request, self.feeds.handle, message)
            else:
                self.strays.wait(message)
        else:
            self._guard(request, self.remote.handle, message)

    def _handle_all(self, messages: Iterable[Between]) -> None:
        for message in messages:
            self.handle(message)

    def _remove(self, request: RequestState, *, is_well: bool = False) -> None:
        """A request has ended here."""
        name = request.info.request_id
        waiting = self.remote.forget(request)
        self.strays.ended(name, session=request.info.session if is_well else None)
        if is_well:
            self.holdings.close(request)
            self._handle_all(waiting)
        else:
            self.output.take_back(name)  # whoever takes the place of one that has ended does not know the request
            self.holdings.remove(request)

    def _guard(self, request: RequestState, act: Any, *args: Any) -> None:
        """Run host work of one request; what it raises fails that request alone."""
        try:
            act(request, *args)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # attributed to the request
            walks = ", ".join(repr(lane.program.walk) for lane in request.lanes.values() if not lane.is_over)
            self.fail(request, explain(error, f"walk {walks}" if walks else "what another worker asked for"))

    def _begin(self, request: RequestState, message: Begin) -> None:
        request.walks |= message.walks
        here = {n: walk for n, walk in message.walks.items() if self.places.home(request, walk) is None}
        lanes = [self._lane(request, name, walk) for name, walk in here.items()]
        env = {name: to_device(value, self.modules.device) for name, value in message.inputs.items()} if lanes else {}
        self.feeds.begin(request, message.walks.values())
        for lane in lanes:
            if lane.is_fed and lane.feeders == 0:
                streams = ", ".join(sorted(lane.program.receives))
                raise RuntimeError(f"walk {lane.program.walk!r} reads {streams}, which no started walk feeds")
        for lane in lanes:
            for name in lane.program.inputs:
                if name not in env:
                    raise RuntimeError(f"walk {lane.program.walk!r} needs the value {name!r}, which nothing gave")
            if not lane.is_fed:
                self.start(lane, (), groups=(), env=env)

    def _lane(self, request: RequestState, name: str, walk: str) -> Lane:
        program = self.programs[walk]
        scope = request.lanes[name].scope if name in request.lanes else request.kept_scopes.get(name)
        lane = Lane(request, name, program, scope, is_fed=bool(program.receives))
        request.lanes[name] = lane
        return lane

    def _stop_at(self, request: RequestState, message: StopAt) -> None:
        for lane in request.lanes.values():
            if not lane.is_fed and not lane.is_over:
                lane.stops[message.path] = message.reason
        for work in [w for w in self.scheduler.works() if w.request is request and w.path == message.path]:
            cursor = work.cursor
            frame = next((f for f in reversed(cursor.loops) if f.op.dynamic), None) if cursor else None
            if frame is not None and work is cursor.work and not cursor.lane.is_fed:  # not running: end it at once
                self.scheduler.cancel(work)
                cursor.work = None
                del cursor.loops[cursor.loops.index(frame) :]
                leave_loop(cursor, frame, message.reason)
                self.advance(cursor)

    def fail(self, request: RequestState, error: Exception) -> None:
        """End one request with its own error."""
        if request.is_dead:
            return
        self._remove(request)
        name, why = request.info.request_id, explain(error)
        if isinstance(why, RequestError):
            failed = Failed(request_id=name, message=why.message, status=why.status, param=why.param, code=why.code)
        else:
            log.error("request %s failed: %s", name, why, exc_info=why.__cause__ or why)
            failed = Failed(request_id=name, message=str(why))
        self.output.messages.append(failed)

    # ---- scopes and cursors -----------------------------------------------------------------------------

    def start(self, lane: Lane, path: Path, *, groups: Groups, env: dict[str, Any]) -> None:
        """Start a lane's outermost cursor at `path`."""
        scope = lane.scope if path == () and lane.scope is not None else self.holdings.scope(lane, path)
        if path == ():
            lane.scope = scope
        cursor = Cursor(lane, scope, groups, 0, dict(env))
        lane.live[path] = cursor
        self.feeds.open(cursor, lane.program.feeds)
        self.advance(cursor)

    # ---- advancing --------------------------------------------------------------------------------------

    def advance(self, cursor: Cursor) -> None:
        """Go on until the cursor has work, waits for a stream or its children, or has ended."""
        ops = cursor.lane.program.ops
        for _ in range(MOST_OPS):
            if cursor.lane.request.is_dead:
                return
            op = ops[cursor.pc]
            if cursor.ahead is not None and not isinstance(op, Run | LoopEnd | Skip):
                self.retract(cursor)
            if isinstance(op, Run):
                self._ready(cursor, op)
                return
            if isinstance(op, LoopEnd):
                end_iteration(cursor, op)
            elif isinstance(op, LoopStart):
                start_loop(cursor, op)
            elif isinstance(op, Skip):
                self._skip(cursor, op)
            elif isinstance(op, KVStep | Spawn) and self._must_wait(cursor):
                return
            elif isinstance(op, KVStep):
                self._kv_step(cursor, op)
                cursor.pc += 1
            elif isinstance(op, Join):
                self._join(cursor)
                return
            elif self._fan_out(cursor, op):
                return
        raise PluginError(f"walk {cursor.lane.program.walk!r} took {MOST_OPS} steps and ran no method: an empty loop?")

    def _kv_step(self, cursor: Cursor, op: KVStep) -> None:
        at = fork_length(cursor, op.step)
        self.holdings.kv_step(cursor.scope, op.step, at=at)
        if not self.places.is_alone:
            self.remote.kv_step(cursor.scope, op.step, at=at)

    def _must_wait(self, cursor: Cursor) -> bool:
        """Sequences that are on the host cannot be forked: the cursor goes on when they are back."""
        if cursor.scope.tenant.is_swapped or cursor.scope.tenant.num_rebuilding:
            self.scheduler.suspend(cursor)
            return True
        return False

    def resume(self) -> None:
        """Go on with cursors whose sequences have come back."""
        for cursor in self.scheduler.take_resumable():
            if cursor.lane.program is ELSEWHERE:
                self._guard(cursor.lane.request, self.remote.resume)
            else:
                self._guard(cursor.lane.request, lambda _, cursor=cursor: self.advance(cursor))

    def awaits_engine(self) -> bool:
        """Whether some request has nothing to run here before the engine's next message: it may free memory then."""
        return any(all(lane.is_over for lane in request.lanes.values()) for request in self.requests.values())

    def _ready(self, cursor: Cursor, op: Run) -> None:
        chunks = self.feeds.receive(cursor, op) if op.receives else {}
        if chunks is None:
            return
        if cursor.ahead is not None:
            if adopts(cursor.ahead, op, cursor):
                cursor.work, cursor.ahead = cursor.ahead, None
                return
            self.retract(cursor)
        env = cursor.env
        inputs = {port: env.get(value) for port, value in op.inputs}
        for port, _ in op.receives:
            inputs[port] = chunks[port].items if port in chunks else None
        work = cursor.work = self.scheduler.make_work(cursor, op, inputs=inputs, chunks=chunks)
        if (worker := self.places.of(cursor.lane.request, op)) is not None:
            self.remote.call(work, worker)
            return
        if self.places.split:
            self.remote.moves.expect(work, awaits=self.remote.moves.before(work, self.places.worker))
        self.scheduler.add(work)

    def retract(self, cursor: Cursor) -> None:
        """The work queued ahead is not what follows: take it back, even if it has been launched."""
        ahead, cursor.ahead = cursor.ahead, None
        assert ahead is not None
        self.scheduler.cancel(ahead)
        if ahead.undo is not None:
            ahead.undo()

    def _skip(self, cursor: Cursor, op: Skip) -> None:
        if op.predicate(cursor.lane.request.view, cursor.current_iteration):
            cursor.pc += 1
            return
        for name in op.absent:
            cursor.env[name] = None
            cursor.written[name] = None
        cursor.pc = op.target

    # ---- fan-out and join -------------------------------------------------------------------------------

    def _fan_out(self, cursor: Cursor, op: Split | Spawn) -> bool:
        """Start a cursor's branches or children; False if there are none and it can go on."""
        if cursor.waiting:  # the next child of an ordered Each
            self._start_child(cursor.waiting.pop(), op)
            return True
        cursor.results = []
        if isinstance(op, Split):
            children = [self._branch(cursor, pc, index) for index, pc in enumerate(op.branches)]
        else:
            items = plain(cursor.env.get(op.over))
            children = self._children(cursor, op, list(items) if items is not None else [])
        cursor.pending = len(children)
        if not children:
            self._collect(cursor, op)
            return False
        view, iteration = cursor.lane.request.view, cursor.current_iteration
        if isinstance(op, Spawn) and op.ordered is not None and op.ordered(view, iteration):
            cursor.waiting = children[:0:-1]
            children = children[:1]
        for child in children:
            self._start_child(child, op)
        return True

    def _branch(self, parent: Cursor, pc: int, index: int) -> Cursor:
        iteration = parent.current_iteration
        return Cursor(parent.lane, parent.scope, parent.groups, pc, dict(parent.env), parent, index, iteration)

    def _children(self, parent: Cursor, op: Spawn, items: list[Any]) -> list[Cursor]:
        group, children = EachGroup(len(items)), []
        for index, item in enumerate(items):
            scope = self.holdings.scope(parent.lane, (*parent.scope.path, index))
            env = {**parent.env, **(item if isinstance(item, Mapping) else {op.over: item})}
            groups = (*parent.groups, (group, index))
            children.append(Cursor(parent.lane, scope, groups, op.body, env, parent, index, parent.current_iteration))
        return children

    def _start_child(self, child: Cursor, op: Split | Spawn) -> None:
        if isinstance(op, Spawn):
            assert child.parent is not None
            for label in op.forks:
                self.remote.moves.ahead.claim_all(child.parent.scope, label)
                self.holdings.fork(child.parent.scope, label, child.scope, label)
                if not self.places.is_alone:
                    self.remote.fork(child.parent.scope, label, child.scope)
            self.feeds.open(child, op.feeds)
        self.advance(child)

    def _join(self, cursor: Cursor) -> None:
        """A branch, a child or a walk has ended."""
        cursor.is_done = True
        parent = cursor.parent
        if parent is None:
            self._walk_ended(cursor)
            return
        op = parent.lane.program.ops[parent.pc]
        if isinstance(op, Spawn):
            self._end_scope(cursor, feeds=op.feeds, emits=op.emits)
        parent.results.append(cursor)
        parent.pending -= 1
        if parent.waiting:
            self.advance(parent)  # still at its Spawn
        elif parent.pending == 0:
            self._collect(parent, op)  # type: ignore[arg-type]
            self.advance(parent)

    def _collect(self, cursor: Cursor, op: Split | Spawn) -> None:
        """Bring what children wrote to the cursor they belong to, in order, and go on behind them."""
        results = sorted(cursor.results, key=lambda child: child.index)
        cursor.results = []
        if isinstance(op, Split):
            for child in results:
                for name in child.written:
                    cursor.env[name] = child.env[name]
                    cursor.written[name] = None
                cursor.reason = child.reason or cursor.reason
        else:
            for source, target in op.collect:
                cursor.env[target] = [child.env.get(source) for child in results]
                cursor.written[target] = None
        cursor.pc = op.join

    def _end_scope(self, cursor: Cursor, *, feeds: Iterable[str], emits: Iterable[str]) -> None:
        """An item, or a whole walk, has ended: its streams close, its output is final, what it held is free."""
        path = cursor.scope.path
        self.feeds.close(cursor, feeds)
        if cursor.reason is not None:
            cursor.lane.reasons[".".join(map(str, path))] = cursor.reason
        for name in sorted(emits):
            self.output.emit(cursor, name, final=True, reason=cursor.reason)
        if cursor.parent is None and cursor.lane.is_fed:
            self.output.settle(cursor.lane, cursor.groups)
        else:
            self.output.item_ended(cursor.groups)
        self.feeds.item_ended(cursor)
        if path:
            self.remote.free(cursor.scope)
            self.holdings.free(cursor.scope)

    def _walk_ended(self, cursor: Cursor) -> None:
        lane, request, path = cursor.lane, cursor.lane.request, cursor.scope.path
        lane.live.pop(path, None)
        lane.ended[path] = cursor
        for stream in lane.program.receives:
            request.buffers.pop((stream, path), None)
        self._end_scope(cursor, feeds=lane.program.feeds, emits=lane.program.emits)
        if not lane.is_fed:
            self.feeds.walk_over(lane)
        self.maybe_over(lane)

    def maybe_over(self, lane: Lane) -> None:
        """Tell the engine when a lane's walk has ended everywhere and nothing can start it again."""
        started_once = () in lane.ended
        if lane.is_over or lane.live or (lane.is_fed and lane.feeders and not started_once):
            return
        lane.is_over = True
        request = lane.request
        if lane.is_fed:
            self.feeds.walk_over(lane)
        self.output.messages.append(
            WalkDone(
                request_id=request.info.request_id,
                lane=lane.name,
                walk=lane.program.walk,
                outputs={name: self._output(lane, name) for name in lane.program.outputs},
                reasons=dict(lane.reasons),
                counters=dict(request.counters),
                counts=dict(request.counts),
            )
        )

    def _output(self, lane: Lane, name: str) -> Any:
        if () in lane.ended:
            return to_host(lane.ended[()].env.get(name))
        return [to_host(lane.ended[path].env.get(name)) for path in sorted(lane.ended)]

    # ---- results ----------------------------------------------------------------------------------------

    def complete(self, work: Work, values: Mapping[str, Any]) -> None:
        """A work has run: `values` has its output ports (None: nothing produced). Its cursor goes on."""
        request, cursor, op = work.request, work.cursor, work.op
        if work.reply is not None:
            self._guard(request, lambda _: self.remote.answer(work, values))
            return
        try:
            if work.error is not None:
                raise work.error
            add_counts(request.counters, () if work.is_cached else op.counts)
            add_counts(request.counts, work.counts.items())
            for port, value in op.outputs:
                if port in values:
                    cursor.env[value] = values[port]
                    cursor.written[value] = None
            for port, name in op.emits:
                if (emitted := values.get(port)) is not None:
                    self.output.emit(cursor, name, value=to_host(emitted))
            if work.stop_reason is not None or cursor.lane.stops or op.receives:
                mark_ends(cursor, op, work)
            for port, name in op.sends:
                if (sent := values.get(port)) is not None:
                    self.feeds.send(cursor, name, sent)
            self.feeds.close(cursor, op.closes)
            if self.places.split:
                self.remote.moves.after(work)
            if op in self.short_turns and turn(cursor, work):
                self.scheduler.add(work)
                return
            cursor.work, cursor.pc = None, cursor.pc + 1
            self.advance(cursor)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # attributed to the request
            self.fail(request, explain(error, f"walk {cursor.lane.program.walk!r}, after {op.target}"))
