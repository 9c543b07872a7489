"""The engine's state machine on its own: no clock, no thread, no channel."""

from __future__ import annotations

import pytest
import torch

from mstar.errors import RequestError
from mstar.ipc.messages import (
    Abort,
    Beat,
    Begin,
    Capacity,
    Close,
    Dead,
    DropSession,
    Failed,
    Open,
    Ready,
    SessionLost,
    ToWorker,
    WalkDone,
)
from mstar.plugin.graph import Call, Graph, Walk
from mstar.plugin.session import SessionTable
from mstar.plugin.states import RequestView, Start, States, Then
from mstar.server.requests import Action, End, EngineState, Limits, RunStep, Send
from mstar.types import Encoded, Request


def broken(view: RequestView) -> bool:
    raise KeyError("a fault in a predicate")


GRAPH = Graph(
    nodes=(),
    walks=(
        Walk(name="read", section=Call("a.b"), inputs=("ids",), outputs=("z",)),
        Walk(name="roll", section=Call("a.b"), inputs=("z", "ids")),
        Walk(name="speak", section=Call("a.b")),
    ),
    states=States(
        starts=(Start(walk="read"), Start(walk="speak", lane="voice", when=lambda r: "audio" in r.outputs)),
        thens=(
            Then(after="read", walk="roll", task="roll"),
            Then(after="read", walk="roll", task="step", step="reread"),
            Then(after="read", walk="roll", task="broken", when=broken),
        ),
    ),
)


def sends(actions: list[Action]) -> list[ToWorker]:
    return [action.message for action in actions if isinstance(action, Send)]


def make_state(*, ready: bool = True, **limits: float) -> EngineState:
    state = EngineState(
        graph=GRAPH,
        limits=Limits(**{"max_running": 2, "max_queue": 4} | limits),  # type: ignore[arg-type]
        sessions=SessionTable(ttl_s=10, max_sessions=2),
    )
    if ready:
        state.receive(Ready(plan=[("lm", 0, 0, 100)], max_model_len=100), now=0)
    return state


def start(
    state: EngineState,
    name: str,
    *,
    task: str = "read",
    now: float = 0,
    timeout_s: float | None = None,
    **fields: object,
) -> list[object]:
    request = Request(id=name, model="m", task=task, parts=(), **fields)  # type: ignore[arg-type]
    deadline = state.limits.deadline(timeout_s, now=now)
    actions = state.submit(name, session=request.session, deadline=deadline, now=now)
    encoded = Encoded(inputs={"ids": torch.tensor([1])}, kv_tokens={"lm.main": 10})
    return [*sends(actions), *sends(state.encoded(request, encoded, now=now))]


def done(name: str, walk: str, *, lane: str = "main", outputs: dict[str, object] | None = None) -> WalkDone:
    return WalkDone(
        request_id=name, lane=lane, walk=walk, outputs=outputs or {}, reasons={"": "stop"}, counters={}, counts={}
    )


def test_lanes_that_start_together_come_in_one_message() -> None:
    opening, begin = start(make_state(), "r", outputs=("audio",))
    assert isinstance(opening, Open) and isinstance(begin, Begin)
    assert begin.walks == {"main": "read", "voice": "speak"}


def test_a_request_is_closed_when_all_its_lanes_are_over() -> None:
    state = make_state()
    start(state, "r", outputs=("audio",))
    assert state.receive(done("r", "read"), now=1) == []
    message, end = state.receive(done("r", "speak", lane="voice"), now=2)
    assert sends([message]) == [Close(request_id="r")]
    assert isinstance(end, End) and end.error is None and state.num_running == 0


def test_a_walk_gets_stored_outputs_once_and_encoded_inputs_always() -> None:
    state = make_state()
    start(state, "r", task="roll")
    (begin,) = sends(state.receive(done("r", "read", outputs={"z": 5, "unused": 6}), now=1))
    assert isinstance(begin, Begin) and begin.walks == {"main": "roll"}
    assert begin.inputs["z"] == 5 and set(begin.inputs) == {"z", "ids"}
    end = state.receive(done("r", "roll"), now=2)[-1]
    assert isinstance(end, End) and end.entry.stored == {"unused": 6}


def test_what_a_step_returns_feeds_the_next_walk() -> None:
    state = make_state()
    start(state, "r", task="step")
    (step,) = state.receive(done("r", "read", outputs={"z": 5}), now=1)
    assert isinstance(step, RunStep) and step.step == "reread" and step.outputs == {"z": 5}
    (begin,) = sends(state.step_done("r", "main", outputs={"ids": "new"}, now=2))
    assert isinstance(begin, Begin) and begin.inputs == {"z": 5, "ids": "new"}


