"""Sessions: what a request leaves is what the next one goes on with, wherever it lay in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from mstar_plugin_echo.oracle import SessionMemory

from mstar.errors import RequestError


def turns(served: Any, make: Callable[..., Any], name: str, texts: list[str], memory: SessionMemory) -> None:
    """Hold a conversation; every turn must be what the oracle says."""
    for number, text in enumerate(texts):
        ask = make("session", text, seed=number, session=name, amount=number + 2, max_tokens=3)
        resumed = memory.history is not None
        right = served.oracle.expected(ask, memory=memory, resumed=resumed)
        answer = served.ask(ask)
        assert answer.token_ids() == right.texts[0], f"turn {number} of {name}"
        assert answer.tensors["total"].tolist() == right.tensors["total"].tolist()
        assert dict(answer.result.counters) == dict(right.counters)


def test_every_turn_goes_on_where_the_last_one_ended(served: Any, make: Callable[..., Any]) -> None:
    turns(served, make, "talk", ["first turn", "second", "x"], SessionMemory())
    served.settle()
    assert served.on_worker(lambda: len(served.worker.router.holdings.sessions)) == 1
    served.drop_session("talk")


def test_an_idle_session_that_was_moved_out_is_right_when_it_is_resumed(
    engines: Callable[[str], Any], make: Callable[..., Any]
) -> None:
    for setting in ("swap", "recompute", "overlap_swap"):
        served = engines(setting)
        memories = {name: SessionMemory() for name in ("one", "two")}
        for name, memory in memories.items():
            turns(served, make, name, ["a first turn"], memory)
        served.check_all([make("generate", "pressure " * 3, seed=seed, max_tokens=30) for seed in range(4)])
        served.settle()
        holdings = served.worker.router.holdings
        idle = served.on_worker(lambda holdings=holdings: [tenant.is_swapped for tenant in holdings.tenants()])
        assert idle == [True, True], "the pressure was to move both"
        for name, memory in memories.items():
            turns(served, make, name, ["a second", "and a third"], memory)
        for name in memories:
            served.drop_session(name)
        served.assert_clean()


def test_sessions_go_on_among_other_requests(both: Any, make: Callable[..., Any]) -> None:
    memory = SessionMemory()
    rest = [make("generate", f"beside {i}", seed=i, temperature=0.8) for i in range(5)]
    turns(both, make, "busy place", ["opening"], memory)
    ask = make("session", "resumed among others", session="busy place", max_tokens=6)
    right = both.oracle.expected(ask, memory=memory, resumed=True)
    answer, *others = both.ask_all([ask, *rest])
    assert answer.token_ids() == right.texts[0]
    for other, got in zip(rest, others, strict=True):
        both.oracle.check(other, got)
    both.drop_session("busy place")


def test_a_turn_brings_its_own_seed(both: Any, make: Callable[..., Any]) -> None:
    both.ask(make("session", "opening", seed=1, session="seeds"))
    both.settle()
    held = both.on_worker(lambda: [scope.rows for scope in both.worker.router.holdings.scopes()])
    assert held and not any(held), "an idle session keeps sequences, no sampler rows"
    both.drop_session("seeds")


def test_a_busy_session_answers_409(both: Any, make: Callable[..., Any]) -> None:
    async def both_at_once() -> Any:
        first = await both.submit(make("session", "long", session="s", max_tokens=60))
        with pytest.raises(RequestError) as caught:
            await both.submit(make("session", "meanwhile", session="s"))
        async for _ in first:
            pass
        return caught.value

    error = both.run(both_at_once())
    assert (error.status, error.code) == (409, "session_busy")
    both.drop_session("s")


def test_unknown_sessions_answer_404_and_expired_ones_410(fresh: Callable[..., Any], make: Callable[..., Any]) -> None:
    served = fresh(max_sessions=1)
    with pytest.raises(RequestError) as caught:
        served.drop_session("never")
    assert caught.value.status == 404
    served.ask(make("session", "first", session="old"))
    served.ask(make("session", "second", session="new"))  # takes the only place
    with pytest.raises(RequestError) as caught:
        served.drop_session("old")
    assert (caught.value.status, caught.value.code) == (410, "session_expired")
    served.settle()
    assert served.on_worker(lambda: list(served.worker.router.holdings.sessions)) == ["new"]
    served.drop_session("new")
    served.assert_clean()


def test_expired_sessions_are_freed(fresh: Callable[..., Any], make: Callable[..., Any]) -> None:
    served = fresh(session_ttl_s=0.2)
    served.ask(make("session", "soon gone", session="short"))

    async def wait() -> None:
        await asyncio.sleep(1.0)  # the engine looks twice a second

    served.run(wait())
    served.assert_clean()


def test_a_turn_that_fails_or_is_aborted_ends_its_session(both: Any, make: Callable[..., Any]) -> None:
    both.ask(make("session", "opening", session="s"))
    with pytest.raises(RequestError):
        both.ask(make("session", "long", session="s", max_tokens=60), abort_after=2)
    both.assert_clean()
    memory = SessionMemory()
    turns(both, make, "s", ["opened anew"], memory)
    both.drop_session("s")
