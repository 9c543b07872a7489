"""Which worker gets what, on its own: no process, no channel, no clock."""

from __future__ import annotations

from typing import Any

import pytest

from mstar.ipc.messages import (
    Abort,
    Beat,
    Begin,
    Capacity,
    Close,
    Compiled,
    Dead,
    DropSession,
    Emit,
    Failed,
    FromWorker,
    Open,
    Parcel,
    Ready,
    SessionLost,
    Shutdown,
    Stats,
    StopAt,
    WalkDone,
)
from mstar.placement import Group, Placement
from mstar.server.routing import Routing


def routing_of(*replicas: int, ready: bool = True, homes: dict[str, int] | None = None) -> Routing:
    """Groups of so many replicas: one with everything, or "g0" with "n0" and so on."""
    groups = [Group(name=f"g{n}", nodes=(f"n{n}",), replicas=number) for n, number in enumerate(replicas)]
    alone = Group(name="all", nodes=("*",), replicas=replicas[0])
    placement = Placement(groups=tuple(groups) if len(groups) > 1 else (alone,), homes=homes or {})
    routing = Routing(placement, max_running_each=4, stall_timeout_s=30, start_timeout_s=100)
    for worker in range(sum(replicas)):
        routing.started(worker, pid=100 + worker)
        if ready:
            routing.from_worker(worker, ready_with())
    return routing


def ready_with(**fields: Any) -> Ready:
    return Ready(**({"plan": [("lm", 1, 2, 3)], "max_model_len": 64} | fields))


def opening(name: str, *, session: str | None = None) -> Open:
    return Open(
        request_id=name, task="t", seed=0, arrival=0.0, params={}, fields={}, samplers={}, sampler_prompts={},
        content_keys={}, session=session,
    )  # fmt: skip


def place(routing: Routing, name: str, *, session: str | None = None) -> int:
    ((worker, message),) = routing.to_workers(opening(name, session=session))
    assert isinstance(message, Open) and message.request_id == name
    return worker


def route_of(routing: Routing, name: str, *, session: str | None = None) -> tuple[int, ...]:
    """The route of a new request, which every worker on it is told."""
    sent = routing.to_workers(opening(name, session=session))
    assert all(isinstance(message, Open) for _, message in sent)
    routes = {message.route for _, message in sent if isinstance(message, Open)}
    assert routes == {tuple(worker for worker, _ in sent)} or not sent
    return routes.pop() if sent else ()


def end(routing: Routing, worker: int, *, age_s: float = 5.0) -> tuple[list[FromWorker], float | None]:
    return routing.ended(worker, "its process was ended by SIGKILL", age_s=age_s)


def states(routing: Routing) -> list[str]:
    return [worker.state for worker in routing.status()]


def test_the_engine_hears_ready_once_when_all_are() -> None:
    routing = routing_of(2, ready=False)
    first = ready_with(max_model_len=64, compiled=Compiled(num_methods=3, num_built=2, seconds=5.0))
    second = ready_with(max_model_len=32, compiled=Compiled(num_methods=3, num_built=1, seconds=7.0))
    assert not any(isinstance(m, Ready) for m in routing.from_worker(0, first))
    told = routing.from_worker(1, second)
    assert told[0] == Capacity(most_running=8)
    assert told[1] == ready_with(max_model_len=32, compiled=Compiled(num_methods=3, num_built=3, seconds=7.0))


def test_what_loads_longest_is_named_with_its_worker() -> None:
    routing = routing_of(3, ready=False)
    assert routing.from_worker(1, Beat(step="reading weights", seconds=9)) == [
        Beat(step="worker 1: reading weights", seconds=9)
    ]
    assert routing.from_worker(2, Beat(step="compiling", seconds=4)) == [
        Beat(step="worker 1: reading weights", seconds=9)
    ]
    assert routing.from_worker(1, ready_with()) == [Beat(step="worker 2: compiling", seconds=4)]


def test_a_request_goes_to_the_worker_with_the_fewest_and_in_turn_among_equals() -> None:
    routing = routing_of(3)
    assert [place(routing, name) for name in "abcd"] == [0, 1, 2, 0]
    routing.to_workers(Close(request_id="b"))
    assert place(routing, "e") == 1
    routing.from_worker(2, Failed(request_id="c", message="no"))
    assert place(routing, "f") == 2


