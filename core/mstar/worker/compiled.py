"""Methods as compiled code: traced over plain tensors, kept in the compile cache, called in place of the method.

Once, at load, and for every batch size: nothing is compiled for a step. What cannot be traced stays as it is, and the
log says why. On CPUs only; compiled code runs without the GIL but for its draws. Knows methods and modules, not walks.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mstar_compile_cache as cache
from mstar.config import environment
from mstar.layers import linear, shims
from mstar.plugin.graph import Method, Port
from mstar.plugin.loader import installed
from mstar.plugin.nodes import Context
from mstar.worker.modules import Module, Modules

log = logging.getLogger("mstar.worker")

MOST_ROWS = 32  # of a batch that runs compiled
_COLUMNS = ("positions", "rows", "iteration", "draw_keys")
_PACKAGE, _SAMPLERS = "method.pt2", "samplers"  # files of an entry
_OPTIONS = {"aot_inductor.compile_wrapper_opt_level": "O0"}  # it only calls kernels


@dataclass(slots=True)
class Compilation:
    """What compiling the methods of a worker came to.

    Args:
        compiled: "module.method" -> its code.
        eager: "module.method" -> why it is not compiled.
        num_built: packages compiled now, rather than found in the cache.
    """

    compiled: dict[str, CompiledMethod] = field(default_factory=dict)
    eager: dict[str, str] = field(default_factory=dict)
    num_built: int = 0
    seconds: float = 0.0


Progress = Callable[[str, int, int], None]
"""(method, its index, how many there are): told before each."""


class NotCompilable(Exception):
    """A method stays as it is; the message says why."""


# ---- running ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Code:
    """A method's code for batches in which these ports are fed and no others; `optional` ones of them in some rows."""

    program: cache.Program
    samplers: list[str]  # in the order of their draws
    ports: list[str]
    optional: list[str]


class CompiledMethod:
    """Called as the method is. Batches that it was not compiled for run the method itself, and are counted.

    Args:
        codes: whether the method's optional ports are fed -> its code.
    """

    def __init__(
        self, method: Method, eager: Callable[..., dict[str, Any]], codes: Mapping[bool, Code], *,
        step: shims.StepAddresses | None, most_rows: int,
    ) -> None:  # fmt: skip
        self.num_runs = self.num_eager = 0
        self._optional, self._most_rows = _optional(method), most_rows
        self._eager, self._codes, self._step = eager, codes, step

    def __call__(self, context: Context, **inputs: Tensor) -> dict[str, Any]:
        positions = context.positions
        fed = {inputs[name] is not None for name in self._optional} or {True}
        is_usual = positions.dtype == torch.int64 and positions.dim() == 1 and not context.plan and len(fed) == 1
        if not is_usual or context.num_rows > self._most_rows:
            self.num_eager += 1
            return self._eager(context, **inputs)
        self.num_runs += 1
        code = self._codes[fed.pop()]
        columns = tuple(getattr(context, name).contiguous() for name in _COLUMNS)
        step = None if self._step is None else self._step.point(context.kv)
        ports = {name: inputs[name].contiguous() for name in code.ports}
        present = {name: context.present[name] for name in code.optional}
        with shims.draws_by(lambda logits, index: context.sample(code.samplers[index], logits)):
            return code.program(columns, step, context.slots, ports, present)  # type: ignore[no-any-return]


# ---- compiling ----------------------------------------------------------------------------------------------


