"""Reads checkpoints, strictly and one tensor at a time, into modules that may have been built on the meta device.

Runs in workers at start-up. Knows the files' formats, not what the weights mean: plugins give the renaming rules.
"""

from __future__ import annotations

import json
import logging
import pickle
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from torch import Tensor, nn

from mstar.errors import ConfigError
from mstar.layers.linear import MergedLinear

_logger = logging.getLogger(__name__)
_SHOWN = 8  # names of each kind in an error

Rename = Callable[[str], str | None] | Mapping[str, str]


# ---- files ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor's place in a checkpoint."""

    file: Path
    shape: tuple[int, ...]
    num_bytes: int


class Weights:
    """The tensors of a checkpoint, by name; only headers are read until one is asked for.

    Example:
        weights = Weights.open(folder)
        for name, tensor in weights: ...
    """

    def __init__(self, source: Path, entries: Mapping[str, Entry]) -> None:
        self.source = source
        self.entries = entries

    @classmethod
    def open(cls, folder: Path | str, *, file: str | None = None) -> Weights:
        """Find the weights in a folder: safetensors (index or single file), else torch's own format.

        Args:
            folder: the checkpoint's folder, or a weights file.
            file: which file (or index) of the folder, where it holds several.

        Raises ConfigError when nothing is found, or a file is missing, damaged or a Git LFS pointer.
        """
        folder = Path(folder)
        if folder.is_file():
            folder, file = folder.parent, folder.name
        if not folder.is_dir():
            raise ConfigError(f"checkpoint folder {folder} does not exist; check --model")
        entries: dict[str, Entry] = {}
        for path in _files(folder, file):
            for name, entry in _headers(path).items():
                if name in entries:
                    raise ConfigError(f"{folder} holds {name!r} twice, in {entries[name].file.name} and {path.name}")
                entries[name] = entry
        return cls(folder / file if file else folder, entries)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.entries)

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries.values())

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """The named tensors on the CPU, file by file; each may share a file's memory and must not be written."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.entries[name].file, []).append(name)
        for path, chosen in by_file.items():
            with _damage(path):
                if path.suffix == ".safetensors":
                    with safetensors.safe_open(path, framework="pt") as opened:
                        for name in chosen:
                            yield name, opened.get_tensor(name)
                else:
                    content = _read_pickle(path)
                    for name in chosen:
                        yield name, content.pop(name)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.read(self.names)


_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLES = ("model.safetensors", "pytorch_model.bin")


def _files(folder: Path, file: str | None) -> list[Path]:
    if file is not None:
        names = [file]
    else:
        # An index wins over a single file, safetensors over pickles.
        ranked = (_INDEXES[0], _SINGLES[0], _INDEXES[1], _SINGLES[1])
        names = [next((name for name in ranked if (folder / name).exists()), "")]
        if not names[0]:
            names = _only_file(folder)
    path = folder / names[0]
    if not path.exists():
        raise ConfigError(f"{folder} has no {path.name}")
    if not path.name.endswith(".index.json"):
        return [path]
    _refuse_pointer(path)
    try:
        mapping = json.loads(path.read_text())["weight_map"]
        shards = sorted(set(mapping.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not an index of weights: {error!r}; download the checkpoint again") from error
    missing = [name for name in shards if not (folder / name).exists()]
    if missing:
        raise ConfigError(f"{path.name} names files that {folder} lacks: {_list(missing)}; download them")
    return [folder / name for name in shards]


def _only_file(folder: Path) -> list[str]:
    for pattern in ("*.safetensors", "*.bin", "*.pt", "*.pth"):
        found = sorted(path.name for path in folder.glob(pattern))
        if len(found) == 1:
            return found
        if found:
            raise ConfigError(f"{folder} holds several weight files and no index: {_list(found)}")
    raise ConfigError(f"{folder} holds no weights: no {', '.join(_INDEXES + _SINGLES)}, *.safetensors, *.bin or *.pt")


def _headers(path: Path) -> dict[str, Entry]:
    _refuse_pointer(path)
    with _damage(path):
        if path.suffix == ".safetensors":
            return _safetensors_headers(path)
        return {
            name: Entry(path, tuple(tensor.shape), tensor.numel() * tensor.element_size())
            for name, tensor in _read_pickle(path).items()
        }


def _safetensors_headers(path: Path) -> dict[str, Entry]:
    with safetensors.safe_open(path, framework="pt"):
        pass  # checks the header against the file's size
    with path.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    header.pop("__metadata__", None)
    return {
        name: Entry(path, tuple(value["shape"]), value["data_offsets"][1] - value["data_offsets"][0])
        for name, value in header.items()
    }


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """Tensors by name; mappings within mappings get dotted names, other values are left out."""
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    tensors: dict[str, Tensor] = {}

    def collect(value: Any, prefix: str) -> None:
        if isinstance(value, Tensor):
            tensors[prefix] = value
        elif isinstance(value, Mapping):
            for key, child in value.items():
                collect(child, f"{prefix}.{key}" if prefix else str(key))

    collect(content, "")
    return tensors


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Errors of readers, by operators' lights."""
    try:
        yield
    except (safetensors.SafetensorError, RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise ConfigError(
            f"cannot read {path}: {str(error).splitlines()[0] if str(error) else error!r}; "
            f"it may be incomplete (it has {path.stat().st_size:,} bytes): download it again"
        ) from error


def _refuse_pointer(path: Path) -> None:
    with path.open("rb") as opened:
        if opened.read(34).startswith(b"version https://git-lfs"):
            raise ConfigError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` in {path.parent}")


def _list(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


# ---- modules --------------------------------------------------------------------------------------------

_PART = re.compile(r"(.+)\[(\d+)\]")


def load_into(
    module: nn.Module,
    weights: Weights,
    *,
    rename: Rename | None = None,
    ignore: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: bool = True,
) -> None:
    """Fill a module's parameters and persistent buffers from a checkpoint, which must match exactly.

    Args:
        module: may be on the meta device. Modules with non-persistent buffers have `reset_buffers(device)`.
        rename: checkpoint name -> the module's, as a function, or as patterns (whole names) with templates; names no
            pattern matches stay. "layers.0.qkv.weight[1]" is the second projection of a `MergedLinear`. A function
            may return None for names it does not know.
        ignore: patterns of checkpoint names to leave out.
        dtype: of floating-point parameters and buffers; None keeps the module's.
        progress: show a bar where standard error is a terminal.

    Parameters that share memory need one of their names in the checkpoint; of several the first registered counts.
    Raises ConfigError that lists missing, unexpected and misshapen tensors.
    """
    started = time.monotonic()
    _materialise(module, dtype=dtype, device=torch.device(device))
    plan = _plan(module, weights, rename=rename, ignore=ignore)
    total = sum(weights.entries[name].num_bytes for name in plan)
    with _bar(weights.source.name, total=total, shown=progress) as advance, torch.no_grad():
        for name, tensor in weights.read(list(plan)):
            plan[name].copy_(tensor)
            advance(weights.entries[name].num_bytes)
    module.eval()
    took = time.monotonic() - started
    _logger.info("loaded %d tensors, %.2f GB, in %.1f s from %s", len(plan), total / 1e9, took, weights.source)


def _materialise(module: nn.Module, *, dtype: torch.dtype | None, device: torch.device) -> None:
    """Give every parameter memory on the device; those that were one stay one."""
    made: dict[int, Tensor] = {}

    def move(old: Tensor) -> Tensor:
        wanted = dtype if dtype is not None and old.is_floating_point() else old.dtype
        if id(old) not in made:
            if old.is_meta:
                made[id(old)] = torch.empty(old.shape, dtype=wanted, device=device)
            else:
                made[id(old)] = old.detach().to(device, wanted)
        return made[id(old)]

    replaced: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in replaced:
                replaced[id(parameter)] = nn.Parameter(move(parameter), requires_grad=False)
            setattr(child, name, replaced[id(parameter)])
        temporary = child._non_persistent_buffers_set
        for name, buffer in child.named_buffers(recurse=False, remove_duplicate=False):
            if name not in temporary:
                setattr(child, name, move(buffer))
            elif not hasattr(child, "reset_buffers"):
                assert not buffer.is_meta, f"{type(child).__name__} needs reset_buffers(device) to remake {name!r}"
                setattr(child, name, buffer.to(device))
        if temporary and hasattr(child, "reset_buffers"):
            child.reset_buffers(device)  # type: ignore[operator]


def _plan(module: nn.Module, weights: Weights, *, rename: Rename | None, ignore: Sequence[str]) -> dict[str, Tensor]:
    """Checkpoint name -> the memory it fills."""
    state = module.state_dict(keep_vars=True)
    first_name: dict[int, str] = {}
    for name, tensor in state.items():
        first_name.setdefault(id(tensor), name)
    order = {name: index for index, name in enumerate(state)}
    ignored = [re.compile(pattern) for pattern in ignore]
    translate = _translator(rename)
    plan: dict[str, Tensor] = {}
    fills: dict[str, dict[str, str]] = {}  # part of a parameter -> which of its names -> the checkpoint's name
    unexpected, misshapen = [], []
    for name, entry in weights.entries.items():
        if any(pattern.fullmatch(name) for pattern in ignored):
            continue
        target = translate(name)
        parameter, part = _split_part(target or "")
        if target is None or parameter not in state:
            unexpected.append(name)
            continue
        primary = first_name[id(state[parameter])]
        filled = fills.setdefault(f"{primary}[{part}]", {})
        if parameter in filled:
            unexpected.append(f"{name} (as {filled[parameter]})")
            continue
        filled[parameter] = name
        memory = _memory(module, parameter, part=part, state=state)
        if memory is None or tuple(memory.shape) != entry.shape:
            wanted = "no such part" if memory is None else list(memory.shape)
            misshapen.append(f"{name}: {list(entry.shape)} in {entry.file.name}, the model has {wanted}")
            continue
        plan[name] = memory.detach()
    for filled in fills.values():
        first = min(filled, key=order.__getitem__)
        for parameter in filled.keys() - {first}:
            plan.pop(filled[parameter], None)
    missing = _missing(module, first_name, filled=set(fills))
    if missing or unexpected or misshapen:
        problems = [
            f"{kind}: {_list(names)}"
            for kind, names in (("missing", missing), ("unexpected", unexpected), ("wrong shape", misshapen))
            if names
        ]
        raise ConfigError(f"the weights in {weights.source} do not fit the model; " + "; ".join(problems))
    return plan


def _translator(rename: Rename | None) -> Callable[[str], str | None]:
    if rename is None:
        return lambda name: name
    if callable(rename):
        return rename
    rules = [(re.compile(pattern), template) for pattern, template in rename.items()]

    def translate(name: str) -> str | None:
        for pattern, template in rules:
            if match := pattern.fullmatch(name):
                return match.expand(template)
        return name

    return translate


def _split_part(target: str) -> tuple[str, int | None]:
    match = _PART.fullmatch(target)
    return (match[1], int(match[2])) if match else (target, None)


def _memory(module: nn.Module, name: str, *, part: int | None, state: Mapping[str, Tensor]) -> Tensor | None:
    tensor = state[name]
    if part is None:
        return tensor
    owner = module.get_submodule(name.rpartition(".")[0])
    if not isinstance(owner, MergedLinear) or part >= len(owner.widths):
        return None
    start = sum(owner.widths[:part])
    return tensor[start : start + owner.widths[part]]


def _missing(module: nn.Module, first_name: Mapping[int, str], *, filled: set[str]) -> list[str]:
    missing = []
    for name in first_name.values():
        owner = module.get_submodule(name.rpartition(".")[0])
        if f"{name}[None]" in filled:
            continue
        if isinstance(owner, MergedLinear):
            missing += [f"{name}[{part}]" for part in range(len(owner.widths)) if f"{name}[{part}]" not in filled]
        else:
            missing.append(name)
    return missing


@contextmanager
def _bar(name: str, *, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    if not shown or not sys.stderr.isatty():
        yield lambda _: None
        return
    columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=total)
        yield lambda amount: bar.advance(task, amount)