def test_only_who_goes_through_a_walk_gets_what_it_begins_with() -> None:
    routing = routing_of(1, 1, 1, homes={"see": 0, "write": 2})
    assert route_of(routing, "a") == (0, 1, 2)
    for walks, given in (({"main": "write"}, [2]), ({"main": "see", "side": "write"}, [0, 2])):
        whole = Begin(request_id="a", walks=walks, inputs={"ids": [1]})
        bare = Begin(request_id="a", walks=walks, inputs={})
        assert routing.to_workers(whole) == [(worker, whole if worker in given else bare) for worker in range(3)]


def test_what_concerns_a_request_follows_it_until_it_is_over() -> None:
    routing = routing_of(2)
    place(routing, "a")
    worker = place(routing, "b")
    begin = Begin(request_id="b", walks={"main": "w"}, inputs={})
    assert routing.to_workers(begin) == [(worker, begin)]
    assert routing.to_workers(Abort(request_id="b")) == [(worker, Abort(request_id="b"))]
    assert routing.to_workers(begin) == []
    emit = Emit(request_id="a", name="x", path=())
    assert routing.from_worker(0, emit) == [emit]


def test_a_session_stays_where_it_was_opened() -> None:
    routing = routing_of(2)
    place(routing, "a")
    home = place(routing, "b", session="s")
    routing.to_workers(Close(request_id="b"))
    for number in range(3):
        assert place(routing, f"more {number}", session="s") == home
    assert routing.to_workers(DropSession(session="s")) == [(home, DropSession(session="s"))]
    assert routing.to_workers(DropSession(session="s")) == []
    assert place(routing, "anew", session="s") == 1 - home, "it has fewer now"


@pytest.mark.parametrize("how", ["aborted", "failed"])
def test_a_session_whose_request_goes_wrong_is_open_nowhere(how: str) -> None:
    routing = routing_of(2)
    home = place(routing, "a", session="s")
    if how == "aborted":
        routing.to_workers(Abort(request_id="a"))
    else:
        routing.from_worker(home, Failed(request_id="a", message="no"))
    assert routing.to_workers(DropSession(session="s")) == []


def test_requests_and_sessions_of_a_worker_that_ends_are_lost_and_others_are_not() -> None:
    routing = routing_of(2)
    assert [place(routing, name) for name in "abc"] == [0, 1, 0]
    place(routing, "d", session="theirs")  # worker 1
    routing.to_workers(Close(request_id="d"))
    told, delay_s = end(routing, 1)
    capacity, failed, lost, stats = told
    assert isinstance(failed, Failed) and (failed.request_id, failed.status) == ("b", 503)
    assert "SIGKILL" in failed.message and "worker 1" in failed.message
    assert lost == SessionLost(session="theirs") and isinstance(stats, Stats)
    assert isinstance(capacity, Capacity) and capacity.most_running == 4
    assert delay_s is not None and states(routing) == ["ready", "restarting"]
    assert routing.to_workers(Begin(request_id="b", walks={}, inputs={})) == []
    assert [place(routing, name) for name in "ef"] == [0, 0]


def test_without_any_worker_nothing_runs_and_the_reason_is_told() -> None:
    routing = routing_of(1)
    (capacity, _), _ = end(routing, 0)
    assert isinstance(capacity, Capacity) and capacity.most_running == 0
    assert capacity.missing is not None and "SIGKILL" in capacity.missing and "started again" in capacity.missing
    assert routing.to_workers(opening("a")) == [] and routing.to_workers(Shutdown()) == []
    routing.started(0, pid=7)
    assert states(routing) == ["loading"]
    assert routing.from_worker(0, ready_with()) == [Capacity(most_running=4)]
    assert states(routing) == ["ready"] and routing.status()[0].restarts == 1


def test_its_own_word_on_why_it_ends_counts_more_than_how() -> None:
    routing = routing_of(2)
    assert routing.from_worker(0, Dead(reason="the device is gone")) == []
    end(routing, 0)
    assert routing.status()[0].detail == "worker 0 has ended: the device is gone"


