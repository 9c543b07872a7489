"""Builds C++ kernels for this machine's CPU, once, into the compile cache. Runs in workers, at first use.

Sources are plain functions over pointers, without torch's headers, so that a build takes a few seconds. `vectors.h`
beside this module is what they share.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from mstar.config import environment
from mstar.errors import ConfigError
from mstar_compile_cache import CacheKey, Store, StoreError, canonical, current_machine, source_hash

_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-ffp-contract=off")
_HEADER = Path(__file__).with_name("vectors.h")
_BUILT = "kernel.so"
_logger = logging.getLogger(__name__)


def function(
    source: Path, dtype: torch.dtype, arguments: Sequence[Any], *, name: str | None = None
) -> Callable[..., None] | None:
    """The function of a source file that is named after it, or as said, and a dtype, for example `linear_bfloat16`.

    Returns None for other dtypes than float32 and bfloat16, and where the file cannot be built.
    """
    found = library(source) if dtype in (torch.float32, torch.bfloat16) else None
    if found is None:
        return None
    entry = found[f"{name or source.stem}_{dtype}".replace("torch.", "")]
    entry.argtypes, entry.restype = arguments, None
    return entry


@functools.cache
def library(source: Path, *, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL | None:
    """The kernels of a source file, built if this machine has not built them before; `mode` is of `ctypes.CDLL`.

    Returns None, after one warning, where they cannot be built: callers then go without.
    """
    try:
        return _open(source, compiler=environment().compiler, store=compile_cache(), mode=mode)
    except (OSError, subprocess.SubprocessError, StoreError, ConfigError) as error:
        detail = getattr(error, "stderr", None) or error
        _logger.warning(
            "kernels of %s cannot be built, so slower code runs; install g++ or set CXX: %s",
            source.name,
            str(detail).strip()[-500:],
        )
        return None


def compile_cache() -> Store:
    """This process's store of kernels and compiled methods, never closed: what is loaded is not evicted.

    Raises ConfigError if its folder cannot be used.
    """
    return _store(environment().cache / "compiled")


@functools.cache
def _store(root: Path) -> Store:
    try:
        return Store(root)
    except (StoreError, OSError) as error:
        raise ConfigError(f"no compiled code can be kept in {root} (MSTAR_CACHE): {error}") from error


@functools.cache
def try_compiler(compiler: str) -> None:
    """Build and open a kernel that does nothing. Raises OSError or SubprocessError where that fails."""
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "nothing.cpp"), Path(folder, _BUILT)
        source.write_text('extern "C" int nothing() { return 0; }\n')
        _run(compiler, *_FLAGS, "-shared", str(source), "-o", str(built))
        ctypes.CDLL(str(built))


def _open(source: Path, *, compiler: str, store: Store, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    key = CacheKey(
        machine=current_machine(compiler=compiler),
        plugin="mstar",
        plugin_version="",
        name=source.name,
        source=source_hash(source, _HEADER),
        dtype="any",
        threads=0,
        options=canonical(_FLAGS),
    )

    def build(folder: Path) -> None:
        compiled = folder / "kernel.o"
        _run(compiler, *_FLAGS, f"-I{_HEADER.parent}", "-c", str(source), "-o", str(compiled))
        # Linked without -fopenmp, to share the threads of torch's own OpenMP instead of starting a second team.
        _run(compiler, "-shared", str(compiled), "-o", str(folder / _BUILT))
        compiled.unlink()

    folder, _ = store.get_or_build(key, build)
    return ctypes.CDLL(str(folder / _BUILT), mode=mode)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
