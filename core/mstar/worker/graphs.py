"""CUDA graphs: a method or fused unit recorded once per batch size, then replayed in place of its kernels' launches.

A graph reads and writes memory that stays where it is. So a launch copies what it has into fixed operands, replays, and
copies what came out. Batches are padded to a bucket of rows by rows that use scratch memory only. Knows methods and
modules, not walks; all a device must do is in `Graphs`.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from mstar.layers.attention import AttentionPlan, KVBatch, decode_plan
from mstar.layers.sampling import SamplingState
from mstar.plugin.nodes import Context
from mstar.plugin.program import MethodKey, Program, Run
from mstar.types import SamplingParams
from mstar.worker.finish import described
from mstar.worker.fused import call_unit
from mstar.worker.launched import COLUMNS, BatchLayout, Traces, draw, everywhere, require_sampler
from mstar.worker.modules import Module, port_dtype, varies
from mstar.worker.runner import Runner
from mstar.worker.scheduler import Batch
from mstar.worker.state import Work

log = logging.getLogger("mstar.worker")

T = TypeVar("T")
_FEATURES: dict[str, dict[str, Any]] = {  # of samplers: what makes a row use them
    "random": {"temperature": 1.0},
    "filter": {"temperature": 1.0, "top_p": 0.5},
    "bias": {"logit_bias": {"0": 1.0}},
    "repetition": {"repetition_penalty": 2.0},
    "additive": {"presence_penalty": 1.0},
}
AT_LOAD = (frozenset[str](), frozenset({"random"}), frozenset({"random", "filter"}))
"""Features of samplers for which graphs are captured at load; for others they are when first asked for."""


class Graphs(Protocol):
    """What captures on a device."""

    def capture(self, function: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Warm a function up, then record the one call after that.

        Returns what replays the record, and what that call returned: every replay writes its tensors anew.
        """


class CudaGraphs:
    """Graphs of one CUDA device, which share one memory pool: what a replay leaves there, the next may overwrite."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], T]) -> tuple[Callable[[], None], T]:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):  # libraries set themselves up at a first call, kernels at a second
            for _ in range(2):
                function()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on allocating.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = function()
        return graph.replay, result


@runtime_checkable
class CapturableAttention(Protocol):
    """An attention backend whose decoding over a plan of fixed tensors (`AttentionPlan.held`) can be captured."""

    def can_capture(self, *, head_dim: int, dtype: torch.dtype) -> bool: ...

    def refresh(self, fixed: AttentionPlan, live: AttentionPlan) -> None:
        """Before a replay: let a captured plan say what the step's own plan of as many rows says."""


def buckets(most: int) -> list[int]:
    """Rows of captured batches: 1, 2, 4, 8, then multiples of 8, and the most there may be."""
    return sorted({n for n in (1, 2, 4, *range(8, most, 8)) if n < most} | {most})


@dataclass(slots=True)
class Counts:
    """Graphs captured, replays, launches of captured methods without a graph, graphs dropped as pools grew."""

    captures: int = 0
    replays: int = 0
    eager: int = 0
    dropped: int = 0


class Key(NamedTuple):
    """What a graph depends on, besides the pools: its operands by name tell which optional ports are fed."""

    method: MethodKey
    rows: int
    operands: frozenset[str]
    features: frozenset[str]


