"""A seeded request draws the same numbers alone, in any batch, at any row, in any order of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

SAMPLED = {"temperature": 1.1, "top_k": 60, "top_p": 0.95, "repetition_penalty": 1.2, "max_tokens": 12}


@pytest.mark.parametrize("setting", ["default", "overlap", "few_rows", "overlap_swap", "batch_invariant"])
def test_a_seed_draws_the_same_at_any_row_of_any_batch(
    engines: Callable[[str], Any], make: Callable[..., Any], setting: str
) -> None:
    served = engines(setting)
    mine = make("generate", "the same", seed=77, **SAMPLED)
    alone = served.ask(mine).token_ids()
    assert alone == served.oracle.expected(mine).texts[0]
    for place in (0, 5, 15):
        others = [make("generate", f"other {i}", seed=i, **SAMPLED) for i in range(15)]
        answers = served.ask_all([*others[:place], mine, *others[place:]])
        assert answers[place].token_ids() == alone
    served.assert_clean()


def test_requests_that_join_and_leave_do_not_disturb_a_draw(both: Any, make: Callable[..., Any]) -> None:
    long = make("generate", "long", seed=5, temperature=1.0, frequency_penalty=0.6, max_tokens=60)
    passing = [make("generate", "x" * (1 + i % 7), seed=i, **{**SAMPLED, "max_tokens": 1 + i % 5}) for i in range(24)]
    both.check_all([long, *passing], stagger_s=0.003)


def test_each_sample_of_n_draws_by_its_own_path(both: Any, make: Callable[..., Any]) -> None:
    one = both.ask(make("generate", "samples", seed=8, **SAMPLED))
    four = both.ask(make("generate", "samples", seed=8, n=4, **SAMPLED))
    drawn = [four.token_ids(index) for index in range(4)]
    assert drawn[0] == one.token_ids(), "sample 0 draws as a lone one does"
    assert len({tuple(ids) for ids in drawn}) == 4
    both.oracle.check(make("generate", "samples", seed=8, n=4, **SAMPLED), four)


def test_equal_requests_with_different_seeds_differ_and_with_equal_ones_do_not(
    both: Any, make: Callable[..., Any]
) -> None:
    asks = [make("generate", "seeds", seed=seed, **SAMPLED) for seed in (1, 2, 1, 3, 2)]
    ids = [answer.token_ids() for answer in both.ask_all(asks)]
    assert ids[0] == ids[2] and ids[1] == ids[4]
    assert len({tuple(found) for found in ids}) == 3


def test_an_absent_seed_is_drawn_and_reported(both: Any, make: Callable[..., Any]) -> None:
    unseeded = make("generate", "which seed", seed=None, **SAMPLED)
    answer = both.ask(unseeded)
    again = both.ask(make("generate", "which seed", seed=answer.result.seed, **SAMPLED))
    assert again.token_ids() == answer.token_ids()
    assert both.ask(unseeded).result.seed != answer.result.seed


@pytest.mark.parametrize("setting", ["default", "swap", "recompute", "overlap_swap"])
def test_penalties_survive_preemption(engines: Callable[[str], Any], make: Callable[..., Any], setting: str) -> None:
    served = engines(setting)
    penalised = {"temperature": 0.9, "repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.5}
    asks = [make("generate", "penalised " * 2, seed=seed, max_tokens=40, **penalised) for seed in range(6)]
    swaps, rebuilds = served.worker.scheduler.num_swaps, served.worker.scheduler.num_rebuilds
    served.check_all(asks)
    served.assert_clean()
    if setting == "recompute":
        assert served.worker.scheduler.num_rebuilds > rebuilds
    elif setting != "default":
        assert served.worker.scheduler.num_swaps > swaps
