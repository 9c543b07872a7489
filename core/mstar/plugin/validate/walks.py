"""What walks name: methods, ports, streams, limits, KV labels."""

from __future__ import annotations

from collections.abc import Iterator

from mstar.config import suggest
from mstar.plugin.graph import (
    Alias,
    Call,
    Drop,
    DynamicLoop,
    Each,
    Fork,
    Graph,
    Loop,
    Parallel,
    Port,
    Section,
    Sequential,
    Walk,
    When,
    calls,
    children,
)
from mstar.plugin.validate.nodes import duplicates, mismatch


def walk_parts(graph: Graph, walk: Walk) -> Iterator[str]:
    where = f"walk {walk.name!r}: "
    yield from duplicates("input", list(walk.inputs), where)
    yield from duplicates("output", list(walk.outputs), where)
    if not calls(walk.section):
        yield f"{where}it calls no method"
    for section in sections(walk.section):
        if isinstance(section, Call):
            yield from _call(graph, section, where)
        elif isinstance(section, When):
            if not callable(section.predicate):
                yield f"{where}When {section.name or ''}: the predicate {section.predicate!r} cannot be called"
        elif isinstance(section, Loop):
            if isinstance(section.count, int) and section.count < 1:
                yield f"{where}{title(section)}: its count is {section.count}; it must be at least 1"
        elif isinstance(section, DynamicLoop):
            yield from _limit(graph, section, f"{where}{title(section)}: ")
        elif not isinstance(section, Sequential | Parallel | Each | Fork | Alias | Drop):
            yield f"{where}{section!r} is not a section"


def sections(section: Section) -> Iterator[Section]:
    yield section
    for child in children(section):
        yield from sections(child)


def title(section: Loop | DynamicLoop | Each) -> str:
    if isinstance(section, Each):
        return f"Each over {section.over!r}"
    inside = calls(section)
    return f"{type(section).__name__} {section.name or (f'of {inside[0].target}' if inside else 'of nothing')}"


def _call(graph: Graph, call: Call, where: str) -> Iterator[str]:
    where = f"{where}{call.target}: "
    node = graph.node(call.node)
    if node is None:
        yield f"{where}there is no node {call.node!r}{suggest(call.node, [n.name for n in graph.nodes])}"
        return
    method = node.method(call.method)
    if method is None:
        known = suggest(call.method, [m.name for m in node.methods])
        yield f"{where}node {node.name!r} has no method {call.method!r}{known}"
        return
    inputs, outputs = [p.name for p in method.inputs], [p.name for p in method.outputs]
    for kind, names, side, ports in (
        ("inputs", call.inputs, "input", inputs),
        ("receives", call.receives, "input", inputs),
        ("outputs", call.outputs, "output", outputs),
        ("sends", call.sends, "output", outputs),
        ("emits", call.emits, "output", outputs),
    ):
        for port in names:
            if port not in ports:
                yield f"{where}{kind} names no {side} port: {port!r}{suggest(port, ports)}"
    for port in call.receives:
        if port in call.inputs:
            yield f"{where}input port {port!r} is in both inputs and receives; feed it one way"
    yield from duplicates("value", [call.outputs.get(port, port) for port in outputs], f"{where}outputs: ")
    streams = [s.name for s in graph.streams]
    for kind, targets in (("sends", call.sends), ("receives", call.receives)):
        yield from duplicates("stream", list(targets.values()), f"{where}{kind}: ")
        for port, name in targets.items():
            if name not in streams:
                yield f"{where}{kind} port {port!r}: there is no stream {name!r}{suggest(name, streams)}"
    for port, name in call.receives.items():
        declared, stream = method.input(port), graph.stream(name)
        if declared and stream and stream.after_end == "absent" and not declared.optional:
            yield f"{where}input port {port!r} must be optional: it is absent once stream {name!r} has ended"


def _limit(graph: Graph, loop: DynamicLoop, where: str) -> Iterator[str]:
    if isinstance(loop.limit, int) and loop.limit < 1:
        yield f"{where}its limit is {loop.limit}; it must be at least 1"
    if loop.limit is None and not _ending_streams(graph, loop.section):
        yield (
            f"{where}it has no limit, so its body must receive a stream with after_end='end' (outside inner loops "
            f"and Eaches)"
        )


def _ending_streams(graph: Graph, section: Section) -> bool:
    if isinstance(section, Call):
        streams = [graph.stream(name) for name in section.receives.values()]
        return any(stream is not None and stream.after_end == "end" for stream in streams)
    return not isinstance(section, Loop | DynamicLoop | Each) and any(
        _ending_streams(graph, child) for child in children(section)
    )


def emitted_ports(graph: Graph) -> Iterator[str]:
    first: dict[str, tuple[str, Port]] = {}
    for walk in graph.walks:
        for call in calls(walk.section):
            method = graph.method(call.target)
            for port_name, name in call.emits.items() if method else ():
                port = method.output(port_name) if method else None
                if port is None:
                    continue
                where, other = first.setdefault(name, (f"{call.target} {port_name}", port))
                if mismatch(other, port):
                    yield (
                        f"walk {walk.name!r}: {call.target}: emits {name!r} from output port {port_name!r}, but "
                        f"{where} emits under the same name and {mismatch(other, port)}; use two names"
                    )


def kv_labels(graph: Graph) -> Iterator[str]:
    known = {m.kv.label for node in graph.nodes for m in node.methods if m.kv is not None}
    steps = [(walk, section) for walk in graph.walks for section in sections(walk.section)]
    known |= {step.new for _, step in steps if isinstance(step, Fork | Alias)}
    for walk, step in steps:
        where = f"walk {walk.name!r}: {type(step).__name__}: "
        if isinstance(step, Fork | Alias):
            if step.new == step.source or not step.new:
                yield f"{where}{step.new!r} cannot be made from {step.source!r}; give the new sequence another name"
            if step.source not in known:
                yield f"{where}no method uses KV label {step.source!r}{suggest(step.source, known)}"
        label = step.label if isinstance(step, Drop) else step.fork if isinstance(step, Each) else None
        if label is not None and label not in known:
            yield f"{where}no method uses KV label {label!r}{suggest(label, known)}"
