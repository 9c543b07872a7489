"""Runs a fused unit: its methods one after the other over one batch, wired port to port.

Batched tensors flow from one method to the next; nothing is split, routed or scheduled between. Host-side `prepare`
hooks have all run before; what is needed for `finish` hooks is kept for afterwards. Called by the runner.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mstar.plugin.graph import Port
from mstar.plugin.nodes import NO_PLAN, Context, Plan
from mstar.plugin.program import Run
from mstar.worker.finish import Columns, Step, explain
from mstar.worker.launched import BatchLayout, Launched, Traces, draw, everywhere, repeat_last, task_of, to_device
from mstar.worker.scheduler import Batch
from mstar.worker.state import Batched, Row, Work
from mstar.worker.tape import now

if TYPE_CHECKING:
    from mstar.worker.runner import Runner


def run_unit(runner: Runner, batch: Batch, layout: BatchLayout, columns: Columns, traces: Traces) -> Launched:
    """Prepare, collate what comes from outside, then call method after method. What fails names its method."""
    return _UnitRun(runner, batch, layout, columns, traces).run()


def call_unit(
    runner: Runner, batch: Batch, layout: BatchLayout, traces: Traces, base: Context,
    inputs: dict[str, Any], rows: dict[str, Tensor],
) -> list[dict[str, Any]]:  # fmt: skip
    """Nothing but a unit's calls, on operands that are there already: what each step made. For capturing."""
    made, run = list[dict[str, Any]](), _UnitRun(runner, batch, layout, Columns((), (), (), (), (), ()), traces)
    run.base, run.inputs, run.rows = base, inputs, rows
    for at, (index, _) in enumerate(run.unit.steps):
        made.append(run.call(at))
        run.values |= {value: made[at][port] for port, value in run.unit.runs[index].outputs}
    return made


