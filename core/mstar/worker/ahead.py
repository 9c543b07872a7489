"""Looking ahead: the next work of a cursor whose current work has been launched but not finished.

With overlap a step is launched before the last one's results are known on the host. What a cursor will do next is
predicted from host-side facts alone; its inputs are the running step's device tensors. If the prediction fails,
because a loop ended, the work is taken back and leaves no trace (`Work.undo`). Owned by the worker's thread.
"""

from __future__ import annotations

from typing import Any

from mstar.plugin.program import LoopEnd, Op, Run, Skip
from mstar.worker.finish import Step
from mstar.worker.loops import budget_left
from mstar.worker.scheduler import Scheduler
from mstar.worker.state import Batched, Cursor, Row, Work


def look_ahead(step: Step, scheduler: Scheduler) -> None:
    """Queue the predicted next work of every task of a launched step.

    Not where the next method's `prepare` could read host state that this step's finish has yet to change.
    """
    for index, work in enumerate(step.batch.works):
        cursor = work.cursor
        if work.is_rebuild or not work.is_last or work.request.is_dead or cursor.work is not work:
            continue
        try:
            ahead = _predict(cursor, work, step, scheduler, index=index)
        except Exception:  # noqa: BLE001  # a predicate or an input is wrong: it will be again, when its turn comes
            continue
        if ahead is not None:
            cursor.ahead = ahead
            scheduler.add(ahead)


def adopts(ahead: Work, op: Run, cursor: Cursor) -> bool:
    """Whether a work queued ahead is just what the cursor needs now."""
    if ahead.op is not op or ahead.iteration != cursor.current_iteration or op.receives:
        return False
    return all(_is_same(ahead.inputs.get(port), cursor.env.get(value)) for port, value in op.inputs)


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is Row and type(other) is Row:
        return one.batch.tensor is other.batch.tensor and one.at == other.at
    return one is other


def _predict(cursor: Cursor, work: Work, step: Step, scheduler: Scheduler, *, index: int) -> Work | None:
    found = _next_run(cursor, work)
    if found is None:
        return None
    op, iteration, absent = found
    if not scheduler.runs_here(cursor, op):
        return None
    modules = [(scheduler.modules[run.key[0]], run.method.name) for run in op.runs]
    if any(module.node.host_state is not None and method in module.prepare for module, method in modules):
        return None
    inputs = _inputs(cursor, op, work, step, index=index, absent=absent)
    if inputs is None:
        return None
    ahead = scheduler.make_work(cursor, op, inputs=inputs, chunks={})
    ahead.iteration = iteration
    return ahead


def _next_run(cursor: Cursor, work: Work) -> tuple[Run, int, set[str]] | None:
    """(op, iteration, values that will be absent) if the loop goes on; None if that cannot be told yet."""
    ops: tuple[Op, ...] = cursor.lane.program.ops
    request = cursor.lane.request
    iteration, absent, pc, has_turned = cursor.current_iteration, set[str](), cursor.pc + 1, False
    while True:
        op = ops[pc]
        if isinstance(op, Run):
            return None if op.receives or op.cache is not None else (op, iteration, absent)
        if isinstance(op, Skip):
            if op.predicate(request.view, iteration):
                pc += 1
            else:
                absent |= set(op.absent)
                pc = op.target
        elif isinstance(op, LoopEnd) and not has_turned and _goes_on(cursor, work):
            iteration, pc, has_turned = cursor.loops[-1].iteration + 1, op.body, True
        else:
            return None


def _goes_on(cursor: Cursor, work: Work) -> bool:
    """Whether nothing known now ends the innermost loop after this iteration."""
    frame = cursor.loops[-1]
    left = budget_left(cursor, frame.op)
    if frame.reason is not None or frame.iteration + 1 == frame.limit or (left is not None and left <= 1):
        return False
    return not any(chunk.final for chunk in work.chunks.values())


def _inputs(cursor: Cursor, op: Run, work: Work, step: Step, *, index: int, absent: set[str]) -> dict[str, Any] | None:
    """Inputs of the next run, from the running step's rows and the cursor's values; None if one is not a row."""
    coming = {value: port for port, value in work.op.outputs}
    layouts = {port.name: port.layout for port in work.op.method.outputs}
    inputs: dict[str, Any] = {}
    for port, value in op.inputs:
        if value in absent:
            inputs[port] = None
        elif value not in coming:
            inputs[port] = cursor.env.get(value)
        elif layouts[coming[value]] == "rows" and step.outputs.get(coming[value]) is not None:
            inputs[port] = Row(Batched(step.outputs[coming[value]]), index)
        else:
            return None
    return inputs
