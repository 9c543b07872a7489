"""What nodes declare: methods, ports, KV use; and whether the values of one port fit another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from mstar.config import suggest
from mstar.plugin.graph import KV, Graph, Layout, Method, Node, Port

FLOATS = ("float", "float64", "float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
DTYPES = (*FLOATS, *INTEGERS, "bool")


def check_node(node: Node) -> Iterator[str]:
    if not node.name.isidentifier():
        yield f"node {node.name!r}: its name must be an identifier, so that 'node.method' can name its methods"
    yield from duplicates("method", [m.name for m in node.methods], f"node {node.name!r}: ")
    for method in node.methods:
        where = f"{node.name}.{method.name}: "
        if not method.name.isidentifier():
            yield f"{where}the name of a method must be an identifier"
        if method.max_batch is not None and method.max_batch < 1:
            yield f"{where}max_batch is {method.max_batch}; it must be at least 1"
        for side, ports in (("input", method.inputs), ("output", method.outputs)):
            yield from duplicates(f"{side} port", [p.name for p in ports], where)
            for port in ports:
                yield from _port(port, f"{where}{side} port {port.name!r}")
        ragged = [p.name for p in method.outputs if p.layout == "tokens"]
        if ragged and not method.has_tokens:
            yield f"{where}output port {ragged[0]!r} is of layout tokens, but no input is; use layout item"
        if method.kv is not None:
            yield from _kv(method, method.kv, where)


def _port(port: Port, where: str) -> Iterator[str]:
    if port.name and (not port.name.isidentifier() or port.name in ("self", "ctx")):
        yield f"{where}: the name must be an identifier other than self and ctx, for it is a keyword of the method"
    if port.layout not in get_args(Layout):
        yield f"{where}: unknown layout {port.layout!r}{suggest(port.layout, get_args(Layout))}"
    if port.dtype not in DTYPES:
        yield f"{where}: unknown dtype {port.dtype!r}{suggest(port.dtype, DTYPES)}"
    if port.shape is not None and not all(isinstance(size, int) and size > 0 for size in port.shape):
        yield f"{where}: shape {port.shape} must hold positive integers; use shape=None for a shape that varies"


def _kv(method: Method, kv: KV, where: str) -> Iterator[str]:
    inputs = [p.name for p in method.inputs]
    if not kv.label:
        yield f"{where}its KV label is empty"
    if kv.attention not in ("causal", "full"):
        yield f"{where}unknown attention {kv.attention!r}; known: causal, full"
    if kv.tokens < 1:
        yield f"{where}KV tokens is {kv.tokens}; it must be at least 1"
    if kv.spans is not None:
        port = method.input(kv.spans)
        if port is None:
            yield f"{where}KV spans names no input port: {kv.spans!r}{suggest(kv.spans, inputs)}"
        elif port.layout != "item" or port.dtype != "int64":
            yield f"{where}KV spans: port {port.name!r} is {port.layout} {port.dtype}; it must be item int64, (n, 2)"
    if kv.ids is not None:
        port = method.input(kv.ids)
        if port is None:
            yield f"{where}KV ids names no input port: {kv.ids!r}{suggest(kv.ids, inputs)}"
        elif port.layout not in ("tokens", "rows") or port.dtype not in INTEGERS:
            yield f"{where}KV ids: port {port.name!r} is {port.layout} {port.dtype}; it must be integer tokens or rows"
        if not kv.write:
            yield f"{where}KV ids is set, but the method writes nothing (write=False)"
    if kv.rebuild:
        port = method.input(kv.ids) if kv.ids else None
        if port is None or port.layout != "tokens":
            yield f"{where}rebuild needs KV ids to name a port of layout tokens"
        for other in method.inputs:
            if other.name != kv.ids and not other.optional:
                yield f"{where}rebuild runs from ids alone, so input port {other.name!r} must be optional"


def shared_modules(graph: Graph) -> Iterator[str]:
    """Nodes of one module batch together: a method must mean the same to all of them, but for its KV label."""
    seen: dict[tuple[str, str], tuple[str, Method]] = {}
    rebuilders: dict[str, set[str]] = {}
    for node in graph.nodes:
        for method in node.methods:
            if method.kv is not None and method.kv.rebuild:
                rebuilders.setdefault(node.module, set()).add(method.name)
            plain = replace(method, kv=replace(method.kv, label="")) if method.kv else method
            first, other = seen.setdefault((node.module, method.name), (node.name, plain))
            if other != plain:
                yield (
                    f"nodes {first!r} and {node.name!r} share module {node.module!r} but declare method "
                    f"{method.name!r} differently; only the KV label may differ"
                )
    for module, names in rebuilders.items():
        if len(names) > 1:
            yield f"module {module!r}: methods {', '.join(sorted(names))} all have rebuild; only one may"


def mismatch(source: Port, target: Port) -> str | None:
    """Why values of one port cannot be those of another, or None."""
    if "item" in (source.layout, target.layout):
        return None
    kinds = [next((k for k in (FLOATS, INTEGERS) if port.dtype in k), None) for port in (source, target)]
    if source.dtype != target.dtype and not kinds[0] is kinds[1] is FLOATS:
        return f"one is {source.dtype}, the other {target.dtype}"
    one, other = _task_shape(source), _task_shape(target)
    if one is None or other is None:
        return None
    if len(one) == len(other) and all(a == b or "n" in (a, b) for a, b in zip(one, other, strict=True)):
        return None
    return f"one has shape ({', '.join(map(str, one))}), the other ({', '.join(map(str, other))})"


def _task_shape(port: Port) -> tuple[int | str, ...] | None:
    """What one task's value looks like; None: any."""
    if port.shape is None:
        return None
    return ("n", *port.shape) if port.layout == "tokens" else port.shape


def duplicates(kind: str, names: list[str], where: str = "") -> Iterator[str]:
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"{where}{kind} {name!r} is declared {names.count(name)} times"
        if not name:
            yield f"{where}a {kind} has no name"
