"""What a model's parts take of memory, on which devices a placement puts them, and which placement fits.

Reads headers of weights only: nodes are loaded on torch's meta device, by the very code that loads them for real, so
that names, shapes and dtypes are the model's own. Activations are an estimate. Runs in `mstar plan`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from mstar.config import GIB, EngineConfig
from mstar.errors import ConfigError, PluginError
from mstar.layers.parallel import Ranks
from mstar.model import Model
from mstar.placement import EVERYTHING, Group, Placement, check_state, stateful_methods
from mstar.plugin.graph import calls
from mstar.plugin.nodes import Node
from mstar.plugin.spec import load_object
from mstar.worker.modules import CPU_KV_BYTES, model_device, model_dtype, wanted_model_len
from mstar.worker.pages import page_bytes
from mstar.worker.ranks import split_node

log = logging.getLogger(__name__)

USABLE = 0.9  # of a device's memory
PROCESS_BYTES = GIB // 2  # libraries, contexts, buffers of messages
_LIVE = 6  # tensors as wide as a module's widest layer that live at once
_WIDEST = 12  # times its input, a layer is at most as wide: what is more are several experts' weights in one
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True, slots=True)
class Device:
    """Where processes may run: "cpu", "cuda:0" and so on."""

    name: str
    memory_bytes: int

    @property
    def usable_bytes(self) -> int:
        return int(self.memory_bytes * USABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSize:
    """What one module takes.

    Args:
        kv_token_bytes: of its KV cache, a token; 0: it has none.
        num_kv_heads: of that; 0: it has none.
        row_bytes: what its slots hold of a request, or of an item of an `Each`.
        activation_bytes: of its largest step, about.
        is_counted: from its configuration, not from the headers of its weights.
        can_split: tensor parallelism can.
    """

    name: str
    weights_bytes: int
    kv_token_bytes: int = 0
    num_kv_heads: int = 0
    row_bytes: int = 0
    activation_bytes: int = 0
    is_counted: bool = False
    can_split: bool = False

    def split(self, ranks: int) -> ModuleSize:
        """The share of one of several ranks; what cannot be split is whole."""
        if ranks == 1 or not self.can_split:
            return self
        kv = self.kv_token_bytes // max(1, min(ranks, self.num_kv_heads))
        return replace(self, weights_bytes=-(-self.weights_bytes // ranks), kv_token_bytes=kv)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """How much is to run at once.

    Args:
        seqs: requests at once in one worker.
        length: most tokens of a sequence, whole pages.
        kv_bytes: of a worker's KV cache, if an operator has said so; else as much as it takes.
    """

    seqs: int
    length: int
    kv_bytes: int | None = None

    @classmethod
    def of(cls, config: EngineConfig, model: Model) -> Demand:
        size = config.block_size
        length = -(-wanted_model_len(config, model.plugin.spec, model.checkpoint) // size) * size
        return cls(seqs=config.max_num_seqs, length=length, kv_bytes=config.kv_cache_memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process of a plan, on one device: a replica's, or one rank of it."""

    group: str
    label: str
    device: Device
    modules: tuple[ModuleSize, ...]

    def fixed_bytes(self, demand: Demand) -> int:
        """Everything but KV."""
        activations = max((m.activation_bytes for m in self.modules), default=0)
        held = sum(m.weights_bytes + m.row_bytes * (demand.seqs + 1) for m in self.modules)
        return PROCESS_BYTES + activations + held

    @property
    def token_bytes(self) -> int:
        return sum(m.kv_token_bytes for m in self.modules)

    def kv_bytes(self, demand: Demand) -> int:
        """The KV cache that it makes for itself, if there is room."""
        whole = demand.seqs * demand.length * self.token_bytes
        most = demand.kv_bytes or (CPU_KV_BYTES if self.device.name == "cpu" else whole)
        return min(whole, most) if self.token_bytes else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a plan fits.

    Args:
        seqs: requests of full length that the KV cache of every worker holds; 0: it does not fit.
        missing: device -> bytes that it lacks for one such request.
        advice: what to change, so that all fit at once.
    """

    seqs: int
    missing: Mapping[str, int]
    advice: tuple[str, ...]


# ---- sizes ------------------------------------------------------------------------------------------------------


def module_sizes(model: Model, config: EngineConfig) -> dict[str, ModuleSize]:
    """What each module of a model takes. Raises ConfigError for a checkpoint that cannot be loaded."""
    folders = (model.checkpoint.folder, *model.checkpoint.parts.values())
    has_weights = all(any(path.suffix in _WEIGHTS for path in folder.iterdir()) for folder in folders)
    nodes = {name: meta_node(model, name) for name in dict.fromkeys(node.module for node in model.graph.nodes)}
    return {name: _size(name, node, model, config, has_weights=has_weights) for name, node in nodes.items()}


def meta_node(model: Model, module: str) -> Node:
    """A module's node without any memory."""
    spec = model.plugin.spec
    with torch.device("meta"):
        node: Node = load_object(spec.nodes[module], plugin=spec.name)(model.checkpoint.config)
    return node