def test_a_start_that_fails_is_not_tried_again() -> None:
    routing = routing_of(2, ready=False)
    routing.from_worker(0, ready_with())
    routing.from_worker(1, Dead(reason="no weights"))
    told, delay_s = end(routing, 1)
    assert told == [Dead(reason="worker 1 has ended: no weights")] and delay_s is None


def test_restarts_come_later_and_later_and_end() -> None:
    routing = routing_of(2)
    delays = []
    for _ in range(6):
        told, delay_s = end(routing, 0)
        delays.append(delay_s)
        routing.started(0, pid=1)
        routing.from_worker(0, ready_with())
    assert delays == [0.25, 0.5, 1.0, 2.0, 4.0, None]
    assert not any(isinstance(message, Dead) for message in told), "the other one goes on"


def test_what_is_missing_is_told_until_all_of_it_is_back() -> None:
    routing = routing_of(1, 1)
    for worker in (0, 1):
        end(routing, worker)
        routing.started(worker, pid=7)
    (capacity,) = routing.from_worker(1, ready_with())
    assert isinstance(capacity, Capacity)
    assert capacity.missing == "worker 0 (g0) has ended; it is being started again"


def test_the_last_worker_that_is_given_up_ends_the_model() -> None:
    routing = routing_of(1)
    for _ in range(6):
        told, delay_s = end(routing, 0)
    assert delay_s is None and isinstance(told[-1], Dead) and "given up after 5 restarts" in told[-1].reason
    assert states(routing) == ["dead"]


@pytest.mark.parametrize("why", ["finished a request", "lived long"])
def test_a_worker_that_was_sound_starts_again_at_once_every_time(why: str) -> None:
    routing = routing_of(1)
    for number in range(20):
        if why == "finished a request":
            place(routing, str(number))
            routing.to_workers(Close(request_id=str(number)))
        _, delay_s = end(routing, 0, age_s=5 if why == "finished a request" else 100)
        assert delay_s == 0.25
        routing.started(0, pid=1)
        routing.from_worker(0, ready_with())


def test_what_hangs_is_overdue_by_the_limit_that_counts() -> None:
    routing = routing_of(1, ready=False)
    routing.from_worker(0, Beat(step="reading weights", seconds=99))
    assert routing.overdue(0, silent_s=99, age_s=99) is None
    late = routing.overdue(0, silent_s=0, age_s=101)
    assert late is not None and "reading weights" in late and "--start-timeout" in late
    routing.from_worker(0, ready_with())
    assert routing.overdue(0, silent_s=29, age_s=1e9) is None
    silent = routing.overdue(0, silent_s=31, age_s=0)
    assert silent is not None and "not been heard" in silent and "--stall-timeout" in silent
    assert routing.from_worker(0, Beat(step="lm.decode", seconds=31)) == []
    stuck = routing.overdue(0, silent_s=0, age_s=0)
    assert stuck is not None and "lm.decode" in stuck
    assert routing.status()[0].detail == "lm.decode for 31 s"
    routing.from_worker(0, Beat(step="lm.decode", seconds=0))
    assert routing.overdue(0, silent_s=0, age_s=0) is None


def test_statistics_are_those_of_all() -> None:
    routing = routing_of(2)

    def stats(number: int) -> Stats:
        names = "running waiting steps slots_used swapped swaps cache_hit_tokens cache_queried_tokens"
        counted = dict.fromkeys(names.split(), number)
        return Stats(**counted, pools={"lm": (number, 10)}, method_s={"lm.decode": (number, number, 0.5)})

    assert routing.from_worker(0, stats(1)) == [stats(1)]
    (both,) = routing.from_worker(1, stats(2))
    assert isinstance(both, Stats) and both.running == both.cache_queried_tokens == 3
    assert both.pools == {"lm": (3, 20)} and both.method_s == {"lm.decode": (3, 3, 1.0)}


# ---- groups ----------------------------------------------------------------------------------------------------


def test_a_route_has_the_replica_with_the_fewest_of_each_group() -> None:
    routing = routing_of(1, 2, 3)
    assert [route_of(routing, name) for name in "abcd"] == [(0, 1, 3), (0, 2, 4), (0, 1, 5), (0, 2, 3)]
    routing.to_workers(Close(request_id="a"))
    assert route_of(routing, "e") == (0, 1, 4)
    assert [status.running for status in routing.status()] == [4, 2, 2, 1, 2, 1]
    assert [(s.group, s.role) for s in routing.status()] == [("g0", "n0")] + [("g1", "n1")] * 2 + [("g2", "n2")] * 3
    assert [(s.group, s.role) for s in routing_of(2).status()] == [("all", "everything")] * 2


