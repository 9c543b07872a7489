"""Values of JSON schemas, for fuzzing: drawn by hypothesis, checked, and broken in small ways.

Knows the keywords that the server's document uses, and refuses others, so that none is passed over.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

ANNOTATIONS = {"title", "description", "default", "discriminator", "format"}
KEYWORDS = {
    "$ref", "anyOf", "enum", "const", "type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "minLength", "maxLength", "pattern", "items", "minItems", "maxItems", "properties", "required",
    "additionalProperties", "propertyNames", "maxProperties",
}  # fmt: skip
TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
Schema = dict[str, Any]
TEXTS = ("hello", "A", "é", "日本", "a\n b", "<laugh>", "😀", "𝒳", "x" * 40, "\u200bq", "0")
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, -0.0, 1e308, 1e-320, "", " ", "\x00", "0",
    "null", "x" * 5000, "é" * 300, [], [None], [[[[]]]], {}, {"a": 1}, {"": None}, "../../etc/passwd", "%s%n",
)  # fmt: skip
"""Values that are wrong in most places."""


class Document:
    """The schemas of one OpenAPI document."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.schemas: dict[str, Schema] = document["components"]["schemas"]

    def resolved(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            schema = self.schemas[schema["$ref"].rpartition("/")[2]]
        unknown = set(schema) - ANNOTATIONS - KEYWORDS
        assert not unknown, f"keywords that this module does not know: {unknown}"
        return schema

    # ---- checking -----------------------------------------------------------------------------------------------

    def accepts(self, schema: Schema, value: Any) -> bool:
        schema = self.resolved(schema)
        if "anyOf" in schema:
            return any(self.accepts(one, value) for one in schema["anyOf"])
        if "enum" in schema and not any(type(value) is type(one) and value == one for one in schema["enum"]):
            # Numbers are equal whatever their kind.
            return isinstance(value, int | float) and not isinstance(value, bool) and value in schema["enum"]
        if "const" in schema and value != schema["const"]:
            return False
        if "type" in schema and not TYPES[schema["type"]](value):
            return False
        if isinstance(value, str):
            return self._accepts_text(schema, value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return (
                schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf)
                and schema.get("exclusiveMinimum", -math.inf) < value < schema.get("exclusiveMaximum", math.inf)
            )  # fmt: skip
        if isinstance(value, list):
            is_long = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf)
            return is_long and all(self.accepts(schema.get("items", {}), item) for item in value)
        return self._accepts_object(schema, value) if isinstance(value, dict) else True

    def _accepts_text(self, schema: Schema, value: str) -> bool:
        is_long = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf)
        return is_long and re.search(schema.get("pattern", ""), value) is not None

    def _accepts_object(self, schema: Schema, value: dict[str, Any]) -> bool:
        properties, more = schema.get("properties", {}), schema.get("additionalProperties", True)
        if not set(schema.get("required", ())) <= set(value) or len(value) > schema.get("maxProperties", math.inf):
            return False
        for name, item in value.items():
            if not self.accepts(schema.get("propertyNames", {}), name):
                return False
            if name not in properties and more is False:
                return False
            if not self.accepts(properties.get(name, more if isinstance(more, dict) else {}), item):
                return False
        return True

    # ---- drawing ------------------------------------------------------------------------------------------------

    def values(self, schema: Schema, *, only: Mapping[str, SearchStrategy[Any]] | None = None) -> SearchStrategy[Any]:
        """Values that the schema accepts, small ones; `only`: property -> what it is drawn from instead."""
        schema, only = self.resolved(schema), only or {}
        if "anyOf" in schema:
            return st.one_of([self.values(one, only=only) for one in schema["anyOf"]])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        if "const" in schema:
            return st.just(schema["const"])
        kind = schema.get("type")
        if kind in ("integer", "number"):
            return _numbers(schema)
        if kind == "string":
            texts = [text for text in (*TEXTS, "7", "65") if self._accepts_text(schema, text)]
            return st.sampled_from(texts)
        if kind == "array":
            items, least = self.values(schema.get("items", {}), only=only), schema.get("minItems", 0)
            return st.lists(items, min_size=least, max_size=max(least, 2))
        if kind == "object":
            return self._objects(schema, only)
        return {"null": st.none(), "boolean": st.booleans()}.get(str(kind), st.sampled_from(ODD))

    def _objects(self, schema: Schema, only: Mapping[str, SearchStrategy[Any]]) -> SearchStrategy[dict[str, Any]]:
        properties = schema.get("properties", {})
        drawn = {name: only[name] if name in only else self.values(one, only=only) for name, one in properties.items()}
        required = {name: drawn.pop(name) for name in schema.get("required", ())}
        if not properties and isinstance(schema.get("additionalProperties"), dict):
            names = self.values({"type": "string"} | schema.get("propertyNames", {}))
            return st.dictionaries(names, self.values(schema["additionalProperties"], only=only), max_size=2)
        return st.fixed_dictionaries(required, optional=drawn)


def _numbers(schema: Schema) -> SearchStrategy[Any]:
    is_whole = schema["type"] == "integer"
    least, most = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    edges = [bound for bound in (schema.get("minimum"), most) if bound is not None and abs(bound) <= 1000]
    if "exclusiveMinimum" in schema and not is_whole:
        edges.append(schema["exclusiveMinimum"] + 1e-38)
    low = -10 if least is None else least
    high = low + 10 if most is None else min(most, low + 10)
    if is_whole:
        inner: SearchStrategy[Any] = st.integers(low + ("exclusiveMinimum" in schema), high)
    else:
        inner = st.floats(low, high, exclude_min="exclusiveMinimum" in schema, allow_subnormal=False)
    return st.one_of(inner, st.sampled_from(edges)) if edges else inner


# ---- breaking -------------------------------------------------------------------------------------------------------


@st.composite
def broken(draw: DrawFn, values: SearchStrategy[Any]) -> Any:
    """A value with one thing changed somewhere: replaced, left out, added, renamed."""
    value = draw(values)
    places = list(_places(value, ()))
    place = draw(st.sampled_from(places))
    how = draw(st.sampled_from(("replace", "replace", "replace", "drop", "add", "rename")))
    return _changed(value, place, how=how, odd=draw(st.sampled_from(ODD)))


def _places(value: Any, path: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    found = [path]
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found += _places(item, (*path, key))
    return found


def _changed(value: Any, place: tuple[Any, ...], *, how: str, odd: Any) -> Any:
    if place and len(place) > 1:
        copy = dict(value) if isinstance(value, dict) else list(value)
        copy[place[0]] = _changed(value[place[0]], place[1:], how=how, odd=odd)
        return copy
    if not place or how == "add":
        target = value if not place else value[place[0]]
        added = {**target, "no_such_field": odd} if isinstance(target, dict) else odd
        if not place:
            return added
        return _changed(value, place, how="set", odd=added)
    copy = dict(value) if isinstance(value, dict) else list(value)
    if how == "drop":
        del copy[place[0]]
    elif how == "rename" and isinstance(copy, dict):
        copy[f"{place[0]}x"] = copy.pop(place[0])
    else:
        copy[place[0]] = odd
    return copy
