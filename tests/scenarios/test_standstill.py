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
    monkeypatch.setattr(standstill, "PATIENCE_S", 1.0)
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


def test_what_can_be_recomputed_is_never_failed_for_room(small: Callable[..., Any], cases: Callable[..., Any]) -> None:
    """Without swap space: who is older gets the room that younger ones keep for what is on its way to them."""
    served = small(swap_space_bytes=0)
    asks = cases("generate", "fanout", "states")
    for _ in range(2):
        served.check_all(asks * 2)
        served.assert_clean()


def test_what_cannot_be_recomputed_fails_alone(small: Callable[..., Any], cases: Callable[..., Any]) -> None:
    served = small(swap_space_bytes=0)
    served.check_all(cases())  # nested and spans may fail, and are then asked alone
    served.assert_clean()
