"""Streams: their policies, their two ends, the lanes and Eaches these ends lie in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mstar.plugin.graph import (
    Call,
    Each,
    Fixed,
    Graph,
    LeftContext,
    Parallel,
    Port,
    Section,
    Size,
    SlidingWindow,
    Stream,
    Whole,
    children,
)
from mstar.plugin.validate.nodes import mismatch
from mstar.plugin.validate.states import lanes_of, named_tasks


def stream_policy(stream: Stream) -> Iterator[str]:
    where = f"stream {stream.name!r}: "
    if stream.after_end not in ("end", "absent"):
        yield f"{where}unknown after_end {stream.after_end!r}; known: end, absent"
    policy = stream.policy
    if isinstance(policy, Fixed):
        yield from _size(policy.size, f"{where}Fixed size")
    elif isinstance(policy, LeftContext):
        yield from _size(policy.size, f"{where}LeftContext size")
        yield from _size(policy.context, f"{where}LeftContext context", least=0)
    elif isinstance(policy, SlidingWindow):
        wrong = [*_size(policy.window, f"{where}window"), *_size(policy.stride, f"{where}stride")]
        yield from wrong
        if not wrong and not isinstance(policy.window, str) and not isinstance(policy.stride, str):
            windows, strides = (s if isinstance(s, tuple) else (s,) for s in (policy.window, policy.stride))
            for index in range(max(len(windows), len(strides))):
                window, stride = (sizes[min(index, len(sizes) - 1)] for sizes in (windows, strides))
                if stride > window:
                    yield f"{where}stride {stride} is more than window {window}, so items would be skipped"
    elif not isinstance(policy, Whole):
        yield f"{where}{policy!r} is no policy; known: Fixed, SlidingWindow, LeftContext, Whole"


def _size(size: Size, where: str, *, least: int = 1) -> Iterator[str]:
    if isinstance(size, str):
        if not size:
            yield f"{where} names no request field"
        return
    sizes = size if isinstance(size, tuple) else (size,)
    if not sizes:
        yield f"{where} is an empty schedule; give at least one size"
    for value in sizes:
        if not isinstance(value, int) or value < least:
            yield f"{where} is {value!r}; it must be an integer of at least {least}"


@dataclass(frozen=True, slots=True)
class _End:
    """One end of a stream: `depth` Eaches around the call, and the Parallel branches it is in."""

    walk: str
    call: Call
    port: Port | None
    depth: int
    branches: tuple[tuple[int, int], ...]

    def beside(self, other: _End) -> bool:
        branches = dict(other.branches)
        return any(branches.get(parallel, branch) != branch for parallel, branch in self.branches)


def ends_of(graph: Graph, name: str) -> tuple[list[_End], list[_End]]:
    """(producers, consumers) of a stream."""
    producers: list[_End] = []
    consumers: list[_End] = []
    parallels = itertools.count()

    def visit(walk: str, section: Section, depth: int, branches: tuple[tuple[int, int], ...]) -> None:
        if isinstance(section, Call):
            method = graph.method(section.target)
            for port, stream in section.sends.items():
                if stream == name:
                    producers.append(_End(walk, section, method.output(port) if method else None, depth, branches))
            for port, stream in section.receives.items():
                if stream == name:
                    consumers.append(_End(walk, section, method.input(port) if method else None, depth, branches))
        parallel = next(parallels) if isinstance(section, Parallel) else None
        for index, child in enumerate(children(section)):
            inner = branches if parallel is None else (*branches, (parallel, index))
            visit(walk, child, depth + isinstance(section, Each), inner)

    for walk in graph.walks:
        visit(walk.name, walk.section, 0, ())
    return producers, consumers


def stream_ends_meet(graph: Graph, stream: Stream, *, tasks: tuple[str | None, ...]) -> Iterator[str]:
    where = f"stream {stream.name!r}: "
    producers, consumers = ends_of(graph, stream.name)
    if not producers:
        yield f"{where}no call sends on it"
    if not consumers:
        yield f"{where}no call receives it"
    readers = sorted({end.walk for end in consumers})
    if len(readers) > 1:
        yield f"{where}walks {', '.join(readers)} all receive it; a stream has one consumer, declare one for each"
    for side, ends in (("send on", producers), ("receive", consumers)):
        for index, end in enumerate(ends):
            for other in ends[:index]:
                if end.walk == other.walk and end.beside(other):
                    yield f"{where}walk {end.walk!r}: branches of one Parallel {side} it, in no defined order"
    for producer in producers:
        for consumer in consumers:
            yield from _edge(graph, where, producer, consumer)
    for consumer in consumers:
        for task in tasks:
            lanes = lanes_of(graph.states, task)
            if producers and consumer.walk in lanes and not any(p.walk in lanes for p in producers):
                in_task = f"task {task!r} starts" if task else "states start"
                yield f"{where}{in_task} walk {consumer.walk!r}, which would wait for it, but no walk that sends on it"


def _edge(graph: Graph, where: str, producer: _End, consumer: _End) -> Iterator[str]:
    one, other = producer.walk, consumer.walk
    if one == other:
        yield f"{where}walk {one!r} both sends on and receives it; a stream joins walks that run side by side"
    else:
        shared = [
            (lanes[one], lanes[other])
            for lanes in (lanes_of(graph.states, task) for task in (None, *named_tasks(graph.states)))
            if one in lanes and other in lanes
        ]
        if shared and all(a == b and len(a) == 1 for a, b in shared):
            lane = next(iter(shared[0][0]))
            yield f"{where}walks {one!r} and {other!r} both run on lane {lane!r}, one after the other; use two lanes"
    if producer.port and consumer.port:
        items = replace(consumer.port, layout=producer.port.layout, shape=None)  # a chunk may be shaped otherwise
        if consumer.port.layout != "item" and (wrong := mismatch(producer.port, items)):
            yield (
                f"{where}output port {producer.port.name!r} of {producer.call.target} does not fit input port "
                f"{consumer.port.name!r} of {consumer.call.target}: {wrong}"
            )


def stream_depths(graph: Graph) -> Iterator[str]:
    """A child of an `Each` has its own cursor in a lane it feeds, so all streams of a lane must split it alike."""
    base = {walk.name: 0 for walk in graph.walks}
    ends = {stream.name: ends_of(graph, stream.name) for stream in graph.streams}
    for _ in graph.walks:  # a lane may feed another: settle them in order
        for producers, consumers in ends.values():
            for producer in producers:
                for consumer in consumers:
                    base[consumer.walk] = max(0, base[producer.walk] + producer.depth - consumer.depth)
    for name, (producers, consumers) in ends.items():
        for consumer in consumers:
            for producer in producers:
                sent, read = base[producer.walk] + producer.depth, base[consumer.walk] + consumer.depth
                if sent != read:
                    yield (
                        f"stream {name!r}: {producer.call.target} in walk {producer.walk!r} sends inside {sent} Each, "
                        f"but {consumer.call.target} in walk {consumer.walk!r} receives inside {read}; all that such a "
                        f"walk receives must come from the same depth"
                    )
