from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from mstar.ipc.messages import Abort, Begin, Close, DropSession, Emit, Failed, Open, StopAt, WalkDone
from mstar.plugin.graph import Call, DynamicLoop, Each, Fixed, Loop, Sequential, Stream, Walk
from mstar.plugin.program import compile_walk
from mstar.plugin.states import RequestView, Start, States
from mstar.plugin.validate import validate
from mstar.worker.router import Router


def finish(worker: Any) -> None:
    while worker.step() is not None:
        pass


def test_a_walk_runs_to_its_end_and_says_so(parts: Callable[..., Any]) -> None:
    worker = parts()
    name = worker.open("branches", "ab")
    finish(worker)
    (done,) = worker.messages(WalkDone)
    assert (done.request_id, done.lane, done.walk) == (name, "main", "branches")
    assert set(done.outputs) == {"x", "trace"} and len(done.outputs["trace"]) == 4
    assert done.counters["mix.combine"] == 4
    worker.router.handle(Close(request_id=name))
    assert not worker.router.requests and not list(worker.router.holdings.scopes())


def test_every_item_ends_with_one_final_emission_in_order(parts: Callable[..., Any]) -> None:
    worker = parts()
    worker.open("generate", "three", n=3, max_tokens=2)
    finish(worker)
    seen = [(emit.path, emit.final) for emit in worker.messages(Emit)]
    assert seen == [((item,), final) for item in range(3) for final in (False, False, True)]
    (done,) = worker.messages(WalkDone)
    assert done.reasons == {"0": "length", "1": "length", "2": "length"}


def test_a_predicate_that_raises_fails_its_request_alone(parts: Callable[..., Any]) -> None:
    worker = parts()
    wrong = worker.open("trouble", "wrong", kind="predicate", at=1)
    good = worker.open("trouble", "good")
    finish(worker)
    assert [failed.request_id for failed in worker.messages(Failed)] == [wrong]
    assert [done.request_id for done in worker.messages(WalkDone)] == [good]
    assert wrong not in worker.router.requests


def test_a_walk_without_its_inputs_fails_its_request(parts: Callable[..., Any]) -> None:
    worker = parts()
    name = worker.open("generate", "first")
    worker.router.handle(Begin(request_id=name, walks={"main": "branches"}, inputs={}))
    (failed,) = worker.messages(Failed)
    assert failed.request_id == name and "needs the value 'x'" in failed.message
    assert not worker.scheduler.has_work


def test_a_lane_that_nothing_feeds_fails_its_request(parts: Callable[..., Any]) -> None:
    worker = parts()
    name = worker.open("generate", "first")
    worker.router.handle(Begin(request_id=name, walks={"voice": "speak"}, inputs={}))
    (failed,) = worker.messages(Failed)
    assert "reads frames" in failed.message


def test_an_aborted_request_says_nothing_and_holds_nothing(parts: Callable[..., Any]) -> None:
    worker = parts()
    name = worker.open("generate", "gone", n=3)
    worker.step()
    worker.step()
    worker.router.output.messages.clear()
    worker.router.handle(Abort(request_id=name))
    assert not worker.scheduler.has_work and not worker.router.output.messages
    assert worker.modules["lm"].pool.num_used == 0 and worker.modules["lm"].slots.num_used == 0


def test_messages_about_requests_that_have_ended_are_ignored(parts: Callable[..., Any]) -> None:
    worker = parts()
    for message in (
        Abort(request_id="nobody"),
        Close(request_id="nobody"),
        StopAt(request_id="nobody", path=()),
        Begin(request_id="nobody", walks={"main": "generate"}, inputs={}),
        DropSession(session="nothing"),
    ):
        worker.router.handle(message)
    assert not worker.router.output.messages


def test_stop_at_ends_the_loop_of_one_item(parts: Callable[..., Any]) -> None:
    worker = parts()
    name = worker.open("generate", "two", n=2, max_tokens=5)
    worker.step()
    worker.step()
    worker.router.handle(StopAt(request_id=name, path=(1,)))
    finish(worker)
    (done,) = worker.messages(WalkDone)
    assert done.reasons == {"0": "length", "1": "stop"}
    assert done.counters["lm.decode"] == 5 + 1
    assert [emit.path for emit in worker.messages(Emit) if emit.final] == [(0,), (1,)]


def test_a_stop_that_comes_while_the_item_runs_ends_its_loop_afterwards(parts: Callable[..., Any]) -> None:
    worker = parts()
    name = worker.open("generate", "one", max_tokens=5)
    worker.step()
    batch = worker.scheduler.next_batch()
    worker.router.handle(StopAt(request_id=name, path=(0,)))
    for work, values in worker.runner.run(batch).done:
        worker.router.complete(work, values)
    (done,) = worker.messages(WalkDone)
    assert done.reasons == {"0": "stop"} and done.counters["lm.decode"] == 1


