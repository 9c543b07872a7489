"""The host side of a step that has been launched: stops, counts, whole chunks, and what each task gave.

Reads the step's outputs on the host, once per batch. Used by the runner and by the overlapped step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mstar.errors import MstarError, PluginError, RequestError
from mstar.layers.sampling.native import NOT_FINITE
from mstar.observe import redact
from mstar.plugin.graph import Method, Port
from mstar.worker.kv_pool import KVPool, Sequence
from mstar.worker.modules import Module, Modules
from mstar.worker.scheduler import Batch
from mstar.worker.state import Batched, Work, add_counts
from mstar.worker.tape import Later, Tape, now

_attributes = attrgetter("row", "iteration", "draw_key", "position", "length", "sequence")  # as `Columns` has them
_OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")


@dataclass(slots=True)
class Finished:
    """What a batch gave: (work, output port -> value) for finished works, unfinished chunks, and failures."""

    done: list[tuple[Work, dict[str, Any]]] = field(default_factory=list)
    unfinished: list[Work] = field(default_factory=list)
    failed: list[tuple[Work, Exception]] = field(default_factory=list)


class Columns(NamedTuple):
    """What the engine knows of a batch's works when it is launched, by attribute."""

    rows: tuple[int, ...]
    iterations: tuple[int, ...]
    draw_keys: tuple[int, ...]
    positions: tuple[float, ...]
    lengths: tuple[int, ...]
    sequences: tuple[Sequence, ...]  # of methods without KV: None

    @classmethod
    def of(cls, works: list[Work]) -> Columns:
        return cls(*zip(*map(_attributes, works), strict=True))


@dataclass(slots=True)
class Running:
    """A tape with a step's calls.

    Args:
        entries: of `Module.method_s`, which get its times.
        flags: (B,) uint8, rows whose logits were not finite at a draw; None where nothing is drawn.
    """

    tape: Tape
    entries: list[list[float]]
    flags: Tensor | None

    def settle(self) -> None:
        """Wait for it. Raises RuntimeError if it failed."""
        self.tape.wait()
        if self.entries:  # only once
            for entry, nanoseconds in zip(self.entries, self.tape.nanoseconds.tolist(), strict=True):
                entry[2] += nanoseconds * 1e-9
            self.entries = []


class HostCopies:
    """Tensors of a step on a CUDA device on their way to the host: reading them waits for no later step.

    Args:
        event: makes what is recorded behind the copies; it has `record` and `synchronize`.
    """

    def __init__(self, tensors: Iterable[Tensor], *, event: Callable[[], Any] = torch.cuda.Event) -> None:
        own = {id(one): one for one in tensors}
        pinned = {key: torch.empty_like(one, device="cpu", pin_memory=one.is_cuda) for key, one in own.items()}
        self._copies = {key: (one, pinned[key].copy_(one, non_blocking=True)) for key, one in own.items()}
        self._event = event()
        self._event.record()

    def get(self, tensor: Tensor) -> Tensor | None:
        """The copy, once it is there; None for a tensor that is not copied."""
        if id(tensor) not in self._copies:
            return None
        self._event.synchronize()
        return self._copies[id(tensor)][1]


@dataclass(slots=True)
class Step:
    """A batch that has been launched, and its outputs on the device.

    Args:
        row_ids: ids (B,) that rows wrote, told to the pool at the finish.
        parts: of a fused unit, the steps of its methods with a `finish` hook, whose ports are the unit's with `prefix`.
        copies: what will be read on the host, and is on its way there.
    """

    batch: Batch
    outputs: dict[str, Any]
    starts: list[int]
    columns: Columns
    row_ids: Tensor | Later | None
    parts: list[Step] = field(default_factory=list)
    prefix: str = ""
    running: Running | None = None
    copies: HostCopies | None = None

    def copied(self, value: Tensor) -> Tensor | None:
        """Its copy on the host, where there is one."""
        return None if self.copies is None else self.copies.get(value)

    def on_host(self, value: Any) -> Any:
        """A value whose tensor is on the host."""
        if not isinstance(value, Tensor):
            return value
        found = self.copied(value)
        return value.cpu() if found is None else found

    def settle(self) -> None:
        """Wait for what runs; from here on its outputs are tensors. Raises RuntimeError if it failed."""
        if self.running is not None:
            self.running.settle()
            self.outputs = {port: now(value) for port, value in self.outputs.items()}
            for part in self.parts:
                part.outputs = {port: now(value) for port, value in part.outputs.items()}


