"""Compiles methods: traced over plain tensors, kept in the compile cache, put on tapes in place of the method.

Once, at load, and for every batch size: nothing is compiled for a step. What cannot be traced stays as it is, and the
log says why. On CPUs only. Knows methods and modules, not walks; `taped` runs what is compiled here.
"""

from __future__ import annotations

import dataclasses
import json
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
from mstar.worker.launched import COLUMNS
from mstar.worker.modules import Code, MethodCode, Module, Modules, Output, port_dtype, varies
from mstar_compile_cache.aoti import CompiledCode

log = logging.getLogger("mstar.worker")

MOST_ROWS = 32  # of a batch that runs compiled
_PACKAGE, _NOTES = "method.pt2", "notes.json"  # files of an entry
_COMPILER = Path(cache.__file__).with_name("warm.py")
_OPTIONS = {"aot_inductor.compile_wrapper_opt_level": "O0"}  # it only calls kernels


@dataclass(slots=True)
class Compilation:
    """What compiling the methods of a worker came to.

    Args:
        compiled: "module.method" -> its code, which the module has too.
        eager: "module.method" -> why it is not compiled.
        num_built: packages compiled now, rather than found in the cache.
    """

    compiled: dict[str, MethodCode] = field(default_factory=dict)
    eager: dict[str, str] = field(default_factory=dict)
    num_built: int = 0
    seconds: float = 0.0


Progress = Callable[[str, int, int], None]
"""(method, its index, how many there are): told before each."""


class NotCompilable(Exception):
    """A method stays as it is; the message says why."""


# ---- compiling ----------------------------------------------------------------------------------------------


