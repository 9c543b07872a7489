"""Checks a graph (and its spec) before anything runs: every problem at once, each naming node, port, walk or stream.

Runs at start-up in the server and in `mstar graph`; imports no torch. What only a request can tell (the values of
fields, what a `Processor` encodes, which keys the items of an `Each` hold) is not checked here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import get_args

from mstar.config import suggest
from mstar.errors import PluginError
from mstar.plugin import graph as parts
from mstar.plugin.program import ending_streams, written
from mstar.plugin.spec import ModelSpec
from mstar.plugin.states import Start, States, Then

_FLOATS = ("float", "float64", "float32", "float16", "bfloat16")
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
_DTYPES = (*_FLOATS, *_INTEGERS, "bool")
_WIRING = {"inputs": "input", "receives": "input", "outputs": "output", "sends": "output", "emits": "output"}


def validate(graph: parts.Graph, spec: ModelSpec | None = None) -> None:
    """Raise PluginError with every problem of `graph`; with `spec`, also where spec and graph disagree."""
    report = _Report()
    _check(graph, spec, report)
    if problems := report.problems:
        owner = f"plugin {spec.name!r}: " if spec else ""
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise PluginError(f"{owner}the graph has {count}:\n" + "\n".join(f"  - {problem}" for problem in problems))


def _check(graph: parts.Graph, spec: ModelSpec | None, report: _Report) -> None:
    report.require_distinct("node", [n.name for n in graph.nodes])
    report.require_distinct("walk", [w.name for w in graph.walks])
    report.require_distinct("stream", [s.name for s in graph.streams])
    for node in graph.nodes:
        _check_node(node, report)
    _check_shared_modules(graph, report)
    flow = _Flow(graph)
    for walk in graph.walks:
        flow.follow(walk, report)
        _check_items(walk.section, report.at(f"walk {walk.name!r}"))
    rules: list[Start | Then] = [*graph.states.starts, *graph.states.thens]
    named = [rule.task for rule in rules if rule.task is not None]
    tasks = dict.fromkeys([*(spec.tasks if spec else ()), *named]) or (None,)
    lanes = {task: _lanes(graph.states, task) for task in tasks}
    _check_states(graph, lanes, report)
    for stream in graph.streams:
        at = report.at(f"stream {stream.name!r}")
        _check_policy(stream, at)
        _check_ends(flow.senders[stream.name], flow.receivers[stream.name], lanes, at)
    _check_edges(graph, flow, lanes, report)
    if spec is not None:
        _check_spec(graph, spec, lanes, report)


@dataclass(frozen=True, slots=True)
class _Report:
    """The problems found so far, each once; `place` says where those to come are."""

    problems: dict[str, None] = field(default_factory=dict)
    place: str = ""

    def at(self, place: str) -> _Report:
        return _Report(self.problems, f"{self.place}{place}: ")

    def require(self, holds: object, problem: str) -> None:
        if not holds:
            self.problems[self.place + problem] = None

    def require_known(self, name: str, known: Iterable[str], before: str, after: str = "") -> None:
        names = list(known)
        self.require(name in names, f"{before} {name!r}{after}{suggest(name, names)}")

    def require_distinct(self, kind: str, names: Collection[str]) -> None:
        for name in dict.fromkeys(names):
            times = list(names).count(name)
            self.require(times == 1, f"{kind} {name!r} is declared {times} times")


# ---- nodes ----------------------------------------------------------------------------------------------


def _check_node(node: parts.Node, report: _Report) -> None:
    at = report.at(f"node {node.name!r}")
    at.require(node.name.isidentifier(), "its name must be an identifier, so that 'node.method' can name its methods")
    at.require_distinct("method", [m.name for m in node.methods])
    for method in node.methods:
        at = report.at(f"{node.name}.{method.name}")
        if method.max_batch is not None:
            at.require(method.max_batch >= 1, f"max_batch is {method.max_batch}; it must be at least 1")
        for side, ports in (("input", method.inputs), ("output", method.outputs)):
            at.require_distinct(f"{side} port", [p.name for p in ports])
            for port in ports:
                _check_port(port, at.at(f"{side} port {port.name!r}"))
        for port in method.outputs:
            wrong = f"output port {port.name!r} is of layout tokens, but no input is; use layout item"
            at.require(port.layout != "tokens" or method.has_tokens, wrong)
        if method.kv is not None:
            _check_kv(method, method.kv, at)


def _check_port(port: parts.Port, at: _Report) -> None:
    is_keyword = port.name.isidentifier() and port.name not in ("self", "ctx")
    at.require(is_keyword, "the name must be an identifier other than self and ctx, for it is a keyword of the method")
    at.require_known(port.layout, get_args(parts.Layout), "unknown layout")
    at.require_known(port.dtype, _DTYPES, "unknown dtype")
    wrong = f"shape {port.shape} must hold positive integers; use shape=None for a shape that varies"
    at.require(all(isinstance(size, int) and size > 0 for size in port.shape or ()), wrong)


def _check_kv(method: parts.Method, kv: parts.KV, at: _Report) -> None:
    at.require(kv.label, "its KV label is empty")
    at.require_known(kv.attention, ("causal", "full"), "unknown attention")
    at.require(kv.tokens >= 1, f"KV tokens is {kv.tokens}; it must be at least 1")
    at.require(kv.attention == "causal" or kv.ids is None, "KV ids needs attention causal: ids alone must tell a token")
    at.require(kv.write or kv.ids is None, "KV ids is set, but the method writes nothing (write=False)")
    for role, name, layouts, dtypes, wanted in (
        ("spans", kv.spans, ("item",), ("int64",), "item int64, (n, 2)"),
        ("ids", kv.ids, ("tokens", "rows"), _INTEGERS, "integer tokens or rows"),
    ):
        if name is not None:
            at.require_known(name, [p.name for p in method.inputs], f"KV {role} names no input port:")
        if name is not None and (port := method.input(name)):
            wrong = f"KV {role}: port {name!r} is {port.layout} {port.dtype}; it must be {wanted}"
            at.require(port.layout in layouts and port.dtype in dtypes, wrong)
    if kv.rebuild:
        ids = method.input(kv.ids or "")
        at.require(ids and ids.layout == "tokens", "rebuild needs KV ids to name a port of layout tokens")
        for port in method.inputs:
            wrong = f"rebuild runs from ids alone, so input port {port.name!r} must be optional"
            at.require(port.optional or port.name == kv.ids, wrong)


def _check_shared_modules(graph: parts.Graph, report: _Report) -> None:
    """Nodes of one module batch together: a method must mean the same to all of them, but for its KV label."""
    seen: dict[tuple[str, str], tuple[str, parts.Method]] = {}
    for node in graph.nodes:
        for method in node.methods:
            plain = replace(method, kv=replace(method.kv, label="")) if method.kv else method
            first, other = seen.setdefault((node.module, method.name), (node.name, plain))
            who = f"nodes {first!r} and {node.name!r} share module {node.module!r}"
            what = f"declare method {method.name!r} differently; only the KV label may differ"
            report.require(other == plain, f"{who} but {what}")


def _mismatch(source: parts.Port, target: parts.Port) -> str | None:
    """Why values of one port cannot be those of another, or None."""
    if "item" in (source.layout, target.layout):
        return None
    if source.dtype != target.dtype and not {source.dtype, target.dtype} <= {*_FLOATS}:
        return f"one is {source.dtype}, the other {target.dtype}"
    is_same = source.shape == target.shape or None in (source.shape, target.shape)
    if is_same or source.layout != target.layout:
        return None
    return f"one has shape {source.shape}, the other {target.shape}"


# ---- walks ----------------------------------------------------------------------------------------------

_IN_EACH = "is written only inside an Each; add it to its collect"
_SKIPPED = "when a When is skipped"
_NOT_YET = "in the first iteration of a loop that carries it, for nothing feeds it before"


@dataclass(frozen=True, slots=True)
class _End:
    """One end of a stream: `depth` Eaches around the call."""

    walk: str
    target: str
    port: parts.Port
    depth: int


@dataclass(slots=True, eq=False)
class _Value:
    """What a name stands for at some place of a walk.

    Args:
        port: the port that wrote it.
        absent: when it can be absent.
        missing: what to say of a name that cannot be read here.
        is_list: of collected values.
    """

    port: parts.Port | None = None
    absent: str = ""
    missing: str = ""
    is_list: bool = False


@dataclass(slots=True)
class _Scope:
    """A place in a walk: what can be read there (`is_open`: any other name too), and the sections around it."""

    walk: str
    report: _Report
    values: dict[str, _Value]
    is_open: bool
    depth: int = 0

    def inner(self) -> _Scope:
        return replace(self, values=dict(self.values))

    def hide(self, names: Iterable[str], reason: str) -> None:
        self.values |= {name: _Value(missing=f": {name!r} {reason}") for name in names}

    def read(self, name: str) -> _Value:
        readable = [known for known, value in self.values.items() if not value.missing]
        return self.values.get(name) or _Value(missing="" if self.is_open else suggest(name, readable))


@dataclass(slots=True)
class _Flow:
    """Goes through walks once, section by section: what they name exists, and every port is fed where it is read."""

    graph: parts.Graph
    senders: dict[str, list[_End]] = field(default_factory=lambda: defaultdict(list))
    receivers: dict[str, list[_End]] = field(default_factory=lambda: defaultdict(list))
    labels: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        steps = [step for walk in self.graph.walks for step in parts.sections(walk.section)]
        self.labels |= {step.new for step in steps if isinstance(step, parts.Fork | parts.Alias)}
        self.labels |= {m.kv.label for node in self.graph.nodes for m in node.methods if m.kv}

    def follow(self, walk: parts.Walk, report: _Report) -> None:
        at = report.at(f"walk {walk.name!r}")
        inside = parts.calls(walk.section)
        at.require(inside, "it calls no method")
        # an unknown method could have written anything: its absence is one problem, not many
        is_open = not all(self.graph.method(call.target) for call in inside)
        scope = _Scope(walk.name, at, {name: _Value() for name in walk.inputs}, is_open)
        self.visit(walk.section, scope)
        for name in walk.outputs:
            missing = scope.read(name).missing
            at.require(not missing, f"nothing produces its output {name!r}{missing}")

    def visit(self, section: parts.Section, scope: _Scope) -> None:
        if isinstance(section, parts.Call):
            self.call(section, scope)
        elif isinstance(section, parts.Sequential):
            for child in section.sections:
                self.visit(child, scope)
        elif isinstance(section, parts.Parallel):
            self.parallel(section, scope)
        elif isinstance(section, parts.When):
            self.when(section, scope)
        elif isinstance(section, parts.Each):
            self.each(section, scope)
        elif isinstance(section, parts.Loop | parts.DynamicLoop):
            self.loop(section, scope)
        elif isinstance(section, parts.Fork | parts.Alias | parts.Drop):
            self.kv_step(section, scope)
        else:
            scope.report.require(False, f"{section!r} is not a section")

    def call(self, call: parts.Call, scope: _Scope) -> None:
        at = scope.report.at(call.target)
        node, method = self.graph.node(call.node), self.graph.method(call.target)
        if node is None:
            at.require_known(call.node, [n.name for n in self.graph.nodes], "there is no node")
        elif method is None:
            at.require_known(call.method, [m.name for m in node.methods], f"node {node.name!r} has no method")
        else:
            self.wiring(call, method, scope, at)
            for port in method.inputs:
                if port.name not in call.receives:
                    self.feed(call, port, scope, at)
            wrong = call.cache_problem(method, missing=scope.read(call.cache or "").missing)
            at.require(not wrong, wrong)
            scope.values |= {call.outputs.get(p.name, p.name): _Value(port=p) for p in method.outputs}

    def wiring(self, call: parts.Call, method: parts.Method, scope: _Scope, at: _Report) -> None:
        for kind, side in _WIRING.items():
            ports = method.inputs if side == "input" else method.outputs
            for name in getattr(call, kind):
                at.require_known(name, [p.name for p in ports], f"{kind} names no {side} port:")
        for name in call.receives:
            at.require(name not in call.inputs, f"input port {name!r} is in both inputs and receives; feed it one way")
        at.at("outputs").require_distinct("value", [call.outputs.get(p.name, p.name) for p in method.outputs])
        streams = [s.name for s in self.graph.streams]
        for kind, find, ends in (("sends", method.output, self.senders), ("receives", method.input, self.receivers)):
            at.at(kind).require_distinct("stream", getattr(call, kind).values())
            for name, stream in getattr(call, kind).items():
                at.require_known(stream, streams, f"{kind} port {name!r}: there is no stream")
                if port := find(name):
                    end = _End(scope.walk, call.target, port, scope.depth)
                    ends[stream] += [end] if end not in ends[stream] else []

    def feed(self, call: parts.Call, port: parts.Port, scope: _Scope, at: _Report) -> None:
        name = call.inputs.get(port.name, port.name)
        value = scope.read(name)
        where = f"input port {port.name!r}"
        if value.missing:
            # what is written at another time is wanted, though the port could do without
            is_written = name in scope.values and not value.missing.endswith(_IN_EACH)
            is_idle = port.optional and port.name not in call.inputs and not is_written
            at.require(is_idle, f"{where} is not fed: no value {name!r} by then{value.missing}")
        elif value.absent:
            wrong = f"{name!r} is absent {value.absent}; make the port optional"
            at.require(port.optional, f"{where} is not always fed: {wrong}")
        elif value.port is not None:
            wrong = _mismatch(value.port, port) or ""
            at.require(not wrong, f"{where} does not fit the output port {value.port.name!r} that feeds it: {wrong}")

    def parallel(self, section: parts.Parallel, scope: _Scope) -> None:
        values = [written(branch, self.graph) for branch in section.sections]
        every = [*chain(*values)]
        for name in every:
            wrong = f"two branches of a Parallel write value {name!r}; rename one through outputs"
            scope.report.require(every.count(name) == 1, wrong)
        results: dict[str, _Value] = {}
        for branch, own in zip(section.sections, values, strict=True):
            inner = scope.inner()
            inner.hide({*every} - {*own}, "is written by another branch of the same Parallel")
            self.visit(branch, inner)
            results |= {name: inner.values[name] for name in own}
        scope.values |= results

    def when(self, section: parts.When, scope: _Scope) -> None:
        inner = scope.inner()
        self.visit(section.section, inner)
        for name in written(section.section, self.graph):
            scope.values[name] = replace(inner.values[name], absent=_SKIPPED)

    def each(self, section: parts.Each, scope: _Scope) -> None:
        for label in parts.labels(section.fork):
            scope.report.at("Each").require_known(label, self.labels, "no method uses KV label")
        at = scope.report.at(f"Each over {section.over!r}")
        items = scope.read(section.over)
        at.require(not items.missing, f"there is no such value by then{items.missing}")
        at.require(not items.absent, f"the value is absent {items.absent}")
        inner = scope.inner()
        inner.depth += 1
        inner.is_open = not items.is_list or scope.is_open  # an item may bring names of its own
        inner.values[section.over] = _Value()
        self.visit(section.section, inner)
        body = written(section.section, self.graph)
        scope.hide([name for name in body if name not in scope.values or scope.values[name].missing], _IN_EACH)
        self.collect(section.collect, body, scope, at)

    def loop(self, section: parts.Loop | parts.DynamicLoop, scope: _Scope) -> None:
        inside = parts.calls(section)
        at = scope.report.at(f"{type(section).__name__} {section.name or f'of {inside[0].target if inside else None}'}")
        word, count = ("count", section.count) if isinstance(section, parts.Loop) else ("limit", section.limit)
        is_right = isinstance(count, str | None) or (type(count) is int and count >= 1)
        at.require(is_right, f"its {word} is {count}; it must be at least 1, and whole")
        wrong = "it has no limit, so its body must receive a stream with after_end='end' outside inner loops and Eaches"
        at.require(count is not None or ending_streams(section.section, self.graph), wrong)
        body = written(section.section, self.graph)
        for name in section.carry:
            at.require_known(name, body, "its body does not write", ", which it carries")
        carried = {name: scope.read(name) for name in section.carry}
        carried = {name: _Value(absent=_NOT_YET) if value.missing else value for name, value in carried.items()}
        for _ in range(2):  # the second time around, the carried values are those the body left behind
            inner = scope.inner()
            inner.hide({*body} - {*carried}, "is written later in the loop's body; add it to the loop's carry")
            inner.values |= carried
            self.visit(section.section, inner)
            carried = {name: inner.values[name] for name in carried}
        scope.values |= {name: inner.values[name] for name in body}
        self.collect(section.collect, body, scope, at)

    def collect(self, names: Mapping[str, str], body: list[str], scope: _Scope, at: _Report) -> None:
        for name, target in names.items():
            at.require_known(name, body, "its body does not write", ", which it collects")
            scope.values[target] = _Value(is_list=True)

    def kv_step(self, step: parts.Fork | parts.Alias | parts.Drop, scope: _Scope) -> None:
        at = scope.report.at(type(step).__name__)
        source = step.label if isinstance(step, parts.Drop) else step.source
        at.require_known(source, self.labels, "no method uses KV label")


# ---- states ---------------------------------------------------------------------------------------------

_Lanes = Mapping[str | None, Mapping[str, set[str]]]
"""Task -> walk -> lanes the walk may run on."""


def _lanes(states: States, task: str | None) -> dict[str, set[str]]:
    """Walk -> lanes it may run on when a request has this task."""
    lanes: dict[str, set[str]] = {}
    edges = [(s.walk, {s.lane}) for s in states.starts if s.task in (None, task)]
    while edges:
        walk, found = edges.pop()
        new = found - lanes.get(walk, set())
        if new:
            lanes.setdefault(walk, set()).update(new)
            edges += [(t.walk, new) for t in states.thens if t.after == walk and t.task in (None, task)]
    return lanes


def _check_states(graph: parts.Graph, lanes: _Lanes, report: _Report) -> None:
    at, states, walks = report.at("states"), graph.states, [w.name for w in graph.walks]
    at.require(states.starts, "no walk starts; add a Start")
    for start in states.starts:
        at.require_known(start.walk, walks, "Start names no walk:")
    for then in states.thens:
        at.require_known(then.walk, walks, "Then names no walk:")
        at.require_known(then.after, walks, "Then after names no walk:")
    for name in walks:
        unreached = f"walk {name!r}: no state reaches it; add a Start or a Then, or remove the walk"
        report.require(any(name in running for running in lanes.values()), unreached)


def _check_spec(graph: parts.Graph, spec: ModelSpec, lanes: _Lanes, report: _Report) -> None:
    at = report.at("spec")
    modules = dict.fromkeys(node.module for node in graph.nodes)
    for module in modules:
        at.require_known(module, spec.nodes, "nodes has no path for module")
    for module in spec.nodes if spec.offers is None else ():  # else other checkpoints have other nodes
        at.require_known(module, modules, "nodes names module", ", which no node of the graph has")
    for task, walks in lanes.items():
        report.at("states").require_known(str(task), spec.tasks, "there is no task", " in the spec")
        at.require(walks, f"task {task!r} starts no walk; add a Start for it")


# ---- streams --------------------------------------------------------------------------------------------


def _check_policy(stream: parts.Stream, at: _Report) -> None:
    at.require_known(stream.after_end, ("end", "absent"), "unknown after_end")
    policy = stream.policy
    if not isinstance(policy, parts.Policy):
        at.require(False, f"{policy!r} is no policy; known: Fixed, SlidingWindow, LeftContext, Whole")
        return
    for size in fields(policy):
        place = f"{type(policy).__name__} {size.name}"
        _check_size(getattr(policy, size.name), place, 0 if size.name == "context" else 1, at)
    if isinstance(policy, parts.SlidingWindow) and isinstance(policy.window, int) and isinstance(policy.stride, int):
        wrong = f"stride {policy.stride} is more than window {policy.window}, so items would be skipped"
        at.require(policy.stride <= policy.window, wrong)


def _check_size(size: parts.Size, place: str, least: int, at: _Report) -> None:
    sizes = size if isinstance(size, tuple) else (size,)
    at.require(sizes, f"{place} is an empty schedule; give at least one size")
    for value in sizes:
        wrong = f"{place} is {value!r}; it must be an integer of at least {least}, or the name of a request field"
        at.require(isinstance(value, str) or (isinstance(value, int) and value >= least), wrong)


def _check_ends(senders: list[_End], receivers: list[_End], lanes: _Lanes, at: _Report) -> None:
    at.require(senders, "no call sends on it")
    at.require(receivers, "no call receives it")
    walks = sorted({end.walk for end in receivers})
    wrong = f"walks {', '.join(walks)} all receive it; a stream has one consumer, declare one for each"
    at.require(len(walks) <= 1, wrong)
    for task, running in lanes.items():
        subject = f"task {task!r} starts" if task else "states start"
        is_fed = not senders or any(end.walk in running for end in senders)
        for walk in walks:
            wrong = f"{subject} walk {walk!r}, which would wait for it, but no walk that sends on it"
            at.require(is_fed or walk not in running, wrong)


def _check_items(section: parts.Section, at: _Report) -> None:
    """An item's streams live and end with it, so an Each that sends may run once, and alone on its streams."""
    sent: set[str] = set()
    for child in parts.children(section):
        eaches = (inner for inner in parts.sections(child) if isinstance(inner, parts.Each))
        streams = {name for each in eaches for call in parts.calls(each) for name in call.sends.values()}
        for stream in streams if isinstance(section, parts.Loop | parts.DynamicLoop) else streams & sent:
            at.require(False, f"stream {stream!r} is fed by an Each in a loop, or by two: later items find it ended")
        sent |= streams
        _check_items(child, at)


