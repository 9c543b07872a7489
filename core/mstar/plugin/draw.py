"""Prints a graph: an outline, a Mermaid flowchart, or an SVG, which show one tree of boxes; and its loops' plans.

Used by `mstar graph`. Expects a graph that `validate` accepts; imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from html import escape
from typing import Any, Literal

from mstar.plugin import graph as parts
from mstar.plugin.fuse import Hooks, fuse_all
from mstar.plugin.program import compile_graph
from mstar.plugin.spec import ModelSpec, load_object
from mstar.plugin.states import Start, Then

# ---- words ----------------------------------------------------------------------------------------------

# What the sections around others may say besides what they are.
_AROUND = "< ({name})><; fork {fork}><; in order if {ordered}><; budget {budget}><; carry {carry}><; collect {collect}>"

# Of each declaration, with its fields in braces. "<...>" is left out where a field in it is not set, for what follows
# "|" where there is one; ":.0" asks for a field without showing it.
_WORDS = {
    parts.Node: "{name} (module {module})",
    parts.Method: "{name}({inputs})< → {outputs}><  [{kv}]><  at most {max_batch} rows>",
    parts.Port: "{name}<?{optional:.0}>: {layout} {dtype}< {shape}>",
    parts.KV: "KV {label}, {attention}<, reads only{write:.0}><, {tokens} a row><, {spans} spans><, ids={ids}>"
    "<, rebuilds{rebuild:.0}>",
    parts.Walk: "{name}({inputs})< → {outputs}>",
    parts.When: "when <{name}|{predicate}>",
    parts.Each: "each of {over}" + _AROUND,
    parts.Loop: "loop {count} times" + _AROUND,
    parts.DynamicLoop: "loop <at most {limit} times|until stopped>" + _AROUND,
    parts.Fork: "fork {new} from {source}< at {at}>",
    parts.Alias: "alias {new} = {source}",
    parts.Drop: "drop {label}",
    parts.Stream: "{policy}<, absent after its end{after_end:.0}>",
    parts.Fixed: "{size} a chunk",
    parts.SlidingWindow: "windows of {window}, {stride} apart",
    parts.LeftContext: "{size} a chunk after {context} seen",
    parts.Whole: "whole",
    Start: "start {walk} on lane {lane}<, task {task}><, if {when}>",
    Then: "{walk} follows {after}<, task {task}><, if {when}><, step {step}>",
}


def _words(declaration: Any) -> str:
    """A declaration's template, filled in."""
    given = {one.name for one in fields(declaration) if getattr(declaration, one.name) != _default(one)}

    def chosen(match: re.Match[str]) -> str:
        return match[1] if given.issuperset(re.findall(r"{(\w+)", match[1])) else match[2] or ""

    template = re.sub(r"<(.*?)(?:\|(.*?))?>", chosen, _WORDS[type(declaration)])
    return template.format(**{name: _shown(getattr(declaration, name)) for name in re.findall(r"{(\w+)", template)})


def _default(one: Field[Any]) -> Any:
    if one.default_factory is not MISSING:
        return one.default_factory()
    return None if one.default is MISSING else one.default


def _shown(value: Any) -> str:
    if type(value) in _WORDS:
        return _words(value)
    if value is None:
        return "(any)"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} → {name}" for key, name in value.items())
    if isinstance(value, tuple) and not any(isinstance(item, int) for item in value):
        return ", ".join(map(_shown, value))
    if callable(value):
        name = getattr(value, "__name__", type(value).__name__)
        return "a condition" if name == "<lambda>" else str(name)
    return str(value)


# ---- boxes ----------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Box:
    """A title, wiring below it, and what lies inside: in order, or side by side for kind "across"."""

    kind: Literal["card", "walk", "frame", "across", "call", "step"]
    lines: list[str]
    children: list[_Box] = field(default_factory=list)
    call: parts.Call | None = None
    name: str = ""  # in Mermaid
    x: float = 0
    y: float = 0
    width: float = 0
    height: float = 0

    def every(self) -> Iterator[_Box]:
        yield self
        for child in self.children:
            yield from child.every()