def finish(step: Step, modules: Modules) -> Finished:
    """What the works of a step gave. Works that ended meanwhile leave no trace.

    An error of the device that shows only now cannot be attributed: every other work of the step fails with it.
    """
    works = step.batch.works
    index = list(range(len(works)))
    if works[0].undo is not None:  # launched for a later finish
        index = [i for i, work in enumerate(works) if not (work.is_cancelled or work.request.is_dead)]
        for work in works:
            work.scope.tenant.in_flight -= 1
            work.undo = None
    try:
        return _finish(step, modules, index)
    except Exception as error:  # noqa: BLE001  # attributed to the requests of the step
        where = ".".join(step.batch.key)
        return Finished(failed=[(works[i], explain(error, where)) for i in index])


def _finish(step: Step, modules: Modules, index: list[int]) -> Finished:
    step.settle()
    works, result = step.batch.works, Finished()
    module, op = modules[step.batch.key[0]], works[0].op
    if step.running is not None and step.running.flags is not None:
        index = _without_broken(step, index, result, flags=step.running.flags)
    if op.has_tokens:
        index = [i for i in index if _is_ending(step, op.method, i, works[i], result)]
    elif step.row_ids is not None and module.pool is not None:
        _learn(step, module.pool, index)
    if not index:
        return result
    columns: dict[str, list[Any]] = {}
    given: list[dict[str, Any]] = []
    if step.parts:
        index, given = _finish_parts(step, modules, index, result)
    elif op.method.name in module.finish:
        with module.timed(op.method.name):
            whole = _call_hook(step, module, op.method, index)
            if whole is None:
                index, given = _call_hook_by_task(step, module, op.method, index, result)
            else:
                columns = whole
    for port in op.method.outputs:
        if port.name not in columns:
            columns[port.name] = _column(step, port, index)
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    for values, own in zip(rows, given, strict=False):  # nothing is given where the hook had the whole batch
        values |= own
    result.done += zip([works[i] for i in index], rows or [{}] * len(index), strict=True)
    return result


def _finish_parts(
    step: Step, modules: Modules, index: list[int], result: Finished
) -> tuple[list[int], list[dict[str, Any]]]:
    """Call a unit's hooks in order: (those of `index` that go on, what each was given in place of its outputs)."""
    given: dict[int, dict[str, Any]] = {i: {} for i in index}
    for part in step.parts:
        tasks, method = part.batch.works, part.batch.works[0].op.method
        module = modules[part.batch.key[0]]
        with module.timed(method.name):
            whole = _call_hook(part, module, method, index)
            if whole is None:
                index, own = _call_hook_by_task(part, module, method, index, result)
            else:
                own = [{name: column[at] for name, column in whole.items()} for at in range(len(index))]
        for i, values in zip(index, own, strict=True):
            work, task, prefix = step.batch.works[i], tasks[i], part.prefix
            kept = {name: value for name, value in given[i].items() if not name.startswith(prefix)}
            given[i] = kept | {prefix + name: value for name, value in values.items()}
            work.stop_reason = task.stop_reason or work.stop_reason
            work.error = work.error or task.error
            add_counts(work.counts, task.counts.items())
    return index, [given[i] for i in index]


def _without_broken(step: Step, index: list[int], result: Finished, *, flags: Tensor) -> list[int]:
    """Fail the works whose draws had no finite logits; the others go on."""
    broken = [i for i in flags.nonzero()[:, 0].tolist() if i in index]
    result.failed += [(step.batch.works[i], PluginError(NOT_FINITE)) for i in broken]
    return [i for i in index if i not in broken]