@dataclass(slots=True)
class Operands:
    """What a method or unit is called with. `rows`: slot rows, (B,) int64, of each of its modules."""

    context: Context
    inputs: dict[str, Any]
    rows: dict[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        """Those that differ from call to call, by name; of attention's plan none. Each has a row per task."""
        found: dict[str, Tensor] = {name: getattr(self.context, name) for name in COLUMNS}
        found |= {f"in {name}": batch for name, batch in self.inputs.items() if batch is not None}
        found |= {f"has {name}": fed for name, fed in self.context.present.items()}
        return found | {f"of {name}": rows for name, rows in self.rows.items() if rows is not self.context.rows}

    def moved(self, named: dict[str, Tensor]) -> Operands:
        """The same with other tensors."""
        columns: dict[str, Any] = {name: named[name] for name in COLUMNS}
        present = {name: named[f"has {name}"] for name in self.context.present}
        inputs = {name: None if batch is None else named[f"in {name}"] for name, batch in self.inputs.items()}
        rows = {name: named.get(f"of {name}", named["rows"]) for name in self.rows}
        columns |= {"sample": None, "kv": None}  # those of a launch hold its tasks
        return Operands(replace(self.context, present=present, **columns), inputs, rows)


@dataclass(slots=True)
class Captured:
    """A graph, and whatever it reads and writes: memory must not be given back before it.

    Args:
        named: the tensors of `fixed`.
        outputs: what may be needed of what the methods made, each tensor once.
        made: of each call, port -> index into `outputs`; None: no value, or not needed after the graph.
        draws: (sampler's state, name of the sampler, module) of each draw; `ids` (draws, B) is what was drawn.
        calls: how often it calls each method.
    """

    again: Callable[[], None]
    fixed: Operands
    named: dict[str, Tensor]
    plan: AttentionPlan | None
    outputs: list[Tensor]
    made: list[dict[str, int | None]]
    draws: list[tuple[SamplingState, str, str]]
    ids: Tensor | None
    calls: Mapping[MethodKey, int]


class GraphRunner:
    """Captures a worker's methods and units, and replays them.

    Example:
        runner.graphs = GraphRunner(runner, CudaGraphs(device))
        runner.graphs.capture_all(router.programs)  # from then on a launch replays where it can
    """

    def __init__(self, runner: Runner, graphs: Graphs) -> None:
        self.counts = Counts()
        self.why_not: dict[str, str] = {}  # "module.method" -> why it is not captured
        self._runner, self._graphs, self._modules = runner, graphs, runner.modules
        self._buckets = buckets(runner.modules.config.max_num_seqs)
        self._ops: dict[MethodKey, Run] = {}  # those that are captured
        self._captured: dict[Key, Captured] = {}
        self._fixed: dict[tuple[str, torch.dtype, tuple[int, ...]], Tensor] = {}  # operands, shared by all graphs
        self._plans: dict[tuple[str, int], AttentionPlan] = {}
        self._pool_rows = self._all_pool_rows()

    # ---- replaying --------------------------------------------------------------------------------------

    def align(self, key: MethodKey, num_rows: int) -> int:
        """Rows that a batch is to be padded to a multiple of; 1 if it cannot be replayed."""
        if key not in self._ops or num_rows > self._buckets[-1]:
            return 1
        return self._buckets[bisect_left(self._buckets, num_rows)]

    def replay(
        self, batch: Batch, context: Context, inputs: dict[str, Any], rows: dict[str, Tensor], traces: Traces
    ) -> list[dict[str, Any]] | None:
        """Run a launch by a graph: what each of its calls made, cut to the works; None if there is no graph for it.

        What comes out is the launch's own: later replays leave it alone.
        """
        op, works = self._ops.get(batch.key), batch.works
        if op is None:
            return None
        live = Operands(context, inputs, rows)
        tensors = live.tensors()
        captured = self._find(op, live, frozenset(tensors))
        if captured is None:
            if not self.counts.eager:
                log.info("%s has no CUDA graph for a batch of %d rows, which runs without", _title(op), len(works))
            self.counts.eager += 1
            return None
        for module, sampler in {(module, name) for _, name, module in captured.draws}:
            require_sampler(self._modules[module], works, sampler)
        with self._modules[op.runs[0].key[0]].timed(op.runs[0].key[1]):
            torch._foreach_copy_(list(captured.named.values()), [tensors[name] for name in captured.named])
            if captured.plan is not None:
                cast(CapturableAttention, self._runner.backend).refresh(captured.plan, context.kv.plan)
            captured.again()
            outputs = [tensor[: len(works)].clone() for tensor in captured.outputs]
            ids = [] if captured.ids is None else captured.ids.clone().unbind(0)
        for (module, method), times in captured.calls.items():
            self._modules[module].timed(method, calls=times, rows=times * len(works))
        self.counts.replays += 1
        drawn = zip(captured.draws, ids, strict=True)
        traces.draws += [(state, rows[module], own) for (state, _, module), own in drawn]
        return [{port: None if at is None else outputs[at] for port, at in own.items()} for own in captured.made]

    def _find(self, op: Run, live: Operands, operands: frozenset[str]) -> Captured | None:
        context, positions = live.context, live.context.positions
        is_usual = positions.dtype == torch.int64 and positions.dim() == 1 and not context.plan
        if not is_usual or context.num_rows not in self._buckets:
            return None
        if op.method.kv is not None and context.kv.plan.page_table.shape[1] > self._page_width(op.key[0]):
            return None
        if self._pool_rows != (pool_rows := self._all_pool_rows()):
            self._drop(pool_rows)
        states = self._samplers(op)
        features = frozenset(name for name in _FEATURES if any(state.uses(name) for state in states))
        key = Key(op.key, context.num_rows, operands, features)
        if key not in self._captured:
            log.info("capturing %s while serving: %d rows, sampling %s", _title(op), key.rows, sorted(features))
            self._try(key, op, live)
        return self._captured.get(key)

    def _samplers(self, op: Run) -> dict[SamplingState, tuple[str, str]]:
        """State -> (name, module) of the samplers that an op may draw from."""
        modules = [self._modules[name] for name in _modules(op)]
        return {state: (name, m.name) for m in modules for name, state in m.slots.samplers.items()}

    def _all_pool_rows(self) -> list[int]:
        return [module.slots.rows for module in self._modules.by_name.values()]

    def _drop(self, pool_rows: list[int]) -> None:
        """A pool that grew has new tensors, which graphs do not know."""
        rows = zip(self._modules.by_name, self._pool_rows, pool_rows, strict=True)
        grown = [name for name, before, now in rows if before != now]
        log.warning(
            "the slot pool of %s grew: %d CUDA graphs are captured again when next used; raise --max-num-seqs to avoid "
            "the wait", ", ".join(grown), len(self._captured),
        )  # fmt: skip
        self.counts.dropped += len(self._captured)
        self._captured.clear()
        self._pool_rows = pool_rows

    # ---- capturing --------------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture_all(self, programs: Mapping[str, Program]) -> None:
        """Capture what can be captured of the programs, the largest batches first."""
        runs = [(walk, op) for walk, program in programs.items() for op in program.ops if isinstance(op, Run)]
        places = self._runner.modules.places
        ops = {op.key: op for walk, op in runs if op.unit is not None or not places.is_away(walk, op)}
        for op in ops.values():
            if reason := self._reason(op):
                self._leave(op, reason)
            else:
                self._ops[op.key] = op
        wanted = [
            (rows, op, is_fed, features)
            for rows in reversed(self._buckets)
            for op in self._ops.values()
            for is_fed in ((True, False) if any(port.optional for port in op.method.inputs) else (True,))
            for features in (AT_LOAD if self._samplers(op) else AT_LOAD[:1])
        ]
        for number, (rows, op, is_fed, features) in enumerate(wanted, 1):
            if op.key in self._ops:
                example = self._example(op, rows, is_fed=is_fed)
                self._try(Key(op.key, rows, frozenset(example.tensors()), features), op, example)
            if number % 16 == 0 or number == len(wanted):
                log.info("capturing CUDA graphs: %d of %d", number, len(wanted))

    def _leave(self, op: Run, reason: str) -> None:
        self._ops.pop(op.key, None)
        self._captured = {key: graph for key, graph in self._captured.items() if key.method != op.key}
        self.why_not[_title(op)] = reason
        log.info("%s runs without CUDA graphs: %s", _title(op), reason)

    def _reason(self, op: Run) -> str | None:
        """Why an op cannot be captured."""
        if any(self._modules[run.key[0]].is_split for run in op.runs):
            return "it is split among processes"
        has_prepare = any(run.key[1] in self._modules[run.key[0]].prepare for run in op.runs)
        if reason := varies(op.method, has_prepare=has_prepare):
            return reason
        if not op.method.inputs:
            return "it has no input, so its batches are not padded"
        for port in (port for run in op.runs for port in run.method.outputs if port.layout != "rows"):
            return f"its output {port.name!r} has layout {port.layout}"
        layout, backend = self._modules[op.key[0]].node.kv_layout, self._runner.backend
        if op.method.kv is None or layout is None:
            return None
        if not op.method.kv.write:
            return "it reads the KV cache without writing to it"
        heads: dict[str, Any] = {"head_dim": layout.head_dim, "dtype": self._modules.dtype}
        if not isinstance(backend, CapturableAttention) or not backend.can_capture(**heads):
            return f"attention backend {backend.name!r} cannot be captured with {heads}"
        return None

    def _try(self, key: Key, op: Run, example: Operands) -> None:
        try:
            self._captured[key] = self._capture(key, op, example)
            self.counts.captures += 1
        except Exception as error:  # noqa: BLE001  # whatever a method does that a device cannot record
            self._leave(op, described(error).splitlines()[0])

    def _capture(self, key: Key, op: Run, example: Operands) -> Captured:
        named = {name: self._buffer(name, tensor)[: key.rows] for name, tensor in example.tensors().items()}
        fixed, plan, samplers = example.moved(named), self._plan(op, rows=key.rows), self._samplers(op)
        for tensor in (*named.values(), *([] if plan is None else [plan.slot_mapping])):
            tensor.zero_()  # warming up writes to scratch memory
        with _aside([self._modules[name] for name in _modules(op)], samplers, key.features):
            again, (made, drawn, ids) = self._graphs.capture(partial(self._region, op, fixed, plan))
        outputs = {id(value): value for own in made for value in own.values() if value is not None}
        index = {of: at for at, of in enumerate(outputs)}
        return Captured(
            again=again,
            fixed=fixed,
            named=named,
            plan=plan,
            outputs=list(outputs.values()),
            made=[{port: index.get(id(value)) for port, value in own.items()} for own in made],
            draws=[(state, *samplers[state]) for state in drawn],
            ids=ids,
            calls=Counter([op.key] if op.unit is None else [op.runs[at].key for at, _ in op.unit.steps]),
        )

    def _region(
        self, op: Run, fixed: Operands, plan: AttentionPlan | None
    ) -> tuple[list[dict[str, Tensor | None]], list[SamplingState], Tensor | None]:
        """What a graph records: (what each call made, the sampler of each draw, the draws)."""
        lead, traces, num_rows = self._modules[op.key[0]], Traces(self._modules.fence), fixed.context.num_rows
        info = SimpleNamespace(samplers={name for name, _ in self._samplers(op).values()})
        task = SimpleNamespace(op=op, num_tokens=1, request=SimpleNamespace(info=info))
        works = cast(list[Work], [task] * num_rows)
        layout = BatchLayout(op.method, works, align=1)
        context = replace(fixed.context, sample=partial(draw, lead, works, fixed.context.rows, traces))
        if plan is not None and lead.pool is not None:
            plan.derived.clear()  # computed again, inside the graph
            context.kv = KVBatch(plan, lead.pool.keys, lead.pool.values, self._runner.backend)
        if op.unit is None:
            made = [lead.methods[op.key[1]](context, **fixed.inputs)]
            self._runner.check(lead, op.method, made[0], layout)
        else:
            made = call_unit(self._runner, Batch(op.key, works), layout, traces, context, fixed.inputs, fixed.rows)
        ids = torch.stack([ids for _, _, ids in traces.draws]) if traces.draws else None
        return self._needed(op, made), [state for state, _, _ in traces.draws], ids

    def _needed(self, op: Run, made: list[dict[str, Any]]) -> list[dict[str, Tensor | None]]:
        """Without what only later calls of the unit read."""
        steps = ((0, None),) if op.unit is None else op.unit.steps
        last = {index: at for at, (index, _) in enumerate(steps)}
        hooked = {run for run in op.runs if run.key[1] in self._modules[run.key[0]].finish}
        read = {value for run in hooked for _, value in run.inputs}
        kept = list[dict[str, Tensor | None]]()
        for at, (index, _) in enumerate(steps):
            is_last, values = at == last[index] or op.runs[index] in hooked, dict(op.runs[index].outputs)
            kept.append({port: one if is_last or values.get(port) in read else None for port, one in made[at].items()})
        return kept

    # ---- operands ---------------------------------------------------------------------------------------

    def _example(self, op: Run, rows: int, *, is_fed: bool) -> Operands:
        """Operands as a launch of `rows` rows has them, optional ports fed in all rows or in none."""
        device = self._modules.device
        inputs: dict[str, Any] = dict.fromkeys(port.name for port in op.method.inputs)
        for port in op.method.inputs:
            if is_fed or not port.optional:
                kind = port_dtype(port, self._modules.dtype)
                inputs[port.name] = torch.zeros((rows, *(port.shape or ())), dtype=kind, device=device)
        starts, column = torch.arange(rows + 1, device=device), torch.zeros(rows, dtype=torch.int64, device=device)
        columns: dict[str, Any] = dict.fromkeys(COLUMNS, column)
        context = Context(
            num_rows=rows,
            query_starts=starts.int(),
            last_tokens=starts[:-1],
            slots=self._modules[op.key[0]].slots.tensors,
            present={port.name: everywhere(rows, is_fed, device) for port in op.method.inputs if port.optional},
            sample=cast(Any, None),
            **columns,
        )
        return Operands(context, inputs, {name: column.clone() for name in _modules(op)} | {op.key[0]: column})

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        """Memory that stays, for as many rows as there may be."""
        key = name, like.dtype, tuple(like.shape[1:])
        if key not in self._fixed:
            self._fixed[key] = like.new_zeros((self._buckets[-1], *like.shape[1:]))
        return self._fixed[key]

    def _plan(self, op: Run, *, rows: int) -> AttentionPlan | None:
        """The plan that graphs of so many rows are captured with: at first, of rows that write to the scratch page."""
        (module, _), pool = op.key, self._modules[op.key[0]].pool
        if op.method.kv is None or pool is None:
            return None
        if (module, rows) not in self._plans:
            plan = self._plans[module, rows] = decode_plan(
                context_lens=[0] * rows,
                slot_mapping=torch.zeros(rows, dtype=torch.int64, device=self._modules.device),
                page_table=np.zeros((rows, self._page_width(module)), dtype=np.int32),
                page_size=pool.page_size,
            )
            plan.held = {}
        return self._plans[module, rows]

    def _page_width(self, module: str) -> int:
        pool = self._modules[module].pool
        assert pool is not None
        return -(-self._modules.max_model_len // pool.page_size) + 1  # one may be reserved


def _title(op: Run) -> str:
    return ".".join(op.key) if op.unit is None else op.target


def _modules(op: Run) -> list[str]:
    return list(dict.fromkeys(run.key[0] for run in op.runs))


@contextmanager
def _aside(modules: list[Module], states: Iterable[SamplingState], features: Iterable[str]) -> Iterator[None]:
    """Let scratch rows use features of samplers, so that what is captured has them; and count no calls."""
    params: dict[str, Any] = {"temperature": 0.0}
    for name in features:
        params |= _FEATURES[name]
    counted = [(module, module.method_s) for module in modules]
    with torch.inference_mode(False):  # counts of penalties may be allocated now
        for state in states:
            state.set_row(0, SamplingParams(**params), key=0)
    try:
        for module in modules:
            module.method_s = {}
        yield
    finally:
        for module, entries in counted:
            module.method_s = entries
        for state in states:
            state.clear_row(0)
