"""What the tests of workers share, for a worker on a CUDA device."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

WORKER_TESTS = Path(__file__).parents[1] / "worker"


def _load(stem: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"gpu_shared_{stem}", WORKER_TESTS / f"{stem}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def parts() -> type:
    """`parts(**settings)`: a worker's parts."""
    kind: type = _load("conftest").Parts
    return kind


@pytest.fixture(scope="session")
def shared() -> ModuleType:
    """Requests and backends of the tests of graphs."""
    return _load("test_graphs")