def _boxes(graph: parts.Graph, section: parts.Section) -> list[_Box]:
    """What a section runs, one after the other."""
    if isinstance(section, parts.Call):
        return [_Box("call", [section.target, *_wiring(graph, section)], call=section)]
    branches = [_boxes(graph, child) for child in parts.children(section)]
    if isinstance(section, parts.Parallel):
        inside = [branch[0] if len(branch) == 1 else _Box("frame", ["in order"], branch) for branch in branches]
        return [_Box("across", ["side by side"], inside)]
    inside = [box for branch in branches for box in branch]
    if isinstance(section, parts.Sequential):
        return inside
    return [_Box("frame" if inside else "step", [_words(section)], inside)]


def _wiring(graph: parts.Graph, call: parts.Call) -> list[str]:
    read = {port: f"{name}: {_shown(graph.stream(name))}" for port, name in call.receives.items()}
    arrows = {"←": call.inputs, "⇐ stream": read, "→": call.outputs, "⇒ stream": call.sends, "⇒ client as": call.emits}
    cache = [] if call.cache is None else [f"cached by {call.cache}"]
    return [f"{port} {arrow} {name}" for arrow, ports in arrows.items() for port, name in ports.items()] + cache


_Arrow = tuple[str, _Box, _Box, str]
"""Kind ("stream": from a sender to a receiver; "then": from a walk to one that may follow), its ends, its label."""


def _drawing(graph: parts.Graph) -> tuple[list[_Box], list[_Arrow]]:
    """Boxes of nodes, walks, streams and states; and the arrows between walks."""
    walks = {walk.name: _Box("walk", [_words(walk)], _boxes(graph, walk.section)) for walk in graph.walks}
    calls = [(box, box.call) for walk in walks.values() for box in walk.every() if box.call]
    arrows: list[_Arrow] = [
        ("stream", one, other, name)
        for one, sender in calls
        for other, receiver in calls
        for name in sorted(set(sender.sends.values()).intersection(receiver.receives.values()))
    ]
    nodes = [_Box("card", [_words(node)], [_Box("step", [_words(m)]) for m in node.methods]) for node in graph.nodes]
    streams = []
    for stream in graph.streams:
        pairs = [(one, other) for _, one, other, name in arrows if name == stream.name]
        ends = dict.fromkeys(f"{one.lines[0]} ⇒ {other.lines[0]}" for one, other in pairs)
        streams.append(_Box("card", [f"{stream.name}: {', '.join(ends)}; {_words(stream)}"]))
    states = [_Box("card", [_words(rule)]) for rule in (*graph.states.starts, *graph.states.thens)]
    arrows += [("then", walks[then.after], walks[then.walk], "then") for then in graph.states.thens]
    inside = {"nodes": nodes, "walks": [*walks.values()], "streams": streams, "states": states}
    return [_Box("card", [title], boxes) for title, boxes in inside.items()], arrows


# ---- outline --------------------------------------------------------------------------------------------


def text(graph: parts.Graph) -> str:
    """An outline of nodes, walks, streams and states."""
    sections, _ = _drawing(graph)
    return "".join(f"{line}\n" for section in sections if section.children for line in _outline(section, ""))


def plans(graph: parts.Graph, spec: ModelSpec) -> str:
    """What becomes of every loop. Imports the plugin's nodes, which say what hooks they have."""
    nodes = {node.module: load_object(spec.nodes[node.module], plugin=spec.name) for node in graph.nodes}
    return "\n".join(map(str, fuse_all(compile_graph(graph), Hooks.of(graph, nodes))[1])) + "\n"


def _outline(box: _Box, indent: str) -> Iterator[str]:
    title, *wiring = box.lines
    yield f"{indent}{title}" + (f"  {', '.join(wiring)}" if wiring else "")
    for child in box.children:
        yield from _outline(child, indent + "  ")


# ---- Mermaid --------------------------------------------------------------------------------------------

_ESCAPES = str.maketrans({'"': "#quot;", "<": "#lt;", ">": "#gt;", "&": "#amp;", "#": "#35;"})


