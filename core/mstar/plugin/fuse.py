"""Finds loops whose bodies can run as one method, and puts that method in place of their ops.

A loop inside another is taken in when its count is a constant and its methods use no paged KV and send nothing; then
the body around it, as far as it can be, becomes one `Unit`: batched tensors flow from port to port, nothing is split
between. Pure data, imports no torch; the worker's `fused` runs units. All modules are on the program's one worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mstar.plugin.graph import Graph, Method, Port
from mstar.plugin.program import Join, LoopEnd, LoopStart, MethodKey, Op, Program, Run, Skip, Spawn, Split, Unit

MOST_STEPS = 1024  # of a unit: nothing else runs meanwhile

_JUMPS: dict[type, tuple[str, ...]] = {
    LoopStart: ("exit",), LoopEnd: ("body",), Split: ("branches", "join"), Spawn: ("body", "join"), Skip: ("target",)
}  # fmt: skip
_WORDS: dict[type, str] = {Skip: "a When", Split: "a Parallel", Spawn: "an Each"}

Steps = list[tuple[Run, int | None]]
"""Calls in order, each with the iteration of its loop inside the unit (None: it is in none)."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """Which methods have a `prepare` or a `finish` hook, and which calls of a walk run in another worker."""

    prepare: frozenset[MethodKey] = frozenset()
    finish: frozenset[MethodKey] = frozenset()
    is_away: Callable[[str, Run], bool] = lambda walk, op: False

    @classmethod
    def of(
        cls, graph: Graph, nodes: Mapping[str, Any], *, is_away: Callable[[str, Run], bool] = lambda walk, op: False
    ) -> Hooks:
        """Those of a graph's methods; `nodes`: module -> its class, or the object, of those that run here."""
        keys = [(n.module, method.name) for n in graph.nodes if n.module in nodes for method in n.methods]
        found = [frozenset(k for k in keys if hasattr(nodes[k[0]], f"{hook}_{k[1]}")) for hook in ("prepare", "finish")]
        return cls(found[0], found[1], is_away)


@dataclass(slots=True)
class LoopPlan:
    """What became of a loop's body: its units, and why not more of it is in them."""

    walk: str
    loop: str
    units: list[Run] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"walk {self.walk}, loop {self.loop}", *(f"one method: {unit.target}" for unit in self.units)]
        return "\n  ".join(lines + [f"not fused: {reason}" for reason in dict.fromkeys(self.reasons)])


def fuse(program: Program, hooks: Hooks) -> tuple[Program, list[LoopPlan]]:
    """The program with units in place of what they run, and a plan for each loop that is not inside a unit."""
    fuser = _Fuser(program, hooks)
    fuser.walk(0, len(program.ops))
    return _replaced(program, fuser.units), fuser.plans


def fuse_all(programs: Mapping[str, Program], hooks: Hooks) -> tuple[dict[str, Program], list[LoopPlan]]:
    """Walk name -> fused program, and every loop's plan."""
    fused = {name: fuse(program, hooks) for name, program in programs.items()}
    return {name: found for name, (found, _) in fused.items()}, [plan for _, plans in fused.values() for plan in plans]


def _replaced(program: Program, units: Mapping[int, tuple[int, Run]]) -> Program:
    ops, place, pc = list[Op](), dict[int, int](), 0
    while pc < len(program.ops):
        place[pc] = len(ops)
        end, op = units.get(pc, (pc + 1, program.ops[pc]))
        ops.append(op)
        pc = end

    def moved(op: Op) -> Op:
        jumps = {name: getattr(op, name) for name in _JUMPS.get(type(op), ())}
        there: Any = {n: tuple(place[p] for p in to) if isinstance(to, tuple) else place[to] for n, to in jumps.items()}
        return replace(op, **there) if there else op

    return replace(program, ops=tuple(moved(op) for op in ops))


