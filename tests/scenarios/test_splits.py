"""A model split between workers, in any way: every request gets the oracle's answer, and leaves nothing anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_all_tasks_one_by_one(meshed: Any, cases: Callable[..., Any]) -> None:
    for ask in cases():
        meshed.oracle.check(ask, meshed.ask(ask))


def test_all_tasks_at_once(meshed: Any, cases: Callable[..., Any]) -> None:
    meshed.check_all(cases())
