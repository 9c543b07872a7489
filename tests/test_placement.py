"""Placement files: what runs where, who interprets which walk, and what a wrong file is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from mstar.config import num_cores
from mstar.errors import ConfigError
from mstar.placement import Group, Placement, check_state, read, stateful_methods
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
    Sequential,
    Stream,
    Walk,
)
from mstar.plugin.spec import Task
from mstar.plugin.states import Start, States, Then

ITEM = Port("x")


def node(name: str, *methods: str, module: str = "") -> Node:
    return Node(name, tuple(Method(name=m, inputs=(ITEM,), outputs=(ITEM,)) for m in methods), module)


FRAME = Sequential(Call("lm.frame"), Loop(4, Call("depth.step"), carry=("x",)), Call("depth.sum", sends={"x": "s"}))
DRAW = Sequential(Parallel(Call("lm.flow"), Call("lm_text.flow")), Call("mix.step"))
GRAPH = Graph(
    nodes=(
        node("see", "encode"),
        node("lm", "prefill", "decode", "flow", "frame"),
        node("lm_text", "flow", module="lm"),
        node("depth", "step", "sum"),
        node("mix", "step"),
        node("voice", "render"),
    ),
    walks=(
        Walk(
            name="chat",
            section=Sequential(
                Each(Call("see.encode"), over="images"),
                Call("lm.prefill"),
                Each(DynamicLoop("most", Call("lm.decode"), carry=("x",)), over="samples"),
            ),
        ),
        Walk(name="draw", section=Sequential(Call("lm.prefill"), Loop("steps", DRAW, carry=("x",)))),
        Walk(name="frames", section=DynamicLoop("most", FRAME, carry=("x",))),
        Walk(name="speak", section=DynamicLoop(None, Call("voice.render", receives={"x": "s"}))),
        Walk(name="once", section=Sequential(Call("see.encode"), Call("voice.render"))),
        Walk(name="after", section=Call("mix.step")),
    ),
    streams=(Stream(name="s", policy=Fixed(1)),),
    states=States(
        starts=(
            Start(walk="chat", task="chat"),
            Start(walk="draw", task="draw"),
            Start(walk="frames", lane="lm", task="speech"),
            Start(walk="speak", lane="voice", task="speech"),
            Start(walk="once", lane="lm", task="once"),
        ),
        thens=(Then(after="draw", walk="after"),),
    ),
)


def placed(*nodes: list[str]) -> Placement:
    return Placement.of([Group(nodes=tuple(entries)) for entries in nodes], GRAPH)


def test_equal_workers_run_everything() -> None:
    placement = Placement.of_workers(3, GRAPH)
    assert [(w.index, w.group, w.replica, w.devices) for w in placement.workers] == [(n, 0, n, ()) for n in range(3)]
    assert placement.modules_of(0) == {"see", "lm", "depth", "mix", "voice"}
    assert set(placement.homes.values()) == {0} and placement.group_of("chat", "lm", "decode") == 0


def test_the_narrowest_entry_wins() -> None:
    placement = placed(["*"], ["lm"], ["lm.prefill"], ["draw/lm"], ["draw/lm.prefill", "lm_text"])
    assert placement.group_of("chat", "see", "encode") == 0
    assert placement.group_of("chat", "lm", "decode") == 1
    assert placement.group_of("chat", "lm", "prefill") == 2
    assert placement.group_of("draw", "lm", "flow") == 3
    assert placement.group_of("draw", "lm", "prefill") == 4
    assert placement.modules_of(4) == {"lm"}


def test_a_walk_is_interpreted_where_its_innermost_loops_run() -> None:
    assert placed(["lm.prefill", "see"], ["*"]).homes["chat"] == 1
    assert placed(["lm", "see"], ["depth"], ["*"]).homes["frames"] == 1, "most calls are the inner loop's"
    assert placed(["lm", "see", "mix"], ["lm_text"], ["*"]).homes["draw"] == 0
    assert placed(["see"], ["*"]).homes["once"] == 0, "of equals the first"


def test_what_one_lane_may_run_has_one_home() -> None:
    placement = placed(["mix"], ["*"])
    assert placement.homes["draw"] == placement.homes["after"] == 1
    starts = (*GRAPH.states.starts, Start(walk="once", lane="lm", task="speech", when=lambda request: False))
    joined = Graph(
        nodes=GRAPH.nodes, walks=GRAPH.walks, streams=GRAPH.streams, states=States(starts, GRAPH.states.thens)
    )
    groups = [Group(nodes=("lm", "depth", "mix", "lm_text")), Group(nodes=("*",))]
    assert Placement.of(groups, GRAPH).homes["once"] == 1
    assert Placement.of(groups, joined).homes["once"] == 0


def test_tasks_that_share_sessions_have_one_home_for_a_lane() -> None:
    groups = [Group(nodes=("lm", "depth", "mix", "lm_text")), Group(nodes=("*",))]
    homes = [
        Placement.of(groups, GRAPH, tasks={name: Task(params=dict, sessions=kept) for name in ("speech", "once")}).homes
        for kept in (False, True)
    ]
    assert [found["frames"] for found in homes] == [0, 0]
    assert [found["once"] for found in homes] == [1, 0]


def test_a_stream_is_read_at_one_home() -> None:
    placement = placed(["*"], ["voice"])
    assert placement.homes["speak"] == 1 and placement.homes["frames"] == 0


def test_workers_take_devices_replica_by_replica() -> None:
    groups = [
        Group(nodes=("lm", "lm_text"), replicas=2, tensor_parallel=2, devices=("cuda:0", "cuda:1", "cuda:2", "cuda:3")),
        Group(nodes=("*",), name="rest", replicas=2, devices=("cpu",), threads=1),
    ]
    placement = Placement.of(groups, GRAPH)
    assert [w.devices for w in placement.workers] == [("cuda:0", "cuda:1"), ("cuda:2", "cuda:3"), ("cpu",), ("cpu",)]
    assert [(w.index, w.replica, w.name, w.threads) for w in placement.workers if w.group == 1] == [
        (2, 0, "rest", 1),
        (3, 1, "rest", 1),
    ]
    assert placement.groups[0].name == "group 0"


# ---- files -----------------------------------------------------------------------------------------------------


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "pd.yaml"
    path.write_text(
        "groups:\n"
        "  - {name: prefill, nodes: [see, lm.prefill], devices: [cpu, 'cuda:1'], replicas: 2, threads: 1}\n"
        "  - nodes: ['*']\n"
    )
    first, second = read(path)
    assert first == Group(name="prefill", nodes=("see", "lm.prefill"), devices=("cpu", "cuda:1"), replicas=2, threads=1)
    assert second == Group(nodes=("*",))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "expected 'groups:'"),
        ("groups: []", "expected 'groups:'"),
        ("groups: {}", "expected 'groups:'"),
        ("groups: [{nodes: [*]}]", "quotes"),
        ("groups: [{nodes: ['*']}]\nreplicas: 2", "unknown key 'replicas'; known: groups"),
        ("groups: [lm]", "groups[0] is 'lm'; expected a mapping"),
        ("groups: [{nodes: ['*'], replica: 2}]", "groups[0]: unknown key 'replica'; did you mean replicas"),
        ("groups: [{nodes: lm}]", "groups[0].nodes is 'lm': expected a list, got a text"),
        ("groups: [{nodes: []}]", "groups[0].nodes is []: expected a list of length >= 1"),
        ("groups: [{nodes: [a], nodes: ['*']}]", "'nodes' is given twice"),
        ("groups: [{nodes: ['*']}]\ngroups: []", "'groups' is given twice"),
        ("groups: [{replicas: 1}]", "groups[0]: object missing required field `nodes`"),
        ("groups: [{nodes: ['*'], replicas: two}]", "groups[0].replicas is 'two': expected `int`"),
        ("groups: [{nodes: ['*'], replicas: 0}]", "groups[0].replicas is 0: expected `int` >= 1"),
        ("groups: [{nodes: ['*'], devices: [gpu]}]", "groups[0].devices[0] is 'gpu': expected auto, cpu, cuda"),
        ("groups: [{nodes: [a]}, {nodes: ['*'], threads: -1}]", "groups[1].threads is -1: expected `int` >= 1"),
    ],
)
def test_a_wrong_file_is_told_key_value_and_what_is_expected(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert str(caught.value).startswith(f"--placement {path}: ") and said in str(caught.value)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give a readable YAML file"):
        read(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([Group(nodes=("lm", "see"))], "no group has lm_text.flow (in draw); mix.step (in draw, after); depth.step"),
        ([Group(nodes=("*", "lmm"))], "groups[0].nodes[1] is 'lmm': there is no node 'lmm'; did you mean lm"),
        ([Group(nodes=("*", "lm.decod"))], "node 'lm' has no method 'decod'; did you mean decode"),
        ([Group(nodes=("*", "chatt/lm"))], "there is no walk 'chatt'; did you mean chat"),
        ([Group(nodes=("*", "chat/lm.flow"))], "walk 'chat' does not call it; calls: lm.decode, lm"),
        ([Group(nodes=("*", "chat/voice"))], "walk 'chat' does not call it; calls: lm.decode, lm.prefill, see.encode"),
        ([Group(nodes=("chat/*",))], "'*' stands alone"),
        ([Group(nodes=("*",)), Group(nodes=("lm", "lm"))], "groups[1].nodes[1] is 'lm', as is groups[1].nodes[0]"),
        ([Group(nodes=("*",)), Group(nodes=("*",))], "groups[1].nodes[0] is '*', as is groups[0].nodes[0]"),
        ([Group(nodes=("*",)), Group(nodes=("mix",)), Group(nodes=("mix.step",))], "groups[1] (group 1) has nothing"),
        ([Group(nodes=("*",), name="a"), Group(nodes=("lm",), name="a")], "groups[0].name is 'a', as another's"),
        ([Group(nodes=("*",), replicas=3, devices=("cpu", "cpu"))], "groups[0].devices names 2 devices; expected 3"),
        ([Group(nodes=("*",), replicas=64, tensor_parallel=2)], "it takes 128 processes; at most 64"),
        ([Group(nodes=("*",), threads=num_cores() + 1)], "the cores that this process may use"),
    ],
)
def test_what_does_not_fit_the_graph_is_told(groups: list[Group], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Placement.of(groups, GRAPH, source="--placement x.yaml")
    assert str(caught.value).startswith("--placement x.yaml: ") and said in str(caught.value)


# ---- state -----------------------------------------------------------------------------------------------------


def test_methods_that_share_state_stay_together() -> None:
    slots = SimpleNamespace(slots=("cache",), host_state=None)
    host = SimpleNamespace(slots=(), host_state=dict, finish_decode=None)
    none = SimpleNamespace(slots=(), host_state=None, finish_decode=None)
    assert stateful_methods(slots, ["step", "sum"]) == {"step", "sum"}
    assert stateful_methods(host, ["prefill", "decode"]) == {"decode"}
    assert stateful_methods(none, ["prefill", "decode"]) == frozenset()

    facts = {"depth": frozenset({"step", "sum"}), "lm": frozenset({"decode"})}
    check_state(placed(["lm.decode"], ["*"]), facts)
    with pytest.raises(ConfigError, match=r"group 0 has depth.step, group 1 has depth.sum; these share"):
        check_state(placed(["depth.step"], ["*"]), facts)