class _Fuser:
    """Goes through one program's loops, outermost first."""

    def __init__(self, program: Program, hooks: Hooks) -> None:
        self.program = program
        self.ops = program.ops
        self.hooks = hooks
        self.units: dict[int, tuple[int, Run]] = {}  # first op -> (the op after it, what runs instead)
        self.plans: list[LoopPlan] = []

    def walk(self, start: int, stop: int) -> None:
        """What is in no loop: only the loops in it matter."""
        for pc, end in self._items(start, stop):
            self._inside(pc, end, None)

    def _items(self, pc: int, stop: int) -> Iterator[tuple[int, int]]:
        """(first op, the op after it) of every section directly in a range."""
        while pc < stop:
            op = self.ops[pc]
            end = pc + 1
            if isinstance(op, LoopStart | Skip | Split | Spawn):
                end = op.exit if isinstance(op, LoopStart) else op.target if isinstance(op, Skip) else op.join
            yield pc, end
            pc = end

    def _inside(self, pc: int, end: int, plan: LoopPlan | None) -> None:
        """The loops inside a section that is in no unit itself."""
        op = self.ops[pc]
        if isinstance(op, LoopStart):
            found = LoopPlan(self.program.walk, _title(op))
            self.plans.append(found)
            self._body(pc + 1, end - 1, found)
        elif isinstance(op, Skip | Split | Spawn):
            if plan is None:
                self.walk(pc + 1, end)
            else:
                self._body(pc + 1, end, plan)

    def _body(self, start: int, stop: int, plan: LoopPlan) -> None:
        """Cut a loop's body, or a branch of it, into the longest runs that can be units; keep those with a loop."""
        first, steps, has_loop = start, Steps(), False

        def close(end: int) -> None:
            if has_loop:
                run = _unit(f"{self.program.walk}[{first}:{end}]", steps)
                self.units[first] = end, run
                plan.units.append(run)

        for pc, end in self._items(start, stop):
            more = self._steps(pc)
            why = more if isinstance(more, str) else _conflict(steps + more, self.hooks)
            if why is not None:
                plan.reasons.append(why)
                close(pc)
                first, steps, has_loop = pc, Steps(), False
                if isinstance(more, str) or _conflict(more, self.hooks) is not None:
                    first = end
                    self._inside(pc, end, plan)
                    continue
            assert not isinstance(more, str)
            steps = steps + more
            has_loop = has_loop or isinstance(self.ops[pc], LoopStart)
        close(stop)
        if not any(isinstance(op, LoopStart) for op in self.ops[start:stop]):
            is_method = stop == start + 1 and isinstance(self.ops[start], Run)
            plan.reasons[:] = ["it is one method already" if is_method else "there is no loop in it"]

    def _steps(self, pc: int) -> Steps | str:
        """A section's calls one after the other, or why it cannot be in a unit."""
        op = self.ops[pc]
        if isinstance(op, LoopStart):
            return self._unrolled(pc, op)
        if not isinstance(op, Run):
            return f"it holds {_WORDS.get(type(op), 'a branch' if isinstance(op, Join) else 'a Fork, Alias or Drop')}"
        if self.hooks.is_away(self.program.walk, op):
            return f"{op.target} runs in another worker"
        for port in (*op.method.inputs, *op.method.outputs):
            if port.layout != "rows":
                return f"{op.target} has the port {port.name!r} of layout {port.layout}, not rows"
        if op.cache is not None:
            return f"{op.target} need not run where its outputs are cached"
        if op.method.kv is not None and op.method.kv.tokens != 1:
            return f"{op.target} adds {op.method.kv.tokens} tokens a row"
        return [(op, None)]

    def _unrolled(self, pc: int, loop: LoopStart) -> Steps | str:
        title, steps = f"loop {_title(loop)} in it", Steps()
        if loop.dynamic:
            return f"{title} ends when it is stopped, not after a constant count"
        if not isinstance(loop.limit, int):
            return f"{title} has a count that is no constant of the graph"
        if loop.collect:
            return f"{title} collects {', '.join(value for value, _ in loop.collect)} in a list"
        for at, _ in self._items(pc + 1, loop.exit - 1):
            op, inner = self.ops[at], self._steps(at)
            if isinstance(inner, str):
                return f"{title}: {inner}"
            if isinstance(op, Run):
                uses = {"uses paged KV": op.method.kv, "emits": op.emits, "sends": op.sends, "receives": op.receives}
                for what, is_so in uses.items():
                    if is_so:
                        return f"{title}: {op.target} {what}"
            steps += inner
        if not 0 < loop.limit * len(steps) <= MOST_STEPS:
            return f"{title} takes {loop.limit * len(steps)} steps; a unit has 1 to {MOST_STEPS}"
        return [(run, i if number is None else number) for i in range(loop.limit) for run, number in steps]


