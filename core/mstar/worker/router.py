"""Moves requests through their programs: opens and closes them, advances cursors, feeds streams, orders output.

Between two runs of a method everything here is host work on small objects. It never runs a model, and knows no
clock; what is ready goes to the scheduler's queues, what the client's side must know to `outbox`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from torch import Tensor

from mstar.errors import RequestError
from mstar.ipc.messages import Abort, Begin, Close, DropSession, Emit, Failed, FromWorker, Open, StopAt, WalkDone
from mstar.layers.sampling import draw_key
from mstar.plugin.graph import Alias, Drop, Fork, Graph
from mstar.plugin.nodes import StreamChunk
from mstar.plugin.program import Join, KVStep, LoopEnd, LoopStart, Run, Skip, Spawn, Split, compile_graph
from mstar.plugin.spec import ModelSpec
from mstar.plugin.states import RequestView
from mstar.types import Path
from mstar.worker.ahead import adopts
from mstar.worker.modules import Modules
from mstar.worker.scheduler import Scheduler
from mstar.worker.state import (
    Cursor,
    EachGroup,
    Frame,
    Groups,
    Lane,
    RequestState,
    Row,
    Scope,
    Tenant,
    Work,
    plain,
)
from mstar.worker.streams import StreamBuffer


class Router:
    """Interprets programs for all requests of one worker."""

    def __init__(self, spec: ModelSpec, graph: Graph, *, modules: Modules, scheduler: Scheduler) -> None:
        self.spec = spec
        self.graph = graph
        self.modules = modules
        self.scheduler = scheduler
        self.programs = compile_graph(graph)
        self.requests: dict[str, RequestState] = {}
        self.sessions: dict[str, dict[str, Scope]] = {}  # session -> lane -> scope
        self.outbox: list[FromWorker] = []
        scheduler.tenants = self.tenants
        self._consumers = {stream: p for p in self.programs.values() for stream in p.receives}
        self._items = self._stream_items(graph)

    def _stream_items(self, graph: Graph) -> dict[str, Any]:
        runs = (op for p in self.programs.values() for op in p.ops if isinstance(op, Run))
        return {stream: run.method.output(port) for run in runs for port, stream in run.sends}

    # ---- messages ---------------------------------------------------------------------------------------

    def handle(self, message: Any) -> None:
        """One message from the engine. Messages about requests that have ended meanwhile are ignored."""
        if isinstance(message, Open):
            self._open(message)
        elif isinstance(message, DropSession):
            for scope in self.sessions.pop(message.session, {}).values():
                self._free_scope(scope)
        elif (request := self.requests.get(message.request_id)) is None:
            return
        elif isinstance(message, Begin):
            self._guard(request, self._begin, message)
        elif isinstance(message, StopAt):
            self._guard(request, self._stop_at, message)
        elif isinstance(message, Abort):
            self.remove(request)
        elif isinstance(message, Close):
            self._close(request)

    def _guard(self, request: RequestState, act: Any, *args: Any) -> None:
        """Run host work of one request; what it raises fails that request alone."""
        try:
            act(request, *args)
        except Exception as error:
            self.fail(request, error)

    def _open(self, info: Open) -> None:
        params = msgspec.convert(info.params, self.spec.tasks[info.task].params)
        resumed = info.session is not None and info.session in self.sessions
        view = RequestView(info.task, info.outputs, params, info.fields, info.session, resumed)
        request = RequestState(info, view)
        request.runtime_s = self.scheduler.least_runtime(self.requests.values())
        self.requests[info.request_id] = request
        if resumed:
            assert info.session is not None
            for lane, scope in self.sessions.pop(info.session).items():
                scope.request = scope.tenant.request = request
                scope.tenant.order = (info.arrival, -1)
                request.tenants[-1] = scope.tenant
                request.lanes[lane] = Lane(request, lane, next(iter(self.programs.values())), {(): scope}, is_over=True)

    def _begin(self, request: RequestState, message: Begin) -> None:
        lanes = [self._lane(request, name, walk) for name, walk in message.walks.items()]
        env = {name: self._to_device(value) for name, value in message.inputs.items()}
        for lane in lanes:
            for stream in lane.program.all_feeds:
                consumer = self._consumer_lane(request, stream)
                if consumer is not None:
                    consumer.feeders += 1
        for lane in lanes:
            if lane.is_fed and lane.feeders == 0:
                streams = ", ".join(sorted(lane.program.receives))
                raise RuntimeError(f"walk {lane.program.walk!r} reads {streams}, which no started walk feeds")
        for lane in lanes:
            for name in lane.program.inputs:
                if name not in env:
                    raise RuntimeError(f"walk {lane.program.walk!r} needs the value {name!r}, which nothing gave")
            if not lane.is_fed:
                self._start(lane, (), groups=(), env=env)

    def _lane(self, request: RequestState, name: str, walk: str) -> Lane:
        program = self.programs[walk]
        scopes = request.lanes[name].scopes if name in request.lanes else {}
        lane = Lane(request, name, program, scopes, is_fed=bool(program.receives))
        request.lanes[name] = lane
        return lane

    def _consumer_lane(self, request: RequestState, stream: str) -> Lane | None:
        program = self._consumers[stream]
        return next((x for x in request.lanes.values() if x.program is program and not x.is_over), None)

    def _stop_at(self, request: RequestState, message: StopAt) -> None:
        waiting = {work.cursor for work in self.scheduler.works() if work.request is request and work.cursor}
        found = [c for c in waiting if c.scope.path == message.path and not c.lane.is_fed and c.ahead is None]
        if not found:
            request.stops[message.path] = message.reason  # its work is running
        for cursor in found:
            if not cursor.loops or cursor.work is None:
                continue
            self.scheduler.cancel(cursor.work)
            cursor.work = None
            frame = cursor.loops[0]
            del cursor.loops[1:]
            self._leave_loop(cursor, frame, message.reason)
            self.advance(cursor)

    def _close(self, request: RequestState) -> None:
        session = request.info.session
        if session is not None:
            kept = {name: lane.scopes.pop(()) for name, lane in request.lanes.items() if () in lane.scopes}
            for scope in kept.values():
                scope.tenant.order = (float("inf"), -1)
            self.sessions[session] = kept
        self.remove(request)

    def remove(self, request: RequestState) -> None:
        """Forget a request and free all it holds, wherever it is."""
        request.is_dead = True
        self.requests.pop(request.info.request_id, None)
        self.scheduler.discard(request)
        for lane in request.lanes.values():
            for scope in lane.scopes.values():
                self._free_scope(scope)
            lane.scopes.clear()
        request.buffers.clear()
        request.waiters.clear()

    def fail(self, request: RequestState, error: Exception) -> None:
        """End one request with its own error."""
        if request.is_dead:
            return
        self.remove(request)
        name = request.info.request_id
        if isinstance(error, RequestError):
            self.outbox.append(
                Failed(
                    request_id=name, message=error.message, status=error.status, param=error.param, code=error.code
                )
            )
        else:
            self.outbox.append(Failed(request_id=name, message=f"{type(error).__name__}: {error}"))

    # ---- scopes and cursors -----------------------------------------------------------------------------

    def _start(self, lane: Lane, path: Path, *, groups: Groups, env: dict[str, Any]) -> None:
        """Start a lane's outermost cursor at `path`."""
        scope = lane.scopes.get(path) or self._scope(lane, path)
        cursor = Cursor(lane, scope, groups, 0, dict(env))
        lane.live[path] = cursor
        self._open_streams(cursor, lane.program.feeds)
        self.advance(cursor)

    def _scope(self, lane: Lane, path: Path) -> Scope:
        request = lane.request
        tenant = request.tenant(path)
        scope = Scope(path, request, tenant, draw_key(request.info.seed, path, "noise"))
        tenant.scopes.append(scope)
        lane.scopes[path] = scope
        return scope

    def _free_scope(self, scope: Scope) -> None:
        tenant = scope.tenant
        self.scheduler.discard_scope(scope)
        self.modules.free_scope(scope)
        tenant.scopes.remove(scope)
        if not tenant.scopes and tenant.item >= 0:
            tenant.request.tenants.pop(tenant.item, None)

    def _open_streams(self, cursor: Cursor, streams: Iterable[str]) -> None:
        """A scope that feeds streams begins: its buffers, and the consumers' cursors at the same path."""
        request, path = cursor.lane.request, cursor.scope.path
        for name in streams:
            consumer = self._consumer_lane(request, name)
            if consumer is None:
                continue
            self._buffer(request, name, path)
            if path not in consumer.live and path not in consumer.ended:
                groups = tuple((self._mirror(consumer, group), index) for group, index in cursor.groups)
                self._start(consumer, path, groups=groups, env=cursor.env)

    def _mirror(self, lane: Lane, group: EachGroup) -> EachGroup:
        if id(group) not in lane.groups:
            lane.groups[id(group)] = EachGroup(group.size)
        return lane.groups[id(group)]

    def _buffer(self, request: RequestState, name: str, path: Path) -> StreamBuffer:
        key = (name, path)
        if key not in request.buffers:
            stream = self.graph.stream(name)
            assert stream is not None
            request.buffers[key] = StreamBuffer.open(stream, fields=request.info.fields, item=self._items[name])
        return request.buffers[key]

    def _close_streams(self, cursor: Cursor, streams: Iterable[str]) -> None:
        request, path = cursor.lane.request, cursor.scope.path
        for name in streams:
            buffer = request.buffers.get((name, path))
            if buffer is not None:
                buffer.close()
                self._wake(request, (name, path))

    def _wake(self, request: RequestState, key: tuple[str, Path]) -> None:
        cursor = request.waiters.pop(key, None)
        if cursor is not None:
            self.advance(cursor)

    # ---- advancing --------------------------------------------------------------------------------------

    def advance(self, cursor: Cursor) -> None:
        """Go on until the cursor has work, waits for a stream or its children, or has ended."""
        ops = cursor.lane.program.ops
        while not cursor.lane.request.is_dead:
            op = ops[cursor.pc]
            if cursor.ahead is not None and not isinstance(op, Run | LoopEnd | Skip):
                self._retract(cursor)
            if isinstance(op, Run):
                self._ready(cursor, op)
                return
            if isinstance(op, LoopEnd):
                self._loop_end(cursor, op)
            elif isinstance(op, LoopStart):
                self._loop_start(cursor, op)
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

    def _must_wait(self, cursor: Cursor) -> bool:
        """Sequences that are on the host cannot be forked: the cursor goes on when they are back."""
        if cursor.scope.tenant.is_swapped or cursor.scope.tenant.num_rebuilding:
            self.scheduler.suspend(cursor)
            return True
        return False

    def resume(self) -> None:
        """Go on with cursors whose sequences have come back."""
        for cursor in self.scheduler.take_resumable():
            self._guard(cursor.lane.request, lambda _, cursor=cursor: self.advance(cursor))

    def awaits_engine(self) -> bool:
        """Whether some request has nothing to run here before the engine's next message: it may free memory then."""
        return any(all(lane.is_over for lane in request.lanes.values()) for request in self.requests.values())

    def tenants(self) -> Iterable[Tenant]:
        """Every tenant, those of idle sessions too."""
        for request in self.requests.values():
            yield from request.tenants.values()
        for scopes in self.sessions.values():
            yield from {id(scope.tenant): scope.tenant for scope in scopes.values()}.values()

    def scopes(self) -> Iterable[Scope]:
        """Every scope, for `Modules.check_integrity`."""
        return (scope for tenant in self.tenants() for scope in tenant.scopes)

    def _ready(self, cursor: Cursor, op: Run) -> None:
        chunks: dict[str, StreamChunk] = {}
        if op.receives:
            taken = self._receive(cursor, op)
            if taken is None:
                return
            chunks = taken
        if cursor.ahead is not None:
            if adopts(cursor.ahead, op, cursor):
                cursor.work, cursor.ahead = cursor.ahead, None
                return
            self._retract(cursor)
        env = cursor.env
        inputs = {port: env.get(value) for port, value in op.inputs}
        for port, _ in op.receives:
            inputs[port] = chunks[port].items if port in chunks else None
        cursor.work = self.scheduler.make_work(cursor, op, inputs=inputs, chunks=chunks)
        self.scheduler.add(cursor.work)

    def _retract(self, cursor: Cursor) -> None:
        """The work queued ahead is not what follows: take it back, even if it has been launched."""
        ahead, cursor.ahead = cursor.ahead, None
        assert ahead is not None
        self.scheduler.cancel(ahead)
        if ahead.undo is not None:
            ahead.undo()

    def _receive(self, cursor: Cursor, op: Run) -> dict[str, StreamChunk] | None:
        """One chunk of every stream the op reads, or None after registering to be woken."""
        request, path = cursor.lane.request, cursor.scope.path
        held = cursor.chunks
        for port, stream in op.receives:
            buffer = self._buffer(request, stream.name, path)
            if port in held or buffer.ended:
                continue
            chunk = buffer.take()
            if chunk is None:
                request.waiters[(stream.name, path)] = cursor
                return None
            held[port] = chunk
        cursor.chunks = {}
        return held

    def _loop_start(self, cursor: Cursor, op: LoopStart) -> None:
        limit = self._number(cursor, op.limit)
        frame = Frame(op, limit, collected={source: [] for source, _ in op.collect})
        budget = self._budget_left(cursor, op)
        if limit is not None and limit <= 0 or budget is not None and budget <= 0:
            self._leave_loop(cursor, frame, "length")
            return
        cursor.loops.append(frame)
        cursor.pc += 1

    def _loop_end(self, cursor: Cursor, op: LoopEnd) -> None:
        frame = cursor.loops[-1]
        for source, values in frame.collected.items():
            values.append(cursor.env.get(source))
        frame.iteration += 1
        budgets = cursor.lane.request.budgets
        if frame.op.budget is not None:
            budgets[frame.op.budget] = budgets.get(frame.op.budget, 0) + 1
        left = self._budget_left(cursor, frame.op)
        if frame.reason is None and (frame.iteration == frame.limit or left is not None and left <= 0):
            frame.reason = "length"
        if frame.reason is None:
            cursor.pc = op.body
        else:
            self._leave_loop(cursor, frame, frame.reason)

    def _leave_loop(self, cursor: Cursor, frame: Frame, reason: str) -> None:
        if frame in cursor.loops:
            cursor.loops.pop()
        if frame.op.dynamic and reason != "end":
            cursor.reason = reason
        for source, target in frame.op.collect:
            cursor.env[target] = frame.collected[source]
            cursor.written[target] = None
        cursor.pc = frame.op.exit

    def _budget_left(self, cursor: Cursor, op: LoopStart) -> int | None:
        request = cursor.lane.request
        if op.budget is None or op.budget not in request.info.fields:
            return None
        return request.info.fields[op.budget] - request.budgets.get(op.budget, 0)

    def _number(self, cursor: Cursor, value: int | str | None) -> int | None:
        if not isinstance(value, str):
            return value
        found = cursor.env.get(value, cursor.lane.request.info.fields.get(value))
        if found is None:
            raise RuntimeError(f"loop count {value!r} is neither a value nor a field of the request")
        return int(plain(found))

    def _skip(self, cursor: Cursor, op: Skip) -> None:
        if op.predicate(cursor.lane.request.view, cursor.current_iteration):
            cursor.pc += 1
            return
        for name in op.absent:
            cursor.env[name] = None
            cursor.written[name] = None
        cursor.pc = op.target

    def _kv_step(self, cursor: Cursor, op: KVStep) -> None:
        scope, step = cursor.scope, op.step
        if isinstance(step, Drop):
            for key in [k for k in scope.sequences if k[1] == step.label]:
                self.modules.drop(scope, key)
            return
        for module, label in [k for k in scope.sequences if k[1] == step.source]:
            source = scope.sequences[(module, label)]
            if (module, step.new) in scope.sequences:
                self.modules.drop(scope, (module, step.new))
            if isinstance(step, Alias):
                scope.sequences[(module, step.new)] = source
            else:
                at = cursor.env.get(step.at) if isinstance(step, Fork) and step.at else None
                scope.sequences[(module, step.new)] = self.modules.fork(module, source, at=plain(at))

    # ---- fan-out and join -------------------------------------------------------------------------------

    def _fan_out(self, cursor: Cursor, op: Split | Spawn) -> bool:
        """Start a cursor's branches or children; False if there are none and it can go on."""
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
            scope = self._scope(parent.lane, (*parent.scope.path, index))
            env = {**parent.env, **(item if isinstance(item, Mapping) else {op.over: item})}
            groups = (*parent.groups, (group, index))
            children.append(
                Cursor(parent.lane, scope, groups, op.body, env, parent, index, parent.current_iteration)
            )
        return children

    def _start_child(self, child: Cursor, op: Split | Spawn) -> None:
        if isinstance(op, Spawn):
            assert child.parent is not None
            if op.fork is not None:
                for (module, label), source in child.parent.scope.sequences.items():
                    if label == op.fork:
                        child.scope.sequences[(module, label)] = self.modules.fork(module, source)
            self._open_streams(child, op.feeds)
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
            self._start_child(parent.waiting.pop(), op)  # type: ignore[arg-type]
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
        request, lane, path = cursor.lane.request, cursor.lane, cursor.scope.path
        self._close_streams(cursor, feeds)
        if cursor.reason is not None:
            request.reasons[".".join(map(str, path))] = cursor.reason
        for name in sorted(emits):
            self.emit(cursor, Emit(request_id=request.info.request_id, name=name, path=path, final=True,
                                   reason=cursor.reason))  # fmt: skip
        if cursor.groups:
            group, index = cursor.groups[-1]
            group.done.add(index)
            while group.next in group.done:
                group.done.discard(group.next)
                group.next += 1
                for message in group.held.pop(group.next, ()):
                    self._deliver(message, cursor.groups[:-1])
        if path and path in lane.scopes:
            self._free_scope(lane.scopes.pop(path))

    def _walk_ended(self, cursor: Cursor) -> None:
        lane, request, path = cursor.lane, cursor.lane.request, cursor.scope.path
        lane.live.pop(path, None)
        lane.ended[path] = cursor
        for stream in lane.program.receives:
            request.buffers.pop((stream, path), None)
        self._end_scope(cursor, feeds=lane.program.feeds, emits=lane.program.emits)
        if not lane.is_fed:
            for stream in lane.program.all_feeds:
                consumer = self._consumer_lane(request, stream)
                if consumer is not None:
                    consumer.feeders -= 1
                    self._maybe_over(consumer)
        self._maybe_over(lane)

    def _maybe_over(self, lane: Lane) -> None:
        """Tell the engine when a lane's walk has ended everywhere and nothing can start it again."""
        started_once = () in lane.ended
        if lane.is_over or lane.live or (lane.is_fed and lane.feeders and not started_once):
            return
        lane.is_over = True
        request = lane.request
        if lane.is_fed:
            for stream in lane.program.all_feeds:
                consumer = self._consumer_lane(request, stream)
                if consumer is not None:
                    consumer.feeders -= 1
                    self._maybe_over(consumer)
        self.outbox.append(
            WalkDone(
                request_id=request.info.request_id,
                lane=lane.name,
                walk=lane.program.walk,
                outputs={name: self._output(lane, name) for name in lane.program.outputs},
                reasons=dict(request.reasons),
                counters=dict(request.counters),
                counts=dict(request.counts),
            )
        )

    def _output(self, lane: Lane, name: str) -> Any:
        if () in lane.ended:
            return to_host(lane.ended[()].env.get(name))
        return [to_host(lane.ended[path].env.get(name)) for path in sorted(lane.ended)]

    # ---- output -----------------------------------------------------------------------------------------

    def emit(self, cursor: Cursor, message: Emit) -> None:
        """Send to the client's side, in item order: later items wait until earlier ones have ended."""
        self._deliver(message, cursor.groups)

    def _deliver(self, message: Emit, groups: Groups) -> None:
        for group, index in reversed(groups):
            if group.next != index:
                group.held.setdefault(index, []).append(message)
                return
        self.outbox.append(message)

    def complete(self, work: Work, values: Mapping[str, Any]) -> None:
        """A work has run: `values` has its output ports (None: nothing produced). Its cursor goes on."""
        self._guard(work.request, self._complete, work, values)

    def _complete(self, request: RequestState, work: Work, values: Mapping[str, Any]) -> None:
        cursor, op = work.cursor, work.op
        if work.error is not None:
            raise work.error
        cursor.work = None
        request.counters[op.target] = request.counters.get(op.target, 0) + 1
        for name, amount in work.counts.items():
            request.counts[name] = request.counts.get(name, 0) + amount
        for port, value in op.outputs:
            if port in values:
                cursor.env[value] = values[port]
                cursor.written[value] = None
        for port, name in op.emits:
            if values.get(port) is not None:
                self.emit(cursor, Emit(request_id=request.info.request_id, name=name, path=work.path,
                                       value=to_host(values[port])))  # fmt: skip
        self._end_loops(cursor, op, work)
        for port, name in op.sends:
            if values.get(port) is not None:
                self._send(request, cursor, name, values[port])
        cursor.pc += 1
        self.advance(cursor)

    def _end_loops(self, cursor: Cursor, op: Run, work: Work) -> None:
        """Mark the loops that this work ends: by `stop`, or because a stream has given its final chunk."""
        frame = innermost_dynamic(cursor)
        if frame is None:
            return
        reason = work.stop_reason or work.request.stops.pop(work.path, None)
        if reason is not None:
            frame.reason = reason
        for port, stream in op.receives:
            chunk = work.chunks.get(port)
            if chunk is not None and chunk.final and stream.name in frame.op.streams:
                frame.reason = frame.reason or "end"

    def _send(self, request: RequestState, cursor: Cursor, name: str, value: Any) -> None:
        """Put a port's items on a stream: one row is one item; finish's own tensors and tokens are (k, ...)."""
        key = (name, cursor.scope.path)
        buffer = request.buffers.get(key)
        if buffer is None:
            return
        if type(value) is Row:
            buffer.put(value.batch[value.index : value.index + 1])
        else:
            buffer.put(value)
        self._wake(request, key)

    def _to_device(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self.modules.device)
        if isinstance(value, Mapping):
            return {k: self._to_device(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._to_device(v) for v in value]
        return value


def innermost_dynamic(cursor: Cursor) -> Frame | None:
    """The dynamic loop around a cursor, seen through the branches it may be in but not out of its Each item."""
    at: Cursor | None = cursor
    while at is not None:
        for frame in reversed(at.loops):
            if frame.op.dynamic:
                return frame
        at = at.parent if at.parent is not None and at.parent.scope is at.scope else None
    return None


def to_host(value: Any) -> Any:
    """A value that can leave the worker: no batch behind a row, no device."""
    value = plain(value)
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=value._base is not None or value.device.type == "cpu")
    if isinstance(value, Mapping):
        return {k: to_host(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_host(v) for v in value]
    return value
