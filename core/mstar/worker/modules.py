"""The modules of a worker: one copy of each node's weights, with its KV pool and its slot pool.

Loads them, sizes the pools, and does for a scope or tenant what spans both kinds of pool: allocate, fork, free, swap.
Owned by the worker's thread. Does not know walks or scheduling.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from mstar import observe
from mstar.config import EngineConfig
from mstar.errors import ConfigError
from mstar.ipc.messages import Open
from mstar.layers import linear, quantized, shims
from mstar.layers.linear import self_check, set_batch_invariant
from mstar.layers.sampling import draw_key, native
from mstar.plugin import program
from mstar.plugin.fuse import Hooks, fuse_all
from mstar.plugin.graph import Graph, Method, Port
from mstar.plugin.nodes import Node
from mstar.plugin.program import compile_graph
from mstar.plugin.spec import Checkpoint, ModelSpec, load_object
from mstar.types import SamplingParams
from mstar.worker.kv_pool import KVPool, Sequence
from mstar.worker.pages import page_bytes
from mstar.worker.places import Places, Placing
from mstar.worker.ranks import split_node
from mstar.worker.slots import SlotPool
from mstar.worker.state import Scope, Tenant
from mstar.worker.swap import SwapSpace
from mstar.worker.tape import Queue
from mstar.worker.team import Team
from mstar_compile_cache import Program

log = logging.getLogger("mstar.worker")

CPU_KV_BYTES = 2 * 1024**3
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Output(NamedTuple):
    """What compiled code makes of a port: (B, *shape)."""

    port: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Code:
    """A method's compiled code, for batches in which its optional ports are fed, or are not.

    Args:
        operands: what it takes, in order: columns of the context by name, "step", "draws", "slot NAME", "port NAME" and
            "present NAME".
        samplers: in the order of its draws.
    """

    program: Program
    operands: list[str]
    outputs: list[Output]
    samplers: list[str]


@dataclass(slots=True)
class MethodCode:
    """A method as compiled code, and how often it ran that way, or eagerly where it could not.

    Args:
        absent: for batches in which no row has an optional port; None where there is none.
    """

    fed: Code
    absent: Code | None
    most_rows: int
    num_runs: int = 0
    num_eager: int = 0


class _Timed:
    """A block whose seconds are added to a method's entry."""

    __slots__ = ("_entry", "_started")

    def __init__(self, entry: list[float]) -> None:
        self._entry = entry

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._entry[2] += time.perf_counter() - self._started


@dataclass(slots=True, eq=False)
class Module:
    """One module.

    Args:
        prepare, finish: its hooks, by method name.
        method_s: method -> [calls, rows, seconds in the method and its hooks].
        codes: those of its methods that are compiled.
        is_split: among several processes.
    """

    name: str
    node: Node
    pool: KVPool | None
    slots: SlotPool
    methods: Mapping[str, Callable[..., dict[str, Any]]]
    prepare: Mapping[str, Callable[..., Any]]
    finish: Mapping[str, Callable[..., Any]]
    method_s: dict[str, list[float]] = field(default_factory=dict)
    codes: dict[str, MethodCode] = field(default_factory=dict)
    is_split: bool = False

    def timed(self, method: str, *, calls: int = 0, rows: int = 0) -> _Timed:
        """Account the time of a block to a method."""
        return _Timed(self.counted(method, calls=calls, rows=rows))

    def counted(self, method: str, *, calls: int, rows: int) -> list[float]:
        """A method's entry, with calls of so many rows added to it."""
        entry = self.method_s.setdefault(method, [0, 0, 0.0])
        entry[0] += calls
        entry[1] += rows
        return entry

    @property
    def weights_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.node.parameters(), *self.node.buffers()))