class _UnitRun:
    """One launch of a unit.

    Args:
        tasks: step -> the works as its method's hooks see them, where it has hooks.
        values: value name -> what a method of the unit made last.
        contexts: of methods without a plan; only the iteration and what is present differ from turn to turn.
    """

    def __init__(self, runner: Runner, batch: Batch, layout: BatchLayout, columns: Columns, traces: Traces) -> None:
        unit = batch.works[0].op.unit
        assert unit is not None
        self.runner, self.modules, self.unit = runner, runner.modules, unit
        self.batch, self.works, self.op = batch, batch.works, batch.works[0].op
        self.layout, self.columns, self.traces = layout, columns, traces
        self.tasks: dict[int, list[Work]] = {}
        self.plans: dict[int, Plan] = {}
        self.values: dict[str, Any] = {}
        self.contexts: dict[int, Context] = {}

    def run(self) -> Launched:
        self._prepare()
        lead = self.modules[self.batch.key[0]]
        at_kv = next((at for at, (i, _) in enumerate(self.unit.steps) if self.unit.runs[i].method.kv is not None), -1)
        plan = self.plans.get(at_kv, NO_PLAN)
        base = self.runner.context(lead, self.works, plan, self.layout, self.columns, self.traces)
        self.base = base
        ports = self.op.method.inputs
        self.inputs = {port.name: now(self.runner.collate(port, self.works, self.layout, base)) for port in ports}
        self.rows = {name: base.rows if name == lead.name else self._rows(name) for name in self.unit.modules}
        for name, rows in self.rows.items():
            self.traces.save(self.modules[name].slots, rows)
        outputs: dict[str, Any] = {}
        parts: list[Step] = []
        graphs = self.runner.graphs
        made = graphs and graphs.replay(self.batch, base, self.inputs, self.rows, self.traces)
        for at, (index, _) in enumerate(self.unit.steps):
            run = self.unit.runs[index]
            got = made[at] if made else self.call(at)
            outputs |= {f"{index}.{port}": value for port, value in got.items()}
            if run.method.name in self.modules[run.key[0]].finish:
                tasks = Batch(run.key, self._tasks(at))
                parts.append(Step(tasks, got, self.layout.starts, self.columns, None, prefix=f"{index}."))
            self.values |= {value: got[port] for port, value in run.outputs}
        return Launched(outputs, self.inputs, plan, parts)

    def call(self, at: int) -> dict[str, Any]:
        """What the method of a step makes of what those before it made."""
        index, number = self.unit.steps[at]
        run = self.unit.runs[index]
        return self._call(run, index, self._context(at, run, index, number))

    def _prepare(self) -> None:
        for at, (index, _) in enumerate(self.unit.steps):
            run = self.unit.runs[index]
            if run.method.name in self.modules[run.key[0]].prepare:
                self.plans[at] = self.runner.prepare(Batch(run.key, self._tasks(at)), self.layout)

    def _rows(self, module: str) -> Tensor:
        rows = [work.scope.rows[module] for work in self.works] + [0] * self.layout.num_padding
        return to_device(torch.tensor(rows), self.runner.device)

    def _context(self, at: int, run: Run, index: int, number: int | None) -> Context:
        context = self.contexts.get(index)
        if context is None or at in self.plans:
            context = self.contexts[index] = self._new_context(at, run)
        context.present, context.iteration = {}, self.base.iteration
        if number is not None:
            context.iteration = everywhere(self.layout.num_rows, number, self.runner.device)
        return context

    def _new_context(self, at: int, run: Run) -> Context:
        base, num_rows, module = self.base, self.layout.num_rows, self.modules[run.key[0]]
        if run.method.kv is not None:
            return replace(base)
        plan, rows = self.plans.get(at, NO_PLAN), self.rows[module.name]
        positions = everywhere(num_rows, 0, self.runner.device)
        if plan.positions is not None:
            positions = repeat_last(plan.positions.to(self.runner.device), self.layout.num_padding)
        return Context(
            num_rows=num_rows,
            query_starts=base.query_starts,
            last_tokens=base.last_tokens,
            positions=positions,
            rows=rows,
            iteration=base.iteration,
            draw_keys=base.draw_keys,
            sample=partial(draw, module, self.works, rows, self.traces),
            slots=module.slots.tensors,
            plan=self.runner.planned(plan, self.works, self.layout) if plan.tensors else {},
        )

    def _call(self, run: Run, index: int, context: Context) -> dict[str, Any]:
        module, method, value_of = self.modules[run.key[0]], run.method, dict(run.inputs)
        try:
            inputs = {port.name: self._input(port, index, value_of.get(port.name), context) for port in method.inputs}
            outputs: dict[str, Any] | None = None
            if self.runner.taper is not None:
                outputs = self.runner.taper.call(run, context, inputs, self.works, self.traces)
            if outputs is None:
                with module.timed(method.name, calls=1, rows=len(self.works)):
                    outputs = module.methods[method.name](context, **inputs)
                self.runner.check(module, method, outputs, self.layout)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # which of the methods it was is known here alone
            raise explain(error, ".".join(run.key))  # noqa: B904  # its cause is set
        return outputs

    def _input(self, port: Port, index: int, value: str | None, context: Context) -> Any:
        """A port's batch: from inside where a method of the unit has made it, else what was collated."""
        if value not in self.values:
            name = f"{index}.{port.name}"
            if name in self.base.present:
                context.present[port.name] = self.base.present[name]
            return self.inputs[name]
        batch, layout = self.values[value], self.layout
        if batch is None or port.optional:
            context.present[port.name] = everywhere(layout.num_rows, batch is not None, self.runner.device)
        if batch is None:
            return None
        if layout.num_padding:  # as between two methods that run alone
            batch = repeat_last(batch[: len(self.works)], layout.num_padding)
        return self.runner.cast(port, batch)

    def _tasks(self, at: int) -> list[Work]:
        """A step's works as its method's hooks know them, made once."""
        if at not in self.tasks:
            index, number = self.unit.steps[at]
            run = self.unit.runs[index]
            made = {port: self.values[value] for port, value in run.inputs if value in self.values}
            inside = {port: None if batch is None else Batched(batch) for port, batch in made.items()}
            self.tasks[at] = [
                task_of(work, run, index, number, {p: b and Row(b, i) for p, b in inside.items()})
                for i, work in enumerate(self.works)
            ]
        return self.tasks[at]
