from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import pytest

from mstar.layers import kernels

SOURCE = 'extern "C" int answer() { return %d; }\n'


def test_a_kernel_is_built_once_and_again_when_its_source_changes(tmp_path: Path) -> None:
    source, folder = tmp_path / "answer.cpp", tmp_path / "cache"
    for value in (42, 42, 7):
        source.write_text(SOURCE % value)
        assert kernels._open(source, compiler="c++", folder=folder)["answer"]() == value
    assert len(list(folder.iterdir())) == 2
    assert folder.stat().st_mode & 0o077 == 0


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
