"""Every task of the echo plugin, alone and among others, under every setting: always the oracle's answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

TASKS = ("generate", "nested", "branches", "fanout", "spans", "chunks", "chunks_each", "trouble", "states")


@pytest.mark.parametrize("task", TASKS)
def test_each_task_alone_gives_what_the_oracle_says(served: Any, cases: Callable[..., Any], task: str) -> None:
    for ask in cases(task):
        served.oracle.check(ask, served.ask(ask))


def test_the_cases_cover_every_task(cases: Callable[..., Any]) -> None:
    assert {ask.task for ask in cases()} == set(TASKS)


def test_all_tasks_at_once_give_what_each_gives_alone(served: Any, cases: Callable[..., Any]) -> None:
    served.check_all(cases())


@pytest.mark.parametrize("setting", ["default", "chunked", "swap", "recompute", "overlap", "overlap_swap"])
def test_staggered_arrivals_change_nothing(
    engines: Callable[[str], Any], cases: Callable[..., Any], setting: str
) -> None:
    served = engines(setting)
    served.check_all(cases()[::-1], stagger_s=0.004)
    served.assert_clean()


@pytest.mark.parametrize("setting", ["default", "few_rows", "swap", "recompute", "overlap_swap"])
def test_many_of_one_task_at_once_give_what_each_gives_alone(
    engines: Callable[[str], Any], make: Callable[..., Any], setting: str
) -> None:
    served = engines(setting)
    texts = ["the same start, then one", "the same start, then two", "another", "xyz" * 6]
    for task in ("generate", "nested", "states"):
        served.check_all([make(task, text, seed=seed) for seed in range(4) for text in texts])
        served.assert_clean()


@pytest.mark.parametrize("setting", ["swap", "overlap_swap", "recompute"])
def test_small_pools_are_what_made_requests_move(
    engines: Callable[[str], Any], make: Callable[..., Any], setting: str
) -> None:
    served = engines(setting)
    scheduler = served.worker.scheduler
    before = (scheduler.num_swaps, scheduler.num_rebuilds)
    served.check_all([make("generate", "a long enough prompt", seed=seed, max_tokens=20) for seed in range(5)])
    moved = (scheduler.num_swaps - before[0], scheduler.num_rebuilds - before[1])
    assert (moved[0] > 0, moved[1] > 0) == (setting != "recompute", setting == "recompute")
    served.assert_clean()


def test_the_second_request_with_a_prompt_hits_the_prefix_cache(
    fresh: Callable[..., Any], make: Callable[..., Any]
) -> None:
    for cached in (True, False):
        served = fresh(block_size=4, enable_prefix_caching=cached)
        prompt = "a prompt of some length"
        served.check_all([make("generate", prompt)])
        served.settle()
        served.check_all([make("generate", prompt + " and more", seed=1), make("states", prompt, seed=2)])
        hits = served.on_worker(lambda served=served: served.worker.modules["lm"].pool.hit_tokens)
        assert hits == (24 + 20 if cached else 0)  # whole pages, and never the last token
        served.assert_clean()