def model_dtype(config: EngineConfig, checkpoint: Checkpoint) -> torch.dtype:
    """--dtype, or the checkpoint configuration's `dtype` (a torch dtype name), or float32."""
    name = config.dtype if config.dtype != "auto" else str(getattr(checkpoint.config, "dtype", "float32"))
    if name not in _DTYPES:
        raise ConfigError(f"dtype {name!r} is not supported; pass --dtype with one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def model_device(config: EngineConfig) -> torch.device:
    """--device, or CUDA where there is one."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(config.device)
    if device.type == "cuda" and (device.index or 0) >= (there := num_cuda_devices()):
        wanted = f"choose one up to cuda:{there - 1}" if there else "use --device cpu"
        raise ConfigError(
            f"--device {device}: this torch sees {there or 'no'} CUDA device{'s'[: there != 1]}; {wanted}"
        )
    return device


def num_cuda_devices() -> int:
    """Those that torch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def wanted_model_len(config: EngineConfig, spec: ModelSpec, checkpoint: Checkpoint) -> int:
    """--max-model-len, or what the model was made for."""
    own: int | None = None
    if spec.max_model_len is not None:
        own = load_object(spec.max_model_len, plugin=spec.name)(checkpoint.config)
    asked = config.max_model_len
    if asked is not None and own is not None and asked > own:
        raise ConfigError(f"--max-model-len {asked} is more than the {own} tokens the model was made for")
    return asked or own or 4096


def port_dtype(port: Port, dtype: torch.dtype) -> torch.dtype:
    """A port's dtype where the model's is `dtype`."""
    found: torch.dtype = dtype if port.dtype == "float" else getattr(torch, port.dtype)
    return found


def varies(method: Method, *, has_prepare: bool) -> str | None:
    """Why the shapes of a method's operands are not known before it is called; None if they are."""
    if method.has_tokens:
        return "its batches are ragged"
    for port in method.inputs:
        if port.layout == "item" or port.shape is None:
            kind = "has no fixed shape" if port.layout == "rows" else "is a list"
            return f"its input {port.name!r} {kind}"
    if method.kv is not None and method.kv.tokens != 1:
        return f"it has {method.kv.tokens} tokens a row"
    if has_prepare:
        return "what its prepare hook plans is not known beforehand"
    return None


def draw_name(name: str, ordinal: int) -> str:
    """What a scope draws by: an item of a later round of the same Each draws other numbers than the first."""
    return f"{name}#{ordinal}" if ordinal else name


def load_node(
    node: Node, checkpoint: Checkpoint, *, name: str, config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> None:
    """Fill a node's weights, and change it from outside as the settings say."""
    with observe.about(name):
        node.load_weights(checkpoint, dtype=dtype, device=device)
    node.eval().requires_grad_(False)
    if config.batch_invariant:
        set_batch_invariant(node)
    if config.quantization != "none":
        log.info("%s: %s", name, quantized.quantize_int4(node))


class Modules:
    """All modules of one worker, by name.

    Args:
        placing: which groups run what; None: all is here.
        worker, group: which worker this is, and of which group.
        team: further processes, among which modules are split that can be.
    """

    def __init__(
        self, spec: ModelSpec, graph: Graph, *, checkpoint: Checkpoint, config: EngineConfig,
        placing: Placing | None = None, worker: int = 0, group: int = 0, team: Team | None = None,
    ) -> None:  # fmt: skip
        self.team = team
        self.dtype = model_dtype(config, checkpoint)
        self.device = model_device(config)
        self.config = config
        self.graph = graph
        self._programs = compile_graph(graph)
        self.places = Places(placing, self._programs, worker=worker, group=group)
        nodes = self._load(spec, graph, checkpoint)
        self.max_model_len, pages = self._pages(nodes, wanted_model_len(config, spec, checkpoint))
        if team is not None:
            team.begin({name: count + 1 for name, count in pages.items() if nodes[name].tensor_parallel})
        self.by_name = {name: self._module(name, node, pages.get(name, 0)) for name, node in nodes.items()}
        self.queue: Queue | None = None  # where compiled code runs meanwhile
        self.swap_space = SwapSpace(config.swap_space_bytes)
        self.rebuilders = {
            node.module: (node, method)
            for node in graph.nodes
            for method in node.methods
            if method.kv is not None and method.kv.rebuild
        }

    def __getitem__(self, name: str) -> Module:
        return self.by_name[name]

    def fence(self) -> None:
        """Wait for what runs meanwhile: before anybody else touches what it reads or writes."""
        if self.queue is not None:
            self.queue.wait()

    def compile(self, graph: Graph) -> dict[str, program.Program]:
        """Walk -> the program to run it by: loops of methods that run here fused, unless that is off."""
        programs = self._programs if graph is self.graph else compile_graph(graph)
        if self.config.enforce_eager:
            return programs
        nodes = {name: module.node for name, module in self.by_name.items()}
        return fuse_all(programs, Hooks.of(graph, nodes, is_away=self.places.is_away))[0]

    # ---- loading ----------------------------------------------------------------------------------------

    def _load(self, spec: ModelSpec, graph: Graph, checkpoint: Checkpoint) -> dict[str, Node]:
        if self.config.batch_invariant:
            self_check(self.dtype, self.device)
        if self.config.compile:
            shims.check(self.dtype, self.device)
        if self.config.quantization != "none":
            quantized.check(self.dtype, self.device, invariant=self.config.batch_invariant)
        if self.device.type == "cpu":  # kernels are built now, rather than at the first request
            linear.kernel(self.dtype), linear.product_kernel(self.dtype)
            native.available()
        here = self.places.modules(graph)
        names = dict.fromkeys(node.module for node in graph.nodes if node.module in here)
        nodes: dict[str, Node] = {
            name: load_object(spec.nodes[name], plugin=spec.name)(checkpoint.config) for name in names
        }
        self._heads = {name: node.kv_layout.num_kv_heads for name, node in nodes.items() if node.kv_layout is not None}
        if self.team is not None:
            self._split(nodes, self.team)
        for name, node in nodes.items():
            load_node(node, checkpoint, name=name, config=self.config, dtype=self.dtype, device=self.device)
        return nodes

    def _split(self, nodes: Mapping[str, Node], team: Team) -> None:
        """Keep this rank's share of what can be split, and have the others load theirs."""
        names = [name for name, node in nodes.items() if node.tensor_parallel]
        assert names, "a placement that splits nothing was not refused"
        for name in names:
            split_node(nodes[name], team.ranks, name=name)
        team.load(names)

    def _page_bytes(self, node: Node) -> int:
        assert node.kv_layout is not None
        return page_bytes(node.kv_layout, page_size=self.config.block_size, dtype=self.dtype)

    def _pages(self, nodes: Mapping[str, Node], model_len: int) -> tuple[int, dict[str, int]]:
        """(most tokens of a sequence, module -> pages), from the memory there is."""
        with_kv = {name: node for name, node in nodes.items() if node.kv_layout is not None}
        if not with_kv:
            return model_len, {}
        config, size = self.config, self.config.block_size
        wanted = config.max_num_seqs * -(-model_len // size)
        need = sum(wanted * self._page_bytes(node) for node in with_kv.values())
        budget = config.kv_cache_memory_bytes or min(need, self._default_budget())
        per_round = sum(self._page_bytes(node) for node in with_kv.values())
        pages = min(wanted, budget // per_round)
        if pages < 1:
            raise ConfigError(
                f"--kv-cache-memory-bytes {budget} holds no page of {size} tokens ({per_round} bytes); raise it"
            )
        if pages * size < model_len:
            if config.max_model_len is not None:
                raise ConfigError(
                    f"--max-model-len {model_len} needs {-(-model_len // size) * per_round} bytes of KV cache for one "
                    f"sequence, but there are {budget}; lower it to {pages * size} or raise --kv-cache-memory-bytes"
                )
            log.warning(
                "max_model_len is %d, not the model's %d: so much fits in %d bytes of KV cache "
                "(raise --kv-cache-memory-bytes)",
                pages * size, model_len, budget,
            )  # fmt: skip
            model_len = pages * size
        return model_len, dict.fromkeys(with_kv, pages)

    def _default_budget(self) -> int:
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            return int(free * 0.9)
        return CPU_KV_BYTES

    def _module(self, name: str, node: Node, pages: int) -> Module:
        pool = None
        team = self.team if node.tensor_parallel else None
        if node.kv_layout is not None:
            sizes: dict[str, Any] = {
                "num_pages": pages + 1, "page_size": self.config.block_size, "dtype": self.dtype, "device": self.device
            }  # fmt: skip
            storage = team.pages(name, node.kv_layout, total_heads=self._heads[name], **sizes) if team else None
            cached = self.config.enable_prefix_caching
            pool = KVPool(node.kv_layout, **sizes, prefix_cache=cached, fence=self.fence, storage=storage)
        rows = self.config.max_num_seqs + 1
        slots = SlotPool(node.slots, node.samplers, rows=rows, device=self.device, fence=self.fence)
        names = [m.name for n in self.graph.nodes if n.module == name for m in n.methods]
        return Module(
            name=name,
            node=node,
            pool=pool,
            slots=slots,
            methods={m: team.split(name, m, getattr(node, m)) if team else getattr(node, m) for m in names},
            prepare={m: getattr(node, f"prepare_{m}") for m in names if hasattr(node, f"prepare_{m}")},
            finish={m: getattr(node, f"finish_{m}") for m in names if hasattr(node, f"finish_{m}")},
            is_split=team is not None,
        )

    # ---- scopes -----------------------------------------------------------------------------------------

    def sequence(self, scope: Scope, module: str, label: str) -> Sequence:
        """The scope's sequence of that label, made at first use."""
        key = (module, label)
        found = scope.sequences.get(key)
        if found is None:
            pool = self.by_name[module].pool
            assert pool is not None, f"module {module} has no KV layout"
            found = scope.sequences[key] = pool.create()
        return found

    def row(self, scope: Scope, module: str, info: Open) -> int:
        """The scope's row in the module's slot pool, made and zeroed at first use."""
        row = scope.rows.get(module)
        if row is None:
            part = self.by_name[module]
            sampling = {s.name: self._sampling(info, scope, s.name) for s in part.node.samplers}
            row = scope.rows[module] = part.slots.allocate(sampling=sampling)
            if part.node.host_state is not None:
                scope.states[module] = part.node.host_state()
        return row

    @staticmethod
    def _sampling(info: Open, scope: Scope, name: str) -> tuple[SamplingParams, int, list[int]]:
        prompts = info.sampler_prompts.get(name, [])
        if prompts and isinstance(prompts[0], list | tuple):
            prompts = prompts[scope.path[0] if scope.path else 0]
        params = info.samplers.get(name, SamplingParams())
        return params, draw_key(info.seed, scope.path, draw_name(name, scope.ordinal)), list(prompts)

    def fork(self, module: str, source: Sequence, *, at: Any = None) -> Sequence:
        """A copy-on-write fork, cut to `at`: a length, or (length, position)."""
        pool = self.by_name[module].pool
        assert pool is not None
        if at is None:
            return pool.fork(source)
        length, position = at if isinstance(at, tuple | list) else (at, at)
        return pool.fork(source, at=int(length), position=float(position))

    def drop(self, scope: Scope, key: tuple[str, str]) -> None:
        """Forget one label; its pages are freed with the last label of the sequence."""
        sequence = scope.sequences.pop(key)
        if not any(other is sequence for other in scope.sequences.values()):
            pool = self.by_name[key[0]].pool
            assert pool is not None
            self._release(pool, sequence)

    def _release(self, pool: KVPool, sequence: Sequence) -> None:
        if sequence.swapped:
            self.swap_space.drop(pool, [sequence])
        else:
            pool.free(sequence)

    def free_scope(self, scope: Scope) -> None:
        """Free everything a scope holds."""
        for key in list(scope.sequences):
            self.drop(scope, key)
        self.free_rows(scope)

    def free_rows(self, scope: Scope) -> None:
        """Free a scope's slot rows and host states; what it does next begins with zeroed ones."""
        for module, row in scope.rows.items():
            if module not in scope.saved_rows:
                self.by_name[module].slots.free(row)
        scope.rows.clear()
        scope.saved_rows.clear()
        scope.states.clear()

    # ---- tenants ----------------------------------------------------------------------------------------

    def _sequences(self, tenant: Tenant) -> Iterable[tuple[KVPool, list[Sequence]]]:
        for module in self.by_name.values():
            if module.pool is not None:
                found = {id(s): s for scope in tenant.scopes for s in scope.distinct(module.name)}
                if found:
                    yield module.pool, list(found.values())

    def num_pages_held(self, tenant: Tenant) -> int:
        return sum(len(s.pages) for _, sequences in self._sequences(tenant) for s in sequences)

    def swap_out(self, tenant: Tenant) -> bool:
        """Move all pages and rows of a tenant to the host; False, and nothing moved, if the swap space is full."""
        if not self.can_swap_out(tenant):
            return False
        for pool, own in self._sequences(tenant):
            moved = self.swap_space.swap_out(pool, own)
            assert moved, "room was checked"
        for scope in tenant.scopes:
            for module, row in scope.rows.items():
                scope.saved_rows[module] = self.by_name[module].slots.swap_out(row)
        tenant.is_swapped = True
        return True

    def swap_bytes(self, tenant: Tenant) -> int:
        """What `swap_out` would take of the swap space."""
        return sum(self.swap_space.bytes_needed(pool, own) for pool, own in self._sequences(tenant))

    def can_swap_out(self, tenant: Tenant) -> bool:
        return self.swap_space.can_hold(self.swap_bytes(tenant))

    def sequences(self, tenants: Iterable[Tenant], module: str) -> list[Sequence]:
        """The tenants' sequences in one module."""
        return [s for tenant in tenants for scope in tenant.scopes for s in scope.distinct(module)]

    def pages_to_return(self, tenant: Tenant) -> list[tuple[Module, int]]:
        """Pages, by module, that it takes to swap a tenant in, or to recompute it and write one more token each."""
        need: dict[str, int] = {}
        for name, _, sequence in tenant.forgotten:
            pool = self.by_name[name].pool
            assert pool is not None
            need[name] = need.get(name, 0) + pool.pages_needed(sequence, sequence.num_pending + 1)
        for name in self.by_name:
            swapped = [s for s in self.sequences([tenant], name) if s.swapped]
            if swapped:
                need[name] = self.swap_space.pages_needed(swapped)
        return [(self.by_name[name], count) for name, count in need.items()]

    def _swapped(self, tenant: Tenant) -> Iterable[tuple[KVPool, list[Sequence]]]:
        for pool, sequences in self._sequences(tenant):
            if any(s.swapped for s in sequences):
                yield pool, [s for s in sequences if s.swapped]

    def swap_in(self, tenant: Tenant) -> None:
        """Bring a tenant back, for which there must be room."""
        for pool, own in self._swapped(tenant):
            moved = self.swap_space.swap_in(pool, own)
            assert moved, "room was checked"
        for scope in tenant.scopes:
            for module, saved in scope.saved_rows.items():
                scope.rows[module] = self.by_name[module].slots.swap_in(saved)
            scope.saved_rows.clear()
        tenant.is_swapped = False

    def can_forget(self, tenant: Tenant) -> bool:
        """Whether every sequence of a tenant could be recomputed from token ids."""
        return all(
            sequence.history is not None and module in self.rebuilders
            for module in self.by_name
            for scope in tenant.scopes
            for sequence in scope.distinct(module)
        )

    def forget(self, tenant: Tenant) -> None:
        """Free a tenant's pages; its sequences are to be rewritten from their ids."""
        for scope in tenant.scopes:
            for module in self.by_name.values():
                for sequence in scope.distinct(module.name):
                    assert module.pool is not None
                    module.pool.forget(sequence)
                    if sequence.history:
                        tenant.forgotten.append((module.name, scope, sequence))
        tenant.is_swapped = True

    def check_integrity(self, scopes: Iterable[Scope]) -> None:
        """Assert that pools, slots and the swap space hold exactly what the scopes hold."""
        held = list(scopes)
        sequences: list[Sequence] = []
        for module in self.by_name.values():
            if module.pool is not None:
                live = {id(s): s for scope in held for s in scope.distinct(module.name)}
                module.pool.check_integrity(list(live.values()))
                sequences += live.values()
            here = [scope for scope in held if module.name in scope.rows and module.name not in scope.saved_rows]
            module.slots.check_integrity([scope.rows[module.name] for scope in here])
        self.swap_space.check_integrity(sequences)