class TracedMethod(nn.Module):
    """A method as a function of plain tensors.

    They are `COLUMNS` of the context, the attention's step, the draws' operand, slots, row ports, and for optional
    ports which rows have them. Optional ports that are not given are absent in all rows. Returns the outputs that are
    not None.
    """

    def __init__(self, module: Module, method: Method) -> None:
        super().__init__()
        self.node = module.node
        self.method = method
        self.widths = {name: state.vocab_size for name, state in module.slots.samplers.items()}
        self.optional = _optional(method)
        notes: dict[str, Any] = {"samplers": [], "outputs": []}
        self._note, self.noted = notes.__setitem__, notes.__getitem__  # the export undoes changes to attributes

    @property
    def notes(self) -> str:
        """JSON: its samplers in the order of their draws, and its outputs; known once it has been traced."""
        return json.dumps({name: self.noted(name) for name in ("samplers", "outputs")})

    def forward(
        self, columns: tuple[Tensor, ...], step: Tensor | None, draws: Tensor, slots: dict[str, Tensor],
        ports: dict[str, Tensor], present: dict[str, Tensor],
    ) -> list[Tensor]:  # fmt: skip
        num_rows = columns[0].shape[0]
        absent = [name for name in self.optional if name not in ports]
        drawn = list[str]()

        def draw(name: str, logits: Tensor) -> Tensor:
            if name not in self.widths:
                raise NotCompilable(f"it draws by {name!r}, which is not one of its samplers")
            width = self.widths[name]
            if logits.dim() != 2 or logits.shape[1] != width:
                raise NotCompilable(f"{name!r} draws from {tuple(logits.shape)}, not (rows, {width})")
            if len(drawn) == shims.MOST_DRAWS:
                raise NotCompilable(f"it draws more than {shims.MOST_DRAWS} times")
            drawn.append(name)
            logits = logits if logits.dtype in (torch.float32, torch.bfloat16) else logits.float()
            return torch.ops.mstar.draw(logits.contiguous(), draws, len(drawn) - 1)  # type: ignore[no-any-return]

        context = Context(
            num_rows=num_rows,
            query_starts=torch.arange(num_rows + 1, dtype=torch.int32),
            last_tokens=torch.arange(num_rows),
            sample=draw,
            slots=slots,
            present={**present, **{name: torch.zeros(num_rows, dtype=torch.bool) for name in absent}},
            **dict(zip(COLUMNS, columns, strict=True)),  # type: ignore[arg-type]
        )
        if step is not None:
            context.kv = shims.TracedKV(step)  # type: ignore[assignment]
        made = getattr(self.node, self.method.name)(context, **ports, **dict.fromkeys(absent))
        kept = self._checked(made, num_rows)
        self._note("samplers", drawn)
        self._note("outputs", [(n, str(v.dtype).removeprefix("torch."), list(map(int, v.shape[1:]))) for n, v in kept])
        return [value.contiguous() for _, value in kept]

    def _checked(self, made: Any, num_rows: Any) -> list[tuple[str, Tensor]]:
        """The outputs there are, by port."""
        names = [port.name for port in self.method.outputs]
        if not isinstance(made, dict) or sorted(made) != sorted(names):
            raise NotCompilable(f"it does not return a dict of its output ports, {', '.join(names) or 'none'}")
        kept = [(port, made[port.name]) for port in self.method.outputs if made[port.name] is not None]
        for port, value in kept:
            if not isinstance(value, Tensor) or port.layout != "rows" or value.dim() == 0:
                raise NotCompilable(f"its output {port.name!r} is not a tensor of rows")
            if value.shape[0] != num_rows or port.shape not in (None, tuple(value.shape[1:])):
                raise NotCompilable(f"its output {port.name!r} is {tuple(value.shape)}, not as its port says")
        return [(port.name, value) for port, value in kept]


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
        started, built_before, result = time.perf_counter(), self._store.counters.builds, Compilation()
        graph = self._modules.graph
        here = self._modules.places.methods(graph)
        known = [(node.module, method) for node in graph.nodes for method in node.methods]
        pairs = [(self._modules[module], method) for module, method in known if (module, method.name) in here]
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
            module.codes[method.name] = result.compiled[name] = code
        result.num_built = self._store.counters.builds - built_before
        result.seconds = time.perf_counter() - started
        log.info(
            "%d methods are compiled, by %d packages built now, in %.1f s; %d are not",
            len(result.compiled), result.num_built, result.seconds, len(result.eager),
        )  # fmt: skip
        return result

    def _check(self, module: Module, method: Method) -> None:
        """Raise NotCompilable for what is known without tracing."""
        if module.is_split:
            raise NotCompilable("it is split among processes")
        if reason := varies(method, has_prepare=method.name in module.prepare):
            raise NotCompilable(reason)
        if method.kv is not None and self._attention != "cpu":
            raise NotCompilable(f"only attention backend 'cpu' can be compiled, not {self._attention!r}")
        if not shims.load():
            raise NotCompilable("kernels cannot be built here")

    def _compiled(self, module: Module, method: Method) -> MethodCode:
        absent = self._code(module, method, is_fed=False) if _optional(method) else None
        fed = self._code(module, method, is_fed=True)
        return MethodCode(fed, absent, most_rows=min(MOST_ROWS, linear.kernel(self._modules.dtype)[1]))

    def _code(self, module: Module, method: Method, *, is_fed: bool) -> Code:
        traced = TracedMethod(module, method)
        ports = [port for port in method.inputs if is_fed or not port.optional]

        def build(folder: Path) -> None:
            log.info("compiling %s.%s", module.name, method.name)
            examples, shapes = self._examples(module, method, ports)
            with torch.inference_mode(False):
                cache.aot_compile(
                    traced, examples, out=folder / _PACKAGE, dynamic_shapes=shapes,
                    options=_OPTIONS | shims.compiler_options(),
                )  # fmt: skip
            (folder / _NOTES).write_text(traced.notes)

        folder, _ = self._store.get_or_build(self._key(module, method, ports), build)
        program = cache.aot_load(folder / _PACKAGE, weights=traced.state_dict())
        if not isinstance(program.code, CompiledCode):
            raise NotCompilable("it calls an operator that compiled code cannot call without Python")
        notes = json.loads((folder / _NOTES).read_text())
        names = [*COLUMNS, *["step"] * (method.kv is not None), "draws"]
        names += [f"slot {name}" for name in module.slots.tensors]
        names += [f"port {port.name}" for port in ports] + [f"present {port.name}" for port in ports if port.optional]
        outputs = [Output(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in notes["outputs"]]
        return Code(program, names, outputs, notes["samplers"])

    def _examples(self, module: Module, method: Method, ports: list[Port]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Operands of two rows, and which of their dimensions vary."""
        batch = {0: torch.export.Dim("batch", min=1, max=MOST_ROWS)}
        slot_rows = {0: torch.export.Dim("slot_rows", min=2)}
        types = {port.name: port_dtype(port, self._modules.dtype) for port in ports}
        inputs = {port.name: torch.zeros((2, *(port.shape or ())), dtype=types[port.name]) for port in ports}
        present = {port.name: torch.ones(2, dtype=torch.bool) for port in ports if port.optional}
        columns = tuple(torch.zeros(2, dtype=torch.int64) for _ in COLUMNS)
        slots, layout = dict(module.slots.tensors), module.node.kv_layout
        step = shims.step_operand(layout.num_layers) if method.kv is not None and layout is not None else None
        examples = columns, step, shims.draws_operand(), slots, inputs, present
        varying = dict.fromkeys(slots, slot_rows), dict.fromkeys(inputs, batch), dict.fromkeys(present, batch)
        return examples, ((batch,) * len(columns), None, None, *varying)

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
            source=cache.source_hash(node, shims, shims.SOURCE, Path(__file__), _COMPILER),
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