class TracedMethod(nn.Module):
    """A method as a function of plain tensors: `columns` (as `_COLUMNS`), the attention's step, slots, row ports, and
    for optional ports which rows have them. Optional ports that are not given are absent in all rows."""

    def __init__(self, module: Module, method: Method) -> None:
        super().__init__()
        self.node = module.node
        self.method = method.name
        self.optional = _optional(method)
        samplers = dict[int, str]()  # by the number of the draw
        self.samplers, self._note = samplers.values, samplers.__setitem__  # the export undoes changes to attributes

    def forward(
        self, columns: tuple[Tensor, ...], step: Tensor | None, slots: dict[str, Tensor], ports: dict[str, Tensor],
        present: dict[str, Tensor],
    ) -> dict[str, Tensor | None]:  # fmt: skip
        given: dict[str, Any] = dict(zip(_COLUMNS, columns, strict=True))
        num_rows = columns[0].shape[0]
        absent = [name for name in self.optional if name not in ports]
        drawn = list[Tensor]()

        def draw(name: str, logits: Tensor) -> Tensor:
            self._note(len(drawn), name)
            after = drawn[-1] if drawn else None  # keeps them in order
            drawn.append(torch.ops.mstar.draw(logits, after, len(drawn)))
            return drawn[-1]

        context = Context(
            num_rows=num_rows,
            query_starts=torch.arange(num_rows + 1, dtype=torch.int32),
            last_tokens=torch.arange(num_rows),
            sample=draw,
            slots=slots,
            present={**present, **{name: torch.zeros(num_rows, dtype=torch.bool) for name in absent}},
            **given,
        )
        if step is not None:
            context.kv = shims.TracedKV(step)  # type: ignore[assignment]
        return getattr(self.node, self.method)(context, **ports, **dict.fromkeys(absent))  # type: ignore[no-any-return]


