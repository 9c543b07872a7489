"""Streams between lanes: what one walk sends and another, side by side with it, reads.

A reader is told five things, in order: that a scope which feeds it has begun, items, that its stream has ended, that an
Each item of the feeding walk has, and that the walk can begin no more scopes. If its lane lives in another worker they
go there as messages, else they are done at once. Owned by the worker's thread; knows no methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from mstar.ipc.messages import Feed
from mstar.plugin.graph import Graph
from mstar.plugin.nodes import StreamChunk
from mstar.plugin.program import Program, Run
from mstar.types import Path
from mstar.worker.output import Output, mirrored, to_host
from mstar.worker.places import Places, names_read
from mstar.worker.state import Cursor, Groups, Lane, RequestState, Row, settled
from mstar.worker.streams import StreamBuffer


class Lanes(Protocol):
    """Who goes through programs."""

    def start(self, lane: Lane, path: Path, *, groups: Groups, env: dict[str, Any]) -> None:
        """Start a lane's outermost cursor at `path`."""

    def advance(self, cursor: Cursor) -> None:
        """Go on with a cursor that waited."""

    def maybe_over(self, lane: Lane) -> None:
        """See whether a lane has ended."""


class Feeds:
    """The streams of all requests of one worker."""

    def __init__(
        self, graph: Graph, programs: Mapping[str, Program], *, output: Output, places: Places, lanes: Lanes
    ) -> None:
        self._graph = graph
        self._programs = programs
        self._output = output
        self._places = places
        self._lanes = lanes
        self._readers = {stream: p for p in programs.values() for stream in p.receives}
        self._seen = {program.walk: names_read(program) for program in self._readers.values()}
        runs = [op for p in programs.values() for op in p.ops if isinstance(op, Run)]
        self._items = {stream: run.method.output(port) for run in runs for port, stream in run.sends}

    # ---- the feeding side -----------------------------------------------------------------------------------

    def begin(self, request: RequestState, walks: Iterable[str]) -> None:
        """Walks begin: lanes here that read what they send wait for them."""
        for walk in walks:
            for stream in self._programs[walk].all_feeds:
                if (lane := self._lane(request, stream)) is not None:
                    lane.feeders += 1

    def open(self, cursor: Cursor, streams: Iterable[str]) -> None:
        """A scope that feeds streams begins: their buffers, and the readers' cursors at the same path."""
        for stream in streams:
            self._tell(cursor, stream, "open", value=cursor.env, groups=cursor.groups)

    def send(self, cursor: Cursor, stream: str, value: Any) -> None:
        """Put a port's items on a stream: one row is one item; finish's own tensors and tokens are (k, ...)."""
        request, key = cursor.lane.request, (stream, cursor.scope.path)
        if (buffer := request.buffers.get(key)) is None:
            if not self._places.is_alone:
                items = to_host(value)
                self._tell(cursor, stream, "items", value=items[None] if type(value) is Row else items)
            return
        buffer.put(value.batch.tensor[value.at : value.at + 1] if type(value) is Row else value)
        self._wake(request, key)

    def close(self, cursor: Cursor, streams: Iterable[str]) -> None:
        """Streams have ended at the cursor's path."""
        for stream in streams:
            self._tell(cursor, stream, "close")

    def item_ended(self, cursor: Cursor) -> None:
        """An Each item, or an outermost scope inside of one, has ended."""
        for stream in cursor.lane.program.all_feeds if cursor.groups else ():
            self._tell(cursor, stream, "item", groups=cursor.groups)

    def walk_over(self, lane: Lane) -> None:
        """A lane's walk can begin no more scopes."""
        for stream in lane.program.all_feeds:
            self._reach(lane.request, Feed(request_id=lane.request.info.request_id, stream=stream, event="over"))

    def _tell(self, cursor: Cursor, stream: str, event: Any, *, value: Any = None, groups: Groups = ()) -> None:
        request, worker = cursor.lane.request, self._places.worker
        keys = tuple((worker, group.number, group.size, index) for group, index in groups)
        name, path = request.info.request_id, cursor.scope.path
        self._reach(request, Feed(request_id=name, stream=stream, event=event, path=path, groups=keys, value=value))

    def _reach(self, request: RequestState, message: Feed) -> None:
        walk = self._readers[message.stream].walk
        if (worker := self._places.home(request, walk)) is None:
            if (lane := self._lane(request, message.stream)) is not None:
                self._take(lane, message)
        elif walk in request.walks.values():
            if message.event == "open":
                seen = {name: to_host(settled(message.value[name])) for name in self._seen[walk] & set(message.value)}
                message = Feed(
                    request_id=message.request_id, stream=message.stream, event="open", path=message.path,
                    groups=message.groups, value=seen,
                )  # fmt: skip
            self._output.post(worker, message)

    # ---- the reading side -----------------------------------------------------------------------------------

    def has_begun(self, request: RequestState, stream: str) -> bool:
        """Whether the lane that reads a stream here has begun, and may have ended."""
        return any(lane.program is self._readers[stream] for lane in request.lanes.values())

    def handle(self, request: RequestState, message: Feed) -> None:
        """What a lane elsewhere tells. What comes for a lane that has ended is ignored."""
        if (lane := self._lane(request, message.stream)) is not None:
            self._take(lane, message)

    def receive(self, cursor: Cursor, op: Run) -> dict[str, StreamChunk] | None:
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

    def _take(self, lane: Lane, message: Feed) -> None:
        request, path, key = lane.request, message.path, (message.stream, message.path)
        if message.event == "open":
            self._buffer(request, message.stream, path)
            if path not in lane.live and path not in lane.ended:
                self._lanes.start(lane, path, groups=mirrored(lane, message.groups), env=message.value)
        elif message.event == "items":
            if (buffer := request.buffers.get(key)) is not None:
                buffer.put(message.value)
                self._wake(request, key)
        elif message.event == "close":
            if (buffer := request.buffers.get(key)) is not None:
                buffer.close()
                self._wake(request, key)
        elif message.event == "item":
            groups = mirrored(lane, message.groups)
            groups[-1][0].fed.add(groups[-1][1])
            self._output.settle(lane, groups)
        else:
            lane.feeders -= 1
            self._lanes.maybe_over(lane)

    def _lane(self, request: RequestState, stream: str) -> Lane | None:
        """The lane here that reads a stream."""
        program = self._readers[stream]
        return next((x for x in request.lanes.values() if x.program is program and not x.is_over), None)

    def _buffer(self, request: RequestState, name: str, path: Path) -> StreamBuffer:
        key = (name, path)
        if key not in request.buffers:
            stream, item = self._graph.stream(name), self._items[name]
            assert stream is not None and item is not None
            request.buffers[key] = StreamBuffer.open(stream, fields=request.info.fields, item=item)
        return request.buffers[key]

    def _wake(self, request: RequestState, key: tuple[str, Path]) -> None:
        cursor = request.waiters.pop(key, None)
        if cursor is not None:
            self._lanes.advance(cursor)