def _is_ending(step: Step, method: Method, i: int, work: Work, result: Finished) -> bool:
    """Whether a work's last chunk has run, whose outputs count; otherwise what follows is decided here."""
    if work.is_rebuild and work.sequence is not None and work.sequence.row < 0:
        result.done.append((work, {}))  # its item has ended meanwhile
        return False
    if not work.is_rebuild:
        _keep_token_outputs(step, method, i, work)
        if work.is_last:
            return True
    work.token_start += work.num_tokens
    work.is_first = False
    if work.token_start < work.total:
        result.unfinished.append(work)
    else:
        result.done.append((work, {}))
    return False


def _keep_token_outputs(step: Step, method: Method, i: int, work: Work) -> None:
    for port in method.outputs:
        value = step.outputs[port.name]
        if port.layout == "tokens" and value is not None:
            piece = value[step.starts[i] : step.starts[i + 1]]
            work.token_outputs.setdefault(port.name, []).append(piece)


def _learn(step: Step, pool: KVPool, index: list[int]) -> None:
    """Tell the pool the ids that decoding rows wrote, for the prefix cache and for recomputation."""
    assert step.row_ids is not None
    ids = step.on_host(now(step.row_ids)).tolist()[: len(step.batch.works)]
    rows = list(zip(step.columns.sequences, step.columns.lengths, ids, strict=True))
    pool.learn(rows if len(index) == len(rows) else [rows[i] for i in index])


def _call_hook(step: Step, module: Module, method: Method, index: list[int]) -> dict[str, list[Any]] | None:
    """What `finish_<method>` put in place of the outputs, for the whole batch; None if it has to go task by task.

    It has to where the node has host state, which a second call would change again, and where the hook raises.
    """
    if module.node.host_state is not None:
        return None
    works, host = [step.batch.works[i] for i in index], _on_host(step, method)
    if len(index) < len(step.batch.works):
        host = {name: _pick(value, index) for name, value in host.items()}
    try:
        own = module.finish[method.name](works, host) or {}
        return {name: [values[at] for at in range(len(works))] for name, values in own.items()}
    except (Exception, SystemExit):  # noqa: BLE001  # found out task by task whose fault it was
        for work in works:
            work.stop_reason, work.error, work.counts = None, None, {}
        return None


def _call_hook_by_task(
    step: Step, module: Module, method: Method, index: list[int], result: Finished
) -> tuple[list[int], list[dict[str, Any]]]:
    """The same for each task alone: (those of `index` that go on, what each gave). One that raises fails alone."""
    hook, host = module.finish[method.name], _on_host(step, method)
    kept, given = list[int](), list[dict[str, Any]]()
    for i in index:
        work = step.batch.works[i]
        try:
            own = hook([work], {name: value[i : i + 1] for name, value in host.items()}) or {}
            given.append({name: values[0] for name, values in own.items()})
            kept.append(i)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # attributed to the request
            result.failed.append((work, explain(error, f"{module.name}.finish_{method.name}")))
    return kept, given


def _pick(value: Any, index: list[int]) -> Any:
    return value[index] if isinstance(value, Tensor) else [value[i] for i in index]


def _on_host(step: Step, method: Method) -> dict[str, Any]:
    rows = [port.name for port in method.outputs if port.layout != "tokens"]
    outputs = {name: step.outputs[name] for name in rows if step.outputs[name] is not None}
    return {name: step.on_host(value) for name, value in outputs.items()}


def _column(step: Step, port: Port, index: list[int]) -> list[Any]:
    """One output's values of the tasks at `index`."""
    value = step.outputs[port.name]
    if value is None:
        return [None] * len(index)
    if port.layout == "rows":
        return Batched(value, copy=step.copied(value)).rows(index)
    if port.layout == "item":
        return [value[i] for i in index]
    pieces = [step.batch.works[i].token_outputs.pop(port.name) for i in index]
    return [own[0] if len(own) == 1 else torch.cat(own) for own in pieces]


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
    """An error's type and text, whatever its own `__str__` does; of our own errors the text, which says it all."""
    try:
        return redact(str(error) if isinstance(error, MstarError) else f"{type(error).__name__}: {error}")
    except Exception:  # noqa: BLE001  # a plugin's exception that cannot be printed
        return f"{type(error).__name__}: (its text cannot be had)"