def test_all_of_a_route_hear_what_concerns_the_request() -> None:
    routing = routing_of(1, 2)
    assert (route_of(routing, "a"), route_of(routing, "b")) == ((0, 1), (0, 2))
    for message in (
        Begin(request_id="b", walks={"main": "w"}, inputs={}),
        StopAt(request_id="b", path=()),
        Close(request_id="b"),
    ):
        assert routing.to_workers(message) == [(0, message), (2, message)]
    assert routing.to_workers(Abort(request_id="b")) == [] and routing.take_sends() == []


def test_a_session_keeps_its_route() -> None:
    routing = routing_of(2, 2)
    assert route_of(routing, "a") == (0, 2)
    home = route_of(routing, "b", session="s")
    routing.to_workers(Close(request_id="b"))
    assert [route_of(routing, f"more {n}", session="s") for n in range(3)] == [home] * 3 == [(1, 3)] * 3
    drop = DropSession(session="s")
    assert routing.to_workers(drop) == [(1, drop), (3, drop)] and routing.to_workers(drop) == []


def test_what_fails_in_one_worker_of_a_route_is_aborted_in_the_others() -> None:
    routing = routing_of(1, 2, 1)
    assert route_of(routing, "a", session="s") == (0, 1, 3)
    failed = Failed(request_id="a", message="no")
    assert routing.from_worker(1, failed) == [failed]
    assert routing.take_sends() == [(0, Abort(request_id="a")), (3, Abort(request_id="a"))]
    assert routing.take_sends() == [] and sum(status.running for status in routing.status()) == 0
    assert routing.to_workers(DropSession(session="s")) == []
    assert routing.from_worker(0, failed) == [failed] and routing.take_sends() == [], "a late one changes nothing"


def test_what_runs_over_a_worker_that_ends_is_aborted_in_the_others_and_its_sessions_dropped() -> None:
    routing = routing_of(1, 2)
    assert [route_of(routing, name) for name in "ab"] == [(0, 1), (0, 2)]
    assert route_of(routing, "c", session="s") == (0, 1)
    routing.to_workers(Close(request_id="c"))
    told, delay_s = end(routing, 1)
    assert [type(message) for message in told] == [Capacity, Failed, SessionLost, Stats] and delay_s is not None
    assert isinstance(told[1], Failed) and told[1].request_id == "a" and "worker 1 (g1) has ended" in told[1].message
    assert routing.take_sends() == [(0, Abort(request_id="a")), (0, DropSession(session="s"))]
    assert told[0] == Capacity(most_running=4) and route_of(routing, "d") == (0, 2)


def test_nothing_is_sent_to_a_worker_that_is_not_there() -> None:
    routing = routing_of(1, 1)
    route_of(routing, "a")
    end(routing, 1)
    end(routing, 0)
    assert routing.take_sends() == []


def test_a_group_without_a_ready_replica_keeps_all_requests_out_until_it_is_back() -> None:
    routing = routing_of(2, 1)
    assert [w.state for w in routing.status()] == ["ready"] * 3
    (capacity, *_), _ = end(routing, 2)
    assert isinstance(capacity, Capacity) and capacity.most_running == 0 and capacity.missing is not None
    assert "worker 2 (g1) has ended" in capacity.missing and "started again" in capacity.missing
    assert route_of(routing, "a") == ()
    routing.started(2, pid=9)
    assert routing.from_worker(2, ready_with()) == [Capacity(most_running=4)]
    assert route_of(routing, "a") == (0, 2)


def test_a_group_that_is_given_up_ends_the_model() -> None:
    routing = routing_of(2, 1)
    for _ in range(6):
        told, delay_s = end(routing, 2)
    assert delay_s is None and isinstance(told[-1], Dead)
    assert states(routing) == ["ready", "ready", "dead"]


