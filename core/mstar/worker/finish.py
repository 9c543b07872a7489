"""The host side of a step that has been launched: stops, counts, whole chunks, and what each task gave.

Reads the step's outputs on the host, once per batch. Used by the runner and by the overlapped step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mstar.errors import PluginError, RequestError
from mstar.plugin.graph import Method
from mstar.worker.modules import Module, Modules
from mstar.worker.scheduler import Batch
from mstar.worker.state import Batched, Row, Work

_OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")


@dataclass(slots=True)
class Finished:
    """What a batch gave: (work, output port -> value) for finished works, unfinished chunks, and failures."""

    done: list[tuple[Work, dict[str, Any]]] = field(default_factory=list)
    unfinished: list[Work] = field(default_factory=list)
    failed: list[tuple[Work, Exception]] = field(default_factory=list)


@dataclass(slots=True)
class Step:
    """A batch that has been launched, and its outputs on the device."""

    batch: Batch
    outputs: dict[str, Any]
    starts: list[int]
    row_ids: Tensor | None  # ids that rows wrote, told to the pool at the finish


def finish(step: Step, modules: Modules) -> Finished:
    """What the works of a step gave. Works that ended meanwhile leave no trace.

    An error of the device that shows only now cannot be attributed: every work of the step fails with it.
    """
    for work in step.batch.works:
        work.scope.tenant.in_flight -= 1
        work.undo = None
    try:
        return _finish(step, modules)
    except Exception as error:  # noqa: BLE001  # attributed to the requests of the step
        where = ".".join(step.batch.key)
        return Finished(failed=[(work, explain(error, where)) for work in step.batch.works])


def _finish(step: Step, modules: Modules) -> Finished:
    works, result = step.batch.works, Finished()
    module, method = modules[step.batch.key[0]], works[0].op.method
    _learn(step, module)
    ending: list[tuple[int, Work]] = []
    is_ragged = any(port.layout == "tokens" for port in method.outputs)
    for i, work in enumerate(works):
        if work.is_cancelled or work.request.is_dead:
            continue
        if work.is_rebuild and work.sequence is not None and work.sequence.row < 0:
            result.done.append((work, {}))  # its item has ended meanwhile
            continue
        if is_ragged and not work.is_rebuild:
            _keep_token_outputs(step, method, i, work)
        if work.is_rebuild or not work.is_last:
            _advance_chunk(work, result)
        else:
            ending.append((i, work))
    batched = {n: Batched(v) for n, v in step.outputs.items() if isinstance(v, Tensor)}
    given: dict[int, dict[str, Any]] = {}
    if method.name in module.finish and ending:
        with module.timed(method.name):
            given = _call_hook(step, module, method, ending, result)
    for i, work in ending:
        if i not in given and method.name in module.finish:
            continue  # its hook raised
        values = _values(step, method, i, work, batched)
        if given.get(i):
            values.update(given[i])
        result.done.append((work, values))
    return result


def _learn(step: Step, module: Module) -> None:
    """Tell the pool the ids that decoding rows wrote, for the prefix cache and for recomputation."""
    if step.row_ids is None or module.pool is None:
        return
    for work, written in zip(step.batch.works, step.row_ids.tolist(), strict=True):
        sequence = work.sequence
        is_late = work.is_cancelled or work.request.is_dead
        if not is_late and sequence is not None and len(sequence.ids) == work.length:
            module.pool.learn(sequence, [written])


def _call_hook(
    step: Step, module: Module, method: Method, ending: list[tuple[int, Work]], result: Finished
) -> dict[int, dict[str, Any]]:
    """Index -> what `finish_<method>` put in place of the outputs. A task for which it raises fails alone.

    Nodes without host state get the batch in one call; if it raises, or if there is state that a second call would
    change again, they get task by task.
    """
    hook, host = module.finish[method.name], _on_host(step, method)
    given: dict[int, dict[str, Any]] = {}
    if module.node.host_state is None:
        whole = len(ending) == len(step.batch.works)
        rows = host if whole else {name: _pick(value, [i for i, _ in ending]) for name, value in host.items()}
        try:
            own = hook([work for _, work in ending], rows) or {}
            return {i: {name: values[at] for name, values in own.items()} for at, (i, _) in enumerate(ending)}
        except (Exception, SystemExit):  # noqa: BLE001  # found out below whose fault it was
            for _, work in ending:
                work.stop_reason, work.error, work.counts = None, None, {}
    for i, work in ending:
        try:
            own = hook([work], {name: value[i : i + 1] for name, value in host.items()}) or {}
            given[i] = {name: values[0] for name, values in own.items()}
        except (Exception, SystemExit) as error:  # noqa: BLE001  # attributed to the request
            result.failed.append((work, explain(error, f"{module.name}.finish_{method.name}")))
    return given


def _pick(value: Any, index: list[int]) -> Any:
    return value[index] if isinstance(value, Tensor) else [value[i] for i in index]


def _on_host(step: Step, method: Method) -> dict[str, Any]:
    rows = [port.name for port in method.outputs if port.layout != "tokens"]
    outputs = {name: step.outputs[name] for name in rows if step.outputs[name] is not None}
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in outputs.items()}


def _advance_chunk(work: Work, result: Finished) -> None:
    work.token_start += work.num_tokens
    work.is_first = False
    if work.token_start < work.total:
        result.unfinished.append(work)
    else:
        result.done.append((work, {}))


def _keep_token_outputs(step: Step, method: Method, i: int, work: Work) -> None:
    for port in method.outputs:
        value = step.outputs[port.name]
        if port.layout == "tokens" and value is not None:
            piece = value[step.starts[i] : step.starts[i + 1]]
            work.token_outputs.setdefault(port.name, []).append(piece)


def _values(step: Step, method: Method, i: int, work: Work, batched: dict[str, Batched]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for port in method.outputs:
        value = step.outputs[port.name]
        if value is None:
            values[port.name] = None
        elif port.layout == "rows":
            values[port.name] = Row(batched[port.name], i)
        elif port.layout == "item":
            values[port.name] = value[i]
        else:
            pieces = work.token_outputs.pop(port.name)
            values[port.name] = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return values


def explain(error: BaseException, where: str = "") -> Exception:
    """The error to fail a request with.

    Its own RequestError; 503 for memory that ran out, which is the server's state, not the request's fault; and for
    anything else a PluginError that says in which method it came up.
    """
    if isinstance(error, RequestError | PluginError):
        return error
    text = described(error)
    out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if out_of_memory or any(words in text.lower() for words in _OUT_OF_MEMORY):
        return RequestError(
            f"a step ran out of memory: {text.splitlines()[0]}; lower --max-num-seqs or the request's size",
            status=503,
            code="out_of_memory",
        )
    found = PluginError(f"{where}: {text}" if where else text)
    found.__cause__ = error
    return found


def described(error: BaseException) -> str:
    """An error's type and text, whatever its own `__str__` does."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  # a plugin's exception that cannot be printed
        return f"{type(error).__name__}: (its text cannot be had)"
