"""Checks a graph (and its spec) before anything runs: every problem at once, each naming node, port, walk or stream.

Runs at start-up in the server and in `mstar graph`; imports no torch. What only a request can tell (the values of
fields, what a `Processor` encodes, which keys the items of an `Each` hold) is not checked here.
"""

from __future__ import annotations

from collections.abc import Iterator

from mstar.errors import PluginError
from mstar.plugin.graph import Graph, calls
from mstar.plugin.spec import ModelSpec
from mstar.plugin.validate.nodes import check_node, duplicates, shared_modules
from mstar.plugin.validate.states import named_tasks, spec_agrees, states_reach_walks
from mstar.plugin.validate.streams import stream_depths, stream_ends_meet, stream_policy
from mstar.plugin.validate.values import Flow
from mstar.plugin.validate.walks import emitted_ports, kv_labels, walk_parts

__all__ = ["validate"]


def validate(graph: Graph, spec: ModelSpec | None = None) -> None:
    """Raise PluginError with every problem of `graph`; with `spec`, also where spec and graph disagree.

    Problems in how values flow through a walk are looked for once all its calls name existing methods.
    """
    problems = dict.fromkeys(_problems(graph, spec))
    if problems:
        owner = f"plugin {spec.name!r}: " if spec else ""
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise PluginError(f"{owner}the graph has {count}:\n" + "\n".join(f"  - {problem}" for problem in problems))


def _problems(graph: Graph, spec: ModelSpec | None) -> Iterator[str]:
    yield from duplicates("node", [n.name for n in graph.nodes])
    yield from duplicates("walk", [w.name for w in graph.walks])
    yield from duplicates("stream", [s.name for s in graph.streams])
    for node in graph.nodes:
        yield from check_node(node)
    yield from shared_modules(graph)
    for walk in graph.walks:
        broken = list(walk_parts(graph, walk))
        yield from broken
        if all(graph.method(call.target) for call in calls(walk.section)):
            yield from Flow(graph, walk).problems()
    yield from emitted_ports(graph)
    yield from kv_labels(graph)
    yield from states_reach_walks(graph)
    tasks: tuple[str | None, ...] = tuple(spec.tasks) if spec else named_tasks(graph.states) or (None,)
    for stream in graph.streams:
        yield from stream_policy(stream)
        yield from stream_ends_meet(graph, stream, tasks=tasks)
    yield from stream_depths(graph)
    if spec is not None:
        yield from spec_agrees(graph, spec)