def mermaid(graph: parts.Graph) -> str:
    """A Mermaid flowchart: walks as subgraphs, streams as dotted arrows, what follows a walk as thick ones."""
    (_, walks, _, _), arrows = _drawing(graph)
    every = list(walks.every())
    for index, box in enumerate(every):
        box.name = f"b{index}"
    lines = ["flowchart TD", *(line for walk in walks.children for line in _flowchart(walk, "  "))]
    lines += [f"  {one.name} --> {other.name}" for box in every[1:] for one, other in _in_order(box)]
    shafts = {"stream": "-. {} .->", "then": "== {} ==>"}
    lines += [f"  {one.name} {shafts[kind].format(_label([label]))} {other.name}" for kind, one, other, label in arrows]
    return "\n".join(lines) + "\n"


def _flowchart(box: _Box, indent: str) -> Iterator[str]:
    if not box.children:
        yield f"{indent}{box.name}[{_label(box.lines)}]"
        return
    yield f"{indent}subgraph {box.name}[{_label(box.lines)}]"
    for child in box.children:
        yield from _flowchart(child, indent + "  ")
    yield f"{indent}end"


def _in_order(box: _Box) -> Iterator[tuple[_Box, _Box]]:
    """From each box directly inside to what runs after it."""
    ends = [child.children if child.kind == "across" else [child] for child in box.children]
    for before, after in zip(ends, ends[1:] if box.kind != "across" else [], strict=False):
        yield from ((one, other) for one in before for other in after)


def _label(lines: list[str]) -> str:
    return f'"{"<br/>".join(line.translate(_ESCAPES) for line in lines)}"'


# ---- SVG ------------------------------------------------------------------------------------------------

_CHARACTER, _LINE, _PAD, _GAP = 7.3, 17, 10, 60
_HEAD = """<style>
text { font: 12px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace }
rect { fill: #fff; stroke: #52606d } .walk { fill: #f5f7fa } .frame, .across { fill: none; stroke-dasharray: 5 3 }
.call { fill: #e3f0ff } .step { fill: #fff3d6 } path { fill: none; stroke: #0b6e4f } .then { stroke: #b44d12 }
</style><defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9"
markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" style="fill:#52606d"/></marker></defs>"""


def svg(graph: parts.Graph) -> str:
    """An SVG: columns of the nodes, of each walk, read from top to bottom, of streams and of states."""
    (nodes, walks, streams, states), arrows = _drawing(graph)
    columns = [nodes, *walks.children, streams, states]
    x: float = _GAP
    for column in columns:
        _place(column, x, _GAP)
        x += column.width + _GAP
    size = f'width="{x:.0f}" height="{max(column.height for column in columns) + 2 * _GAP:.0f}"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', _HEAD, f'<rect {size} style="stroke:none"/>']
    lines += [line for column in columns for box in column.every() for line in _drawn(box)]
    return "\n".join([*lines, *(_drawn_arrow(*arrow) for arrow in arrows), "</svg>\n"])


def _place(box: _Box, x: float, y: float) -> None:
    """Its lines, then what lies inside, from top to bottom."""
    box.x, box.y = x, y
    y += len(box.lines) * _LINE + _PAD
    for child in box.children:
        _place(child, x + _PAD, y)
        y += child.height + _PAD
    widths = [len(line) * _CHARACTER for line in box.lines] + [child.width for child in box.children]
    box.width, box.height = max(widths) + 2 * _PAD, y - box.y


def _drawn(box: _Box) -> Iterator[str]:
    size = f'width="{box.width:.1f}" height="{box.height:.1f}"'
    yield f'<rect class="{box.kind}" x="{box.x:.1f}" y="{box.y:.1f}" rx="4" {size}/>'
    for index, line in enumerate(box.lines, 1):
        yield f'<text x="{box.x + _PAD:.1f}" y="{box.y + _LINE * index:.1f}">{escape(line)}</text>'


def _drawn_arrow(kind: str, one: _Box, other: _Box, label: str) -> str:
    """A line from the right of one box's title to the left of another's."""
    x, y, to_x, to_y = one.x + one.width, one.y + _LINE / 2, other.x, other.y + _LINE / 2
    note = f'<text x="{(x + to_x) / 2:.1f}" y="{(y + to_y) / 2:.1f}">{escape(label)}</text>'
    return f'<path class="{kind}" marker-end="url(#head)" d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"/>{note}'
