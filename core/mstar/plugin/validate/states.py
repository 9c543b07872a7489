"""States: walks they start and reach; and whether spec and graph agree."""

from __future__ import annotations

from collections.abc import Iterator

from mstar.config import suggest
from mstar.plugin.graph import Graph
from mstar.plugin.spec import ModelSpec
from mstar.plugin.states import Start, States, Then


def named_tasks(states: States) -> tuple[str, ...]:
    rules: list[Start | Then] = [*states.starts, *states.thens]
    return tuple(dict.fromkeys(rule.task for rule in rules if rule.task is not None))


def lanes_of(states: States, task: str | None) -> dict[str, set[str]]:
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


def states_reach_walks(graph: Graph) -> Iterator[str]:
    states, walks = graph.states, [w.name for w in graph.walks]
    if not states.starts:
        yield "states: no walk starts; add a Start"
    named = [("Start", s.walk) for s in states.starts]
    named += [(kind, name) for t in states.thens for kind, name in (("Then", t.walk), ("Then after", t.after))]
    for kind, name in named:
        if name not in walks:
            yield f"states: {kind} names no walk: {name!r}{suggest(name, walks)}"
    reached = {walk for task in (None, *named_tasks(states)) for walk in lanes_of(states, task)}
    for name in walks:
        if name not in reached:
            yield f"walk {name!r}: no state reaches it; add a Start or a Then, or remove the walk"
    rules: list[tuple[str, str, Start | Then]] = [("Start on lane", s.lane, s) for s in states.starts]
    rules += [("Then after", t.after, t) for t in states.thens]
    for index, (kind, key, rule) in enumerate(rules):
        for earlier_kind, earlier_key, earlier in rules[:index]:
            always = earlier.when is None and earlier.task in (None, rule.task)
            if always and (kind, key) == (earlier_kind, earlier_key):
                yield f"states: {kind} {key!r}: walk {rule.walk!r} is never taken, for {earlier.walk!r} always is"


def spec_agrees(graph: Graph, spec: ModelSpec) -> Iterator[str]:
    modules = list(dict.fromkeys(node.module for node in graph.nodes))
    for module in modules:
        if module not in spec.nodes:
            yield f"spec: nodes has no path for module {module!r}{suggest(module, spec.nodes)}"
    for module in spec.nodes:
        if module not in modules:
            yield f"spec: nodes names module {module!r}, which no node of the graph has{suggest(module, modules)}"
    for name in named_tasks(graph.states):
        if name not in spec.tasks:
            yield f"states: there is no task {name!r} in the spec{suggest(name, spec.tasks)}"
    for name in spec.tasks:
        if not lanes_of(graph.states, name):
            yield f"spec: task {name!r} starts no walk; add a Start for it"
