"""Workers that wait for each other's memory: nothing fails while any of them moves, and all ends if none does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mstar.worker import standstill

PREFILL_APART = [["*"], ["lm.prefill", "lm.read"]]


@pytest.fixture
def small(
    make_mesh: Callable[..., Any], small_pool: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """`small(**settings)`: prompts read apart, with room for two or three requests and little patience."""
    monkeypatch.setattr(standstill, "PATIENCE_S", 0.2)
    started: list[Any] = []

    def start(**settings: Any) -> Any:
        started.append(make_mesh(PREFILL_APART, {**small_pool, **settings}))
        return started[-1]

    yield start
    for served in started:
        served.close()


def test_who_waits_for_a_busy_worker_fails_nothing(small: Callable[..., Any], make: Callable[..., Any]) -> None:
    served = small()
    busy = make("trouble", "slow", kind="sleep", sleep_s=0.05, steps=150)  # for longer than anybody has patience
    asks = [make("generate", "as long a prompt as that", n=2, max_tokens=8, seed=seed) for seed in range(12)]
    served.check_all([busy, *asks])
    served.assert_clean()
