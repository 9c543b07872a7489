"""Outputs kept by content: found again, as copies, the least recently used dropped first."""

from __future__ import annotations

import torch

from mstar.plugin.graph import Method, Port
from mstar.plugin.program import Run
from mstar.worker.output_cache import OutputCache


def op(name: str = "encode", *, cached_by: str | None = "key") -> Run:
    key = Port("key", "item", "int64", None)
    method = Method(name=name, inputs=(key,), outputs=(Port("y", "item", shape=None),), cached_by=cached_by)
    return Run("node", ("node", name), method, (), (), (), (), ())


def key(*numbers: int) -> dict[str, torch.Tensor]:
    return {"key": torch.tensor(numbers)}


def test_what_was_kept_is_found_by_method_and_key_alone() -> None:
    cache, batch = OutputCache(1000), torch.arange(40.0).reshape(2, 20)
    cache.keep(op(), key(1, 2), {"y": batch[0]})
    found = cache.find(op(), key(1, 2))
    assert found is not None and torch.equal(found["y"], batch[0])
    batch.zero_()  # what is kept holds no batch, and is not changed by one
    assert found["y"].untyped_storage().nbytes() == 80 == cache.num_bytes and found["y"][1] == 1
    assert cache.find(op(), key(2, 1)) is None and cache.find(op("other"), key(1, 2)) is None
    assert cache.find(op(cached_by=None), key(1, 2)) is None


def test_the_least_recently_used_leave_first_and_what_is_too_large_never_enters() -> None:
    cache, value = OutputCache(240), torch.zeros(20)
    for number in range(3):
        cache.keep(op(), key(number), {"y": value})
    assert cache.find(op(), key(0)) is not None
    cache.keep(op(), key(3), {"y": value})
    assert [cache.find(op(), key(number)) is not None for number in range(4)] == [True, False, True, True]
    cache.keep(op(), key(4), {"y": torch.zeros(100)})
    cache.keep(op(), key(5), {"y": None})
    assert cache.find(op(), key(4)) is None and cache.find(op(), key(5)) is None and cache.num_bytes == 240


def test_without_memory_nothing_is_kept() -> None:
    cache = OutputCache(0)
    cache.keep(op(), key(1), {"y": torch.zeros(0)})
    assert cache.find(op(), key(1)) is None
