from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from mstar.ipc.messages import Abort, Failed


def test_ready_work_of_one_method_runs_together(parts: Callable[..., Any]) -> None:
    worker = parts()
    names = [worker.open("generate", f"prompt {i}") for i in range(5)]
    batch = worker.scheduler.next_batch()
    assert batch.key == ("lm", "prefill")
    assert [work.request_id for work in batch.works] == names, "oldest first"


def test_a_prompt_is_cut_to_the_token_budget_and_goes_on_where_it_was_cut(parts: Callable[..., Any]) -> None:
    worker = parts(max_num_batched_tokens=7)
    worker.open("generate", "0123456789")
    cuts = []
    for _ in range(2):
        batch = worker.step()
        cuts.append([(work.num_tokens, work.is_last) for work in batch.works])
    assert cuts == [[(7, False)], [(3, True)]]


def test_what_an_older_prompt_leaves_of_the_budget_goes_to_the_next(parts: Callable[..., Any]) -> None:
    worker = parts(max_num_batched_tokens=16)
    for text in ("0123456789", "abcdefghij"):
        worker.open("generate", text)
    assert [work.num_tokens for work in worker.step().works] == [10, 6]
    rest = next(batch for batch in iter(worker.step, None) if batch.key[1] == "prefill")
    assert [work.num_tokens for work in rest.works] == [4]


def test_no_batch_is_larger_than_max_num_seqs(parts: Callable[..., Any]) -> None:
    worker = parts(max_num_seqs=3)
    worker.open("generate", "eight samples", n=8, max_tokens=2)
    sizes = []
    while (batch := worker.step()) is not None:
        sizes.append(len(batch.works))
    assert max(sizes) == 3 and sum(sizes) == 1 + 8 * 2


def test_methods_share_time_and_not_turns(parts: Callable[..., Any]) -> None:
    """A prompt step takes ten times as long as a decode step: decode gets ten turns for one."""
    worker = parts(max_num_batched_tokens=4, block_size=4)
    worker.open("generate", "d", max_tokens=60)
    worker.step()
    worker.open("generate", "p" * 200, max_tokens=1)
    turns: Counter[str] = Counter()
    for _ in range(44):
        batch = worker.step(lambda batch: 10.0 if batch.key[1] == "prefill" else 1.0)
        turns[batch.key[1]] += 1
    assert 3 <= turns["prefill"] <= 5


@pytest.mark.parametrize("scale_s", [3.0, 10.0, 40.0])
def test_nothing_ready_waits_for_two_long_steps_in_a_row(parts: Callable[..., Any], scale_s: float) -> None:
    seconds = {"decode": 1.0, "scale": scale_s, "prefill": 10.0}
    worker = parts(max_num_batched_tokens=4, block_size=4)
    worker.open("generate", "d", max_tokens=400)
    worker.step()
    worker.open("generate", "p" * 120, max_tokens=1)
    worker.open("draw", "d", steps=64)
    turns = []
    while {work.op.target for work in worker.scheduler.works()} == {"lm.decode", "lm.prefill", "left.scale"}:
        turns.append(worker.step(lambda batch: seconds[batch.key[1]]).key[1])
    had = {method: turns.count(method) * cost for method, cost in seconds.items()}
    pairs = {pair for pair in itertools.pairwise(turns[5:]) if "decode" not in pair}
    assert set(had) == set(turns) and not pairs, "decode is always ready"
    assert max(had.values()) < 1.4 * min(had.values()) + max(seconds.values()), had


def test_steps_that_take_no_time_are_not_long(parts: Callable[..., Any]) -> None:
    worker = parts(max_num_batched_tokens=4, block_size=4)
    worker.open("generate", "p" * 40, max_tokens=4)
    worker.open("draw", "d", steps=4)
    while (batch := worker.step(lambda batch: 0.0)) is not None:
        assert not worker.scheduler._passed, batch.key


def test_a_method_that_had_nothing_to_do_has_saved_no_time(parts: Callable[..., Any]) -> None:
    worker = parts(max_num_batched_tokens=4, block_size=4)
    worker.open("generate", "d", max_tokens=200)
    for _ in range(50):
        worker.step()
    worker.open("generate", "p" * 200, max_tokens=1)
    turns = Counter(worker.step().key[1] for _ in range(40))
    assert turns["decode"] >= 19, "prefill may not run for the fifty seconds in which there was none"


