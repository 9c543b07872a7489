"""`mstar plan`: what a model takes of memory, on which devices it fits, and a placement file. Loads no weights."""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mstar import config
from mstar.cli import options
from mstar.config import GIB
from mstar.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mstar.placement import Placement
    from mstar.planning import Demand, Device, Process, Verdict

_SETTINGS = {
    "plugin", "model", "parts", "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size",
    "kv_cache_memory_bytes", "placement",
}  # fmt: skip
_LEAST_BYTES = 1 << 20  # of a device; fewer is a unit left out
_MEMORY = Path("/proc/meminfo")
_QUOTA = Path("/sys/fs/cgroup/memory.max")
_CONFIGURATION = ("*.json", "*.txt")


@click.command(short_help="Say what fits on which devices, and write a placement.")
@options.settings(config.EngineConfig, without=config.flags(config.EngineConfig).keys() - _SETTINGS)
@click.option(
    "--devices", default="auto", show_default=True, metavar="DEVICE[=SIZE],...",
    help="such as cuda:0=80GiB,cuda:1=80GiB or cpu,cpu; sizes default to what is there; auto: all GPUs, or the CPU",
)  # fmt: skip
@click.option(
    "--tensor-parallel-size", type=click.IntRange(1, 64), metavar="N",
    help="split modules with a KV cache over N devices  [default: as few as it takes]",
)  # fmt: skip
@click.option(
    "--format", "style", type=click.Choice(["table", "yaml"]), default="table", show_default=True,
    help="table: what goes where, a verdict and the file; yaml: the file alone",
)  # fmt: skip
@click.option("--list", "is_list", is_flag=True, help="list the plugin's own placements instead")
@click.pass_context
def plan(
    ctx: click.Context, devices: str, tensor_parallel_size: int | None, style: str, is_list: bool, **given: Any
) -> None:
    """Say what a model's parts take, and propose a placement for these devices, or judge that of --placement.

    Reads headers of weights only; of a hub id that is not here yet, the configuration only. Exits with 1 if not even
    one request of full length fits.
    """
    settings = options.collect(given, None)
    if is_list:
        _list(options.choose_plugin(settings.get("plugin")))
        return
    found = read_devices(devices)
    engine = options.engine_config(settings)

    from mstar import planning
    from mstar.model import find_model
    from mstar.placement import Placement
    from mstar.plugin import checkpoint
    from mstar.worker.modules import model_dtype

    model = find_model(engine, download=partial(checkpoint.download_snapshot, only=_CONFIGURATION))
    sizes = planning.module_sizes(model, engine)
    demand = planning.Demand.of(engine, model)
    if engine.placement is None:
        groups = planning.propose(model, sizes, found, demand, ranks=tensor_parallel_size)
        placement = Placement.of(groups, model.graph, tasks=model.plugin.spec.tasks)
    elif tensor_parallel_size is not None:
        raise ConfigError("--placement says its own tensor_parallel; leave --tensor-parallel-size out")
    else:
        placement = Placement.wanted(engine, model.plugin.spec, model.graph)
    source = "the placement for these devices" if engine.placement is None else f"--placement {engine.placement}"
    planning.check(model, placement, source=source)
    processes = planning.processes(placement, sizes, found)
    is_float32 = model_dtype(engine, model.checkpoint).itemsize == 4
    verdict = planning.judge(processes, found, demand, is_float32=is_float32)
    is_table = style == "table"
    if is_table:
        _print(processes, found, demand)
    for line in _words(verdict, placement, demand):
        click.echo(line, err=not is_table)
    if engine.placement is None:
        click.echo(("\n" if is_table else "") + planning.as_yaml(placement.groups), nl=False)
    ctx.exit(0 if verdict.seqs else 1)


def _list(plugin: str) -> None:
    """The plugin's own placements: name, file, and the comment it begins with."""
    from mstar.placement import examples
    from mstar.plugin import loader

    for name, path in examples(loader.load(plugin).spec).items():
        lines = path.read_text(encoding="utf-8").splitlines()
        about = lines[0].lstrip("# ") if lines and lines[0].startswith("#") else ""
        click.echo(f"{name:16}{about}  ({path})")


# ---- devices ----------------------------------------------------------------------------------------------------


