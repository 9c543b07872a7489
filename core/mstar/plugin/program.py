"""Walks compiled once to flat programs: run, loop, each, split, fork, join. A request carries cursors into them.

Pure data, imports no torch. `compile_graph` expects a graph that `validate` accepts. The worker's router interprets
programs; nothing here executes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mstar.plugin import graph as parts

MethodKey = tuple[str, str]
"""(module, method): the unit of batching."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Run one method, then go on at the next op.

    `free_ports`: row inputs of any shape, which tasks must agree on to batch. `closes`: streams that nothing after it
    sends on. `unit`: the methods it runs in truth.
    """

    node: str
    key: MethodKey
    method: parts.Method
    inputs: tuple[tuple[str, str], ...]  # (port, value)
    outputs: tuple[tuple[str, str], ...]
    receives: tuple[tuple[str, parts.Stream], ...]
    sends: tuple[tuple[str, str], ...]  # (port, stream name)
    emits: tuple[tuple[str, str], ...]
    target: str = ""
    closes: tuple[str, ...] = ()
    has_tokens: bool = False
    free_ports: tuple[str, ...] = ()
    unit: Unit | None = None
    cache: str | None = None  # the value that holds its content key

    @property
    def counts(self) -> tuple[tuple[str, int], ...]:
        """How often it runs each "node.method", for the request's counters."""
        return self.unit.counts if self.unit is not None else ((self.target, 1),)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The methods it runs: itself, unless it is a unit."""
        return self.unit.runs if self.unit is not None else (self,)


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Methods that run as one, see `plugin.fuse`. Port p of `runs[i]` is port "i.p" of the unit's own method.

    Args:
        steps: (index into `runs`, iteration of its loop inside the unit; None: that of the loop around it), in order.
        modules: those of its methods, once each.
    """

    runs: tuple[Run, ...]
    steps: tuple[tuple[int, int | None], ...]
    modules: tuple[str, ...]
    counts: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class LoopStart:
    """Enter a loop; `exit` is the op after it. `streams`: those whose end ends this loop."""

    dynamic: bool
    limit: int | str | None
    budget: str | None
    exit: int
    collect: tuple[tuple[str, str], ...]
    streams: frozenset[str]
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class LoopEnd:
    """The end of a loop's body; back to `body` (the op after its LoopStart) or on to the next op."""

    body: int


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Side by side: one branch cursor at each of `branches`; this cursor goes on at `join` when all have joined."""

    branches: tuple[int, ...]
    join: int


@dataclass(frozen=True, slots=True, eq=False)
class Spawn:
    """One child cursor at `body` per item of `over`; this cursor goes on at `join` when all have joined.

    `feeds`, `emits`: streams that the body itself (not an inner Spawn) sends on, and names under which it emits:
    they live and end with each child.
    """

    over: str
    body: int
    join: int
    forks: tuple[str, ...]
    collect: tuple[tuple[str, str], ...]
    ordered: parts.Predicate | None
    feeds: frozenset[str]
    emits: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class Skip:
    """Go to `target`, leaving `absent` values absent, unless the predicate holds."""

    predicate: parts.Predicate
    target: int
    absent: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class KVStep:
    """A Fork, Alias or Drop."""

    step: parts.Fork | parts.Alias | parts.Drop


@dataclass(frozen=True, slots=True, eq=False)
class Join:
    """The end of a branch, child or walk."""


Op = Run | LoopStart | LoopEnd | Split | Spawn | Skip | KVStep | Join


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A compiled walk.

    Args:
        ops: op 0 is the first; the walk itself ends at a Join.
        feeds, emits: streams that the walk sends on, and names under which it emits, outside any Each.
        all_feeds: every stream it sends on.
        receives: every stream it reads.
    """

    walk: str
    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    feeds: frozenset[str]
    emits: frozenset[str]
    all_feeds: frozenset[str]
    receives: frozenset[str]


