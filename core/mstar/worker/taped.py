"""Launches what is compiled: a method, or all of a fused unit, becomes one tape of calls.

Calls are wired once for each op; a launch fills in what its batch brings and keeps what it takes to undo it. Knows ops
and works; does not know walks. Called by the runner.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mstar.errors import PluginError
from mstar.layers import shims
from mstar.layers.sampling import native
from mstar.plugin.graph import Port
from mstar.plugin.nodes import NO_PLAN, Context
from mstar.plugin.program import Run
from mstar.worker.finish import Columns, Running, Step
from mstar.worker.launched import BatchLayout, Launched, Traces, everywhere, require_sampler, task_of
from mstar.worker.modules import Code, Output, port_dtype
from mstar.worker.scheduler import Batch
from mstar.worker.state import Batched, Row, Work
from mstar.worker.tape import Call, Later, Queue, Tape, library

if TYPE_CHECKING:
    from mstar.worker.runner import Runner

_CPU = torch.device("cpu")

log = logging.getLogger("mstar.worker")

_TOO_MANY = "{} rows; compiled code takes at most {}"
_FRACTIONS = "its positions are not whole numbers"
_PLANNED = "its prepare hook has planned something"

Name = tuple[str, ...]
"""What is in a register before the first call: ("positions",), ("rows", module), ("slot", module, slot), ("turn", "3"),
("port", name), ("absent", name), ("present", name), ("draws", number)..."""

Made = tuple[int, Output]
"""A register and what a call has put there."""


@dataclass(slots=True)
class _Part:
    """A step of a unit whose method has a `finish` hook: what it made, and what of its inputs was made inside."""

    index: int
    iteration: int | None
    made: dict[str, Made | None]
    inside: dict[str, Made | None]


@dataclass(slots=True)
class Wiring:
    """An op's calls for batches that lack these of its optional ports.

    Args:
        names: what the first registers are filled with; those after are written by calls.
        outputs: of the op, by port.
        draws: (module, its samplers) of every call that draws, in order.
        charges: (module, method, calls).
        absent: shape and dtype of ports that are filled with zeros.
    """

    names: list[Name] = field(default_factory=list)
    calls: Any = None
    num_registers: int = 0
    outputs: dict[str, Made | None] = field(default_factory=dict)
    parts: list[_Part] = field(default_factory=list)
    draws: list[tuple[str, list[str]]] = field(default_factory=list)
    charges: dict[tuple[str, str], int] = field(default_factory=dict)
    absent: dict[str, Port] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)  # the calls point into them


class Taper:
    """Makes tapes for a worker's runner.

    Args:
        queue: where tapes run; None: at once.
    """

    def __init__(self, runner: Runner, *, queue: Queue | None) -> None:
        self.runner, self.modules, self.queue = runner, runner.modules, queue
        library()  # built now, rather than at the first request
        self._wirings: dict[tuple[int, frozenset[str]], Wiring | str] = {}  # or why there is none
        self._told = set[str]()
        self._ops: dict[int, Run] = {}  # whose ids the wirings are known by
        self._steps: dict[str, shims.StepAddresses] = {}

    def launch(self, batch: Batch, layout: BatchLayout, columns: Columns, traces: Traces) -> Launched | None:
        """Put a batch on a tape; None if it cannot run as compiled code, and nothing has happened."""
        works, op = batch.works, batch.works[0].op
        found = [self.modules[run.key[0]].codes.get(run.method.name) for run in op.runs]
        codes = [code for code in found if code is not None]
        if len(codes) < len(found):
            return None
        if layout.num_rows > (most_rows := min(code.most_rows for code in codes)):
            return self._leave(op, _TOO_MANY.format(layout.num_rows, most_rows))
        lead = self.modules[batch.key[0]]
        base = self.runner.context(lead, works, NO_PLAN, layout, columns, traces)
        inputs = {port.name: self.runner.collate(port, works, layout, base) for port in op.method.inputs}
        wiring = self._wiring(op, inputs)
        if isinstance(wiring, str) or base.positions.dtype != torch.int64:
            return self._leave(op, wiring if isinstance(wiring, str) else _FRACTIONS)
        rows = {lead.name: base.rows}
        for name in op.unit.modules if op.unit is not None else ():
            if name not in rows:
                rows[name] = torch.tensor([work.scope.rows[name] for work in works])
        playing = self._play(wiring, base, inputs, rows=rows, works=works, traces=traces)
        outputs = {port.name: playing.later(wiring.outputs.get(port.name)) for port in op.method.outputs}
        parts = [self._part(part, works, op, playing, layout, columns) for part in wiring.parts]
        return Launched(outputs, inputs, NO_PLAN, parts, playing.running)

    def _leave(self, op: Run, why: str) -> Launched | None:
        """Say once that compiled code cannot do a launch, and count it; a unit's methods count for themselves."""
        name, how = (".".join(op.key), "eagerly") if op.unit is None else (op.target, "method by method")
        if name not in self._told:
            self._told.add(name)
            log.info("%s is compiled, but runs %s in some batches: %s", name, how, why)
        if op.unit is None:
            self.modules[op.key[0]].codes[op.method.name].num_eager += 1
        return None

    def call(self, run: Run, context: Context, inputs: dict[str, Any], works: list[Work], traces: Traces) -> Any:
        """One method of a unit that cannot run as a whole: its outputs; None if this batch needs the method itself.

        The unit has saved the slots. Raises PluginError for logits that are not finite.
        """
        code = self.modules[run.key[0]].codes.get(run.method.name)
        if code is None:
            return None
        if context.num_rows > code.most_rows:
            return self._leave(run, _TOO_MANY.format(context.num_rows, code.most_rows))
        wiring = self._wiring(run, inputs)
        if isinstance(wiring, str) or context.positions.dtype != torch.int64 or context.plan:
            return self._leave(run, wiring if isinstance(wiring, str) else _PLANNED if context.plan else _FRACTIONS)
        rows = {run.key[0]: context.rows}
        playing = self._play(wiring, context, inputs, rows=rows, works=works, traces=traces, is_saved=True)
        playing.running.settle()
        if playing.running.flags is not None and playing.running.flags.any():
            raise PluginError(native.NOT_FINITE)
        made = {port.name: playing.later(wiring.outputs[port.name]) for port in run.method.outputs}
        return {name: None if later is None else later.get() for name, later in made.items()}

    # ---- wiring -----------------------------------------------------------------------------------------

    def _wiring(self, op: Run, inputs: Mapping[str, Any]) -> Wiring | str:
        absent = frozenset(name for name, value in inputs.items() if value is None)
        key = (id(op), absent)
        if key not in self._wirings:
            self._ops[id(op)] = op
            self._wirings[key] = _Wirer(self, op, absent).wire()
        return self._wirings[key]

    # ---- playing ----------------------------------------------------------------------------------------

    def _play(
        self, wiring: Wiring, base: Context, inputs: Mapping[str, Any], *, rows: Mapping[str, Tensor],
        works: list[Work], traces: Traces, is_saved: bool = False,
    ) -> _Playing:  # fmt: skip
        """Make a tape and start it; `traces` get what it takes to undo it once nothing can fail before that.

        With `is_saved`, slots are saved already, and it runs at once.
        """
        changes = Traces(traces.fence)
        draws, flags = self._draws(wiring, rows, works, changes, num_rows=base.num_rows)
        filler = _Filler(self, wiring, base, inputs, rows, draws)
        values = [filler.value(name) for name in wiring.names]
        saves = [save for name in rows if not is_saved for save in self._saves(name, rows[name], changes)]
        entries = [
            self.modules[module].counted(method, calls=count, rows=count * len(works))
            for (module, method), count in wiring.charges.items()
        ]
        tape = Tape(
            wiring.calls, values, num_registers=wiring.num_registers, num_times=len(entries), saves=saves,
            kept=(wiring, base.kv, draws, flags, changes.draws),
        )  # fmt: skip
        traces.draws += changes.draws
        traces.saved += changes.saved
        for (module, method), count in wiring.charges.items():
            self.modules[module].codes[method].num_runs += count
        if self.queue is None or is_saved:
            tape.run()
        else:
            tape.put(self.queue)
        return _Playing(tape, base.num_rows, Running(tape, entries, flags))

    def _draws(
        self, wiring: Wiring, rows: Mapping[str, Tensor], works: list[Work], traces: Traces, *, num_rows: int
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """The `draws` operands, and the rows' flags; remembers what will be drawn."""
        if not wiring.draws:
            return (), None
        for module, name in dict.fromkeys((module, name) for module, names in wiring.draws for name in names):
            require_sampler(self.modules[module], works, name)
        flags = torch.zeros(num_rows, dtype=torch.uint8)
        ids = torch.full((sum(len(names) for _, names in wiring.draws), num_rows), -1)  # until they are drawn
        table = np.zeros((len(wiring.draws), shims.draws_operand().shape[0]), dtype=np.int64)
        number, address = 0, ids.data_ptr()
        for at, (module, names) in enumerate(wiring.draws):
            table[at, : shims.DRAW_HEADER] = rows[module].data_ptr(), flags.data_ptr()
            for place, name in enumerate(names):
                state = self.modules[module].slots.samplers[name]
                first = shims.DRAW_HEADER + 2 * place
                table[at, first : first + 2] = native.address_of(state), address + 8 * num_rows * number
                traces.draws.append((state, rows[module], ids[number]))
                number += 1
        return torch.from_numpy(table).unbind(0), flags

    def _saves(self, module: str, rows: Tensor, traces: Traces) -> list[tuple[Tensor, Tensor, Tensor]]:
        slots = self.modules[module].slots
        if not slots.tensors:
            return []
        saved = {name: tensor.new_empty((len(rows), *tensor.shape[1:])) for name, tensor in slots.tensors.items()}
        traces.saved.append((slots, rows, saved))
        return [(tensor, rows, saved[name]) for name, tensor in slots.tensors.items()]

    def step_of(self, module: str, base: Context) -> Tensor:
        """The attention's operand."""
        found = self._steps.get(module)
        if found is None:
            found = self._steps[module] = shims.StepAddresses(base.kv.keys, base.kv.values)
        return found.of(base.kv)

    def _part(
        self, part: _Part, works: list[Work], op: Run, playing: _Playing, layout: BatchLayout, columns: Columns
    ) -> Step:
        run, later = op.runs[part.index], playing.later
        inside = {port: None if made is None else Batched(later(made)) for port, made in part.inside.items()}
        tasks = [
            task_of(work, run, part.index, part.iteration, {p: b and Row(b, i) for p, b in inside.items()})
            for i, work in enumerate(works)
        ]
        outputs = {port: later(made) for port, made in part.made.items()}
        return Step(Batch(run.key, tasks), outputs, layout.starts, columns, None, prefix=f"{part.index}.")


@dataclass(slots=True)
class _Playing:
    """A tape that runs, or has run, and its outputs."""

    tape: Tape
    num_rows: int
    running: Running
    _laters: dict[int, Later] = field(default_factory=dict)

    def later(self, made: Made | None) -> Any:
        if made is None:
            return None
        register, output = made
        if register not in self._laters:
            shape = (self.num_rows, *output.shape)
            self._laters[register] = Later(self.tape, register, shape=shape, dtype=output.dtype)
        return self._laters[register]


class _Filler:
    """What a launch puts into the first registers."""

    def __init__(
        self, taper: Taper, wiring: Wiring, base: Context, inputs: Mapping[str, Any], rows: Mapping[str, Tensor],
        draws: Sequence[Tensor],
    ) -> None:  # fmt: skip
        self._taper, self._wiring, self._base = taper, wiring, base
        self._inputs, self._rows, self._draws = inputs, rows, draws

    def value(self, name: Name) -> Any:
        """A contiguous tensor, or a Later."""
        base, num_rows = self._base, self._base.num_rows
        match name:
            case ("positions",) | ("iteration",) | ("draw_keys",):
                return getattr(base, name[0])
            case ("rows", module):
                return self._rows[module]
            case ("turn", number):
                return everywhere(num_rows, int(number), _CPU)
            case ("port", port):
                value = self._inputs[port]
                return value if type(value) is Later else value.contiguous()
            case ("slot", module, slot):
                return self._taper.modules[module].slots.tensors[slot]
            case ("draws", number):
                return self._draws[int(number)]
            case ("step", module):
                return self._taper.step_of(module, base)
            case ("present", port):
                return base.present[port]
            case ("everywhere",) | ("nowhere",):
                return everywhere(num_rows, name[0] == "everywhere", _CPU)
            case ("absent", port):
                spec = self._wiring.absent[port]
                return _zeros((num_rows, *(spec.shape or ())), port_dtype(spec, self._taper.modules.dtype))
        assert name == ("no draws",), name
        return _no_draws()


class _Wirer:
    """Connects the calls of one op, register to register."""

    def __init__(self, taper: Taper, op: Run, absent: frozenset[str]) -> None:
        self.modules, self.op, self.absent = taper.modules, op, absent
        self.wiring = Wiring()
        self._places: dict[Name, int] = {}
        self._calls: list[tuple[Code, list[int | Name], list[int], int]] = []
        self._num_made = 0
        self._written: dict[str, Made | None] = {}  # value -> who wrote it last

    def wire(self) -> Wiring | str:
        """Why not, if a value is not as the code after it needs it."""
        unit = self.op.unit
        steps = ((0, None),) if unit is None else unit.steps
        for index, iteration in steps:
            if (name := self._step(index, iteration)) is not None:
                return f"its input {name!r} is absent, or not of the shape and dtype that its code takes"
        self._finish()
        return self.wiring

    def _step(self, index: int, iteration: int | None) -> str | None:
        """Add a call; a port's name if it has no value that can be read."""
        run, wiring = self.op.runs[index], self.wiring
        module, prefix = self.modules[run.key[0]], "" if self.op.unit is None else f"{index}."
        fed = self._fed(run, prefix)
        if isinstance(fed, str):
            return fed
        codes, optional = module.codes[run.method.name], [p.name for p in run.method.inputs if p.optional]
        code = codes.absent if codes.absent is not None and not any(name in fed for name in optional) else codes.fed
        reads = [self._source(operand, run, prefix, iteration, fed, code) for operand in code.operands]
        if code.samplers:
            wiring.draws.append((module.name, code.samplers))
        made: dict[str, Made | None] = {port.name: None for port in run.method.outputs}
        writes = []
        for output in code.outputs:
            made[output.port] = self._num_made, output
            writes.append(self._num_made)
            self._num_made += 1
        self._calls.append((code, reads, writes, self._charge(run.key[0], run.method.name)))
        if run.method.name in module.finish and self.op.unit is not None:
            inside = {port: self._written[value] for port, value in run.inputs if value in self._written}
            wiring.parts.append(_Part(index, iteration, made, inside))
        wiring.outputs |= {f"{prefix}{port}": value for port, value in made.items()}
        self._written |= {value: made[port] for port, value in run.outputs}
        return None

    def _fed(self, run: Run, prefix: str) -> dict[str, int | None] | str:
        """The run's ports that have a value -> its register, or None where it comes from outside; or one without."""
        fed: dict[str, int | None] = {}
        value_of = dict(run.inputs)
        for port in run.method.inputs:
            value = value_of.get(port.name, "")
            if value not in self._written:
                if prefix + port.name not in self.absent:
                    fed[port.name] = None
                elif not port.optional:
                    return port.name
                continue
            made = self._written[value]
            if made is None and not port.optional:
                return port.name
            if made is not None:
                register, output = made
                if output.dtype != port_dtype(port, self.modules.dtype) or output.shape != port.shape:
                    return port.name
                fed[port.name] = register
        return fed

    def _source(
        self, operand: str, run: Run, prefix: str, iteration: int | None, fed: Mapping[str, int | None], code: Code
    ) -> int | Name:
        kind, _, name = operand.partition(" ")
        match kind:
            case "positions":
                return ("positions",) if self.op.unit is None or run.method.kv is not None else ("turn", "0")
            case "rows" | "step":
                return (kind, run.key[0])
            case "iteration":
                return ("iteration",) if iteration is None else ("turn", str(iteration))
            case "draws":
                return ("draws", str(len(self.wiring.draws))) if code.samplers else ("no draws",)
            case "slot":
                return ("slot", run.key[0], name)
            case "port" | "present":
                return self._port(kind, name, run, prefix, fed)
        return (kind,)

    def _port(self, kind: str, name: str, run: Run, prefix: str, fed: Mapping[str, int | None]) -> int | Name:
        if name not in fed:
            self.wiring.absent[prefix + name] = next(port for port in run.method.inputs if port.name == name)
            return ("absent", prefix + name) if kind == "port" else ("nowhere",)
        register = fed[name]
        if register is None:
            return (kind, prefix + name)
        return register if kind == "port" else ("everywhere",)

    def _charge(self, module: str, method: str) -> int:
        charges = self.wiring.charges
        charges[module, method] = charges.get((module, method), 0) + 1
        return list(charges).index((module, method))

    def _finish(self) -> None:
        """Number the registers: first those that are filled, then those that are made."""
        wiring = self.wiring
        for _, reads, _, _ in self._calls:
            for name in reads:
                if isinstance(name, tuple) and name not in self._places:
                    self._places[name] = len(self._places)
        wiring.names = list(self._places)
        first = len(wiring.names)
        wiring.num_registers = first + self._num_made
        calls = []
        for code, reads, writes, charge in self._calls:
            read = np.array([self._places[r] if isinstance(r, tuple) else first + r for r in reads], dtype=np.int64)
            write = np.array([first + w for w in writes], dtype=np.int64)
            wiring.kept += [read, write, code.program]
            calls.append(Call.of(code.program.code, reads=read, writes=write, charge=charge))
        wiring.calls = (Call * len(calls))(*calls)

        def moved(made: dict[str, Made | None]) -> dict[str, Made | None]:
            return {port: one and (first + one[0], one[1]) for port, one in made.items()}

        wiring.outputs = moved(wiring.outputs)
        for part in wiring.parts:
            part.made, part.inside = moved(part.made), moved(part.inside)


@cache
def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@cache
def _no_draws() -> Tensor:
    return shims.draws_operand()
