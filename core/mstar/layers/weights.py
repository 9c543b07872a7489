"""Reads checkpoints, strictly and one tensor at a time, into modules that may have been built on the meta device.

Runs in workers at start-up. Knows the files' formats, not what the weights mean: plugins give the renaming rules.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from torch import Tensor, nn

from mstar.errors import ConfigError
from mstar.layers.linear import MergedLinear
from mstar.observe import progress

_SHOWN = 8  # names of each kind in an error

Rename = Callable[[str], str | None] | Mapping[str, str]


# ---- files ----------------------------------------------------------------------------------------------

# What may hold the weights of a folder, best first: an index before a single file, safetensors before pickles.
_FILES = (
    *("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin"),
    *("*.safetensors", "*.bin", "*.pt", "*.pth"),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a checkpoint. Its memory is the file's, read when touched; it must not be written."""

    file: Path
    tensor: Tensor


class Weights:
    """The tensors of a checkpoint, by name, file by file; only headers are read until one is touched.

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
        for path in _shards(folder / file if file else _find(folder)):
            for name, tensor in _tensors(path).items():
                if name in entries:
                    raise ConfigError(f"{folder} holds {name!r} twice, in {entries[name].file.name} and {path.name}")
                entries[name] = Entry(path, tensor)
        return cls(folder / file if file else folder, entries)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.entries)

    @property
    def num_bytes(self) -> int:
        return sum(entry.tensor.nbytes for entry in self.entries.values())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, entry.tensor) for name, entry in self.entries.items())


def _find(folder: Path) -> Path:
    for pattern in _FILES:
        found = sorted(folder.glob(pattern))
        if len(found) > 1:
            raise ConfigError(
                f"{folder} holds several weight files and no index: {_list([path.name for path in found])}"
            )
        if found:
            return found[0]
    raise ConfigError(f"{folder} holds no weights: no {', '.join(_FILES)}")


def _shards(path: Path) -> list[Path]:
    """The files of an index, or the file itself."""
    if not path.exists():
        raise ConfigError(f"{path.parent} has no {path.name}")
    if not path.name.endswith(".index.json"):
        return [path]
    _refuse_pointer(path)
    try:
        shards = sorted(set(json.loads(path.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not an index of weights: {error!r}; download the checkpoint again") from error
    missing = [name for name in shards if not (path.parent / name).exists()]
    if missing:
        raise ConfigError(f"{path.name} names files that {path.parent} lacks: {_list(missing)}; download them")
    return [path.parent / name for name in shards]


def _tensors(path: Path) -> dict[str, Tensor]:
    """Tensors by name, mapped into memory; mappings within a pickle's mappings get dotted names."""
    _refuse_pointer(path)
    try:
        if path.suffix == ".safetensors":
            with safetensors.safe_open(path, framework="pt") as opened:
                return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return dict(_flat(torch.load(path, map_location="cpu", weights_only=True, mmap=True)))
    except (safetensors.SafetensorError, RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise ConfigError(
            f"cannot read {path}: {str(error).splitlines()[0] if str(error) else error!r}; "
            f"it may be incomplete (it has {path.stat().st_size:,} bytes): download it again"
        ) from error


def _flat(content: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(content, Tensor):
        yield prefix, content
    elif isinstance(content, Mapping):
        for key, child in content.items():
            yield from _flat(child, f"{prefix}.{key}" if prefix else str(key))


def _refuse_pointer(path: Path) -> None:
    with path.open("rb") as opened:
        if opened.read(34).startswith(b"version https://git-lfs"):
            raise ConfigError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` in {path.parent}")


def _list(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


# ---- modules --------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """What of a checkpoint's tensor goes into a parameter, or into one projection of it.

    A module's `pieces` say it by parameter name, where that is not all: one for each projection, or one for all. What
    they do not fill is zero.

    Args:
        dim: along which it is cut.
        whole: the tensor's size there.
    """

    dim: int
    start: int
    length: int
    whole: int


class _Home(NamedTuple):
    """Where a tensor goes: first, the first name of the same memory; pieces, what of it, nothing if all."""

    first: str
    memory: Tensor
    pieces: tuple[Piece, ...] = ()

    @property
    def shape(self) -> list[int]:
        """Of the tensor."""
        shape = list(self.memory.shape)
        if self.pieces:
            shape[self.pieces[0].dim] = sum(piece.whole for piece in self.pieces)
        return shape

    def copies(self, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of the tensor, and the memory each fills."""
        if not self.pieces:
            yield source, self.memory
        offset = at = 0
        for dim, start, length, whole in self.pieces:
            if length:
                yield source.narrow(dim, offset + start, length), self.memory.narrow(dim, at, length)
            offset, at = offset + whole, at + length


def load_into(
    module: nn.Module,
    weights: Weights,
    *,
    rename: Rename | None = None,
    ignore: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Fill a module's parameters and persistent buffers from a checkpoint, which must match exactly.

    Args:
        module: may be on the meta device. Modules with non-persistent buffers have `reset_buffers(device)`.
        rename: checkpoint name -> the module's, as a function, or as patterns (whole names) with templates; names no
            pattern matches stay. "layers.0.qkv.weight[1]" is the second projection of a `MergedLinear`. A function
            may return None for names it does not know.
        ignore: patterns of checkpoint names to leave out.
        dtype: of floating-point parameters and buffers; None keeps the module's.

    Parameters that share memory need one of their names in the checkpoint; of several the first registered counts.
    Raises ConfigError that lists missing, unexpected and misshapen tensors.
    """
    _materialise(module, dtype=dtype, device=torch.device(device))
    plan = _plan(module, weights, rename=rename, ignore=ignore)
    total = sum(source.nbytes for source, _ in plan)
    with progress(f"loading {len(plan)} tensors of {weights.source.name}", total, "bytes") as advance, torch.no_grad():
        for source, memory in plan:
            memory.copy_(source)
            advance(source.nbytes)
    module.eval()


def _materialise(module: nn.Module, *, dtype: torch.dtype | None, device: torch.device) -> None:
    """Give every parameter memory on the device; those that were one stay one."""
    made: dict[int, Tensor] = {}

    def remade(old: Tensor) -> Tensor:
        if id(old) not in made:
            wanted = dtype if dtype is not None and old.is_floating_point() else old.dtype
            new = torch.empty_like(old, dtype=wanted, device=device) if old.is_meta else old.detach().to(device, wanted)
            made[id(old)] = nn.Parameter(new, requires_grad=False) if isinstance(old, nn.Parameter) else new
        return made[id(old)]

    for child in module.modules():
        pieces: Mapping[str, tuple[Piece, ...]] = getattr(child, "pieces", {})
        for name, parameter in child.named_parameters(recurse=False, remove_duplicate=False):
            setattr(child, name, remade(parameter))
            if name in pieces and sum(p.length for p in pieces[name]) < parameter.shape[pieces[name][0].dim]:
                remade(parameter).detach().zero_()
        temporary = child._non_persistent_buffers_set
        resets = temporary and hasattr(child, "reset_buffers")
        for name, buffer in child.named_buffers(recurse=False, remove_duplicate=False):
            if name not in temporary:
                setattr(child, name, remade(buffer))
            elif not resets:
                assert not buffer.is_meta, f"{type(child).__name__} needs reset_buffers(device) to remake {name!r}"
                setattr(child, name, buffer.to(device))
        if resets:
            child.reset_buffers(device)  # type: ignore[operator]


def _plan(
    module: nn.Module, weights: Weights, *, rename: Rename | None, ignore: Sequence[str]
) -> list[tuple[Tensor, Tensor]]:
    """Tensors of the checkpoint, and the memory each fills."""
    homes, together = _homes(module)
    translate = _translator(rename)
    filled: dict[str, str] = {}  # the module's name -> the checkpoint's
    unexpected, misshapen = [], []
    for name, entry in weights.entries.items():
        if any(re.fullmatch(pattern, name) for pattern in ignore):
            continue
        target = translate(name)
        if target is None or target not in homes:
            unexpected.append(name)
        elif target in filled:
            unexpected.append(f"{name} (as {filled[target]})")
        else:
            filled[target] = name
            shape, wanted = list(entry.tensor.shape), homes[target].shape
            if shape != wanted:
                misshapen.append(f"{name}: {shape} in {entry.file.name}, the model has {wanted}")
    plan: dict[str, tuple[_Home, Tensor]] = {}  # by the first of the names that share memory
    for target, home in homes.items():
        if target in filled:
            plan.setdefault(home.first, (home, weights.entries[filled[target]].tensor))
    missing = [part for name, parts in together.items() if name not in plan for part in parts if part not in plan]
    problems = {"missing": missing, "unexpected": unexpected, "wrong shape": misshapen}
    if any(problems.values()):
        listed = "; ".join(f"{kind}: {_list(names)}" for kind, names in problems.items() if names)
        raise ConfigError(f"the weights in {weights.source} do not fit the model; {listed}")
    return [copy for home, source in plan.values() for copy in home.copies(source)]


def _homes(module: nn.Module) -> tuple[dict[str, _Home], dict[str, list[str]]]:
    """Where tensors may go, by name; and the names, of parts or itself, that together fill each parameter."""
    homes: dict[str, _Home] = {}
    together: dict[str, list[str]] = {}
    first_names: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        first = first_names.setdefault(id(tensor), name)
        path, _, own = name.rpartition(".")
        owner = module.get_submodule(path)
        pieces: tuple[Piece, ...] = getattr(owner, "pieces", {}).get(own, ())
        homes[name] = _Home(first, tensor.detach(), pieces)
        is_split = isinstance(owner, MergedLinear) and len(pieces) > 1
        widths = [piece.length for piece in pieces] if is_split else getattr(owner, "widths", ())
        parts = tensor.detach().split(widths) if isinstance(owner, MergedLinear) else ()
        for index, part in enumerate(parts):
            homes[f"{name}[{index}]"] = _Home(f"{first}[{index}]", part, pieces[index : index + 1] or pieces)
        together.setdefault(first, [f"{first}[{index}]" for index in range(len(parts))] or [first])
    return homes, together


def _translator(rename: Rename | None) -> Callable[[str], str | None]:
    if callable(rename):
        return rename
    rules = [(re.compile(pattern), template) for pattern, template in (rename or {}).items()]

    def translate(name: str) -> str:
        matches = ((pattern.fullmatch(name), template) for pattern, template in rules)
        return next((match.expand(template) for match, template in matches if match), name)

    return translate
