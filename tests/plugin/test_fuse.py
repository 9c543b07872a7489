"""Which loop bodies become one method, what that method looks like, and why others do not."""

from __future__ import annotations

from typing import Any

import pytest

from mstar.plugin.fuse import MOST_STEPS, Hooks, LoopPlan, fuse
from mstar.plugin.graph import (
    KV,
    Call,
    Drop,
    DynamicLoop,
    Each,
    Fixed,
    Graph,
    Loop,
    Method,
    Node,
    Parallel,
    Port,
    Section,
    Sequential,
    Stream,
    Walk,
    When,
)
from mstar.plugin.program import Join, LoopEnd, LoopStart, Program, Run, Skip, Spawn, Split, compile_walk
from mstar.plugin.states import Start, States

HIDDEN = Port("hidden", shape=(4,))
CODE = Port("code", dtype="int64")


def method(name: str, inputs: tuple[Port, ...] = (), outputs: tuple[Port, ...] = (), **more: Any) -> Method:
    return Method(name=name, inputs=inputs, outputs=outputs, **more)


NODES = (
    Node(
        "lm",
        (
            method("step", (HIDDEN,), (HIDDEN, CODE), kv=KV()),
            method("decode", (CODE,), (CODE,), kv=KV(ids="code")),
            method("block", (HIDDEN,), (HIDDEN,), kv=KV(tokens=3)),
            method("prefill", (Port("ids", "tokens", "int64"),), (HIDDEN,), kv=KV()),
        ),
    ),
    Node("lm_side", (method("step", (HIDDEN,), (HIDDEN, CODE), kv=KV(label="side")),), "lm"),
    Node(
        "inner",
        (
            method("start", (HIDDEN, CODE)),
            method("step", (CODE,), (CODE,), max_batch=8),
            method("sum", (), (HIDDEN, Port("frame", dtype="int64", shape=None))),
            method("list", (Port("items", "item", shape=None),)),
        ),
    ),
    Node("other", (method("step", (CODE, HIDDEN), (CODE,), max_batch=5),)),
)
INNER = Loop(3, Call("inner.step"), carry=("code",), name="inner")
BODY = (Call("lm.step"), Call("inner.start"), INNER, Call("inner.sum", emits={"frame": "out"}, sends={"frame": "s"}))


def hooks(*names: str) -> Hooks:
    """`hooks("finish inner.sum")`."""
    found: dict[str, set[tuple[str, str]]] = {"prepare": set(), "finish": set()}
    for name in names:
        hook, target = name.split()
        found[hook].add(tuple(target.split(".")))  # type: ignore[arg-type]
    return Hooks(**{hook: frozenset(keys) for hook, keys in found.items()})


def fused(section: Section, *have: str) -> tuple[Program, list[LoopPlan]]:
    graph = Graph(
        nodes=NODES,
        walks=(Walk(name="w", section=section, inputs=("hidden", "code")),),
        states=States((Start(walk="w"),)),
        streams=(Stream(name="s", policy=Fixed(1)),),
    )
    return fuse(compile_walk(graph, "w"), hooks(*have))


def outer(*sections: Section, limit: Any = "steps") -> DynamicLoop:
    return DynamicLoop(limit, Sequential(*sections), carry=("hidden", "code"), name="outer")


def units(program: Program) -> list[Run]:
    return [op for op in program.ops if isinstance(op, Run) and op.unit is not None]


def test_a_body_around_a_constant_loop_becomes_one_method_wired_port_to_port() -> None:
    program, (plan,) = fused(outer(*BODY), "finish inner.sum")
    assert [type(op) for op in program.ops] == [LoopStart, Run, LoopEnd, Join]
    assert program.ops[0].exit == 3 and program.ops[2].body == 1  # type: ignore[union-attr]
    (run,) = units(program)
    assert plan.units == [run] and not plan.reasons
    assert run.target == "lm.step, inner.start, 3 × inner.step, inner.sum"
    assert run.unit is not None
    assert run.unit.steps == ((0, None), (1, None), (2, 0), (2, 1), (2, 2), (3, None))
    assert run.counts == (("lm.step", 1), ("inner.start", 1), ("inner.step", 3), ("inner.sum", 1))
    assert run.unit.modules == ("lm", "inner")
    assert run.key[0] == "lm"  # where the KV is
    assert run.inputs == (("0.hidden", "hidden"),)  # all else is made inside
    assert dict(run.outputs) == {"2.code": "code", "3.hidden": "hidden", "3.frame": "frame"}
    assert run.emits == (("3.frame", "out"),) and run.sends == (("3.frame", "s"),)
    assert [port.name for port in run.method.outputs] == ["2.code", "3.hidden", "3.frame"]
    assert run.method.kv == KV() and run.method.max_batch == 8


