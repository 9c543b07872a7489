from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mstar.plugin.graph import Fork
from mstar.plugin.program import LoopEnd, LoopStart
from mstar.worker.loops import budget_left, end_iteration, fork_length, innermost_dynamic, leave_loop, named, start_loop
from mstar.worker.state import Cursor

START = 10  # where the loop's op lies; its body begins behind it


def loop(**changes: Any) -> LoopStart:
    usual = {"dynamic": True, "limit": 3, "budget": None, "exit": 99, "collect": (), "streams": frozenset(), "name": ""}
    return LoopStart(**(usual | changes))


def cursor(*, fields: dict[str, int] | None = None, **env: Any) -> Cursor:
    request: Any = SimpleNamespace(info=SimpleNamespace(fields=fields or {}), budgets={})
    lane: Any = SimpleNamespace(request=request, stops={})
    scope: Any = SimpleNamespace(path=())
    return Cursor(lane, scope, (), START, env)


def turn(at: Cursor, times: int = 1) -> None:
    for _ in range(times):
        end_iteration(at, LoopEnd(START + 1))


def test_a_loop_turns_until_its_limit() -> None:
    at = cursor()
    start_loop(at, loop())
    assert (at.pc, at.current_iteration) == (START + 1, 0)
    turn(at, 2)
    assert (at.pc, at.current_iteration) == (START + 1, 2)
    turn(at)
    assert (at.pc, at.loops, at.reason) == (99, [], "length")


def test_a_static_loop_gives_no_reason() -> None:
    at = cursor(steps=2)
    start_loop(at, loop(dynamic=False, limit="steps"))
    turn(at, 2)
    assert (at.pc, at.reason) == (99, None)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_loop_of_no_iterations_is_left_at_once(limit: int) -> None:
    at = cursor(x="kept")
    start_loop(at, loop(limit=limit, collect=(("x", "xs"),)))
    assert (at.pc, at.loops, at.env["xs"]) == (99, [], [])


def test_what_is_collected_is_the_list_of_every_iteration() -> None:
    at = cursor()
    start_loop(at, loop(collect=(("x", "xs"),)))
    for value in (1, None, 3):
        at.env["x"] = value
        turn(at)
    assert at.env["xs"] == [1, None, 3] and "xs" in at.written


def test_a_reason_set_in_the_body_ends_the_loop_after_the_iteration() -> None:
    at = cursor()
    start_loop(at, loop(limit=None))
    turn(at, 5)
    at.loops[-1].reason = "stop"
    turn(at)
    assert (at.pc, at.reason) == (99, "stop")


def test_the_end_of_a_stream_is_no_finish_reason() -> None:
    at = cursor()
    start_loop(at, loop(limit=None))
    at.loops[-1].reason = "end"
    turn(at)
    assert (at.pc, at.reason) == (99, None)


def test_loops_with_a_budget_share_it() -> None:
    at, other = cursor(fields={"tokens": 4}), cursor()
    other.lane = at.lane
    op = loop(limit=3, budget="tokens")
    start_loop(at, op)
    turn(at, 3)
    start_loop(other, op)
    assert budget_left(other, op) == 1
    turn(other)
    assert (other.pc, other.reason) == (99, "length")
    start_loop(other, op)
    assert other.loops == [], "nothing is left for another"


def test_a_field_that_the_request_lacks_bounds_nothing() -> None:
    at = cursor()
    assert budget_left(at, loop(budget="tokens")) is None


def test_names_stand_for_values_before_fields() -> None:
    at = cursor(fields={"steps": 5, "count": 7}, steps=3)
    assert (named(at, "steps"), named(at, "count")) == (3, 7)
    with pytest.raises(RuntimeError, match="'nothing' is neither a value nor a field"):
        named(at, "nothing")


def test_a_fork_is_cut_where_its_value_says() -> None:
    at = cursor(text_end=[4, 2])
    assert fork_length(at, Fork("new", "main", at="text_end")) == [4, 2]
    assert fork_length(at, Fork("new", "main")) is None


def test_leaving_an_outer_loop_keeps_what_it_collected() -> None:
    at = cursor(x=1)
    start_loop(at, loop(collect=(("x", "xs"),)))
    turn(at, 2)
    leave_loop(at, at.loops.pop(), "stop")
    assert (at.pc, at.loops, at.reason, at.env["xs"]) == (99, [], "stop", [1, 1])


def test_the_dynamic_loop_is_seen_from_a_branch_but_not_from_an_item() -> None:
    parent = cursor()
    start_loop(parent, loop())
    branch, item = cursor(), cursor()
    branch.parent = item.parent = parent
    branch.scope = parent.scope
    make_static: Callable[[Cursor], None] = lambda at: start_loop(at, loop(dynamic=False))  # noqa: E731
    make_static(branch)
    assert innermost_dynamic(branch) is parent.loops[0]
    assert innermost_dynamic(item) is None, "an item has a scope, and loops, of its own"
