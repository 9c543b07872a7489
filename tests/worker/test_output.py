from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from mstar.worker.output import Output, to_host
from mstar.worker.state import EachGroup, Groups


def cursor(*path: int, groups: Groups = ()) -> Any:
    """What `Output` sees of a cursor."""
    request = SimpleNamespace(info=SimpleNamespace(request_id="r"))
    return SimpleNamespace(lane=SimpleNamespace(request=request), scope=SimpleNamespace(path=path), groups=groups)


def values(output: Output) -> list[Any]:
    return [message.value for message in output.messages]


def test_output_outside_any_each_goes_out_at_once() -> None:
    output = Output()
    output.emit(cursor(), "text", value=1)
    output.emit(cursor(), "text", final=True, reason="stop")
    assert values(output) == [1, None]
    assert (output.messages[1].final, output.messages[1].reason) == (True, "stop")


def test_a_later_item_waits_for_the_earlier_ones() -> None:
    output, group = Output(), EachGroup(3)
    children = [cursor(index, groups=((group, index),)) for index in range(3)]
    for index in (2, 1, 0):
        output.emit(children[index], "text", value=index)
    assert values(output) == [0], "item 0 is heard as it comes"
    output.item_ended(children[2].groups)
    output.item_ended(children[0].groups)
    assert values(output) == [0, 1]
    output.item_ended(children[1].groups)
    assert values(output) == [0, 1, 2]
    assert not group.held and not group.done


def test_an_item_without_output_holds_up_only_until_it_ends() -> None:
    output, group = Output(), EachGroup(2)
    first, second = (cursor(index, groups=((group, index),)) for index in range(2))
    output.emit(second, "text", value="late")
    assert not output.messages
    output.item_ended(first.groups)
    assert values(output) == ["late"]
    output.emit(second, "text", value="now at once")
    assert values(output) == ["late", "now at once"]


def test_items_of_items_come_in_the_order_of_both() -> None:
    output, outer = Output(), EachGroup(2)
    inner = [EachGroup(2), EachGroup(2)]
    places = [(a, b) for a in range(2) for b in range(2)]
    children = {(a, b): cursor(a, b, groups=((outer, a), (inner[a], b))) for a, b in places}
    for place in reversed(places):
        output.emit(children[place], "text", value=place)
        output.item_ended(children[place].groups)
    assert values(output) == [(0, 0), (0, 1)], "group 1 waits for the end of group 0"
    output.item_ended(((outer, 0),))
    assert values(output) == places


def test_what_leaves_holds_no_batch() -> None:
    nested = to_host({"a": [torch.ones(2), None, 3], "b": (1, "x")})
    assert nested["a"][0].device.type == "cpu" and nested["a"][1:] == [None, 3] and nested["b"] == [1, "x"]