@dataclass(slots=True)
class _Compiler:
    graph: parts.Graph
    ops: list[Op | None] = field(default_factory=list)
    closing: dict[int, frozenset[str]] = field(default_factory=dict)

    def scope(self, section: parts.Section) -> None:
        """A whole walk, or the body of an Each: what its streams live and end with."""
        self.closing |= last_senders(section)
        self.emit(section)
        self.ops.append(Join())

    def emit(self, section: parts.Section) -> None:
        if isinstance(section, parts.Call):
            self.ops.append(self._run(section))
        elif isinstance(section, parts.Sequential):
            for child in section.sections:
                self.emit(child)
        elif isinstance(section, parts.Parallel):
            self._split(section)
        elif isinstance(section, parts.When):
            self._skip(section)
        elif isinstance(section, parts.Each):
            self._spawn(section)
        elif isinstance(section, parts.Loop | parts.DynamicLoop):
            self._loop(section)
        else:
            self.ops.append(KVStep(section))

    def _hole(self) -> int:
        self.ops.append(None)
        return len(self.ops) - 1

    def _run(self, call: parts.Call) -> Run:
        node = self.graph.node(call.node)
        method = self.graph.method(call.target)
        assert node is not None and method is not None, call.target
        streams = {port: self.graph.stream(name) for port, name in call.receives.items()}
        return Run(
            node=node.name,
            key=(node.module, method.name),
            method=method,
            inputs=tuple((p.name, call.inputs.get(p.name, p.name)) for p in method.inputs if p.name not in streams),
            outputs=tuple((p.name, call.outputs.get(p.name, p.name)) for p in method.outputs),
            receives=tuple((port, stream) for port, stream in streams.items() if stream is not None),
            sends=tuple(call.sends.items()),
            emits=tuple(call.emits.items()),
            target=call.target,
            closes=tuple(sorted(self.closing.get(id(call), ()))),
            has_tokens=method.has_tokens,
            free_ports=tuple(p.name for p in method.inputs if p.layout == "rows" and p.shape is None),
            cache=call.cache,
        )

    def _split(self, section: parts.Parallel) -> None:
        hole = self._hole()
        starts = []
        for branch in section.sections:
            starts.append(len(self.ops))
            self.emit(branch)
            self.ops.append(Join())
        self.ops[hole] = Split(tuple(starts), len(self.ops))

    def _skip(self, section: parts.When) -> None:
        hole = self._hole()
        self.emit(section.section)
        self.ops[hole] = Skip(section.predicate, len(self.ops), tuple(written(section.section, self.graph)))

    def _spawn(self, section: parts.Each) -> None:
        hole = self._hole()
        self.scope(section.section)
        self.ops[hole] = Spawn(
            over=section.over,
            body=hole + 1,
            join=len(self.ops),
            forks=parts.labels(section.fork),
            collect=tuple(section.collect.items()),
            ordered=section.ordered,
            feeds=feeds(section.section),
            emits=emits(section.section),
        )

    def _loop(self, section: parts.Loop | parts.DynamicLoop) -> None:
        hole = self._hole()
        self.emit(section.section)
        self.ops.append(LoopEnd(hole + 1))
        dynamic = isinstance(section, parts.DynamicLoop)
        self.ops[hole] = LoopStart(
            dynamic=dynamic,
            limit=section.limit if isinstance(section, parts.DynamicLoop) else section.count,
            budget=section.budget if isinstance(section, parts.DynamicLoop) else None,
            exit=len(self.ops),
            collect=tuple(section.collect.items()),
            streams=ending_streams(section.section, self.graph) if dynamic else frozenset(),
            name=section.name,
        )


def written(section: parts.Section, graph: parts.Graph) -> list[str]:
    """Values a section leaves behind, in order of first writing."""
    names: list[str] = []
    if isinstance(section, parts.Call):
        method = graph.method(section.target)
        names += [section.outputs.get(port.name, port.name) for port in (method.outputs if method else ())]
    elif not isinstance(section, parts.Each):
        names += [name for child in parts.children(section) for name in written(child, graph)]
    if isinstance(section, parts.Each | parts.Loop | parts.DynamicLoop):
        names += section.collect.values()
    return list(dict.fromkeys(names))


def calls_outside(section: parts.Section, *kinds: type[parts.Section]) -> Iterator[parts.Call]:
    """A section's calls that lie in no inner section of these kinds."""
    if isinstance(section, parts.Call):
        yield section
    elif not isinstance(section, kinds):
        for child in parts.children(section):
            yield from calls_outside(child, *kinds)


def ending_streams(section: parts.Section, graph: parts.Graph) -> frozenset[str]:
    """Streams whose end ends a loop with this body: those it receives outside inner loops and Eaches."""
    received = [
        n for call in calls_outside(section, parts.Loop, parts.DynamicLoop, parts.Each) for n in call.receives.values()
    ]
    return frozenset(s.name for s in graph.streams if s.name in received and s.after_end == "end")


def feeds(section: parts.Section) -> frozenset[str]:
    """Streams that a section sends on outside inner Eaches."""
    return frozenset(name for call in calls_outside(section, parts.Each) for name in call.sends.values())


def last_senders(section: parts.Section) -> dict[int, frozenset[str]]:
    """Calls directly in a scope's sequence, by id -> the streams that nothing later in the scope sends on."""
    found: dict[int, frozenset[str]] = {}
    later: frozenset[str] = frozenset()
    for part in reversed(list(_in_order(section))):
        if isinstance(part, parts.Call):
            found[id(part)] = frozenset() if id(part) in found else feeds(part) - later
        later |= feeds(part)
    return found


def _in_order(section: parts.Section) -> Iterator[parts.Section]:
    if isinstance(section, parts.Sequential):
        for child in section.sections:
            yield from _in_order(child)
    else:
        yield section


def emits(section: parts.Section) -> frozenset[str]:
    """Names under which a section emits outside inner Eaches."""
    return frozenset(name for call in calls_outside(section, parts.Each) for name in call.emits.values())


def compile_walk(graph: parts.Graph, name: str) -> Program:
    """The flat program of one walk."""
    walk = graph.walk(name)
    assert walk is not None, name
    compiler = _Compiler(graph)
    compiler.scope(walk.section)
    return Program(
        walk=name,
        ops=tuple(op for op in compiler.ops if op is not None),
        inputs=walk.inputs,
        outputs=walk.outputs,
        feeds=feeds(walk.section),
        emits=emits(walk.section),
        all_feeds=frozenset(stream for call in parts.calls(walk.section) for stream in call.sends.values()),
        receives=frozenset(stream for call in parts.calls(walk.section) for stream in call.receives.values()),
    )


def compile_graph(graph: parts.Graph) -> dict[str, Program]:
    """Walk name -> program, for every walk."""
    return {walk.name: compile_walk(graph, walk.name) for walk in graph.walks}