def _title(loop: LoopStart) -> str:
    count = "until stopped" if loop.limit is None else f"{'at most ' * loop.dynamic}{loop.limit} times"
    return f"{loop.name!r} ({count})" if loop.name else f"({count})"


def _conflict(steps: Steps, hooks: Hooks) -> str | None:
    """Why calls cannot run as one method, with all their `prepare` hooks before and all `finish` hooks after it."""
    written: dict[str, Run] = {}  # value -> who wrote it last
    with_kv: Run | None = None
    finished: set[str] = set()  # modules
    for at, (run, _) in enumerate(steps):
        inside = {port: written[value] for port, value in run.inputs if value in written}
        kv, target = run.method.kv, run.target
        if at and run.receives:
            return f"{target} waits for a stream in the middle of it"
        if kv is not None and with_kv is not None:
            return f"{with_kv.target} and {target} both use paged KV"
        if kv is not None and kv.ids in inside:
            return f"{target} writes ids that {inside[kv.ids].target} has yet to make"
        if run.key in hooks.prepare and inside:
            return f"{target} has a prepare hook, and reads what {next(iter(inside.values())).target} has yet to make"
        if run.key in hooks.prepare and run.key[0] in finished:
            return f"{target} has a prepare hook, and an earlier finish hook of its module has yet to run"
        for port, writer in inside.items():
            if writer.key in hooks.finish:
                return f"{target} reads {port!r} from {writer.target}, whose finish hook may replace it"
        if run.key in hooks.finish:
            finished.add(run.key[0])
        with_kv = run if kv is not None else with_kv
        written |= {value: run for _, value in run.outputs}
    return None


def _unit(name: str, steps: Steps) -> Run:
    """What runs these calls as one; its method is on the module with the KV, or the first."""
    runs = tuple(dict.fromkeys(run for run, _ in steps))
    inputs: dict[str, str] = {}
    written: dict[str, str] = {}  # value -> port that wrote it last
    times = dict.fromkeys(runs, 0)
    for run, _ in steps:
        times[run] += 1
        prefix = f"{runs.index(run)}."
        inputs |= {prefix + port: value for port, value in run.inputs if value not in written}
        written |= {value: prefix + port for port, value in run.outputs}

    def wired(name: str) -> tuple[tuple[str, Any], ...]:
        return tuple((f"{i}.{port}", other) for i, run in enumerate(runs) for port, other in getattr(run, name))

    def ports(name: str, used: set[str]) -> tuple[Port, ...]:
        every = [replace(p, name=f"{i}.{p.name}") for i, run in enumerate(runs) for p in getattr(run.method, name)]
        return tuple(port for port in every if port.name in used)

    receives, sends, emits = wired("receives"), wired("sends"), wired("emits")
    lead = next((run for run in runs if run.method.kv is not None), runs[0])
    kv = lead.method.kv
    if kv is not None and kv.ids is not None:
        kv = replace(kv, ids=f"{runs.index(lead)}.{kv.ids}")
    limits = [run.method.max_batch for run in runs if run.method.max_batch is not None]
    method = Method(
        name=name,
        inputs=ports("inputs", {*inputs, *(port for port, _ in receives)}),
        outputs=ports("outputs", {*written.values(), *(port for port, _ in (*sends, *emits))}),
        kv=kv,
        max_batch=min(limits, default=None),
    )
    return Run(
        node=lead.node,
        key=(lead.key[0], name),
        method=method,
        inputs=tuple(inputs.items()),
        outputs=tuple((port, value) for value, port in written.items()),
        receives=receives,
        sends=sends,
        emits=emits,
        target=", ".join(run.target if count == 1 else f"{count} × {run.target}" for run, count in times.items()),
        free_ports=tuple(port.name for port in method.inputs if port.shape is None),
        unit=Unit(
            runs=runs,
            steps=tuple((runs.index(run), number) for run, number in steps),
            modules=tuple(dict.fromkeys(run.key[0] for run in runs)),
            counts=tuple((run.target, count) for run, count in times.items()),
        ),
    )
