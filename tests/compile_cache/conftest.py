"""Keys of made-up artifacts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mstar_compile_cache import CacheKey, Machine

MACHINE = Machine(python="3.11", torch="2.9", compiler="g++ 12", processor="x86_64", accelerator="")


@pytest.fixture
def key() -> Callable[[str], CacheKey]:
    def make(name: str) -> CacheKey:
        return CacheKey(
            machine=MACHINE, plugin="echo", plugin_version="1.0", name=name, source="ab", dtype="float32", threads=1
        )

    return make
