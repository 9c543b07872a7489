"""Prints a graph: an outline, a Mermaid flowchart, or an SVG by a small layered layout of our own.

Used by `mstar graph`. Expects a graph that `validate` accepts; imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal

from mstar.plugin.graph import (
    KV,
    Alias,
    Call,
    Drop,
    DynamicLoop,
    Each,
    Fixed,
    Fork,
    Graph,
    LeftContext,
    Loop,
    Method,
    Parallel,
    Port,
    Section,
    Sequential,
    SlidingWindow,
    Stream,
    Walk,
    When,
    calls,
)
from mstar.plugin.states import Start, Then


@dataclass(slots=True, eq=False)
class _Box:
    """A part of a drawing. `call` and `step` are leaves; a `frame` has a title; `down` and `across` are groups."""

    kind: Literal["call", "step", "card", "frame", "down", "across"]
    lines: list[str] = field(default_factory=list)
    children: list[_Box] = field(default_factory=list)
    call: Call | None = None
    name: str = ""  # of a walk
    gap: float = 26  # between children
    is_left: bool = False  # children of a `down` group are flush left, not centred
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


def _condition(predicate: Callable[..., Any]) -> str:
    name = getattr(predicate, "__name__", type(predicate).__name__)
    return "a condition" if name == "<lambda>" else str(name)


def _port(port: Port) -> str:
    shape = "" if port.shape == () else " (any)" if port.shape is None else f" {list(port.shape)}"
    return f"{port.name}{'?' if port.optional else ''}: {port.layout} {port.dtype}{shape}"


def _kv(kv: KV) -> str:
    words = [f"KV {kv.label}", kv.attention if kv.write else f"{kv.attention}, reads only"]
    words += [f"{kv.tokens} tokens a row"] if kv.tokens != 1 else []
    words += [f"{name}={port}" for name, port in (("spans", kv.spans), ("ids", kv.ids)) if port]
    return ", ".join([*words, "rebuilds"] if kv.rebuild else words)


def _method(method: Method) -> str:
    signature = f"{method.name}({', '.join(map(_port, method.inputs))})"
    outputs = f" → {', '.join(map(_port, method.outputs))}" if method.outputs else ""
    notes = [_kv(method.kv)] if method.kv else []
    notes += [f"at most {method.max_batch} rows"] if method.max_batch else []
    return signature + outputs + (f"  [{'; '.join(notes)}]" if notes else "")


def _wiring(graph: Graph, call: Call) -> list[str]:
    return [
        *(f"{port} ← {value}" for port, value in call.inputs.items()),
        *(f"{port} ⇐ stream {s.name}: {_policy(s)}" for port, s in _received(graph, call)),
        *(f"{port} → {value}" for port, value in call.outputs.items()),
        *(f"{port} ⇒ stream {name}" for port, name in call.sends.items()),
        *(f"{port} ⇒ client as {name}" for port, name in call.emits.items()),
    ]


def _received(graph: Graph, call: Call) -> Iterator[tuple[str, Stream]]:
    for port, name in call.receives.items():
        if (stream := graph.stream(name)) is not None:
            yield port, stream


def _title(section: When | Each | Loop | DynamicLoop) -> str:
    if isinstance(section, When):
        return f"when {section.name or _condition(section.predicate)}"
    notes = []
    if isinstance(section, Each):
        words = f"each of {section.over}"
        notes += [f"fork {section.fork}"] if section.fork else []
        notes += [f"in order if {_condition(section.ordered)}"] if section.ordered else []
    else:
        if isinstance(section, Loop):
            words = f"loop {section.count} times"
        else:
            words = "loop until stopped" if section.limit is None else f"loop at most {section.limit} times"
            notes += [f"budget {section.budget}"] if section.budget else []
        words += f" ({section.name})" if section.name else ""
        notes += [f"carry {', '.join(section.carry)}"] if section.carry else []
    notes += [f"collect {', '.join(f'{value} → {name}' for value, name in section.collect.items())}"] * bool(
        section.collect
    )
    return "; ".join([words, *notes])


def _step(step: Fork | Alias | Drop) -> str:
    if isinstance(step, Drop):
        return f"drop {step.label}"
    if isinstance(step, Alias):
        return f"alias {step.new} = {step.source}"
    return f"fork {step.new} from {step.source}" + (f" at {step.at}" if step.at else "")


def _policy(stream: Stream) -> str:
    policy = stream.policy
    if isinstance(policy, Fixed):
        words = f"{policy.size} a chunk"
    elif isinstance(policy, SlidingWindow):
        words = f"windows of {policy.window}, {policy.stride} apart"
    elif isinstance(policy, LeftContext):
        words = f"{policy.size} a chunk after {policy.context} seen"
    else:
        words = "whole"
    return words if stream.after_end == "end" else f"{words}, absent after its end"


def _rule(rule: Start | Then) -> str:
    notes = [f"task {rule.task}"] if rule.task else []
    notes += [f"if {_condition(rule.when)}"] if rule.when else []
    if isinstance(rule, Then):
        notes += [f"step {rule.step}"] if rule.step else []
        return ", ".join(notes)
    return ", ".join([f"lane {rule.lane}", *notes])


def _walk_title(walk: Walk) -> str:
    outputs = f" → {', '.join(walk.outputs)}" if walk.outputs else ""
    return f"{walk.name}({', '.join(walk.inputs)}){outputs}"


def _box(graph: Graph, section: Section) -> _Box:
    if isinstance(section, Call):
        return _Box("call", [section.target, *_wiring(graph, section)], call=section)
    if isinstance(section, Sequential | Parallel):
        kind: Literal["down", "across"] = "down" if isinstance(section, Sequential) else "across"
        return _Box(kind, children=[_box(graph, child) for child in section.sections])
    if isinstance(section, Fork | Alias | Drop):
        return _Box("step", [_step(section)])
    return _Box("frame", [_title(section)], [_box(graph, section.section)])


def _walk_box(graph: Graph, walk: Walk) -> _Box:
    lines = [f"starts on {_rule(start)}" for start in graph.states.starts if start.walk == walk.name]
    for then in graph.states.thens:
        if then.walk == walk.name:
            lines.append(", ".join([f"follows {then.after}", _rule(then)]).removesuffix(", "))
    return _Box("frame", [_walk_title(walk), *lines], [_box(graph, walk.section)], name=walk.name)


def _stream_arrows(graph: Graph, walks: list[_Box]) -> Iterator[tuple[_Box, _Box, str]]:
    boxes = [(box, box.call) for walk in walks for box in walk.walk() if box.call is not None]
    for stream in graph.streams:
        for sender, sends in ((box, call.sends) for box, call in boxes):
            for receiver, receives in ((box, call.receives) for box, call in boxes):
                if stream.name in sends.values() and stream.name in receives.values():
                    yield sender, receiver, stream.name


# ---- outline --------------------------------------------------------------------------------------------


def text(graph: Graph) -> str:
    """An outline of nodes, walks, streams and states."""
    lines = ["nodes"]
    for node in graph.nodes:
        lines.append(f"  {node.name}" + (f" (module {node.module})" if node.module != node.name else ""))
        lines += [f"    {_method(method)}" for method in node.methods]
    lines.append("walks")
    for walk in graph.walks:
        lines.append(f"  {_walk_title(walk)}")
        lines += _outline(_box(graph, walk.section), "    ")
    if graph.streams:
        lines.append("streams")
        for stream in graph.streams:
            found = [call for walk in graph.walks for call in calls(walk.section)]
            senders = dict.fromkeys(call.target for call in found if stream.name in call.sends.values())
            receivers = dict.fromkeys(call.target for call in found if stream.name in call.receives.values())
            lines.append(f"  {stream.name}: {', '.join(senders)} ⇒ {', '.join(receivers)}; {_policy(stream)}")
    lines.append("states")
    lines += [f"  start {start.walk} on {_rule(start)}" for start in graph.states.starts]
    for then in graph.states.thens:
        lines.append(f"  {then.walk} follows {then.after}, {_rule(then)}".removesuffix(", "))
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


_MERMAID = {'"': "#quot;", "<": "#lt;", ">": "#gt;", "&": "#amp;", "#": "#35;"}


def mermaid(graph: Graph) -> str:
    """A Mermaid flowchart: walks as subgraphs, streams as dotted arrows, what follows a walk as thick ones."""
    walks = [_walk_box(graph, walk) for walk in graph.walks]
    names = {id(box): f"b{index}" for index, box in enumerate(box for walk in walks for box in walk.walk())}
    lines = ["flowchart TD"]

    def label(texts: list[str]) -> str:
        escaped = ("".join(_MERMAID.get(letter, letter) for letter in line) for line in texts)
        return f'"{"<br/>".join(escaped)}"'

    def emit(box: _Box, indent: str) -> None:
        if box.kind == "frame":
            lines.append(f"{indent}subgraph {names[id(box)]}[{label(box.lines)}]")
        elif box.lines:
            opening, closing = ("[", "]") if box.kind == "call" else ("([", "])")
            lines.append(f"{indent}{names[id(box)]}{opening}{label(box.lines)}{closing}")
        for child in box.children:
            emit(child, indent + "  " if box.kind == "frame" else indent)
        if box.kind == "frame":
            lines.append(f"{indent}end")

    for walk in walks:
        emit(walk, "  ")
    for walk in walks:
        lines += [f"  {names[id(a)]} --> {names[id(b)]}" for a, b in walk.arrows()]
    for sender, receiver, words in _stream_arrows(graph, walks):
        lines.append(f"  {names[id(sender)]} -. {label([words])} .-> {names[id(receiver)]}")
    by_name = {walk.name: names[id(walk)] for walk in walks}
    lines += [f"  {by_name[then.after]} ==> {by_name[then.walk]}" for then in graph.states.thens]
    return "\n".join(lines) + "\n"


# ---- SVG ------------------------------------------------------------------------------------------------

_CHARACTER, _LINE, _PAD, _MARGIN, _PAGE = 7.3, 17, 10, 24, 1200
_STYLE = """
  text { font: 12px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #1f2933 }
  .title { font-weight: bold } .note { fill: #0b6e4f; paint-order: stroke; stroke: #fff; stroke-width: 4px }
  rect { fill: #fff; stroke: #52606d } .walk { fill: #f5f7fa } .frame { fill: none; stroke-dasharray: 5 3 }
  .call { fill: #e3f0ff } .step { fill: #fff3d6 } .card { fill: #fbfbfb; stroke: #cbd2d9 }
  path { fill: none; stroke: #52606d; stroke-width: 1.3 } .stream { stroke: #0b6e4f; stroke-dasharray: 6 3 }
  .then { stroke: #b44d12; stroke-width: 2 } .head { fill: #52606d; stroke: none }
"""
_ARROW_HEAD = """<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9"
 markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" class="head"/></marker></defs>"""


def svg(graph: Graph) -> str:
    """An SVG: cards of the nodes, then walks from left to right in the order they feed or follow one another."""
    cards = [
        _Box("card", [f"{n.name} (module {n.module})" if n.module != n.name else n.name, *map(_method, n.methods)])
        for n in graph.nodes
    ]
    walks = {walk.name: _walk_box(graph, walk) for walk in graph.walks}
    groups = [
        _Box("across", children=[_Box("down", children=[walks[n] for n in names]) for names in columns], gap=100)
        for columns in _columns(graph)
    ]
    head = _Box("down", children=cards, gap=12, is_left=True)
    page = _Box("down", children=[head, *_rows(groups)], gap=48, is_left=True)
    _measure(page)
    _place(page, _MARGIN, _MARGIN)
    boxes = list(walks.values())
    body = [line for card in cards for line in _drawn(card, is_walk=False)]
    body += [line for walk in boxes for line in _drawn(walk, is_walk=True)]
    body += [_down(a, b) for walk in boxes for a, b in walk.arrows()]
    body += [_followed(walks[then.after], walks[then.walk]) for then in graph.states.thens]
    body += [_streamed(sender, receiver, name) for sender, receiver, name in _stream_arrows(graph, boxes)]
    width, height = page.width + 2 * _MARGIN, page.height + 2 * _MARGIN
    size = f'width="{width:.0f}" height="{height:.0f}"'
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width:.0f} {height:.0f}">',
            f"<style>{_STYLE}</style>",
            _ARROW_HEAD,
            f'<rect {size} style="stroke:none"/>',
            *body,
            "</svg>\n",
        )
    )


def _columns(graph: Graph) -> list[list[list[str]]]:
    """Walks that streams or states join, as one group each, in columns."""
    edges = {(then.after, then.walk) for then in graph.states.thens}
    boxes = [_walk_box(graph, walk) for walk in graph.walks]
    owner = {id(box): walk.name for walk in boxes for box in walk.walk()}
    edges |= {(owner[id(a)], owner[id(b)]) for a, b, _ in _stream_arrows(graph, boxes)}
    remaining = [walk.name for walk in graph.walks]
    groups = []
    while remaining:
        group, size = {remaining[0]}, 0
        while size < len(group):
            size = len(group)
            group |= {name for edge in edges if group & {*edge} for name in edge}
        members = [name for name in remaining if name in group]
        remaining = [name for name in remaining if name not in group]
        columns: list[list[str]] = []
        for name in members:  # after every earlier walk that feeds it; arrows back to earlier walks are only drawn
            before = [index for index, column in enumerate(columns) for a in column if (a, name) in edges]
            at = max(before, default=-1) + 1
            columns += [[]] * (at == len(columns))
            columns[at] = [*columns[at], name]
        groups.append(columns)
    return groups


def _rows(groups: list[_Box]) -> Iterator[_Box]:
    """Groups side by side as far as the page is wide."""
    row = _Box("across", gap=48)
    for group in groups:
        _measure(group)
        if row.children and sum(box.width + row.gap for box in row.children) + group.width > _PAGE:
            yield row
            row = _Box("across", gap=48)
        row.children.append(group)
    yield row


def _measure(box: _Box) -> None:
    for child in box.children:
        _measure(child)
    widths, heights = [c.width for c in box.children], [c.height for c in box.children]
    gaps = box.gap * max(0, len(box.children) - 1)
    if box.kind == "across":
        box.width, box.height = sum(widths) + gaps, max(heights, default=0)
    elif box.kind == "down":
        box.width, box.height = max(widths, default=0), sum(heights) + gaps
    else:
        text_width = max(len(line) for line in box.lines) * _CHARACTER
        box.width = max([text_width, *widths]) + 2 * _PAD
        box.height = len(box.lines) * _LINE + sum(heights) + (3 if widths else 1.4) * _PAD


def _place(box: _Box, x: float, y: float) -> None:
    box.x, box.y = x, y
    if box.kind == "frame":
        y += len(box.lines) * _LINE + 2 * _PAD
    for child in box.children:
        if box.kind == "across":
            _place(child, x, y)
            x += child.width + box.gap
        else:
            _place(child, x if box.is_left else x + (box.width - child.width) / 2, y)
            y += child.height + box.gap


def _drawn(box: _Box, *, is_walk: bool) -> Iterator[str]:
    if box.lines:
        kind = "walk" if is_walk else box.kind
        yield (
            f'<rect class="{kind}" x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" '
            f'height="{box.height:.1f}" rx="{4 if box.kind != "step" else 12}"/>'
        )
        for index, line in enumerate(box.lines):
            style = ' class="title"' if index == 0 and box.kind != "step" else ""
            yield f'<text{style} x="{box.x + _PAD:.1f}" y="{box.y + _LINE * (index + 1):.1f}">{escape(line)}</text>'
    for child in box.children:
        yield from _drawn(child, is_walk=False)


def _down(one: _Box, other: _Box) -> str:
    x, y, to_x, to_y = one.x + one.width / 2, one.y + one.height, other.x + other.width / 2, other.y
    middle = (y + to_y) / 2
    curve = f"M{x:.1f} {y:.1f}C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y:.1f}"
    return f'<path marker-end="url(#head)" d="{curve}"/>'


def _streamed(one: _Box, other: _Box, name: str) -> str:
    x, y, to_x, to_y = one.x + one.width, one.y + one.height / 2, other.x, other.y + other.height / 2
    bend = max(50, abs(to_x - x) / 2)
    curve = f"M{x:.1f} {y:.1f}C{x + bend:.1f} {y:.1f} {to_x - bend:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}"
    label_x = (x + to_x - len(name) * _CHARACTER) / 2
    return (
        f'<path class="stream" marker-end="url(#head)" d="{curve}"/>\n'
        f'<text class="note" x="{label_x:.1f}" y="{(y + to_y) / 2 - 5:.1f}">{escape(name)}</text>'
    )


def _followed(one: _Box, other: _Box) -> str:
    """An arc over whatever lies between two walks."""
    x, to_x, peak = one.x + one.width - 30, other.x + 30, min(one.y, other.y) - 34
    curve = f"M{x:.1f} {one.y:.1f}C{x:.1f} {peak:.1f} {to_x:.1f} {peak:.1f} {to_x:.1f} {other.y:.1f}"
    return f'<path class="then" marker-end="url(#head)" d="{curve}"/>'
