"""Prints a graph: an outline, a Mermaid flowchart, or an SVG by a small layered layout of our own.

Used by `mstar graph`. Expects a graph that `validate` accepts; imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal

from mstar.plugin import graph as parts
from mstar.plugin.states import Start, Then


@dataclass(slots=True, eq=False)
class _Box:
    """A part of a drawing: calls, KV steps and cards are leaves, walks and frames have a title, the rest are groups."""

    kind: Literal["call", "step", "card", "walk", "frame", "down", "across"]
    lines: list[str] = field(default_factory=list)
    children: list[_Box] = field(default_factory=list)
    call: parts.Call | None = None
    x: float = 0
    y: float = 0
    width: float = 0
    height: float = 0

    def walk(self) -> Iterator[_Box]:
        yield self
        for child in self.children:
            yield from child.walk()

    def ends(self, index: int) -> list[_Box]:
        """The boxes that an arrow to (index 0) or from (index -1) this one touches."""
        if self.kind == "across":
            return [end for child in self.children for end in child.ends(index)]
        if self.kind == "down":
            return self.children[index].ends(index) if self.children else []
        return [self]

    def arrows(self) -> Iterator[tuple[_Box, _Box]]:
        """From each box to what runs after it."""
        for box in self.walk():
            if box.kind == "down":
                for one, other in zip(box.children, box.children[1:], strict=False):
                    yield from ((a, b) for a in one.ends(-1) for b in other.ends(0))


# ---- words ----------------------------------------------------------------------------------------------

_WORDS = {
    parts.Fixed: "{0.size} a chunk",
    parts.SlidingWindow: "windows of {0.window}, {0.stride} apart",
    parts.LeftContext: "{0.size} a chunk after {0.context} seen",
    parts.Whole: "whole",
    parts.Fork: "fork {0.new} from {0.source}",
    parts.Alias: "alias {0.new} = {0.source}",
    parts.Drop: "drop {0.label}",
    parts.Each: "each of {0.over}",
    parts.Loop: "loop {0.count} times",
    parts.DynamicLoop: "loop at most {0.limit} times",
}


def _words(declaration: object) -> str:
    return _WORDS[type(declaration)].format(declaration)


def _listed(*notes: str | None) -> str:
    return ", ".join(note for note in notes if note)


def _condition(predicate: Callable[..., Any]) -> str:
    name = getattr(predicate, "__name__", type(predicate).__name__)
    return "a condition" if name == "<lambda>" else str(name)


def _port(port: parts.Port) -> str:
    shape = "" if port.shape == () else " (any)" if port.shape is None else f" {list(port.shape)}"
    return f"{port.name}{'?' if port.optional else ''}: {port.layout} {port.dtype}{shape}"


def _kv(kv: parts.KV) -> str:
    ports = [f"{name}={port}" for name, port in (("spans", kv.spans), ("ids", kv.ids)) if port]
    tokens = f"{kv.tokens} tokens a row" if kv.tokens != 1 else None
    reads, rebuilds = None if kv.write else "reads only", "rebuilds" if kv.rebuild else None
    return _listed(f"KV {kv.label}", kv.attention, reads, tokens, *ports, rebuilds)


def _method(method: parts.Method) -> str:
    outputs = f" → {', '.join(map(_port, method.outputs))}" if method.outputs else ""
    notes = [_kv(method.kv)] if method.kv else []
    notes += [f"at most {method.max_batch} rows"] if method.max_batch else []
    details = f"  [{'; '.join(notes)}]" if notes else ""
    return f"{method.name}({', '.join(map(_port, method.inputs))}){outputs}{details}"


def _node(node: parts.Node) -> str:
    return node.name if node.module == node.name else f"{node.name} (module {node.module})"


def _walk(walk: parts.Walk) -> str:
    outputs = f" → {', '.join(walk.outputs)}" if walk.outputs else ""
    return f"{walk.name}({', '.join(walk.inputs)}){outputs}"


def _rule(rule: Start | Then) -> str:
    task = rule.task and f"task {rule.task}"
    when = rule.when and f"if {_condition(rule.when)}"
    if isinstance(rule, Start):
        return _listed(f"on lane {rule.lane}", task, when)
    return _listed(f"follows {rule.after}", task, when, rule.step and f"step {rule.step}")


def _stream(stream: parts.Stream) -> str:
    return _listed(_words(stream.policy), "absent after its end" if stream.after_end == "absent" else None)


def _wiring(graph: parts.Graph, call: parts.Call) -> list[str]:
    received = [(port, graph.stream(name)) for port, name in call.receives.items()]
    return [
        *(f"{port} ← {value}" for port, value in call.inputs.items()),
        *(f"{port} ⇐ stream {stream.name}: {_stream(stream)}" for port, stream in received if stream),
        *(f"{port} → {value}" for port, value in call.outputs.items()),
        *(f"{port} ⇒ stream {name}" for port, name in call.sends.items()),
        *(f"{port} ⇒ client as {name}" for port, name in call.emits.items()),
    ]


def _frame(section: parts.When | parts.Each | parts.Loop | parts.DynamicLoop) -> str:
    """The title of what holds another section."""
    if isinstance(section, parts.When):
        return f"when {section.name or _condition(section.predicate)}"
    notes = [_words(section)]
    if isinstance(section, parts.DynamicLoop) and section.limit is None:
        notes = ["loop until stopped"]
    if isinstance(section, parts.Each):
        notes += [f"fork {section.fork}"] if section.fork else []
        notes += [f"in order if {_condition(section.ordered)}"] if section.ordered else []
    else:
        notes[0] += f" ({section.name})" if section.name else ""
        notes += [f"budget {section.budget}"] if isinstance(section, parts.DynamicLoop) and section.budget else []
        notes += [f"carry {', '.join(section.carry)}"] if section.carry else []
    collected = ", ".join(f"{value} → {name}" for value, name in section.collect.items())
    return "; ".join([*notes, f"collect {collected}"] if collected else notes)


# ---- boxes ----------------------------------------------------------------------------------------------


def _box(graph: parts.Graph, section: parts.Section) -> _Box:
    if isinstance(section, parts.Call):
        return _Box("call", [section.target, *_wiring(graph, section)], call=section)
    if isinstance(section, parts.Sequential):
        return _Box("down", children=[_box(graph, child) for child in section.sections])
    if isinstance(section, parts.Parallel):
        return _Box("across", children=[_box(graph, child) for child in section.sections])
    if isinstance(section, parts.Fork | parts.Alias | parts.Drop):
        at = f" at {section.at}" if isinstance(section, parts.Fork) and section.at else ""
        return _Box("step", [_words(section) + at])
    return _Box("frame", [_frame(section)], [_box(graph, section.section)])


def _walks(graph: parts.Graph) -> dict[str, _Box]:
    boxes = {walk.name: _Box("walk", [_walk(walk)], [_box(graph, walk.section)]) for walk in graph.walks}
    for start in graph.states.starts:
        boxes[start.walk].lines.append(f"starts {_rule(start)}")
    for then in graph.states.thens:
        boxes[then.walk].lines.append(_rule(then))
    return boxes


def _streams(graph: parts.Graph, boxes: Iterable[_Box]) -> list[tuple[_Box, _Box, str]]:
    """Sender, receiver and name, for every arrow of every stream."""
    found = [(box, box.call) for outer in boxes for box in outer.walk() if box.call is not None]
    return [
        (sender, receiver, stream.name)
        for stream in graph.streams
        for sender, sending in found
        for receiver, receiving in found
        if stream.name in sending.sends.values() and stream.name in receiving.receives.values()
    ]


# ---- outline --------------------------------------------------------------------------------------------


def text(graph: parts.Graph) -> str:
    """An outline of nodes, walks, streams and states."""
    lines = ["nodes"]
    for node in graph.nodes:
        lines += [f"  {_node(node)}", *(f"    {_method(method)}" for method in node.methods)]
    lines.append("walks")
    for walk in graph.walks:
        lines += [f"  {_walk(walk)}", *_outline(_box(graph, walk.section), "    ")]
    lines += ["streams"] if graph.streams else []
    found = [call for walk in graph.walks for call in parts.calls(walk.section)]
    for stream in graph.streams:
        senders = _listed(*dict.fromkeys(call.target for call in found if stream.name in call.sends.values()))
        receivers = _listed(*dict.fromkeys(call.target for call in found if stream.name in call.receives.values()))
        lines.append(f"  {stream.name}: {senders} ⇒ {receivers}; {_stream(stream)}")
    lines.append("states")
    lines += [f"  start {start.walk} {_rule(start)}" for start in graph.states.starts]
    lines += [f"  {then.walk} {_rule(then)}" for then in graph.states.thens]
    return "\n".join(lines) + "\n"


def _outline(box: _Box, indent: str) -> list[str]:
    if box.kind == "down":
        return [line for child in box.children for line in _outline(child, indent)]
    head = box.lines[0] if box.lines else "side by side"
    wiring = f"  {', '.join(box.lines[1:])}" if box.lines[1:] else ""
    lines = [f"{indent}{head}{wiring}"]
    for child in box.children:
        if box.kind == "across" and child.kind == "down":
            lines += [f"{indent}  in order", *_outline(child, indent + "    ")]
        else:
            lines += _outline(child, indent + "  ")
    return lines


# ---- Mermaid --------------------------------------------------------------------------------------------

_ESCAPES = str.maketrans({'"': "#quot;", "<": "#lt;", ">": "#gt;", "&": "#amp;", "#": "#35;"})


def mermaid(graph: parts.Graph) -> str:
    """A Mermaid flowchart: walks as subgraphs, streams as dotted arrows, what follows a walk as thick ones."""
    walks = _walks(graph)
    every = [box for walk in walks.values() for box in walk.walk()]
    names = {id(box): f"b{index}" for index, box in enumerate(every)}
    lines = ["flowchart TD"]
    for walk in walks.values():
        lines += _flowchart(walk, names, "  ")
    for walk in walks.values():
        lines += [f"  {names[id(a)]} --> {names[id(b)]}" for a, b in walk.arrows()]
    for a, b, stream in _streams(graph, walks.values()):
        lines.append(f"  {names[id(a)]} -. {_label([stream])} .-> {names[id(b)]}")
    for then in graph.states.thens:
        lines.append(f"  {names[id(walks[then.after])]} ==> {names[id(walks[then.walk])]}")
    return "\n".join(lines) + "\n"


def _flowchart(box: _Box, names: dict[int, str], indent: str) -> Iterator[str]:
    is_frame = box.kind in ("walk", "frame")
    name, label = names[id(box)], _label(box.lines)
    if is_frame:
        yield f"{indent}subgraph {name}[{label}]"
    elif box.lines:
        yield f"{indent}{name}[{label}]" if box.kind == "call" else f"{indent}{name}([{label}])"
    for child in box.children:
        yield from _flowchart(child, names, indent + "  " if is_frame else indent)
    if is_frame:
        yield f"{indent}end"


def _label(lines: list[str]) -> str:
    return f'"{"<br/>".join(line.translate(_ESCAPES) for line in lines)}"'


# ---- SVG ------------------------------------------------------------------------------------------------

_CHARACTER, _LINE, _PAD, _GAP = 7.3, 17, 10, 40
_HEAD = """<style>
text { font: 12px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; paint-order: stroke }
rect { fill: #fff; stroke: #52606d } .walk { fill: #f5f7fa } .frame { fill: none; stroke-dasharray: 5 3 }
.call { fill: #e3f0ff } .step { fill: #fff3d6 } .note { fill: #0b6e4f; stroke: #fff; stroke-width: 4px }
path { fill: none; stroke: #52606d } .stream { stroke: #0b6e4f; stroke-dasharray: 6 3 } .then { stroke: #b44d12 }
</style><defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9"
markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" style="fill:#52606d"/></marker></defs>"""


def svg(graph: parts.Graph) -> str:
    """An SVG: cards of the nodes, then walks from left to right in the order they feed or follow one another."""
    walks = _walks(graph)
    streams = _streams(graph, walks.values())
    cards = [_Box("card", [_node(node), *map(_method, node.methods)]) for node in graph.nodes]
    page = _Box("down", children=[*cards, _Box("across", children=_columns(graph, walks, streams))])
    _measure(page)
    _place(page, _GAP, _GAP)
    size = f'width="{page.width + 2 * _GAP:.0f}" height="{page.height + 2 * _GAP:.0f}"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', _HEAD, f'<rect {size} style="stroke:none"/>']
    lines += [line for box in page.walk() if box.lines for line in _drawn(box)]
    lines += [_arrow_down(a, b) for walk in walks.values() for a, b in walk.arrows()]
    lines += [_arrow_across("then", walks[then.after], walks[then.walk]) for then in graph.states.thens]
    lines += [_arrow_across("stream", sender, receiver, name) for sender, receiver, name in streams]
    return "\n".join([*lines, "</svg>\n"])


def _columns(graph: parts.Graph, walks: dict[str, _Box], streams: list[tuple[_Box, _Box, str]]) -> list[_Box]:
    """Each walk in the first column after all earlier walks that lead to it; arrows back are only drawn."""
    owner = {id(box): name for name, walk in walks.items() for box in walk.walk()}
    edges = [(then.after, then.walk) for then in graph.states.thens]
    edges += [(owner[id(sender)], owner[id(receiver)]) for sender, receiver, _ in streams]
    ranks: dict[str, int] = {}
    for name in walks:
        ranks[name] = max((ranks[a] + 1 for a, b in edges if b == name and a in ranks), default=0)
    columns = [_Box("down") for _ in range(max(ranks.values(), default=-1) + 1)]
    for name, rank in ranks.items():
        columns[rank].children.append(walks[name])
    return columns


def _measure(box: _Box) -> None:
    for child in box.children:
        _measure(child)
    widths, heights = [c.width for c in box.children] or [0], [c.height for c in box.children] or [0]
    gaps = _GAP * (len(box.children) - 1)
    if box.kind == "across":
        box.width, box.height = sum(widths) + gaps, max(heights)
    elif box.kind == "down":
        box.width, box.height = max(widths), sum(heights) + gaps
    else:
        box.width = max(*widths, *(len(line) * _CHARACTER for line in box.lines)) + 2 * _PAD
        box.height = len(box.lines) * _LINE + sum(heights) + (3 if box.children else 1.4) * _PAD


def _place(box: _Box, x: float, y: float) -> None:
    box.x, box.y = x, y
    y += len(box.lines) * _LINE + 2 * _PAD if box.lines else 0
    for child in box.children:
        if box.kind == "across":
            _place(child, x, y)
            x += child.width + _GAP
        else:
            _place(child, x + (box.width - child.width) / 2, y)
            y += child.height + _GAP


def _drawn(box: _Box) -> Iterator[str]:
    size = f'width="{box.width:.1f}" height="{box.height:.1f}"'
    yield f'<rect class="{box.kind}" x="{box.x:.1f}" y="{box.y:.1f}" rx="4" {size}/>'
    for index, line in enumerate(box.lines, 1):
        yield f'<text x="{box.x + _PAD:.1f}" y="{box.y + _LINE * index:.1f}">{escape(line)}</text>'


def _arrow_down(one: _Box, other: _Box) -> str:
    x, y, to_x, to_y = one.x + one.width / 2, one.y + one.height, other.x + other.width / 2, other.y
    middle = (y + to_y) / 2
    return _curve("next", (x, y), (x, middle), (to_x, middle), (to_x, to_y))


def _arrow_across(kind: str, one: _Box, other: _Box, name: str = "") -> str:
    x, y, to_x, to_y = one.x + one.width, one.y + one.height / 2, other.x, other.y + other.height / 2
    bend = max(50, abs(to_x - x) / 2)
    curve = _curve(kind, (x, y), (x + bend, y), (to_x - bend, to_y), (to_x, to_y))
    place = f'x="{(x + to_x - len(name) * _CHARACTER) / 2:.1f}" y="{(y + to_y) / 2 - 5:.1f}"'
    return f'{curve}<text class="note" {place}>{escape(name)}</text>'


def _curve(kind: str, *points: tuple[float, float]) -> str:
    """A Bézier curve from the first of four points to the last."""
    start, *others = (f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path class="{kind}" marker-end="url(#head)" d="M{start}C{" ".join(others)}"/>'