class Compiler:
    """Puts compiled code in place of methods.

    Args:
        attention: the backend's name.
        store: stays open, so that what is loaded is not evicted.
    """

    def __init__(self, modules: Modules, *, plugin: str, attention: str, store: cache.Store) -> None:
        self._modules, self._attention, self._store = modules, attention, store
        self._plugin = plugin
        self._version = next((found.version for found in installed() if found.name == plugin), "")

    def run(self, progress: Progress = lambda *_: None) -> Compilation:
        """Compile all methods of the graph that can be compiled, or load what was compiled before."""
        started, result = time.perf_counter(), Compilation()
        pairs = [(self._modules[node.module], method) for node in self._modules.graph.nodes for method in node.methods]
        methods = {f"{module.name}.{method.name}": (module, method) for module, method in pairs}
        for index, (name, (module, method)) in enumerate(methods.items()):
            progress(name, index, len(methods))
            try:
                self._check(module, method)
                code = self._compiled(module, method)
            except Exception as error:  # noqa: BLE001  # whatever tracing and the compiler raise
                result.eager[name] = _reason(error)
                log.info("%s is not compiled: %s", name, result.eager[name])
                continue
            module.methods = {**module.methods, method.name: code}
            result.compiled[name] = code
        result.num_built, result.seconds = self._store.counters.builds, time.perf_counter() - started
        log.info(
            "%d methods are compiled, by %d packages built now, in %.1f s; %d are not",
            len(result.compiled), result.num_built, result.seconds, len(result.eager),
        )  # fmt: skip
        return result

    def _check(self, module: Module, method: Method) -> None:
        """Raise NotCompilable for what is known without tracing."""
        if self._modules.device.type != "cpu":
            raise NotCompilable(f"code is compiled for CPUs, not {self._modules.device.type}")
        if method.has_tokens:
            raise NotCompilable("its batches are ragged")
        for port in method.inputs:
            if port.layout == "item" or port.shape is None:
                kind = "has no fixed shape" if port.layout == "rows" else "is a list"
                raise NotCompilable(f"its input {port.name!r} {kind}")
        if method.kv is not None and self._attention != "cpu":
            raise NotCompilable(f"only attention backend 'cpu' can be compiled, not {self._attention!r}")
        if method.kv is not None and method.kv.tokens != 1:
            raise NotCompilable(f"it has {method.kv.tokens} tokens a row")
        if method.name in module.prepare:
            raise NotCompilable("what its prepare hook plans is not known beforehand")
        if not shims.load():
            raise NotCompilable("kernels cannot be built here")

    def _compiled(self, module: Module, method: Method) -> CompiledMethod:
        layout = module.node.kv_layout
        step = shims.StepAddresses(layout.num_layers) if method.kv is not None and layout is not None else None
        kinds = (False, True) if _optional(method) else (True,)
        codes = {is_fed: self._code(module, method, step, is_fed=is_fed) for is_fed in kinds}
        most_rows = min(MOST_ROWS, linear.kernel(self._modules.dtype)[1])
        return CompiledMethod(method, module.methods[method.name], codes, step=step, most_rows=most_rows)

    def _code(self, module: Module, method: Method, step: shims.StepAddresses | None, *, is_fed: bool) -> Code:
        traced = TracedMethod(module, method)
        ports = [port for port in method.inputs if is_fed or not port.optional]
        examples, shapes = self._examples(module, ports, step)

        def build(folder: Path) -> None:
            log.info("compiling %s.%s", module.name, method.name)
            with torch.inference_mode(False):
                cache.aot_compile(
                    traced, examples, out=folder / _PACKAGE, dynamic_shapes=shapes,
                    options=_OPTIONS | shims.compiler_options(),
                )  # fmt: skip
            (folder / _SAMPLERS).write_text("\n".join(traced.samplers()))

        folder, _ = self._store.get_or_build(self._key(module, method, ports), build)
        program = cache.aot_load(folder / _PACKAGE, weights=traced.state_dict())
        samplers = (folder / _SAMPLERS).read_text().splitlines()
        return Code(program, samplers, [port.name for port in ports], [port.name for port in ports if port.optional])

    def _examples(
        self, module: Module, ports: list[Port], step: shims.StepAddresses | None
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Operands of two rows, and which of their dimensions vary."""
        batch = {0: torch.export.Dim("batch", min=1, max=MOST_ROWS)}
        slot_rows = {0: torch.export.Dim("slot_rows", min=2)}
        dtypes = {
            port.name: self._modules.dtype if port.dtype == "float" else getattr(torch, port.dtype) for port in ports
        }
        inputs = {port.name: torch.zeros((2, *(port.shape or ())), dtype=dtypes[port.name]) for port in ports}
        present = {port.name: torch.ones(2, dtype=torch.bool) for port in ports if port.optional}
        columns = tuple(torch.zeros(2, dtype=torch.int64) for _ in _COLUMNS)
        slots = dict(module.slots.tensors)
        examples = columns, None if step is None else step.tensor, slots, inputs, present
        varying = dict.fromkeys(slots, slot_rows), dict.fromkeys(inputs, batch), dict.fromkeys(present, batch)
        return examples, ((batch,) * len(columns), None, *varying)

    def _key(self, module: Module, method: Method, ports: list[Port]) -> cache.CacheKey:
        node = module.node
        weights = {name: f"{tensor.dtype} {tuple(tensor.shape)}" for name, tensor in node.state_dict().items()}
        slots = {slot.name: f"{slot.dtype} {slot.shape}" for slot in node.slots}
        try:
            config = cache.canonical(
                {"config": _without_paths(node.config), "kv_layout": node.kv_layout, "weights": weights}
            )
        except TypeError as error:
            raise NotCompilable(str(error)) from error
        return cache.CacheKey(
            machine=cache.current_machine(compiler=environment().compiler),
            plugin=self._plugin,
            plugin_version=self._version,
            name=f"{module.name}.{method.name}",
            source=cache.source_hash(node, shims, Path(__file__), shims.SOURCE),
            dtype=str(self._modules.dtype),
            threads=torch.get_num_threads(),
            config=config,
            shapes=cache.canonical({"ports": ports, "slots": slots, "most_rows": MOST_ROWS}),
            options=cache.canonical(_OPTIONS),
        )


def _optional(method: Method) -> list[str]:
    return [port.name for port in method.inputs if port.optional]


def _reason(error: BaseException) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    text = next(filter(None, lines), "")
    return text if isinstance(error, NotCompilable) else f"{type(error).__name__}: {text[:200]}"


def _without_paths(value: Any) -> Any:
    """A configuration without where files lie, which code does not depend on."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _without_paths(one) for key, one in value.items() if not isinstance(one, Path)}
    return value