def read_devices(text: str) -> list[Device]:
    """The devices of --devices. Raises ConfigError for what is none, or has no size that can be found out."""
    from mstar.planning import Device

    if text == "auto":
        return [Device(f"cuda:{index}", size) for index, size in enumerate(gpus())] or [Device("cpu", host_memory())]
    entries = [entry.strip() for entry in text.split(",")]
    num_cpus = sum(entry.partition("=")[0] == "cpu" for entry in entries)
    found: list[Device] = []
    for entry in entries:
        name, given, size = entry.partition("=")
        index = re.fullmatch(r"cpu|cuda:(\d+)", name)
        if index is None:
            wanted = "expected auto, or cpu or cuda:N, each with =SIZE or without, such as cuda:0=80GiB"
            raise ConfigError(f"--devices names {entry!r}; {wanted}")
        if given:
            memory = _size(size, entry)
        elif name == "cpu":
            memory = host_memory() // num_cpus
        else:
            there = gpus()
            if int(index[1]) >= len(there):
                number = f"{len(there)} GPUs are seen here (by nvidia-ml-py)"
                raise ConfigError(f"--devices names {name!r}, but {number}; give its memory: {name}=80GiB")
            memory = there[int(index[1])]
        if name != "cpu" and any(device.name == name for device in found):
            raise ConfigError(f"--devices names {name!r} twice; name each GPU once")
        found.append(Device(name, memory))
    return found


def _size(text: str, entry: str) -> int:
    try:
        memory: int = config.flags(config.EngineConfig)["kv_cache_memory_bytes"].parse(text)
    except ValueError as error:
        raise ConfigError(f"--devices names {entry!r}: {error}") from error
    if memory < _LEAST_BYTES:
        raise ConfigError(
            f"--devices names {entry!r}, a device of {memory} bytes; give a size with its unit, such as 80GiB"
        )
    return memory


def gpus() -> list[int]:
    """Memory of each GPU in bytes, as nvidia-ml-py tells it; none without that or a driver."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles]
    finally:
        pynvml.nvmlShutdown()


def host_memory() -> int:
    """Bytes that this process may use: what the machine has available, or what its control group allows."""
    available = re.search(r"MemAvailable:\s+(\d+) kB", _MEMORY.read_text()) if _MEMORY.exists() else None
    total = int(available[1]) * 1024 if available else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(_QUOTA.read_text()))
    except (OSError, ValueError):  # no such group, or "max": no limit
        return total


# ---- what is said -----------------------------------------------------------------------------------------------


def _print(processes: Sequence[Process], devices: Sequence[Device], demand: Demand) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("device", "group", "module", "weights", "KV", "tokens", "slots", "activations", title="GiB")
    taken: dict[str, int] = {}
    for process in processes:
        tokens = process.kv_bytes(demand) // process.token_bytes if process.token_bytes else 0
        for number, module in enumerate(process.modules):
            first = (process.device.name, process.label) if not number else ("", "")
            kv = tokens * module.kv_token_bytes
            weights = _gib(module.weights_bytes) + (" (by configuration)" if module.is_counted else "")
            slots = _gib(module.row_bytes * (demand.seqs + 1))
            held = f"{tokens:,}" if kv else ""
            table.add_row(*first, module.name, weights, _gib(kv), held, slots, _gib(module.activation_bytes))
        table.add_section()
        total = process.fixed_bytes(demand) + process.kv_bytes(demand)
        taken[process.device.name] = taken.get(process.device.name, 0) + total
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    for name, total in taken.items():
        usable = sum(device.usable_bytes for device in devices if device.name == name)
        click.echo(f"{name}: {total / GIB:.2f} GiB with its processes, of {usable / GIB:.2f} usable")


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}" if size >= GIB / 200 else "<0.01" if size else ""


def _words(verdict: Verdict, placement: Placement, demand: Demand) -> list[str]:
    if verdict.seqs >= demand.seqs:
        at_once = demand.seqs * placement.num_replicas
        return [f"fits: {at_once} requests of {demand.length:,} tokens at once"]
    if verdict.seqs:
        said = (
            f"fits, but the KV cache holds {verdict.seqs} of {demand.seqs} requests of {demand.length:,} tokens at once"
        )
        head = f"{said}; others wait or are swapped. For all of them:"
    else:
        lacks = ", ".join(f"{name} lacks {size / GIB:.2f} GiB" for name, size in verdict.missing.items())
        head = f"does not fit: {lacks} for one request of {demand.length:,} tokens. What helps:"
    return [head, *(f"  - {advice}" for advice in verdict.advice)]
