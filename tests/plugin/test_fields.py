"""Fields are read as what they must be, or refused with file, name, value and remedy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mstar.errors import ConfigError
from mstar.layers.activation import activation
from mstar.plugin.fields import ACTIVATIONS, Fields, read_object

PATH = Path("folder/config.json")
VALUES: dict[str, Any] = {
    "null": None, "text": "x", "count": 3, "share": 0.5, "yes": True, "many": [1, 2], "part": {"inner": "y"}, "zero": 0,
    "infinite": math.inf, "act": "silu",
}  # fmt: skip


@pytest.fixture
def fields() -> Fields:
    return Fields(VALUES, PATH)


def test_values_are_read_as_their_kinds(fields: Fields) -> None:
    assert (fields.text("text"), fields.whole("count"), fields.number("share"), fields.flag("yes")) == (
        "x",
        3,
        0.5,
        True,
    )
    assert fields.wholes("many") == (1, 2) and fields.numbers("many", (0.0,), count=2) == (1.0, 2.0)
    assert fields.part("part").text("inner") == "y" and fields.activation("act", "gelu") == "silu"
    assert fields.whole("zero", least=0) == 0 and fields.number("zero", above=-1) == 0


@pytest.mark.parametrize("name", ["absent", "null"])
def test_what_is_left_out_or_null_has_its_default(fields: Fields, name: str) -> None:
    assert fields.whole(name, 7) == 7 and fields.part(name, {}).values == {} and not fields.has(name)
    fields.require(name, True, "why")
    with pytest.raises(ConfigError, match=f"config.json lacks {name}"):
        fields.whole(name)


@pytest.mark.parametrize(("read", "told"), [
    (lambda f: f.text("count"), "count is 3; expected a string"),
    (lambda f: f.whole("yes"), "yes is True; expected a whole number of at least 1"),
    (lambda f: f.whole("zero"), "zero is 0; expected a whole number of at least 1"),
    (lambda f: f.number("infinite"), "infinite is inf; expected a number above 0"),
    (lambda f: f.number("text", above=-math.inf), "text is 'x'; expected a number:"),
    (lambda f: f.number("zero"), "zero is 0; expected a number above 0"),
    (lambda f: f.flag("count"), "count is 3; expected true or false"),
    (lambda f: f.wholes("many", least=2), r"expected a list of whole numbers of at least 2"),
    (lambda f: f.wholes("many", count=3), r"expected 3 whole numbers"),
    (lambda f: f.numbers("many", (), count=3), r"expected 3 numbers"),
    (lambda f: f.part("text"), "text is 'x'; expected an object"),
    (lambda f: f.part("part").whole("inner"), "part.inner is 'y'; expected a whole number"),
    (lambda f: f.activation("text", "gelu"), "text is 'x'; known: gelu, .*: use another checkpoint"),
    (lambda f: f.require("count", 4, "why"), "count is 3; why, so only 4 can be served"),
])  # fmt: skip
def test_anything_else_is_refused_with_its_name_and_value(fields: Fields, read: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        read(fields)
    assert str(caught.value).startswith(f"{PATH}: ")


def test_files_that_hold_no_object_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert read_object(path, optional=True) == {}
    for content, told in ((None, "no file"), ("{", "is not valid JSON"), ("[]", "found a list")):
        if content is not None:
            path.write_text(content)
        with pytest.raises(ConfigError, match=told):
            read_object(path)
    path.write_text('{"a": 1}')
    assert read_object(path) == {"a": 1}


def test_activations_that_may_be_named_are_there() -> None:
    x = torch.linspace(-3, 3, 7)
    assert {activation(name)(x).shape for name in ACTIVATIONS} == {x.shape}
    torch.testing.assert_close(activation("quick_gelu")(x), x * torch.sigmoid(1.702 * x))
