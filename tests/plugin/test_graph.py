"""What the vocabulary itself promises: look-ups, defaults, traversal."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mstar.plugin.graph import Call, Each, Graph, Loop, Method, Node, Parallel, Port, Sequential, Walk, When, calls
from mstar.plugin.states import Start, States


def graph() -> Graph:
    step = Method(name="step", inputs=(Port("x"),), outputs=(Port("y"),))
    return Graph(
        nodes=(Node("one", (step,)), Node("two", (step,), "one")),
        walks=(Walk(name="go", section=Call("one.step")),),
        states=States(starts=(Start(walk="go"),)),
    )


def test_a_node_is_its_own_module_unless_it_names_one() -> None:
    assert [node.module for node in graph().nodes] == ["one", "one"]


def test_parts_are_found_by_name_and_absent_ones_are_none() -> None:
    found = graph().method("two.step")
    assert found is not None
    assert found.input("x") == Port("x")
    assert found.output("y") == Port("y")
    assert found.input("y") is None
    assert graph().method("two.stop") is None
    assert graph().method("three.step") is None
    assert graph().walk("went") is None
    assert graph().stream("codes") is None


def test_a_method_is_ragged_if_an_input_is() -> None:
    assert Method(name="a", inputs=(Port("x"), Port("ids", "tokens", "int64"))).has_tokens
    assert not Method(name="a", inputs=(Port("x"),), outputs=(Port("y", "tokens"),)).has_tokens


def test_calls_are_listed_in_order_at_any_depth() -> None:
    section = Sequential(
        Call("a.b"),
        Parallel(When(lambda request, iteration: True, Call("c.d")), Each(Loop(2, Call("e.f")), over="items")),
        Call("g.h"),
    )
    assert [call.target for call in calls(section)] == ["a.b", "c.d", "e.f", "g.h"]
    assert [(call.node, call.method) for call in calls(section)][1] == ("c", "d")


def test_declarations_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        graph().nodes[0].name = "other"  # type: ignore[misc]


def test_the_contract_is_importable_without_torch() -> None:
    code = (
        "import sys, mstar.plugin\n"
        "from mstar.plugin import checkpoint, draw, graph, hooks, loader, program, session, spec, states, validate\n"
        "print([name for name in ('torch', 'numpy', 'transformers', 'huggingface_hub') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_the_package_exports_declarations_and_the_nodes_module_what_runs() -> None:
    import mstar.plugin
    from mstar.plugin import graph as declarations
    from mstar.plugin import nodes, spec

    assert mstar.plugin.Node is declarations.Node
    assert mstar.plugin.Task is spec.Task
    assert nodes.Node is not declarations.Node
    assert all(hasattr(mstar.plugin, name) for name in mstar.plugin.__all__)
