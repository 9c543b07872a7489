"""The vocabulary of walks: nodes, methods, ports, sections, streams. Pure data, imports no torch.

A plugin's `graph.py` builds one `Graph` from these; `plugin.validate` checks it, `plugin.program` compiles its
walks to flat programs, `plugin.draw` prints it. Nothing here runs a model or knows one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mstar.plugin.states import RequestView, States

Layout = Literal["rows", "tokens", "item"]
Predicate = Callable[[RequestView, int], bool]
"""(request, iteration of the innermost loop) -> run it? Pure, host-side."""


@dataclass(frozen=True, slots=True)
class Port:
    """A named, typed input or output of a method.

    Args:
        name: the port; a keyword of the method.
        layout: `rows` (one row per task; batched to (B, *shape)), `tokens` (ragged over tokens; batched to
            (T, *shape), cut together by chunked prefill) or `item` (not batched: the method gets a list, as long as
            the batch of its `rows` ports is, padding included).
        dtype: torch dtype name, without the `torch.` prefix; "float" means the model's dtype.
        shape: shape of one row or token. None: any, tasks batch when their shapes agree.
        optional: the method accepts None when nothing feeds the port.
    """

    name: str
    layout: Layout = "rows"
    dtype: str = "float"
    shape: tuple[int, ...] | None = ()
    optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KV:
    """How a method uses its module's KV pool.

    Args:
        label: the request's sequence; a node's `prepare_<method>` may choose another.
        write: append the new tokens' keys and values. False: queries read the context and each other only.
        attention: `causal`, or `full` (the task's new tokens are one atomic block that sees itself whole).
        tokens: new tokens per row, for methods without a `tokens` port.
        spans: name of an item port, int64 (n, 2) [start, end) in the task's tokens: bidirectional spans.
        ids: name of the port that alone determines what is written (token ids). Enables the prefix cache
            (on `tokens` ports) and recomputation after preemption.
        rebuild: on the method that can rewrite a sequence from `ids` alone, with its other ports absent.
    """

    label: str = "main"
    write: bool = True
    attention: Literal["causal", "full"] = "causal"
    tokens: int = 1
    spans: str | None = None
    ids: str | None = None
    rebuild: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One batched function of a node: `name` is the method of the module's class."""

    name: str
    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()
    kv: KV | None = None
    max_batch: int | None = None

    def input(self, name: str) -> Port | None:
        return next((p for p in self.inputs if p.name == name), None)

    def output(self, name: str) -> Port | None:
        return next((p for p in self.outputs if p.name == name), None)

    @property
    def has_tokens(self) -> bool:
        """Whether a `tokens` input makes the batch ragged."""
        return any(p.layout == "tokens" for p in self.inputs)


@dataclass(frozen=True, slots=True)
class Node:
    """A component of the graph. Nodes with the same `module` share one copy of the weights and one batch."""

    name: str
    methods: tuple[Method, ...]
    module: str = ""

    def __post_init__(self) -> None:
        if not self.module:
            object.__setattr__(self, "module", self.name)

    def method(self, name: str) -> Method | None:
        return next((m for m in self.methods if m.name == name), None)


# ---- sections -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallFields:
    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    receives: Mapping[str, str] = field(default_factory=dict)
    sends: Mapping[str, str] = field(default_factory=dict)
    emits: Mapping[str, str] = field(default_factory=dict)
    cache: str | None = None


@dataclass(frozen=True, slots=True)
class Call(_CallFields):
    """Run one method: `Call("lm.decode", sends={"code": "codes"})`.

    Args:
        target: "node.method".
        inputs: input port -> value name, where they differ.
        outputs: output port -> value name, where they differ.
        receives: input port -> stream it takes one chunk from at every run.
        sends: output port -> stream it puts its items on.
        emits: output port -> name under which the client's side gets it, at every run.
        cache: name of the value with the bytes that tell all it depends on (`plugin.media.content_key`; None: it has to
            run): outputs of an equal call, of this request or another, stand for its own. For methods that do nothing
            else: no KV, slots, host state or draws.
    """

    target: str

    @property
    def node(self) -> str:
        return self.target.partition(".")[0]

    @property
    def method(self) -> str:
        return self.target.partition(".")[2]

    def cache_problem(self, method: Method, *, missing: str) -> str:
        """Why its outputs cannot be cached, or nothing. `missing`: why the key is no value here."""
        if self.cache is not None and missing:
            return f"cache names no value {self.cache!r} that is there by then{missing}"
        is_alone = method.kv is None and not self.receives
        return "" if self.cache is None or is_alone else "it has a cache, but uses KV or a stream, which no key tells"


class Sequential:
    """Sections one after the other."""

    __slots__ = ("sections",)

    def __init__(self, *sections: Section) -> None:
        self.sections = sections


class Parallel:
    """Sections side by side on one request's sequences; joined before what follows. Each writes its own values."""

    __slots__ = ("sections",)

    def __init__(self, *sections: Section) -> None:
        self.sections = sections


@dataclass(frozen=True, slots=True)
class When:
    """Run the section if `predicate(request, iteration)`; else its outputs are absent, never zeros."""

    predicate: Predicate
    section: Section
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _EachFields:
    over: str
    fork: str | tuple[str, ...] | None = None
    collect: Mapping[str, str] = field(default_factory=dict)
    ordered: Predicate | None = None


@dataclass(frozen=True, slots=True)
class Each(_EachFields):
    """Run the section once per item of the value `over`, side by side, joined in order.

    An item is a mapping of value names to values, or a bare value (then it is known under `over`'s own name); the
    value `over` is a list of them, `[{}] * n` for n samples. Each child has its own sequences, slots, samplers and
    stream buffers; what it sends to the client is released in item order.

    Args:
        over: name of the value that holds the list of items.
        fork: labels of sequences each child gets copy-on-write forks of, as far as there are any, dropped at the join.
        collect: value name in the child -> name of the list it becomes after the join.
        ordered: a predicate; true makes the children run one after the other.
    """

    section: Section


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoopFields:
    carry: tuple[str, ...] = ()
    collect: Mapping[str, str] = field(default_factory=dict)
    name: str = ""


@dataclass(frozen=True, slots=True)
class Loop(_LoopFields):
    """Run the section `count` times: a constant, or the name of a value or request field.

    Args:
        count: how often.
        carry: values the body reads before it writes them: fed from outside first, then from the last iteration.
        collect: value name in the body -> name of the list of its values over all iterations.
    """

    count: int | str
    section: Section


@dataclass(frozen=True, slots=True)
class DynamicLoop(_LoopFields):
    """Run the section until a node's `finish` stops it, a stream it reads has ended, or `limit` is reached.

    Args:
        limit: most iterations: a constant, the name of a value or request field, or None (then the body must
            receive a stream). Reaching it ends the loop with reason "length".
        budget: name of a request field that bounds all loops naming it together, in the order they run.
    """

    limit: int | str | None
    section: Section
    budget: str | None = None


@dataclass(frozen=True, slots=True)
class Fork:
    """Make sequence `new` a copy-on-write fork of `source`.

    Args:
        at: name of a value or field: the length to cut it to, or [length, position of the next token] where
            positions are not consecutive. None: all of it.
    """

    new: str
    source: str
    at: str | None = None


@dataclass(frozen=True, slots=True)
class Alias:
    """Make label `new` another name of sequence `source`."""

    new: str
    source: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget sequence `label` and free its pages."""

    label: str


Section = Call | Sequential | Parallel | When | Each | Loop | DynamicLoop | Fork | Alias | Drop


# ---- streams --------------------------------------------------------------------------------------------

Size = int | str | tuple[int | str, ...]
"""A constant, the name of a request field, or a growing schedule of such whose last entry repeats."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Chunks of `size` new items; the last one holds the rest and may be empty."""

    size: Size


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Windows of `window` items, `stride` apart. The final chunk is the last min(window, n) items, seen or not."""

    window: Size
    stride: Size


@dataclass(frozen=True, slots=True)
class LeftContext:
    """Chunks of `size` new items after up to `context` items already seen."""

    size: Size
    context: Size


@dataclass(frozen=True, slots=True)
class Whole:
    """One chunk with every item, when the producer has ended."""


Policy = Fixed | SlidingWindow | LeftContext | Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """An edge between walks that run side by side; `policy` says how its consumer reads it.

    A stream ends with the walk, or the item of an `Each`, that feeds it; or after the last call that sends on it, where
    that lies in no loop, branch or condition.

    A chunk reaches the receiving port as its items stacked, (n, *item shape), so the port's shape is best None; n
    varies, and the final chunk may hold none. `Task.chunks` has its flags.

    Args:
        name: the stream, as used by `Call.sends` and `Call.receives`.
        policy: how items become chunks.
        after_end: "end" (a loop that received the final chunk ends after that iteration) or "absent" (the loop
            goes on; its port is absent).
    """

    name: str
    policy: Policy
    after_end: Literal["end", "absent"] = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """A named composition of node methods.

    Args:
        inputs: values the walk needs, from `Processor.encode` or an earlier walk's outputs.
        outputs: values that stay on the request until a later walk, or the result, consumes them.
    """

    name: str
    section: Section
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Nodes, walks, streams and states of one model."""

    nodes: tuple[Node, ...]
    walks: tuple[Walk, ...]
    states: States
    streams: tuple[Stream, ...] = ()

    def node(self, name: str) -> Node | None:
        return next((n for n in self.nodes if n.name == name), None)

    def walk(self, name: str) -> Walk | None:
        return next((w for w in self.walks if w.name == name), None)

    def stream(self, name: str) -> Stream | None:
        return next((s for s in self.streams if s.name == name), None)

    def method(self, target: str) -> Method | None:
        """The method a call's "node.method" names."""
        node, _, method = target.partition(".")
        found = self.node(node)
        return found.method(method) if found else None


def labels(fork: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """What `Each.fork` names."""
    return (fork,) if isinstance(fork, str) else fork or ()


def children(section: Section) -> tuple[Any, ...]:
    """The sections directly inside a section."""
    if isinstance(section, Sequential | Parallel):
        return section.sections
    if isinstance(section, When | Each | Loop | DynamicLoop):
        return (section.section,)
    return ()


def sections(section: Section) -> Iterator[Section]:
    """A section and every section inside it, in order."""
    yield section
    for child in children(section):
        yield from sections(child)


def calls(section: Section) -> list[Call]:
    """Every call inside a section, in order."""
    return [found for found in sections(section) if isinstance(found, Call)]