def check(model: Model, placement: Placement, *, source: str = "placement") -> None:
    """Raise ConfigError if methods that share state are in several groups, or modules cannot be split so many ways."""
    groups = [placement.modules_of(group) for group in range(len(placement.groups))]
    facts = {}
    for module in sorted({name for own in groups for name in own}):
        if sum(module in own for own in groups) > 1:
            methods = [m.name for node in model.graph.nodes if node.module == module for m in node.methods]
            facts[module] = stateful_methods(meta_node(model, module), methods)
    check_state(placement, facts, source=source)
    for index, (group, names) in enumerate(zip(placement.groups, groups, strict=True)):
        if group.tensor_parallel > 1:
            at = f"{source}: groups[{index}].tensor_parallel is {group.tensor_parallel}"
            _check_split({name: meta_node(model, name) for name in sorted(names)}, group.tensor_parallel, at)


def _check_split(nodes: Mapping[str, Node], ranks: int, at: str) -> None:
    if not any(node.tensor_parallel for node in nodes.values()):
        raise ConfigError(f"{at}, but of {', '.join(nodes)} none can be split; set it to 1")
    for name, node in nodes.items():
        if node.tensor_parallel:
            try:
                split_node(node, cast(Ranks, SimpleNamespace(rank=0, size=ranks)), name=name)
            except ConfigError as error:
                raise ConfigError(f"{at}: {error}") from error


def check_devices(placement: Placement, config: EngineConfig, *, source: str = "placement") -> None:
    """Raise ConfigError for a device that is not here."""
    model_device(config)
    for index, group in enumerate(placement.groups):
        for number, device in enumerate(group.devices):
            try:
                model_device(replace(config, device=device))
            except ConfigError as error:
                said = str(error).partition(": ")[2].replace("--device ", "")
                raise ConfigError(f"{source}: groups[{index}].devices[{number}] is {device!r}: {said}") from error


def _size(name: str, node: Node, model: Model, config: EngineConfig, *, has_weights: bool) -> ModuleSize:
    dtype = model_dtype(config, model.checkpoint)
    is_counted = not has_weights
    if has_weights:
        try:
            node.load_weights(model.checkpoint, dtype=dtype, device=torch.device("meta"))
        except (ConfigError, PluginError):
            raise
        except Exception as error:  # noqa: BLE001  # it computes with its weights while it loads them
            log.warning("%s: loads only for real (%s); its size is that of its configuration", name, error)
            node, is_counted = meta_node(model, name), True
    tensors = [*node.parameters(), *node.buffers()]
    sizes = [t.numel() * (dtype.itemsize if is_counted and t.is_floating_point() else t.itemsize) for t in tensors]
    layout = node.kv_layout
    kv = 0 if layout is None else page_bytes(layout, page_size=1, dtype=dtype)
    return ModuleSize(
        name=name,
        weights_bytes=sum(sizes),
        kv_token_bytes=kv,
        num_kv_heads=0 if layout is None else layout.num_kv_heads,
        row_bytes=sum(math.prod(slot.shape) * slot.dtype.itemsize for slot in node.slots),
        activation_bytes=_activation_bytes(node, config, dtype),
        is_counted=is_counted and bool(tensors),
        can_split=bool(node.tensor_parallel),
    )


def _activation_bytes(node: Node, config: EngineConfig, dtype: torch.dtype) -> int:
    """Of a step of as many tokens as there may be, in tensors as wide as its widest layer; and logits to draw from."""
    vocabularies = [sampler.vocab_size for sampler in node.samplers]
    matrices = [t.shape for m in node.modules() if not isinstance(m, nn.Embedding) for t in m.parameters(recurse=False)]
    widths = [min(s[-2], s[-1] * _WIDEST) for s in matrices if len(s) > 1 and s[-2] not in vocabularies]
    logits = config.max_num_seqs * max(vocabularies, default=0) * 3 * torch.float32.itemsize
    return config.max_num_batched_tokens * max(widths, default=0) * dtype.itemsize * _LIVE + logits


