"""Each way a graph can be wrong, and the message that says where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from mstar.errors import PluginError
from mstar.plugin.graph import (
    KV,
    Alias,
    Call,
    Drop,
    DynamicLoop,
    Each,
    Fixed,
    Fork,
    Graph,
    LeftContext,
    Loop,
    Method,
    Node,
    Parallel,
    Policy,
    Port,
    Section,
    Sequential,
    SlidingWindow,
    Stream,
    Walk,
    When,
    Whole,
)
from mstar.plugin.spec import ModelSpec, Task
from mstar.plugin.states import RequestView, Start, States, Then
from mstar.plugin.validate import validate

IDS = Port("ids", "tokens", "int64")
PREFILL = Method(name="prefill", inputs=(IDS,), outputs=(Port("hidden", shape=(8,)),), kv=KV(ids="ids", rebuild=True))
DECODE = Method(
    name="decode",
    inputs=(Port("last", dtype="int64"), Port("bias", shape=(8,), optional=True)),
    outputs=(Port("last", dtype="int64"), Port("code", dtype="int64")),
    kv=KV(ids="last"),
)
LM = Node("lm", (PREFILL, DECODE))
HEAD = Node("head", (Method(name="mix", inputs=(Port("a"), Port("b", optional=True)), outputs=(Port("c"),)),))
VOICE = Node(
    "voice", (Method(name="render", inputs=(Port("chunk", dtype="int64", shape=None, optional=True),), outputs=()),)
)
NODES = (LM, HEAD, VOICE)
DECODING = DynamicLoop("max_tokens", Call("lm.decode"), carry=("last",))
RENDERING = DynamicLoop(None, Call("voice.render", receives={"chunk": "codes"}))
MIX = Call("head.mix")

EVERY_TWO = Fixed(2)


def runs(request: RequestView, iteration: int) -> bool:
    return True


def problems(graph: Graph, spec: ModelSpec | None = None) -> str:
    with pytest.raises(PluginError) as error:
        validate(graph, spec)
    return str(error.value)


def one_walk(section: Section, inputs: Sequence[str] = (), outputs: Sequence[str] = (), nodes: Any = NODES) -> Graph:
    walk = Walk(name="main", section=section, inputs=tuple(inputs), outputs=tuple(outputs))
    return Graph(nodes=nodes, walks=(walk,), states=States(starts=(Start(walk="main"),)))


def one_method(**fields: Any) -> Graph:
    return one_walk(Call("n.m"), ["x", "ids"], nodes=(Node("n", (Method(name="m", **fields),)),))


def two_lanes(
    policy: Policy = EVERY_TWO, producer: Section | None = None, consumer: Section = RENDERING, **changes: Any
) -> Graph:
    sending = Call("lm.decode", sends={"code": "codes"})
    producer = producer or DynamicLoop("max_tokens", sending, carry=("last",))
    graph = Graph(
        nodes=NODES,
        walks=(Walk(name="speak", section=producer, inputs=("last", "items")), Walk(name="hear", section=consumer)),
        streams=(Stream(name="codes", policy=policy),),
        states=States(starts=(Start(walk="speak"), Start(walk="hear", lane="voice"))),
    )
    return replace(graph, **changes)


def spec(**changes: Any) -> ModelSpec:
    paths = dict.fromkeys(("lm", "head", "voice"), "package.nodes:Node")
    fields: dict[str, Any] = {
        "name": "sample", "graph": lambda config: None, "config": "package.config:load", "checkpoint": "owner/name",
        "processor": "package.processing:Processor", "nodes": paths, "tasks": {"speech": Task(params=dict)},
    }  # fmt: skip
    return ModelSpec(**{**fields, **changes})


# ---- graphs that are right ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "graph",
    [
        one_walk(Sequential(Call("lm.prefill"), DECODING), ["ids", "last"], ["last", "hidden"]),
        one_walk(
            Loop("n", Call("head.mix", outputs={"c": "a"}), carry=("a",), collect={"a": "trace"}), ["a"], ["trace", "a"]
        ),
        one_walk(
            Sequential(
                Parallel(
                    Call("head.mix", outputs={"c": "left"}),
                    When(runs, Call("head.mix", outputs={"c": "right"})),
                ),
                Call("head.mix", inputs={"a": "left", "b": "right"}),
            ),
            ["a"],
        ),
        one_walk(Each(Sequential(Call("lm.prefill"), DECODING), over="items", collect={"last": "ends"}), ["items"]),
        one_walk(
            Sequential(Call("lm.prefill"), Fork("text", "main", at="cut"), Alias("also", "text"), Drop("text")), ["ids"]
        ),
        two_lanes(SlidingWindow(28, 7)),
        two_lanes(SlidingWindow((2, 4), "stride")),
        two_lanes(LeftContext((1, 2, 4), 0)),
        two_lanes(Whole()),
        two_lanes(
            producer=Each(DynamicLoop("n", Call("lm.decode", sends={"code": "codes"}), carry=("last",)), over="items")
        ),
    ],
)
def test_sound_graphs_pass(graph: Graph) -> None:
    validate(graph)


def test_a_sound_graph_agrees_with_its_spec() -> None:
    validate(two_lanes(), spec())


def test_a_loop_may_begin_without_a_carried_value_if_its_reader_can() -> None:
    step = Call("head.mix", inputs={"b": "memory"}, outputs={"c": "memory"})
    validate(one_walk(Loop(3, step, carry=("memory",)), ["a"]))


def test_every_problem_is_listed_at_once_under_the_plugins_name() -> None:
    graph = one_walk(Sequential(Call("lm.decode"), MIX))
    message = problems(graph, spec(name="mine"))
    assert message.startswith("plugin 'mine': the graph has 2 problems:\n")
    assert "walk 'main': lm.decode: input port 'last' is not fed" in message
    assert "walk 'main': head.mix: input port 'a' is not fed" in message


# ---- nodes ----------------------------------------------------------------------------------------------

X = Port("x", dtype="int64")


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (one_walk(MIX, ["a"], nodes=(*NODES, HEAD)), "node 'head' is declared 2 times"),
        (one_walk(MIX, ["a"], nodes=(*NODES, Node("a.b", ()))), "node 'a.b': its name must be an identifier"),
        (one_method(inputs=(X, X)), "n.m: input port 'x' is declared 2 times"),
        (one_method(inputs=(Port("ctx"),)), "n.m: input port 'ctx': the name must be an identifier other than"),
        (one_method(inputs=(Port("x", "row"),)), "n.m: input port 'x': unknown layout 'row'; did you mean rows"),  # type: ignore[arg-type]
        (one_method(inputs=(Port("x", dtype="float23"),)), "unknown dtype 'float23'; did you mean float32"),
        (one_method(inputs=(Port("x", shape=(0,)),)), r"shape \(0,\) must hold positive integers"),
        (one_method(max_batch=0), "n.m: max_batch is 0; it must be at least 1"),
        (one_method(outputs=(Port("y", "tokens"),)), "n.m: output port 'y' is of layout tokens, but no input is"),
        (one_method(inputs=(IDS,), kv=KV(ids="id")), "n.m: KV ids names no input port: 'id'; did you mean ids"),
        (one_method(inputs=(IDS, Port("x")), kv=KV(ids="x")), "KV ids: port 'x' is rows float; it must be integer"),
        (one_method(inputs=(IDS,), kv=KV(ids="ids", write=False)), "writes nothing"),
        (one_method(inputs=(IDS,), kv=KV(spans="x")), "n.m: KV spans names no input port: 'x'"),
        (one_method(inputs=(IDS, X), kv=KV(spans="x")), "KV spans: port 'x' is rows int64; it must be item int64"),
        (one_method(kv=KV(tokens=0)), "n.m: KV tokens is 0"),
        (one_method(kv=KV(label="")), "n.m: its KV label is empty"),
        (one_method(kv=KV(attention="sliding")), "unknown attention 'sliding'"),  # type: ignore[arg-type]
        (one_method(inputs=(X,), kv=KV(rebuild=True)), "rebuild needs KV ids to name a port of layout tokens"),
        (one_method(inputs=(X,), kv=KV(ids="x", rebuild=True)), "rebuild needs KV ids to name a port of layout tok"),
        (one_method(inputs=(IDS, X), kv=KV(ids="ids", rebuild=True)), "so input port 'x' must be optional"),
    ],
)
def test_wrong_nodes(graph: Graph, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        validate(graph)


def test_nodes_of_one_module_must_agree_but_for_the_kv_label() -> None:
    def decode(**changes: Any) -> Method:
        return replace(DECODE, **changes)

    other = Node("lm_text", (decode(kv=KV(label="text", ids="last")),), "lm")
    validate(one_walk(DECODING, ["last"], nodes=(LM, other)))
    other = Node("lm_text", (decode(kv=KV(label="text")),), "lm")
    assert "nodes 'lm' and 'lm_text' share module 'lm' but declare method 'decode' differently" in problems(
        one_walk(DECODING, ["last"], nodes=(LM, other))
    )


# ---- walks ----------------------------------------------------------------------------------------------

LEFT, RIGHT = Call("head.mix", outputs={"c": "left"}), Call("head.mix", outputs={"c": "right"})
USE_RIGHT = Call("head.mix", inputs={"a": "right"})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (Call("had.mix"), "walk 'main': had.mix: there is no node 'had'; did you mean head"),
        (Call("head.mixed"), "walk 'main': head.mixed: node 'head' has no method 'mixed'; did you mean mix"),
        (Call("head.mix", inputs={"aa": "a"}), "head.mix: inputs names no input port: 'aa'"),
        (Call("head.mix", outputs={"a": "a"}), "head.mix: outputs names no output port: 'a'"),
        (Call("head.mix", emits={"d": "d"}), "head.mix: emits names no output port: 'd'"),
        (Call("head.mix", sends={"c": "nowhere"}), "sends port 'c': there is no stream 'nowhere'"),
        (Call("head.mix", receives={"b": "nowhere"}), "receives port 'b': there is no stream 'nowhere'"),
        (Call("lm.decode", inputs={"last": "a"}, outputs={"code": "last"}), "outputs: value 'last' is declared 2"),
        (Call("head.mix", inputs={"a": "aa"}), "head.mix: input port 'a' is not fed: no value 'aa' by then"),
        (Call("head.mix", inputs={"b": "aa"}), "head.mix: input port 'b' is not fed: no value 'aa' by then"),
        (Sequential(), "walk 'main': it calls no method"),
        (Loop(0, MIX), "Loop of head.mix: its count is 0"),
        (DynamicLoop(0, MIX), "DynamicLoop of head.mix: its limit is 0"),
        (DynamicLoop(None, MIX), "it has no limit, so its body must receive a stream with after_end='end'"),
        (Sequential(MIX, "head.mix"), "'head.mix' is not a section"),  # type: ignore[arg-type]
        (Parallel(MIX, MIX), "two branches of a Parallel write value 'c'"),
        (Parallel(RIGHT, USE_RIGHT), "no value 'right' by then: 'right' is written by another branch of the same Par"),
        (
            Sequential(When(runs, RIGHT), USE_RIGHT),
            "head.mix: input port 'a' is not always fed: 'right' is absent when a When is skipped",
        ),
        (
            Sequential(RIGHT, When(runs, RIGHT), USE_RIGHT),
            "'right' is absent when a When is skipped; make the port optional",
        ),
        (Sequential(Each(RIGHT, over="a"), USE_RIGHT), "'right' is written only inside an Each; add it to its collect"),
        (Sequential(When(runs, RIGHT), Each(MIX, over="right")), "Each over 'right': the value is absent when a When"),
        (Each(MIX, over="items"), "Each over 'items': there is no such value by then"),
        (
            Each(RIGHT, over="a", collect={"rite": "all"}),
            "does not write 'rite', which it collects; did you mean right",
        ),
        (Loop(2, RIGHT, collect={"left": "all"}, name="turns"), "Loop turns: its body does not write 'left', which it"),
        (Loop(2, RIGHT, carry=("a",)), "Loop of head.mix: its body does not write 'a', which it carries"),
        (Loop(2, Sequential(USE_RIGHT, RIGHT)), "'right' is written later in the loop's body; add it to the loop's"),
        (
            Loop(2, Call("head.mix", inputs={"b": "memory"}, outputs={"c": "memory"})),
            "'memory' is written later in the loop's body; add it to the loop's carry",
        ),
        (
            Loop(2, Sequential(USE_RIGHT, RIGHT), carry=("right",)),
            "'right' is absent in the first iteration of a loop that carries it",
        ),
        (
            Sequential(RIGHT, Loop(2, Sequential(USE_RIGHT, When(runs, RIGHT)), carry=("right",))),
            "'right' is absent when a When is skipped",
        ),
        (Call("lm.decode", inputs={"last": "a", "bias": "c"}), "no value 'c' by then"),
        (
            Sequential(RIGHT, Call("lm.decode", inputs={"last": "right"})),
            "port 'last' does not fit the output port 'c' that feeds it: one is float, the other int64",
        ),
        (
            Sequential(RIGHT, Call("lm.decode", inputs={"last": "a", "bias": "right"})),
            r"port 'bias' does not fit the output port 'c' that feeds it: one has shape \(\), the other \(8,\)",
        ),
        (Fork("text", "mian"), "walk 'main': Fork: no method uses KV label 'mian'; did you mean main"),
        (Alias("view", "mien"), "Alias: no method uses KV label 'mien'"),
        (Drop("maim"), "Drop: no method uses KV label 'maim'; did you mean main"),
        (Each(MIX, over="a", fork="mane"), "Each: no method uses KV label 'mane'"),
        (Each(MIX, over="a", fork=("main", "tax")), "Each: no method uses KV label 'tax'"),
    ],
)
def test_wrong_walks(section: Section, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        validate(one_walk(section, ["a"]))


def test_items_of_an_each_may_bring_any_value_but_collected_lists_only_their_own() -> None:
    validate(one_walk(Each(USE_RIGHT, over="items"), ["items"]))
    lists = Sequential(Loop(2, LEFT, collect={"left": "all"}), Each(USE_RIGHT, over="all"))
    assert "no value 'right' by then" in problems(one_walk(lists, ["a"]))


def test_a_walk_must_produce_its_outputs() -> None:
    assert "walk 'main': nothing produces its output 'd'; known: a, c" in problems(one_walk(MIX, ["a"], ["d"]))


# ---- states ---------------------------------------------------------------------------------------------

LONE = one_walk(MIX, ["a"])


@pytest.mark.parametrize(
    ("states", "message"),
    [
        (States(starts=()), "no walk starts"),
        (States(starts=(Start(walk="mian"),)), "Start names no walk: 'mian'; did you mean main"),
        (States(starts=(Start(walk="mian"),)), "walk 'main': no state reaches it"),
        (States(starts=(Start(walk="main"),), thens=(Then(after="main", walk="x"),)), "Then names no walk: 'x'"),
        (States(starts=(Start(walk="main"),), thens=(Then(after="x", walk="main"),)), "Then after names no walk: 'x'"),
    ],
)
def test_wrong_states(states: States, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        validate(replace(LONE, states=states))


# ---- streams --------------------------------------------------------------------------------------------

SEND = DynamicLoop("n", Call("lm.decode", sends={"code": "codes"}), carry=("last",))


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (two_lanes(Fixed(0)), "stream 'codes': Fixed size is 0; it must be an integer of at least 1"),
        (two_lanes(Fixed(("size", 0))), "Fixed size is 0; it must be an integer of at least 1, or the name of a"),
        (two_lanes(Fixed(())), "stream 'codes': Fixed size is an empty schedule"),
        (two_lanes(LeftContext(2, -1)), "LeftContext context is -1; it must be an integer of at least 0"),
        (two_lanes(SlidingWindow(2, 3)), "stride 3 is more than window 2"),
        (two_lanes(7), "stream 'codes': 7 is no policy"),  # type: ignore[arg-type]
        (two_lanes(producer=DECODING), "stream 'codes': no call sends on it"),
        (two_lanes(consumer=Call("voice.render")), "stream 'codes': no call receives it"),
        (
            two_lanes(streams=(Stream(name="codes", policy=Whole(), after_end="stop"),)),  # type: ignore[arg-type]
            "unknown after_end 'stop'",
        ),
        (
            two_lanes(streams=(Stream(name="codes", policy=Whole(), after_end="absent"),)),
            "it has no limit, so its body must receive a stream with after_end='end'",
        ),
        (
            two_lanes(
                states=States(starts=(Start(walk="speak"),), thens=(Then(after="speak", walk="hear"),)),
            ),
            "walks 'speak' and 'hear' both run on lane 'main'",
        ),
        (
            two_lanes(
                states=States(
                    starts=(
                        Start(walk="speak", task="a"),
                        Start(walk="hear", lane="voice"),
                        Start(walk="rest", task="b"),
                    )
                ),
                walks=(*two_lanes().walks, Walk(name="rest", section=MIX, inputs=("a",))),
            ),
            "task 'b' starts walk 'hear', which would wait for it, but no walk that sends on it",
        ),
        (two_lanes(consumer=Each(RENDERING, over="items")), "lm.decode in walk 'speak' sends inside 0 Each, but"),
        (
            two_lanes(producer=Sequential(SEND, Each(SEND, over="items"))),
            "all that such a walk receives must come from the same depth",
        ),
        (
            two_lanes(producer=Loop(2, Each(SEND, over="items"))),
            "stream 'codes' is fed by an Each in a loop, or by two: later items find it ended",
        ),
        (
            two_lanes(producer=Sequential(Each(SEND, over="items"), Each(SEND, over="others"))),
            "stream 'codes' is fed by an Each in a loop, or by two",
        ),
    ],
)
def test_wrong_streams(graph: Graph, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        validate(graph)


def test_a_stream_joins_two_walks_and_has_one_consumer() -> None:
    graph = two_lanes()
    both = Walk(name="hear_too", section=RENDERING)
    states = States(starts=(*graph.states.starts, Start(walk="hear_too", lane="third")))
    assert "walks hear, hear_too all receive it" in problems(replace(graph, walks=(*graph.walks, both), states=states))
    alone = replace(one_walk(Sequential(SEND, RENDERING), ["last"]), streams=graph.streams)
    assert "walk 'main' both sends on and receives it" in problems(alone)


def test_a_port_that_outlives_its_stream_must_be_optional() -> None:
    strict = Node("voice", (Method(name="render", inputs=(Port("chunk", dtype="int64", shape=None),)),))
    loop = DynamicLoop("n", Call("voice.render", receives={"chunk": "codes"}))
    streams = (Stream(name="codes", policy=Fixed(1), after_end="absent"),)
    message = problems(two_lanes(consumer=loop, nodes=(LM, HEAD, strict), streams=streams))
    assert "walk 'hear': voice.render: input port 'chunk' must be optional" in message


def test_items_must_be_of_the_type_their_consumer_takes() -> None:
    floats = Node("voice", (Method(name="render", inputs=(Port("chunk", shape=None),)),))
    assert "output port 'code' of lm.decode does not fit input port 'chunk' of voice.render" in problems(
        two_lanes(nodes=(LM, HEAD, floats))
    )


def test_a_lane_fed_by_an_each_may_feed_another() -> None:
    relay = Node("relay", (Method(name="pass_on", inputs=(Port("chunk", dtype="int64", shape=None),), outputs=(X,)),))
    graph = two_lanes(
        producer=Each(SEND, over="items"),
        consumer=DynamicLoop(None, Call("relay.pass_on", receives={"chunk": "codes"}, sends={"x": "more"})),
    )
    last = Walk(name="last", section=DynamicLoop(None, Call("voice.render", receives={"chunk": "more"})))
    graph = replace(
        graph,
        nodes=(*NODES, relay),
        walks=(*graph.walks, last),
        streams=(*graph.streams, Stream(name="more", policy=Whole())),
        states=States(starts=(*graph.states.starts, Start(walk="last", lane="last"))),
    )
    validate(graph)


# ---- the spec -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": {"lm": "a:B", "heat": "a:B", "voice": "a:B"}}, "nodes has no path for module 'head'; did you mean"),
        ({"nodes": {"lm": "a:B", "heat": "a:B", "voice": "a:B"}}, "nodes names module 'heat', which no node"),
    ],
)
def test_a_spec_and_its_graph_name_the_same_modules(changes: dict[str, Any], message: str) -> None:
    assert message in problems(two_lanes(), spec(**changes))


def test_a_spec_and_its_graph_name_the_same_tasks() -> None:
    starts = (Start(walk="speak", task="speach"), Start(walk="hear", lane="voice", task="speach"))
    message = problems(two_lanes(states=States(starts=starts)), spec())
    assert "states: there is no task 'speach' in the spec; did you mean speech" in message
    assert "spec: task 'speech' starts no walk" in message
