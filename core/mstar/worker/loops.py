"""Loops of a cursor: how they start, turn, and end: by a count, a budget, a node's stop, or the end of a stream.

And what branches and children leave behind.

Functions on cursors; they know no scheduler and no device. Used by the router.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from mstar.plugin.graph import Alias, Drop, Fork
from mstar.plugin.program import LoopEnd, LoopStart, Program, Run, Spawn, Split
from mstar.worker.state import Cursor, Frame, Work, plain


def start_loop(cursor: Cursor, op: LoopStart) -> None:
    """Enter a loop, or go on behind it if it has nothing to run."""
    limit = _number(cursor, op.limit)
    frame = Frame(op, limit, collected={source: [] for source, _ in op.collect})
    budget = budget_left(cursor, op)
    stop = cursor.lane.stops.get(cursor.scope.path) if op.dynamic else None
    if stop is not None or (limit is not None and limit <= 0) or (budget is not None and budget <= 0):
        leave_loop(cursor, frame, stop or "length")
        return
    cursor.loops.append(frame)
    cursor.pc += 1


def short_turns(program: Program) -> Iterator[Run]:
    """Methods that are a loop's whole body, and whose next turn needs no more than `turn` does."""
    for at, (op, after) in enumerate(itertools.pairwise(program.ops)):
        if isinstance(op, Run) and isinstance(after, LoopEnd) and after.body == at:
            start, kv = program.ops[at - 1], op.method.kv
            assert isinstance(start, LoopStart)
            is_ragged = op.has_tokens or op.free_ports or (kv is not None and kv.spans is not None)
            if not (op.receives or is_ragged or start.collect or start.budget is not None):
                yield op


def turn(cursor: Cursor, work: Work) -> bool:
    """Make a finished work, one of `short_turns`, its loop's next turn; False, and nothing changed, if it has none.

    What going through the ops does for any loop, with less to do for each of many tasks.
    """
    frame, op = cursor.loops[-1], work.op
    iteration, kv = frame.iteration + 1, op.method.kv
    if frame.reason is not None or iteration == frame.limit or cursor.ahead is not None or cursor.lane.request.is_dead:
        return False
    if kv is not None and work.scope.sequences.get((op.key[0], kv.label)) is not work.sequence:
        return False
    frame.iteration = work.iteration = iteration
    env, inputs = cursor.env, work.inputs
    for port, value in op.inputs:
        inputs[port] = env.get(value)
    work.stop_reason = None
    if work.counts:
        work.counts = {}
    return True


def end_iteration(cursor: Cursor, op: LoopEnd) -> None:
    """Collect, count, and turn or leave."""
    frame = cursor.loops[-1]
    for source, values in frame.collected.items():
        values.append(cursor.env.get(source))
    frame.iteration += 1
    budgets = cursor.lane.request.budgets
    if frame.op.budget is not None:
        budgets[frame.op.budget] = budgets.get(frame.op.budget, 0) + 1
    left = budget_left(cursor, frame.op)
    if frame.reason is None and (
        (frame.limit is not None and frame.iteration >= frame.limit) or (left is not None and left <= 0)
    ):
        frame.reason = "length"
    if frame.reason is None:
        cursor.pc = op.body
    else:
        cursor.loops.pop()
        leave_loop(cursor, frame, frame.reason)


def leave_loop(cursor: Cursor, frame: Frame, reason: str) -> None:
    """Go on behind a loop that the cursor is not in any more."""
    if frame.op.dynamic and reason != "end":
        cursor.reason = reason
    for source, target in frame.op.collect:
        cursor.env[target] = frame.collected[source]
        cursor.written[target] = None
    cursor.pc = frame.op.exit


def budget_left(cursor: Cursor, op: LoopStart) -> int | None:
    """Iterations that the request's budget for this loop still allows; None: it has none."""
    request = cursor.lane.request
    if op.budget is None or op.budget not in request.info.fields:
        return None
    return request.info.fields[op.budget] - request.budgets.get(op.budget, 0)


def _number(cursor: Cursor, value: int | str | None) -> int | None:
    return int(named(cursor, value)) if isinstance(value, str) else value


def named(cursor: Cursor, name: str) -> Any:
    """What a name in the graph stands for: a value of the walk, or a field of the request."""
    found = cursor.env.get(name, cursor.lane.request.info.fields.get(name))
    if found is None:
        raise RuntimeError(f"{name!r} is neither a value nor a field of the request")
    return plain(found)


def fork_length(cursor: Cursor, step: Fork | Alias | Drop) -> Any:
    """Where a Fork cuts its source: a length, or [length, position]; None: nowhere."""
    return named(cursor, step.at) if isinstance(step, Fork) and step.at is not None else None


def mark_ends(cursor: Cursor, op: Run, work: Work) -> None:
    """Mark the loops that this work ends: by `stop`, from the client's side, or at a stream's end."""
    stop = work.stop_reason or cursor.lane.stops.get(work.path)
    if stop is None and not op.receives:
        return
    frame = innermost_dynamic(cursor)
    if frame is None:
        return
    if stop is not None:
        frame.reason = stop
    for port, stream in op.receives:
        chunk = work.chunks.get(port)
        if chunk is not None and chunk.final and stream.name in frame.op.streams:
            frame.reason = frame.reason or "end"


def innermost_dynamic(cursor: Cursor) -> Frame | None:
    """The dynamic loop around a cursor, seen through the branches it may be in but not out of its Each item."""
    at: Cursor | None = cursor
    while at is not None:
        for frame in reversed(at.loops):
            if frame.op.dynamic:
                return frame
        at = at.parent if at.parent is not None and at.parent.scope is at.scope else None
    return None


def collect(cursor: Cursor, op: Split | Spawn) -> None:
    """Bring what children wrote to the cursor they belong to, in order, and go on behind them."""
    results = sorted(cursor.results, key=lambda child: child.index)
    cursor.results = []
    if isinstance(op, Split):
        for child in results:
            for name in child.written:
                cursor.env[name] = child.env[name]
                cursor.written[name] = None
            cursor.reason = child.reason or cursor.reason
    else:
        for source, target in op.collect:
            cursor.env[target] = [child.env.get(source) for child in results]
            cursor.written[target] = None
    cursor.pc = op.join