def _check_edges(graph: parts.Graph, flow: _Flow, lanes: _Lanes, report: _Report) -> None:
    """Each sender with each receiver: side by side, of one type, and as deep.

    A child of an `Each` has its own cursor in a lane it feeds, so all streams of a lane must split it alike.
    """
    edges = [(s, one, other) for s in graph.streams for one in flow.senders[s.name] for other in flow.receivers[s.name]]
    base = {walk.name: 0 for walk in graph.walks}  # Eaches around the cursors of a walk
    for _ in graph.walks:  # a lane may feed another: settle them in order
        for _, sender, receiver in edges:
            base[receiver.walk] = max(0, base[sender.walk] + sender.depth - receiver.depth)
    for stream, sender, receiver in edges:
        at = report.at(f"stream {stream.name!r}")
        one, other = sender.walk, receiver.walk
        wrong = f"walk {one!r} both sends on and receives it; a stream joins walks that run side by side"
        at.require(one != other, wrong)
        both = [running for running in lanes.values() if {one, other} <= running.keys()]
        used = {lane for running in both for lane in running[one] | running[other]}
        lane = min(used, default="")
        wrong = f"walks {one!r} and {other!r} both run on lane {lane!r}, one after the other; use two lanes"
        at.require(one == other or len(used) != 1, wrong)
        is_present = stream.after_end == "end" or receiver.port.optional
        wrong = f"input port {receiver.port.name!r} must be optional: it is absent once the stream has ended"
        report.at(f"walk {other!r}").at(receiver.target).require(is_present, wrong)
        unfit = _mismatch(sender.port, replace(receiver.port, shape=None))  # a chunk may be shaped otherwise
        ports = f"output port {sender.port.name!r} of {sender.target} does not fit input port {receiver.port.name!r}"
        at.require(not unfit, f"{ports} of {receiver.target}: {unfit}")
        sent, read = base[one] + sender.depth, base[other] + receiver.depth
        wrong = (
            f"{sender.target} in walk {one!r} sends inside {sent} Each, but {receiver.target} in walk {other!r} "
            f"receives inside {read}; all that such a walk receives must come from the same depth"
        )
        at.require(sent == read, wrong)