def test_what_expires_when_the_model_has_ended_is_said_to_those_that_are_left() -> None:
    routing = routing_of(2, 1)
    for _ in range(5):
        end(routing, 2)
    routing.started(2, pid=9)
    routing.from_worker(2, ready_with())
    assert route_of(routing, "a", session="s") == (0, 2)
    told, _ = end(routing, 2)
    assert isinstance(told[-1], Dead)
    assert routing.to_workers(DropSession(session="s")) == [(0, DropSession(session="s"))]
    assert routing.to_workers(Abort(request_id="a")) == [(0, Abort(request_id="a"))]


def test_all_processes_of_a_worker_are_shown() -> None:
    routing = routing_of(1, 1, ready=False)
    routing.from_worker(0, ready_with(ranks=(7, 8)))
    assert [(worker.pid, worker.ranks) for worker in routing.status()] == [(100, (7, 8)), (101, ())]


def test_it_is_ready_when_every_group_is_with_the_components_of_each() -> None:
    routing = routing_of(2, 1, ready=False)
    large, small = [("lm", 1, 20, 200)], [("lm", 1, 10, 100)]
    assert routing.from_worker(0, ready_with(plan=large)) == [Beat(step="", seconds=0.0)]
    routing.from_worker(1, ready_with(plan=small, max_model_len=32, compiled=Compiled(num_methods=2)))
    capacity, ready = routing.from_worker(2, ready_with(plan=[("voice", 3, 0, 0)], compiled=Compiled(num_methods=1)))
    assert capacity == Capacity(most_running=4), "of the group that can take least"
    assert isinstance(ready, Ready) and ready.max_model_len == 32 and ready.compiled.num_methods == 1
    assert ready.plan == [*small, ("voice", 3, 0, 0)]


def test_what_workers_of_a_request_count_is_added_up() -> None:
    routing = routing_of(1, 1)
    route_of(routing, "a")

    def done(lane: str, counters: dict[str, int], counts: dict[str, int]) -> WalkDone:
        return WalkDone(
            request_id="a", lane=lane, walk="w", outputs={}, reasons={}, counters=counters, counts=counts
        )  # fmt: skip

    assert routing.from_worker(0, done("lm", {"lm.decode": 2}, {"n": 1})) == [done("lm", {"lm.decode": 2}, {"n": 1})]
    assert routing.from_worker(1, done("voice", {"voice.render": 1}, {"n": 2})) == [
        done("voice", {"lm.decode": 2, "voice.render": 1}, {"n": 3})
    ]
    assert routing.from_worker(0, done("lm", {"lm.decode": 5}, {"n": 4})) == [
        done("lm", {"lm.decode": 5, "voice.render": 1}, {"n": 6})
    ]


def test_a_parcel_and_the_message_that_names_it_come_in_any_order() -> None:
    routing = routing_of(1, 1)
    for name, first in (("a", True), ("b", False)):
        route_of(routing, name)
        named = Emit(request_id=name, name="audio", path=(), parcel=(1, 7))
        after = Emit(request_id=name, name="text", path=(), value="x")
        done = WalkDone(request_id=name, lane="l", walk="w", outputs={}, reasons={}, counters={}, counts={})
        parcel = Parcel(request_id=name, number=7, value="large")
        right = [Emit(request_id=name, name="audio", path=(), value="large"), after, done]
        told = routing.from_worker(1, parcel) if first else []
        told += [got for message in (named, after, done) for got in routing.from_worker(0, message)]
        assert told == (right if first else [])
        told += [] if first else routing.from_worker(1, parcel)
        assert told == right
        routing.to_workers(Close(request_id=name))


@pytest.mark.parametrize("ends", ["abort", "failed", "lost"])
def test_parcels_end_with_their_request(ends: str) -> None:
    routing = routing_of(1, 2)
    route = route_of(routing, "a")
    parcel = Parcel(request_id="a", number=1, value="large")
    assert not routing.from_worker(0, Emit(request_id="a", name="audio", path=(), parcel=(route[1], 2)))
    assert not routing.from_worker(route[1], parcel)
    if ends == "abort":
        routing.to_workers(Abort(request_id="a"))
    elif ends == "failed":
        assert routing.from_worker(0, failed := Failed(request_id="a", message="m")) == [failed]
    else:
        assert any(isinstance(told, Failed) for told in routing.ended(route[1], "it was killed", age_s=1)[0])
    assert not routing._routed
    assert not routing.from_worker(route[1], parcel) and not routing._routed
