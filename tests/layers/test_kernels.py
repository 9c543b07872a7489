from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mstar.config import read_environment
from mstar.layers import kernels
from mstar_compile_cache import Store

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SOURCE = 'extern "C" int answer() { return %d; }\n'


def answer(source: Path, root: Path) -> tuple[int, int]:
    """What the kernel says, and how many builds a process needs that opens it."""
    with Store(root) as store:
        return kernels._open(source, compiler="c++", store=store)["answer"](), store.counters.builds


def test_a_kernel_is_built_once_and_again_when_its_source_changes(tmp_path: Path) -> None:
    source, root = tmp_path / "answer.cpp", tmp_path / "cache"
    found = []
    for value in (42, 42, 7):
        source.write_text(SOURCE % value)
        found.append(answer(source, root))
    assert found == [(42, 1), (42, 0), (7, 1)]
    with Store(root) as store:
        entries = store.entries()
        assert set(store.verify().values()) == {None}
    assert [(entry.key["plugin"], entry.key["name"], list(entry.files)) for entry in entries] == [
        ("mstar", "answer.cpp", ["kernel.so"])
    ] * 2
    assert all(path.stat().st_mode & 0o077 == 0 for path in (root, *(root / "entries").rglob("*")))


def test_a_kernel_is_built_again_when_what_all_share_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, root, header = tmp_path / "answer.cpp", tmp_path / "cache", tmp_path / "vectors.h"
    monkeypatch.setattr(kernels, "_HEADER", header)
    source.write_text('#include "vectors.h"\n' + SOURCE.replace("%d", "ANSWER"))
    for value in (42, 7):
        header.write_text(f"#define ANSWER {value}\n")
        assert answer(source, root) == (value, 1)


def test_processes_that_start_at_once_build_a_kernel_once(tmp_path: Path) -> None:
    source = tmp_path / "answer.cpp"
    source.write_text(SOURCE % 42)
    code = (
        "import sys\nfrom pathlib import Path\nfrom mstar.layers import kernels\n"
        "print(kernels.library(Path(sys.argv[1]))['answer'](), kernels.compile_cache().counters.builds)"
    )
    environment = os.environ | {"MSTAR_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", code, str(source)]
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert sorted(process.communicate(timeout=100)[0] for process in started) == ["42 0\n"] * 3 + ["42 1\n"]


def test_a_cache_that_others_can_write_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, root = tmp_path / "answer.cpp", tmp_path / "cache" / "compiled"
    source.write_text(SOURCE % 42)
    root.mkdir(parents=True)
    root.chmod(0o777)
    monkeypatch.setattr(kernels, "environment", lambda: read_environment({"MSTAR_CACHE": str(tmp_path / "cache")}))
    assert kernels.library(source) is None
    assert "chmod 700" in caplog.text


def test_functions_are_those_of_two_dtypes() -> None:
    source = Path(kernels.__file__).with_name("linear.cpp")
    if kernels.library(source) is None:
        pytest.skip("no compiler")
    names = [getattr(kernels.function(source, dtype, ()), "__name__", None) for dtype in DTYPES]
    assert names == ["linear_float32", "linear_bfloat16", None]


def test_without_a_compiler_there_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("this is not C++")
    with caplog.at_level(logging.WARNING):
        assert kernels.library(source) is None
        assert kernels.library(source) is None
    assert [record.getMessage()[:36] for record in caplog.records] == ["kernels of broken.cpp cannot be buil"]


def test_threads_are_those_of_torch() -> None:
    with Path("/proc/self/maps").open() as maps:
        before = {line.split()[-1] for line in maps if "libgomp" in line}
    library = kernels.library(Path(kernels.__file__).with_name("linear.cpp"))
    assert library is None or isinstance(library, ctypes.CDLL)
    with Path("/proc/self/maps").open() as maps:
        assert {line.split()[-1] for line in maps if "libgomp" in line} == before