def test_a_stream_of_short_requests_does_not_starve_a_long_one(parts: Callable[..., Any]) -> None:
    worker = parts(max_num_seqs=2)
    long = worker.open("generate", "long", n=4, max_tokens=10)
    num_steps = 0
    while worker.is_open(long):
        while sum(worker.is_open(name) for name in list(worker.router.requests)) < 5:
            worker.open("generate", "s", max_tokens=1)
        for name in list(worker.router.requests):
            if name != long and not worker.is_open(name):
                worker.router.handle(Abort(request_id=name))
        assert worker.step() is not None
        num_steps += 1
        assert num_steps < 400, "the long request starves"


def test_a_long_request_does_not_hold_up_short_ones(parts: Callable[..., Any]) -> None:
    worker = parts(max_num_seqs=2)
    worker.open("generate", "long", n=8, max_tokens=60)
    for _ in range(20):
        worker.step()
    short = worker.open("generate", "short", max_tokens=4)
    num_steps = 0
    while worker.is_open(short):
        worker.step()
        num_steps += 1
    assert num_steps < 20


def test_prompts_do_not_starve_decoding(parts: Callable[..., Any]) -> None:
    worker = parts(max_num_batched_tokens=8, block_size=4)
    first = worker.open("generate", "decoding", max_tokens=10)
    worker.step()
    num_steps = 0
    while worker.is_open(first):
        if not any(work.op.target == "lm.prefill" for work in worker.scheduler.works()):
            worker.open("generate", "p" * 60, max_tokens=1)
        worker.step()
        num_steps += 1
    assert num_steps < 40


def test_a_request_whose_sampler_cannot_be_made_fails_alone(parts: Callable[..., Any]) -> None:
    worker = parts()
    good = worker.open("generate", "good", max_tokens=2)
    wrong = worker.open("generate", "wrong", logit_bias={"99999": 1.0})
    while worker.step() is not None:
        pass
    failures = worker.messages(Failed)
    assert [failed.request_id for failed in failures] == [wrong]
    assert failures[0].status == 400 and "99999" in failures[0].message
    assert not worker.is_open(good)
    worker.modules.check_integrity(worker.router.holdings.scopes())


def test_younger_requests_make_room_only_where_that_is_enough(parts: Callable[..., Any]) -> None:
    worker = parts(block_size=4)
    names = [worker.open("generate", "abcdefgh", seed=seed, max_tokens=30) for seed in range(3)]
    for _ in range(4):
        worker.step()
    oldest = next(worker.router.requests[names[0]].tenants[item] for item in (0,))
    scheduler = worker.scheduler
    assert not scheduler._make_room(oldest, [], lambda moved: False)
    assert scheduler.num_swaps == 0, "nothing moves for nothing"
    assert scheduler._make_room(oldest, [], lambda moved: len(moved) == 2)
    assert scheduler.num_swaps == 2
    moved = [tenant.request.info.request_id for tenant in scheduler.tenants() if tenant.is_swapped]
    assert set(moved) == {names[2]}, "the youngest go first: an item, then what it was forked from"
    while worker.step() is not None or scheduler.has_moved:
        pass
    assert not any(worker.is_open(name) for name in names)


def test_what_is_dropped_while_it_waits_to_be_recomputed_is_not(parts: Callable[..., Any]) -> None:
    """As where another worker has the only copy from now on."""
    worker = parts(block_size=4, swap_space_bytes=0)
    first, second = (worker.open("generate", "abcdefgh", seed=seed, max_tokens=30) for seed in range(2))
    for _ in range(4):
        worker.step()
    scheduler, holdings = worker.scheduler, worker.router.holdings

    def scope_of(name: str) -> Any:
        return worker.router.requests[name].tenants[0].scopes[0]

    for name, is_back in ((first, False), (second, True)):
        scope = scope_of(name)
        scheduler._move(scope.tenant)
        assert len(scope.tenant.forgotten) == 1
        if is_back:
            assert not scheduler._bring_back(scope.tenant, [])
            assert scope.tenant.num_rebuilding == 1
        holdings.drop(scope, ("lm", "main"))
        assert not scope.tenant.forgotten and scope.tenant.num_rebuilding == 0
        assert not any(work.is_rebuild for work in scheduler.works())
        assert is_back or scheduler._bring_back(scope.tenant, [])
    worker.modules.check_integrity(holdings.scopes())
