"""Walks become flat programs whose jumps say what nested sections said."""

from mstar.plugin.graph import (
    Call,
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
from mstar.plugin.program import Join, LoopEnd, LoopStart, Run, Skip, Spawn, Split, compile_walk, written
from mstar.plugin.states import Start, States

STEP = Method(name="step", inputs=(Port("x"),), outputs=(Port("x"), Port("y")))
NODE = Node("n", (STEP,), module="shared")


def graph_of(section: Section, *streams: Stream) -> Graph:
    return Graph(
        nodes=(NODE,),
        walks=(Walk(name="w", section=section, inputs=("x",)),),
        states=States((Start(walk="w"),)),
        streams=streams,
    )


def test_a_call_runs_on_its_module_with_ports_mapped_to_values() -> None:
    call = Call("n.step", inputs={"x": "a"}, outputs={"y": "b"}, emits={"y": "out"})
    program = compile_walk(graph_of(call), "w")
    run, join = program.ops
    assert isinstance(run, Run) and isinstance(join, Join)
    assert run.key == ("shared", "step") and run.target == "n.step"
    assert run.inputs == (("x", "a"),) and run.outputs == (("x", "x"), ("y", "b"))
    assert program.emits == {"out"}


def test_nested_loops_jump_back_to_their_bodies_and_out_behind_them() -> None:
    section = DynamicLoop("limit", Sequential(Call("n.step"), Loop(3, Call("n.step"), collect={"y": "ys"})))
    ops = compile_walk(graph_of(section), "w").ops
    kinds = [type(op) for op in ops]
    assert kinds == [LoopStart, Run, LoopStart, Run, LoopEnd, LoopEnd, Join]
    outer, inner = ops[0], ops[2]
    assert isinstance(outer, LoopStart) and isinstance(inner, LoopStart)
    assert (outer.exit, inner.exit) == (6, 5)
    assert [op.body for op in ops if isinstance(op, LoopEnd)] == [3, 1]
    assert outer.dynamic and not inner.dynamic and inner.collect == (("y", "ys"),)


def test_branches_end_in_joins_and_when_skips_what_it_would_write() -> None:
    section = Sequential(
        Parallel(Call("n.step"), When(lambda request, i: False, Call("n.step", outputs={"y": "z"}))), Call("n.step")
    )
    ops = compile_walk(graph_of(section), "w").ops
    split = ops[0]
    assert isinstance(split, Split) and split.branches == (1, 3) and split.join == 6
    skip = ops[3]
    assert isinstance(skip, Skip) and skip.target == 5 and skip.absent == ("x", "z")


def test_an_each_knows_which_streams_live_and_end_with_its_children() -> None:
    inner = Each(Call("n.step", sends={"y": "deep"}), over="parts")
    section = Sequential(Call("n.step", sends={"x": "top"}), Each(Sequential(Call("n.step"), inner), over="items"))
    streams = (Stream(name="top", policy=Fixed(1)), Stream(name="deep", policy=Fixed(1)))
    program = compile_walk(graph_of(section, *streams), "w")
    outer, nested = (op for op in program.ops if isinstance(op, Spawn))
    assert program.feeds == {"top"} and program.all_feeds == {"top", "deep"}
    assert outer.feeds == frozenset() and nested.feeds == {"deep"}


def test_only_streams_of_its_own_body_end_a_dynamic_loop() -> None:
    ending, lasting = Stream(name="a", policy=Fixed(1)), Stream(name="b", policy=Fixed(1), after_end="absent")
    body = Sequential(
        Call("n.step", receives={"x": "b"}), DynamicLoop(None, Call("n.step", receives={"x": "a"}), name="inner")
    )
    program = compile_walk(graph_of(DynamicLoop("limit", body, name="outer"), ending, lasting), "w")
    outer, inner = (op for op in program.ops if isinstance(op, LoopStart))
    assert outer.streams == frozenset() and inner.streams == {"a"}
    assert program.receives == {"a", "b"}


def test_what_a_section_writes_is_what_its_calls_and_collects_leave() -> None:
    graph = graph_of(Call("n.step"))
    assert written(Loop(2, Call("n.step"), collect={"y": "ys"}), graph) == ["x", "y", "ys"]
    assert written(Each(Call("n.step"), over="items", collect={"x": "xs"}), graph) == ["xs"]


def test_a_stream_closes_behind_the_last_call_that_feeds_it_unless_that_may_run_again() -> None:
    send = Call("n.step", sends={"x": "once", "y": "looped"})
    section = Sequential(send, Sequential(Call("n.step", sends={"x": "once"})), Loop(2, send, name="l"), Call("n.step"))
    streams = (Stream(name="once", policy=Fixed(1)), Stream(name="looped", policy=Fixed(1)))
    runs = [op for op in compile_walk(graph_of(section, *streams), "w").ops if isinstance(op, Run)]
    assert [run.closes for run in runs] == [(), (), (), ()]
    section = Sequential(send, Sequential(Call("n.step", sends={"x": "once"})), Call("n.step"))
    runs = [op for op in compile_walk(graph_of(section, *streams), "w").ops if isinstance(op, Run)]
    assert [run.closes for run in runs] == [("looped",), ("once",), ()]