def test_the_unit_of_batching_is_the_unit_itself() -> None:
    one, two = outer(*BODY), outer(*BODY)
    program, _ = fused(Sequential(one, two))
    first, second = units(program)
    assert first.key != second.key
    assert not {first.key, second.key} & {(n.module, m.name) for n in NODES for m in n.methods}


def test_a_loop_of_a_request_s_count_has_its_body_fused_too() -> None:
    program, _ = fused(Loop("n", Sequential(*BODY), carry=("hidden",)))
    assert len(units(program)) == 1


def test_nested_constant_loops_are_unrolled_with_the_iteration_of_the_innermost() -> None:
    nested = Loop(2, Sequential(Call("inner.start"), Loop(2, Call("inner.step"), carry=("code",))), carry=("code",))
    (run,) = units(fused(outer(Call("lm.step"), nested))[0])
    assert run.unit is not None
    assert run.unit.steps == ((0, None), (1, 0), (2, 0), (2, 1), (1, 1), (2, 0), (2, 1))


def test_ids_that_are_written_come_in_by_the_unit_s_port() -> None:
    (run,) = units(fused(outer(Call("lm.decode"), INNER))[0])
    assert run.method.kv is not None and run.method.kv.ids == "0.code"


def test_the_first_method_may_receive_a_stream() -> None:
    first = Call("inner.sum", sends={"frame": "s"})
    body = (Call("lm.step", receives={"hidden": "s"}), INNER)
    (run,) = units(fused(Parallel(first, outer(*body)))[0])
    assert [port for port, _ in run.receives] == ["0.hidden"] and not run.inputs
    assert [port.name for port in run.method.inputs] == ["0.hidden"]


def test_what_cannot_be_in_the_unit_cuts_the_body_and_jumps_still_meet() -> None:
    maybe = When(lambda request, i: True, Sequential(Call("other.step"), INNER), "maybe")
    both = Parallel(Call("inner.start"), Loop(2, Call("inner.step"), carry=("code",)))
    section = outer(Call("lm.step"), INNER, maybe, both, Each(INNER, over="items"), Call("inner.sum"))
    program, (plan,) = fused(section)
    assert [type(op) for op in program.ops] == [
        LoopStart, Run, Skip, Run, Split, Run, Join, Run, Join, Spawn, Run, Join, Run, LoopEnd, Join
    ]  # fmt: skip
    start, skip, split, spawn = (program.ops[at] for at in (0, 2, 4, 9))
    assert isinstance(start, LoopStart) and isinstance(skip, Skip)
    assert isinstance(split, Split) and isinstance(spawn, Spawn)
    assert (start.exit, skip.target, split.branches, split.join) == (14, 4, (5, 7), 9)
    assert (spawn.body, spawn.join) == (10, 12)
    assert [run.target for run in plan.units] == [
        "lm.step, 3 × inner.step", "other.step, 3 × inner.step", "2 × inner.step", "3 × inner.step"
    ]  # fmt: skip
    assert {"it holds a When", "it holds a Parallel", "it holds an Each"} <= set(plan.reasons)


def only_reason(section: Section, *have: str) -> str:
    program, plans = fused(section, *have)
    assert not units(program)
    return plans[0].reasons[0]


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        (Loop("n", Call("inner.step")), "has a count that is no constant of the graph"),
        (DynamicLoop(3, Call("inner.step")), "ends when it is stopped, not after a constant count"),
        (Loop(3, Call("inner.step"), collect={"code": "codes"}), "collects code in a list"),
        (Loop(3, Call("lm.decode")), "lm.decode uses paged KV"),
        (Loop(3, Call("inner.step", emits={"code": "out"})), "inner.step emits"),
        (Loop(3, Call("inner.step", sends={"code": "s"})), "inner.step sends"),
        (Loop(3, Call("inner.step", receives={"code": "s"})), "inner.step receives"),
        (Loop(3, When(lambda request, i: True, Call("inner.step"))), "it holds a When"),
        (Loop(3, Each(Call("inner.step"), over="items")), "it holds an Each"),
        (Loop(3, Parallel(Call("inner.step"), Call("inner.sum"))), "it holds a Parallel"),
        (Loop(3, Sequential(Call("inner.step"), Drop("main"))), "it holds a Fork, Alias or Drop"),
        (Loop(3, Call("inner.list")), "inner.list has the port 'items' of layout item, not rows"),
        (Loop(0, Call("inner.step")), "takes 0 steps"),
        (Loop(MOST_STEPS + 1, Call("inner.step")), f"takes {MOST_STEPS + 1} steps"),
        (Loop(2, Loop("n", Call("inner.step"))), "has a count that is no constant of the graph"),
    ],
)
def test_an_inner_loop_that_cannot_be_taken_in_says_why(inner: Section, reason: str) -> None:
    assert reason in only_reason(outer(Call("lm.step"), inner))