def test_a_missing_input_fails_the_request_by_name() -> None:
    state = make_state()
    start(state, "r", task="roll")
    abort, end = state.receive(done("r", "read"), now=1)
    assert sends([abort]) == [Abort(request_id="r")]
    assert isinstance(end, End) and end.error is not None and "needs 'z'" in end.error.message


def test_a_predicate_that_raises_fails_its_request_only() -> None:
    state = make_state()
    start(state, "r", task="broken")
    start(state, "s")
    end = state.receive(done("r", "read"), now=1)[-1]
    assert isinstance(end, End) and end.error is not None and end.error.status == 500
    assert state.num_running == 1 and state.unready is None


def test_a_freed_place_goes_to_the_oldest_in_the_queue() -> None:
    state = make_state(max_running=1)
    start(state, "a")
    assert start(state, "b") == [] and start(state, "c") == []
    assert state.num_waiting == 2
    opened = [m for m in sends(state.receive(done("a", "read"), now=1)) if isinstance(m, Open)]
    assert [m.request_id for m in opened] == ["b"]


def test_a_failure_on_the_worker_is_not_aborted_there_again() -> None:
    state = make_state()
    start(state, "r")
    (end,) = state.receive(Failed(request_id="r", message="no", status=400, param="x"), now=1)
    assert isinstance(end, End) and end.error is not None and (end.error.status, end.error.param) == (400, "x")
    assert state.receive(done("r", "read"), now=1) == []


def test_deadlines_end_requests_wherever_they_are() -> None:
    state = make_state(max_running=1)
    start(state, "a", timeout_s=5)
    start(state, "b", now=1, timeout_s=5)
    state.submit("c", session=None, deadline=state.limits.deadline(5, now=2), now=2)
    assert state.tick(now=4.9) == []
    ended = [a for a in state.tick(now=7) if isinstance(a, End)]
    assert [e.entry.request_id for e in ended] == ["a", "b", "c"]
    assert all(e.error is not None and e.error.status == 504 for e in ended)


def test_the_nearer_of_two_deadlines_counts_and_its_remedy_is_named() -> None:
    limits = Limits(max_running=1, max_queue=1, timeout_s=60)
    own, operators = limits.deadline(5, now=10), limits.deadline(90, now=10)
    assert own is not None and own.at == 15 and "'timeout_s'" in own.error("queued").message
    assert operators is not None and operators.at == 70 and "--request-timeout" in operators.error("queued").message
    assert limits.deadline(None, now=10) == limits.deadline(60.5, now=10) == operators
    assert Limits(max_running=1, max_queue=1).deadline(None, now=10) is None


def test_requests_being_encoded_count_against_the_queue() -> None:
    state = make_state(max_running=1, max_queue=1)
    for name in ("a", "b"):
        state.submit(name, session=None, now=0)
    with pytest.raises(RequestError, match="the limit is 2") as caught:
        state.submit("c", session=None, now=0)
    assert (caught.value.status, caught.value.code) == (429, "queue_full")
    assert state.num_waiting == 2 and state.retry_after_s >= 1
    state.fail("a", RequestError("gone", status=499), now=1)
    state.submit("c", session=None, now=1)


def test_a_step_that_lasts_is_stuck_only_past_the_limit() -> None:
    state = make_state(stall_timeout_s=30)
    state.receive(Beat(step="lm.decode", seconds=29), now=0)
    assert state.stuck is None and state.unhealthy is None and state.num_stalls == 0
    for seconds in (35, 36):
        state.receive(Beat(step="lm.decode", seconds=seconds), now=0)
        assert state.stuck == f"lm.decode has been running for {seconds} s" == state.unhealthy == state.unready
    with pytest.raises(RequestError, match="for 36 s; try again later") as caught:
        state.submit("r", session=None, now=0)
    assert caught.value.status == 503 and state.num_stalls == 1
    state.receive(Beat(step="lm.decode", seconds=0), now=0)
    assert state.stuck is None and state.unready is None
    state.draining = True
    assert state.unhealthy is None and state.unready is not None