def test_children_of_an_ordered_each_start_one_after_the_other(parts: Callable[..., Any]) -> None:
    worker = parts()
    worker.open("fanout", "a|b|c", "d", ordered=True, reply_tokens=[1])
    most = 0
    while worker.step() is not None:
        most = max(most, sum(1 for _ in worker.scheduler.works()))
    assert most == 1
    (done,) = worker.messages(WalkDone)
    assert done.counters["lm.decode"] == 4


def test_a_loop_that_runs_no_method_fails_its_request_alone(parts: Callable[..., Any]) -> None:
    worker = parts()
    walk = worker.graph.states.start(RequestView("generate", ("text",), None, {}))[0].walk
    program = worker.router.programs[walk]
    empty = replace(worker.graph, walks=(Walk(name=walk, section=Loop(10**9, Sequential()), inputs=program.inputs),))
    worker.router.programs[walk] = compile_walk(empty, walk)
    worker.open("generate", "one", max_tokens=5)
    (failed,) = worker.messages(Failed)
    assert failed.status == 500 and walk in failed.message and "ran no method" in failed.message
    assert not worker.router.requests


def test_items_of_nested_eaches_reach_a_fed_lane_whole_and_in_order(parts: Callable[..., Any]) -> None:
    """Each group of the feeding lane has its own order in the fed one, though groups follow each other in memory."""
    worker = parts()
    send = Call("source.emit", sends={"fixed": "fixed"})
    inner = Each(send, over="inner", ordered=lambda request, iteration: True)
    produce = Each(inner, over="outer", ordered=lambda request, iteration: True)
    take = DynamicLoop(None, Call("sink.take", receives={"chunk": "fixed"}, emits={"report": "report"}))
    graph = replace(
        worker.graph,
        walks=(Walk(name="produce", section=produce, inputs=("outer",)), Walk(name="take", section=take)),
        streams=(Stream(name="fixed", policy=Fixed(1)),),
        states=States((Start(walk="produce"), Start(walk="take", lane="taking"))),
    )
    validate(graph)
    router = Router(worker.router.spec, graph, modules=worker.modules, scheduler=worker.scheduler)
    worker.router = router
    items = [
        {"inner": [{"counts": torch.ones(4), "base": torch.tensor(10 * k + j)} for j in range(2)]} for k in range(3)
    ]
    params = msgspec.to_builtins(router.spec.tasks["chunks"].params())
    router.handle(
        Open(
            request_id="nested", task="chunks", seed=0, arrival=0.0, params=params, fields={}, samplers={},
            sampler_prompts={}, content_keys={},
        )
    )  # fmt: skip
    router.handle(Begin(request_id="nested", walks={"main": "produce", "taking": "take"}, inputs={"outer": items}))
    finish(worker)
    ends = [message.path for message in worker.messages(Emit) if message.final]
    assert ends == [(outer, inner) for outer in range(3) for inner in range(2)]
    assert {message.lane for message in worker.messages(WalkDone)} == {"main", "taking"}


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_short_turns_are_what_going_through_the_ops_gives(parts: Callable[..., Any], enforce_eager: bool) -> None:
    """Same messages in the same order, and the same batches, whether or not a loop of one method is turned at once."""

    def run(*, with_short_turns: bool) -> tuple[list[Any], list[Any]]:
        worker = parts(enforce_eager=enforce_eager)
        inner = "depth.step" if enforce_eager else "lm.frame, depth.start, 3 × depth.step, depth.sum"
        assert {op.target for op in worker.router.short_turns} >= {"lm.decode", inner}
        if not with_short_turns:
            worker.router.short_turns = set()
        worker.open("generate", "until the limit", max_tokens=5, n=2, seed=1, temperature=1.0)
        worker.open("generate", "until the end", max_tokens=9, eos_at=3)
        worker.open("nested", "frames", max_frames=3, depth_temperature=1.0)
        worker.open("session", "forks and drops")
        stopped = worker.open("generate", "stopped", max_tokens=20, ignore_eos=True)
        batches: list[Any] = []

        def keep(batch: Any) -> float:
            batches.append((batch.key, [(work.request_id, work.path, work.iteration) for work in batch.works]))
            return 1.0

        while worker.step(keep) is not None:
            if len(batches) == 8:
                worker.router.handle(StopAt(request_id=stopped, path=(0,)))
        messages = worker.router.output.messages
        return [msgspec.json.encode(message, enc_hook=lambda tensor: tensor.tolist()) for message in messages], batches

    assert run(with_short_turns=True) == run(with_short_turns=False)
