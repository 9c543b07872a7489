"""What a compiled artifact depends on, and the digest of it that names the artifact in a store.

Digests are the same in every process: values become JSON in one spelling, and nothing of a process's own (addresses,
hash seeds, absolute paths) enters. Imports torch only to describe the machine.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import inspect
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What compiled code depends on besides the program: see `current_machine`."""

    python: str  # version and ABI, with the platform
    torch: str  # version, with the commit it was built from
    compiler: str  # command and what it says of its version; empty where there is none
    processor: str  # architecture, model and instruction sets
    accelerator: str  # empty for the CPU; else name, capability, driver and CUDA version


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKey:
    """Everything that invalidates an artifact. Mappings are given as `canonical` text, so that a key cannot change.

    Args:
        name: which artifact of the plugin this is, such as the path of a method.
        source: `source_hash` of the captured code.
        config, shapes, options: `canonical` text of the model's configuration; of buckets and ranges of dynamic
            dimensions; of overrides of the compiler's settings.
        threads: what the code was compiled for; 0 where it does not depend on them.
    """

    machine: Machine
    plugin: str
    plugin_version: str
    name: str
    source: str
    dtype: str
    threads: int
    config: str = "{}"
    shapes: str = "{}"
    options: str = "{}"

    def __post_init__(self) -> None:
        for name in ("config", "shapes", "options"):
            text = getattr(self, name)
            try:
                is_canonical = canonical(json.loads(text)) == text
            except (TypeError, ValueError):
                is_canonical = False
            if not is_canonical:
                raise ValueError(f"{name} of a key is {text!r:.200}; give the text that canonical(value) makes")

    @property
    def digest(self) -> str:
        """The name of the artifact in a store."""
        return digest_of(self.describe())

    def describe(self) -> dict[str, Any]:
        """The key in plain values; `digest_of` them is the digest."""
        return dataclasses.asdict(self)


def digest_of(description: Mapping[str, Any]) -> str:
    """SHA-256 of a described key, in hexadecimal."""
    return hashlib.sha256(canonical(description).encode()).hexdigest()


def canonical(value: Any) -> str:
    """JSON in one spelling. Raises TypeError for values without one, such as objects that only have an address."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=canonical)
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value)
    raise TypeError(f"{value!r:.100} cannot be part of a key: a {type(value).__name__} is not plain data")


# ---- source code -------------------------------------------------------------------------------------------------


def source_hash(*things: Any) -> str:
    """Hash of the files that define functions, classes, modules and `torch.nn.Module` instances, or of given paths.

    Follows imports, lazy ones too, inside the packages that the things belong to, so that a change anywhere below
    is seen. Not seen: modules imported by computed names, and what a function closes over; put those into the config.
    """
    hashes: dict[str, str] = {}
    pending: dict[str, Path] = {}
    for number, thing in enumerate(things):
        if isinstance(thing, Path):
            hashes[f"{number} {thing.name}"] = _hash_file(thing)
            continue
        definitions = list(_definitions(thing))
        hashes[f"{number}"] = " ".join(sorted({qualified for _, qualified in definitions}))
        for module, _ in definitions:
            if getattr(module, "__file__", None) is None:
                raise TypeError(f"{module.__name__} has no file to hash; give the paths of its sources")
            pending[module.__name__] = Path(str(module.__file__))
    tops = {name.partition(".")[0] for name in pending}
    roots = {top: [Path(folder) for folder in getattr(sys.modules[top], "__path__", ())] for top in tops}
    while pending:
        name, file = pending.popitem()
        hashes[name] = _hash_file(file)
        for found in _imported(name, file) if file.suffix == ".py" else ():
            top, *rest = found.split(".")
            source = _source(roots.get(top, []), rest)
            if source is not None and found not in hashes:
                pending[found] = source
    return hashlib.sha256(canonical(hashes).encode()).hexdigest()


def _definitions(thing: Any) -> Iterator[tuple[ModuleType, str]]:
    """Modules that define a thing, each with the qualified name it has there; torch has its own place in a key."""
    thing = thing.func if isinstance(thing, functools.partial) else inspect.unwrap(thing) if callable(thing) else thing
    if isinstance(thing, ModuleType):
        yield thing, thing.__name__
    elif isinstance(thing, type):
        for base in thing.__mro__:
            if base.__module__.partition(".")[0] not in {"torch", *sys.stdlib_module_names}:
                yield sys.modules[base.__module__], f"{base.__module__}.{base.__qualname__}"
    elif inspect.isfunction(thing):
        yield sys.modules[thing.__module__], f"{thing.__module__}.{thing.__qualname__}"
    elif inspect.ismethod(thing):
        yield from _definitions(thing.__func__)
        yield from _definitions(thing.__self__)
    elif callable(getattr(thing, "modules", None)):
        for kind in {type(module) for module in thing.modules()}:
            yield from _definitions(kind)
    else:
        raise TypeError(f"{thing!r:.100} has no source to hash; give a function, class, module or path")


def _source(folders: list[Path], rest: list[str]) -> Path | None:
    """File of a module of a package that lies in folders, found without importing it."""
    places = (folder.joinpath(*rest) for folder in folders)
    files = (file for place in places for file in (place / "__init__.py", place.with_name(f"{place.name}.py")))
    return next((file for file in files if file.is_file()), None)


def _imported(name: str, file: Path) -> Iterator[str]:
    """Names of modules that a file may import, with the packages around them."""
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *filter(None, [node.module])])
            names = [f"{start}.{alias.name}" for alias in node.names]
        else:
            continue
        for found in names:
            parts = found.split(".")
            yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _hash_file(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


# ---- this machine ------------------------------------------------------------------------------------------------


@functools.cache
def current_machine(device: str = "cpu", *, compiler: str | None = None) -> Machine:
    """Describe this machine for code that runs on a device; the C++ compiler is CXX or c++ unless given."""
    import torch

    return Machine(
        python=f"{platform.python_implementation()} {platform.python_version()} {sysconfig.get_platform()}",
        torch=f"{torch.__version__} {torch.version.git_version}",
        compiler=_compiler(compiler or os.environ.get("CXX") or "c++"),
        processor=_processor(),
        accelerator="" if device == "cpu" else _accelerator(device),
    )


def _compiler(command: str) -> str:
    if shutil.which(command) is None:
        return ""
    answer = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60, check=True)
    return f"{command}: {answer.stdout.strip()}"


def _processor() -> str:
    """What -march=native depends on, as far as the system tells."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else [platform.processor()]
    facts = ("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), *dict.fromkeys(line for line in lines if line.startswith(facts))])


def _accelerator(device: str) -> str:
    import torch

    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    driver = Path("/proc/driver/nvidia/version")
    version = driver.read_text().splitlines()[0] if driver.exists() else "unknown driver"
    return f"{name}, capability {capability}, CUDA {torch.version.cuda}, {version}"
