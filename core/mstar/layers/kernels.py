"""Builds C++ kernels for this machine's CPU, once, into the cache folder. Runs in workers, at first use.

Sources are plain functions over pointers, without torch's headers, so that a build takes a few seconds. `vectors.h`
beside this module is what they share.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from mstar.config import environment

_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-ffp-contract=off")
_HEADER = Path(__file__).with_name("vectors.h")
_logger = logging.getLogger(__name__)


def function(source: Path, dtype: torch.dtype, arguments: Sequence[Any]) -> Callable[..., None] | None:
    """The function of a source file that is named after it and a dtype, for example `linear_bfloat16`.

    Returns None for other dtypes than float32 and bfloat16, and where the file cannot be built.
    """
    found = library(source) if dtype in (torch.float32, torch.bfloat16) else None
    if found is None:
        return None
    entry = found[f"{source.stem}_{dtype}".replace("torch.", "")]
    entry.argtypes, entry.restype = arguments, None
    return entry


@functools.cache
def library(source: Path, *, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL | None:
    """The kernels of a source file, built if this machine has not built them before; `mode` is of `ctypes.CDLL`.

    Returns None, after one warning, where they cannot be built: callers then use torch's own.
    """
    try:
        return _open(source, compiler=environment().compiler, folder=environment().cache / "kernels", mode=mode)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        _logger.warning(
            "kernels of %s cannot be built, so torch's slower ones are used; install g++ or set CXX: %s",
            source.name,
            str(detail).strip()[-500:],
        )
        return None


def _open(source: Path, *, compiler: str, folder: Path, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    version = _run(compiler, "--version")
    identity = "\0".join((source.read_text(), _HEADER.read_text(), *_FLAGS, compiler, version, _processor()))
    target = folder / f"{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            compiled, linked = f"{scratch}/kernel.o", f"{scratch}/kernel.so"
            _run(compiler, *_FLAGS, f"-I{_HEADER.parent}", "-c", str(source), "-o", compiled)
            # Linked without -fopenmp, to share the threads of torch's own OpenMP instead of starting a second team.
            _run(compiler, "-shared", compiled, "-o", linked)
            os.replace(linked, target)
    return ctypes.CDLL(str(target), mode=mode)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


def _processor() -> str:
    """What -march=native depends on."""
    described = Path("/proc/cpuinfo")
    if not described.exists():
        return platform.processor() or platform.machine()
    lines = described.read_text().splitlines()
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(("model name", "flags", "Features"))))