# ---- what a placement takes -------------------------------------------------------------------------------------


def processes(placement: Placement, sizes: Mapping[str, ModuleSize], devices: Sequence[Device]) -> list[Process]:
    """The processes of a placement; those without a device take these in turn. ConfigError for an unknown device."""
    held = [[sizes[m] for m in sizes if m in placement.modules_of(group)] for group in range(len(placement.groups))]
    found: list[Process] = []
    for place in placement.workers:
        ranks = placement.groups[place.group].tensor_parallel
        for rank in range(ranks):
            name = place.devices[rank] if place.devices else "auto"
            device = devices[len(found) % len(devices)] if name in ("auto", "cuda") else _device(name, devices)
            label = f"{place.name} {place.replica}" if placement.groups[place.group].replicas > 1 else place.name
            found.append(
                Process(
                    group=place.name,
                    label=label + (f" rank {rank}" if ranks > 1 else ""),
                    device=device,
                    modules=tuple(m.split(ranks) for m in held[place.group] if m.can_split or not rank),
                )
            )
    return found


def _device(name: str, devices: Sequence[Device]) -> Device:
    for device in devices:
        if device.name == name:
            return device
    known, size = ", ".join(d.name for d in devices), "" if name == "cpu" else "=80GiB"
    wanted = f"name it there too, such as {name}{size}, or change the placement"
    raise ConfigError(f"the placement names device {name!r}; --devices has {known}: {wanted}")


