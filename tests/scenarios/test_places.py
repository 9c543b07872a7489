"""The same walks give the same results wherever workers are: in the engine's process, in one of their own, in two."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mstar_plugin_echo.oracle import SessionMemory

from mstar.errors import RequestError


def held_by(served: Any) -> list[int]:
    return [worker.running for worker in served.engine.workers()]


def test_all_tasks_at_once_give_what_each_gives_alone(placed: Any, cases: Callable[..., Any]) -> None:
    placed.check_all(cases())


def test_staggered_arrivals_change_nothing(placed: Any, cases: Callable[..., Any]) -> None:
    placed.check_all(cases("generate", "nested", "spans", "states")[::-1], stagger_s=0.01)


def test_many_of_one_task_at_once_give_what_each_gives_alone(placed: Any, make: Callable[..., Any]) -> None:
    texts = ["the same start, then one", "the same start, then two", "another"]
    for task in ("generate", "nested"):
        placed.check_all([make(task, text, seed=seed) for seed in range(3) for text in texts])


def test_a_seed_draws_the_same_in_any_process(placed: Any, make: Callable[..., Any]) -> None:
    asks = [make("generate", "the same", seed=11, temperature=1.3, max_tokens=15) for _ in range(6)]
    answers = placed.ask_all(asks)
    assert len({tuple(answer.token_ids()) for answer in answers}) == 1
    placed.oracle.check(asks[0], answers[0])


def test_large_inputs_and_outputs_cross(placed: Any, make: Callable[..., Any]) -> None:
    latents = torch.randn(1500, 4, generator=torch.Generator().manual_seed(4))  # 24 KB, which goes beside messages
    asks = [make("spans", "draw ", ("latents", latents), seed=seed, steps=2, scale=1.0) for seed in range(4)]
    placed.check_all(asks)


def test_sixteen_mixed_requests_are_right_while_others_are_aborted(placed: Any, cases: Callable[..., Any]) -> None:
    draw = random.Random(5)
    asks = draw.sample(cases(), 16)

    async def scenario() -> list[Any]:
        kept = [placed.answer(ask, after_s=draw.random() / 10) for ask in asks]
        gone = [
            placed.answer(ask, after_s=draw.random() / 10, abort_after=draw.choice((0, 0, 1, 2)))
            for ask in draw.sample(cases(), 16)
        ]
        answers = await asyncio.gather(*kept, *gone, return_exceptions=True)
        return answers[: len(kept)]

    for ask, answer in zip(asks, placed.run(scenario()), strict=True):
        assert not isinstance(answer, BaseException), f"{ask}: {answer!r}"
        placed.oracle.check(ask, answer)


def test_sessions_go_on_where_they_were_opened_among_other_requests(placed: Any, make: Callable[..., Any]) -> None:
    memories = {name: SessionMemory() for name in ("one", "two", "three")}
    for number, text in enumerate(("first turn", "second", "x")):
        asks = [make("session", f"{name} {text}", seed=number, session=name, max_tokens=3) for name in memories]
        beside = [make("generate", f"beside {seed}", seed=seed) for seed in range(3)]
        rights = [
            placed.oracle.expected(ask, memory=memory, resumed=number > 0)
            for ask, memory in zip(asks, memories.values(), strict=True)
        ]
        answers = placed.ask_all([*asks, *beside])
        for ask, right, answer in zip(asks, rights, answers, strict=False):
            assert not isinstance(answer, BaseException), f"{ask}: {answer!r}"
            assert answer.token_ids() == right.texts[0] and dict(answer.result.counters) == dict(right.counters)
        for ask, answer in zip(beside, answers[len(asks) :], strict=True):
            placed.oracle.check(ask, answer)
    placed.assert_clean(sessions=3)
    for name in memories:
        placed.drop_session(name)


def test_a_busy_session_answers_409_and_one_that_is_not_open_404(placed: Any, make: Callable[..., Any]) -> None:
    async def both_at_once() -> Any:
        first = await placed.submit(make("session", "long", session="s", max_tokens=60))
        with pytest.raises(RequestError) as caught:
            await placed.submit(make("session", "meanwhile", session="s"))
        async for _ in first:
            pass
        return caught.value

    assert placed.run(both_at_once()).code == "session_busy"
    placed.drop_session("s")
    with pytest.raises(RequestError) as caught:
        placed.drop_session("s")
    assert caught.value.status == 404


def test_a_request_fails_with_its_own_error_and_others_do_not(placed: Any, make: Callable[..., Any]) -> None:
    kinds = {
        "method": 500, "finish": 500, "predicate": 500, "memory": 503, "request": 422, "lane": 500, "encode": 400,
        "decode": 500, "kv": 400,
    }  # fmt: skip
    failing = [make("trouble", "t", kind=kind, watch=True, at=at) for kind in kinds for at in (0, 2)]
    beside = [make("generate", "beside", seed=seed, temperature=1.1, max_tokens=12) for seed in range(4)]
    answers = placed.ask_all([*failing, *beside])
    assert [answer.status for answer in answers[: len(failing)]] == [s for s in kinds.values() for _ in (0, 2)]
    for ask, answer in zip(beside, answers[len(failing) :], strict=True):
        placed.oracle.check(ask, answer)


def test_a_failing_step_between_walks_fails_its_request(placed: Any, make: Callable[..., Any]) -> None:
    failed, good = placed.ask_all([make("states", "draft", fail_step=True), ask := make("states", "draft")])
    assert isinstance(failed, RequestError) and failed.status == 500
    placed.oracle.check(ask, good)


def test_a_stop_in_the_middle_of_a_stream_frees_all(placed: Any, make: Callable[..., Any]) -> None:
    with pytest.raises(RequestError, match="aborted"):
        placed.ask(make("nested", "frames", seed=1, max_frames=60), abort_after=2)
    placed.assert_clean()


def test_requests_too_large_are_refused_before_they_reach_a_worker(placed: Any, make: Callable[..., Any]) -> None:
    with pytest.raises(RequestError) as caught:
        placed.ask(make("generate", "x" * 400, max_tokens=10_000))
    assert caught.value.status == 400


def test_a_deadline_ends_a_request_wherever_it_runs(placed: Any, make: Callable[..., Any]) -> None:
    async def scenario() -> RequestError:
        wire = make("trouble", "slow", kind="sleep", sleep_s=0.05, steps=100).wire()
        wire.timeout_s = 0.3
        with pytest.raises(RequestError) as caught:
            handle = await placed.engine.submit(wire)
            async for _ in handle:
                pass
        return caught.value

    assert placed.run(scenario()).status == 504


def test_requests_are_spread_over_processes(places: Callable[[str], Any], make: Callable[..., Any]) -> None:
    served = places("two processes")

    async def scenario() -> list[list[int]]:
        seen, handles = [], []
        for seed in range(6):
            handles.append(await served.submit(make("trouble", "slow", kind="sleep", sleep_s=0.2, steps=99, seed=seed)))
            seen.append(held_by(served))
        for handle in handles:
            handle.abort()
        return seen

    # Whoever is chosen first, which what ended just before may decide.
    assert [sorted(held) for held in served.run(scenario())] == [[0, 1], [1, 1], [1, 2], [2, 2], [2, 3], [3, 3]]
    pids = {worker.pid for worker in served.engine.workers()}
    assert len(pids) == 2 and os.getpid() not in pids
    served.assert_clean()
