from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import pytest
import torch

from mstar.layers import kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SOURCE = 'extern "C" int answer() { return %d; }\n'


def test_a_kernel_is_built_once_and_again_when_its_source_changes(tmp_path: Path) -> None:
    source, folder = tmp_path / "answer.cpp", tmp_path / "cache"
    for value in (42, 42, 7):
        source.write_text(SOURCE % value)
        assert kernels._open(source, compiler="c++", folder=folder)["answer"]() == value
    assert len(list(folder.iterdir())) == 2
    assert folder.stat().st_mode & 0o077 == 0


def test_a_kernel_is_built_again_when_what_all_share_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, folder, header = tmp_path / "answer.cpp", tmp_path / "cache", tmp_path / "vectors.h"
    monkeypatch.setattr(kernels, "_HEADER", header)
    source.write_text('#include "vectors.h"\n' + SOURCE.replace("%d", "ANSWER"))
    for value in (42, 7):
        header.write_text(f"#define ANSWER {value}\n")
        assert kernels._open(source, compiler="c++", folder=folder)["answer"]() == value


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