def test_a_model_that_loads_says_what_it_is_at_and_is_not_stuck() -> None:
    state = make_state(ready=False, stall_timeout_s=30)
    assert state.unready == "the model is loading"
    state.receive(Beat(step="compiling lm.decode, 3 of 7", seconds=40), now=0)
    assert state.unready == "the model is loading: compiling lm.decode, 3 of 7, for 40 s"
    assert state.stuck is None and state.num_stalls == 0
    state.receive(Ready(plan=[], max_model_len=1), now=0)
    assert state.unready is None


def test_nothing_is_taken_in_before_ready_when_dead_or_draining() -> None:
    state = make_state(ready=False)
    for prepare, reason in [
        (lambda: None, "loading"),
        (lambda: setattr(state, "draining", True), "shutting down"),
        (lambda: state.receive(Dead(reason="broke"), now=0), "broke; the server has to be restarted"),
    ]:
        prepare()
        with pytest.raises(RequestError, match=reason) as caught:
            state.submit("r", session=None, now=0)
        assert caught.value.status == 503
        state.receive(Ready(plan=[], max_model_len=1), now=0)


def test_a_session_keeps_unconsumed_outputs_for_its_next_request() -> None:
    state = make_state()
    start(state, "a", session="s")
    state.receive(done("a", "read", outputs={"z": 5}), now=1)
    assert state.submit("b", session="s", now=2) == [] and state.is_resumed("b")
    state.fail("b", RequestError("bad input"), now=3)  # never opened: the session is as it was
    start(state, "c", task="roll", session="s", now=4)
    (begin,) = sends(state.receive(done("c", "read"), now=5))
    assert isinstance(begin, Begin) and begin.inputs["z"] == 5


def test_only_a_request_that_is_in_order_takes_another_sessions_place() -> None:
    state = make_state()
    for name in ("a", "b"):
        start(state, name, session=name)
        state.receive(done(name, "read"), now=1)
    state.submit("wrong", session="new", now=2)
    assert not any(isinstance(message, DropSession) for message in start(state, "other"))
    state.fail("wrong", RequestError("bad input"), now=2)
    assert DropSession(session="a") in start(state, "right", session="new", now=3)


def test_idle_sessions_expire_and_are_dropped() -> None:
    state = make_state()
    start(state, "a", session="s")
    state.receive(done("a", "read"), now=1)
    assert sends(state.tick(now=20)) == [DropSession(session="s")]
    state.submit("b", session="s", now=21)
    end = state.fail("b", RequestError("not open", status=404, param="session"), now=21)[-1]
    assert isinstance(end, End) and end.error is not None and end.error.status == 410


def test_a_request_that_needs_more_than_a_pool_is_refused_with_both_numbers() -> None:
    state = make_state(page_tokens=16)
    state.submit("r", session=None, now=0)
    encoded = Encoded(inputs={}, kv_tokens={"lm.main": 65, "lm.side": 20})
    (end,) = state.encoded(Request(id="r", model="m", task="read", parts=()), encoded, now=0)
    assert isinstance(end, End) and end.error is not None and end.error.status == 400
    assert "112" in end.error.message and "100" in end.error.message


def test_fewer_workers_run_fewer_requests_and_none_is_a_reason() -> None:
    state = make_state(max_running=4)
    for name in "ab":
        start(state, name)
    state.receive(Capacity(most_running=2), now=1)
    assert start(state, "c") == [] and state.unready is None
    state.receive(Capacity(most_running=0, missing="worker 0 has ended"), now=1)
    assert state.unhealthy == "worker 0 has ended" == state.unready
    with pytest.raises(RequestError) as caught:
        state.submit("d", session=None, now=1)
    assert caught.value.status == 503 and state.num_waiting == 1
    opened = [m for m in sends(state.receive(Capacity(most_running=4), now=2)) if isinstance(m, Open)]
    assert [m.request_id for m in opened] == ["c"]


def test_a_lost_session_is_open_no_more_and_who_was_about_to_go_on_is_told() -> None:
    state = make_state()
    for name in ("idle", "resumed"):
        start(state, name, session=name)
        state.receive(done(name, "read", outputs={"z": 5}), now=1)
    state.submit("more", session="resumed", now=2)
    assert state.kept("more") == {"z": 5}
    assert state.receive(SessionLost(session="idle"), now=3) == []
    (end,) = state.receive(SessionLost(session="resumed"), now=3)
    assert (
        isinstance(end, End) and end.error is not None and (end.error.status, end.error.code) == (410, "session_lost")
    )
    for name in ("idle", "resumed"):
        state.submit(f"{name} anew", session=name, now=4)
        assert not state.is_resumed(f"{name} anew") and state.kept(f"{name} anew") == {}