def judge(plan: Sequence[Process], devices: Sequence[Device], demand: Demand, *, is_float32: bool) -> Verdict:
    """Whether processes fit where they are, and what helps where they do not. Devices of one name are one memory."""
    held: dict[str, list[Process]] = {}
    for process in plan:
        held.setdefault(process.device.name, []).append(process)
    usable = {name: sum(d.usable_bytes for d in devices if d.name == name) for name in held}
    rooms = {name: usable[name] - sum(p.fixed_bytes(demand) for p in own) for name, own in held.items()}
    tokens = {name: sum(p.token_bytes for p in own) for name, own in held.items()}
    missing = {name: tokens[name] * demand.length - room for name, room in rooms.items()}
    missing = {name: lacking for name, lacking in missing.items() if lacking > 0}
    wanted = {name: sum(p.kv_bytes(demand) for p in own) for name, own in held.items()}
    most = [min(rooms[name], wanted[name]) // (tokens[name] * demand.length) for name in held if tokens[name]]
    seqs = 0 if missing else min((*most, demand.seqs))
    advice = _advice(rooms, wanted, tokens, demand, seqs=seqs, is_float32=is_float32) if seqs < demand.seqs else ()
    return Verdict(seqs=seqs, missing=missing, advice=advice)


def _advice(
    rooms: Mapping[str, int], wanted: Mapping[str, int], tokens: Mapping[str, int], demand: Demand, *, seqs: int,
    is_float32: bool,
) -> tuple[str, ...]:  # fmt: skip
    found = []
    whole = {name: tokens[name] * demand.length * demand.seqs for name in rooms}
    if all(rooms[name] >= whole[name] for name in rooms):
        found.append(f"a larger KV cache: --kv-cache-memory-bytes {-(-max(whole.values()) // 2**20)}MiB")
    if seqs:
        found.append(f"fewer requests at once: --max-num-seqs {seqs}")
    budgets = [min(rooms[name], wanted[name]) // tokens[name] for name in rooms if tokens[name]]
    length = min(budgets, default=0) // (demand.seqs if seqs else 1) // 64 * 64
    if length > 0:
        said = "shorter sequences:" if seqs else "one short sequence at a time: --max-num-seqs 1"
        found.append(f"{said} --max-model-len {length}")
    if is_float32:
        found.append("half the memory: --dtype bfloat16")
    return (*found, "more devices, or larger ones")


# ---- a placement that fits --------------------------------------------------------------------------------------


def propose(
    model: Model, sizes: Mapping[str, ModuleSize], devices: Sequence[Device], demand: Demand, *, ranks: int | None
) -> list[Group]:
    """Groups for these devices: the whole model on each where it fits, else its modules spread over them, the largest
    split where no device holds it.

    Args:
        ranks: processes that share modules with KV; None: as few as it takes.
    """
    called = {call.node for walk in model.graph.walks for call in calls(walk.section)}
    nodes: dict[str, list[str]] = {}
    for node in model.graph.nodes:
        if node.name in called:
            nodes.setdefault(node.module, []).append(node.name)
    everything = [sizes[name] for name in nodes]
    if ranks in (None, 1) and all(_need(everything, demand, device) <= device.usable_bytes for device in devices):
        names = tuple(device.name for device in devices)
        return [Group(name="all", nodes=(EVERYTHING,), replicas=len(devices), devices=names)]
    splits = [ranks] if ranks is not None else [n for n in (1, 2, 4, 8, 16) if n <= len(devices)]
    best: list[Group] = []
    for number in splits:
        best, overflow = _spread(nodes, sizes, devices, demand, ranks=number)
        if not overflow:
            break
    return best


def _need(modules: Sequence[ModuleSize], demand: Demand, device: Device, *, seqs: int | None = None) -> int:
    wanted = demand if seqs is None else replace(demand, seqs=seqs)
    process = Process(group="", label="", device=device, modules=tuple(modules))
    return process.fixed_bytes(demand) + process.kv_bytes(wanted)


def _spread(
    nodes: Mapping[str, list[str]], sizes: Mapping[str, ModuleSize], devices: Sequence[Device], demand: Demand, *,
    ranks: int,
) -> tuple[list[Group], bool]:  # fmt: skip
    """Modules by size onto the device with most room; whether one of them then holds too much for one request."""
    heads = {name: sizes[name].num_kv_heads for name in nodes if sizes[name].can_split and sizes[name].num_kv_heads}
    split = [name for name, number in heads.items() if ranks > 1 and number % ranks == 0]
    if ranks > 1 and not split:
        known = ", ".join(f"{name} {number}" for name, number in heads.items()) or "none"
        raise ConfigError(
            f"--tensor-parallel-size {ranks} divides the KV heads of no module that can be split; KV heads: {known}"
        )
    if ranks > len(devices):
        raise ConfigError(f"--tensor-parallel-size {ranks} is more than the {len(devices)} devices; name more")
    held: dict[int, list[ModuleSize]] = {index: [] for index in range(len(devices))}
    shared = [sizes[name].split(ranks) for name in split]
    for index in range(ranks if split else 0):
        held[index] += shared
    whole: dict[int, list[str]] = {}

    def room(index: int, *more: ModuleSize) -> int:
        return devices[index].usable_bytes - _need([*held[index], *more], demand, devices[index], seqs=1)

    rest = sorted((n for n in nodes if n not in split), key=lambda n: -_need([sizes[n]], demand, devices[0]))
    for name in rest:
        index = max(held, key=lambda place: room(place, sizes[name]))
        together = [place for place in whole if room(place, sizes[name]) >= 0]
        if together and (split or room(index) == room(index, sizes[name])):  # apart it would gain nothing
            index = together[0]
        held[index].append(sizes[name])
        whole.setdefault(index, []).append(name)
    groups = [(split, tuple(d.name for d in devices[:ranks]))] if split else []
    groups += [(names, (devices[index].name,)) for index, names in sorted(whole.items())]
    made = [
        Group(
            name="_".join(names) if len(names) < 3 else f"{names[0]}_and_others",
            nodes=tuple(node for name in names for node in nodes[name]),
            devices=places,
            tensor_parallel=len(places),
        )
        for names, places in groups
    ]
    return made, any(room(index) < 0 for index in held)


def as_yaml(groups: Sequence[Group]) -> str:
    """A file for --placement."""
    lines = ["groups:"]
    for group in groups:
        fields: dict[str, Any] = {"name": group.name, "nodes": _list(group.nodes)}
        fields |= {"replicas": group.replicas} if group.replicas > 1 else {}
        fields |= {"tensor_parallel": group.tensor_parallel} if group.tensor_parallel > 1 else {}
        fields |= {"devices": _list(group.devices)} if group.devices else {}
        lines += [f"  {'- ' if key == 'name' else '  '}{key}: {value}" for key, value in fields.items()]
    return "\n".join(lines) + "\n"


def _list(items: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{item}"' if item == EVERYTHING else item for item in items) + "]"