@pytest.mark.parametrize(
    ("body", "have", "parts", "reason"),
    [
        (
            (Call("lm.step"), INNER, Call("lm_side.step"), Call("inner.sum")), (),
            ["lm.step, 3 × inner.step"], "lm.step and lm_side.step both use paged KV",
        ),
        ((Call("lm.block"), INNER), (), ["3 × inner.step"], "lm.block adds 3 tokens a row"),
        ((Call("lm.prefill"), INNER), (), ["3 × inner.step"], "lm.prefill has the port 'ids' of layout tokens"),
        (
            (Call("inner.sum"), INNER, Call("other.step", receives={"hidden": "s"}), Call("inner.sum")), (),
            ["inner.sum, 3 × inner.step"], "other.step waits for a stream in the middle of it",
        ),
        (
            (INNER, Call("lm.decode"), INNER), (),
            ["3 × inner.step", "lm.decode, 3 × inner.step"], "lm.decode writes ids that inner.step has yet to make",
        ),
        (
            (Call("lm.step"), INNER, Call("other.step")), ("prepare other.step",),
            ["lm.step, 3 × inner.step"], "other.step has a prepare hook, and reads what inner.step has yet to make",
        ),
        (
            (Call("inner.sum"), Call("inner.start"), INNER), ("prepare inner.start", "finish inner.sum"),
            ["inner.start, 3 × inner.step"],
            "inner.start has a prepare hook, and reads what inner.sum has yet to make",
        ),
        (
            (INNER, Call("inner.sum"), Call("inner.start", inputs={"hidden": "a", "code": "b"})),
            ("prepare inner.start", "finish inner.sum"), ["3 × inner.step, inner.sum"],
            "inner.start has a prepare hook, and an earlier finish hook of its module has yet to run",
        ),
        (
            (Call("lm.step"), Call("inner.start"), INNER), ("finish lm.step",),
            ["inner.start, 3 × inner.step"],
            "inner.start reads 'hidden' from lm.step, whose finish hook may replace it",
        ),
    ],
)  # fmt: skip
def test_a_body_that_cannot_be_whole_is_fused_as_far_as_it_can_be(
    body: tuple[Section, ...], have: tuple[str, ...], parts: list[str], reason: str
) -> None:
    sender = Call("inner.sum", sends={"frame": "s"})
    _, (plan,) = fused(Parallel(sender, outer(*body)), *have)
    assert [run.target for run in plan.units] == parts
    assert any(reason in found for found in plan.reasons), plan.reasons


def test_an_inner_loop_whose_finish_replaces_what_it_carries_is_not_taken_in() -> None:
    reason = only_reason(outer(Call("lm.step"), INNER), "finish inner.step")
    assert reason == "inner.step reads 'code' from inner.step, whose finish hook may replace it"


def test_loops_without_a_loop_in_them_are_left_as_they_are() -> None:
    two = Sequential(Call("lm.step"), Call("inner.start"))
    program, plans = fused(Sequential(INNER, outer(Call("lm.step")), DynamicLoop(None, two)))
    assert not units(program)  # one in no other loop returns to the scheduler at every step
    assert [plan.reasons for plan in plans] == [["it is one method already"]] * 2 + [["there is no loop in it"]]


def test_a_plan_says_what_became_of_its_loop() -> None:
    _, (plan, inner) = fused(outer(Call("lm.step"), INNER, Loop("n", Call("inner.step"))))
    assert str(plan) == (
        "walk w, loop 'outer' (at most steps times)\n"
        "  one method: lm.step, 3 × inner.step\n"
        "  not fused: loop (n times) in it has a count that is no constant of the graph"
    )
    assert str(inner) == "walk w, loop (n times)\n  not fused: it is one method already"
