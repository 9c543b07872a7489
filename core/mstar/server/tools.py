"""Tools that a model may ask to be called: what clients say of them, and the calls that a model makes.

One schema for the native route and OpenAI's. A call leaves the model as a `TextChunk` of its own channel, one JSON
object a line.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

Name = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
Arguments = Annotated[str, Meta(max_length=1 << 20, description="JSON")]


class Function(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`parameters` is a JSON schema, which the model is shown and nothing checks."""

    name: Name
    description: Annotated[str, Meta(max_length=1 << 20)] | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"] = "function"
    function: Function


class CalledFunction(Struct, kw_only=True, forbid_unknown_fields=True):
    name: Name
    arguments: Arguments


class ToolCall(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A call that an earlier answer asked for."""

    id: Annotated[str, Meta(max_length=256)] | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


Tools = Annotated[list[Tool], Meta(max_length=128)]
ToolCalls = Annotated[list[ToolCall], Meta(max_length=128)]


def plain(values: list[Tool] | list[ToolCall] | None) -> tuple[dict[str, Any], ...]:
    """As chat templates take them. `type` is always there."""
    return tuple({"type": "function"} | msgspec.to_builtins(value) for value in values or ())


def calls(text: str, *, first: int | None = None) -> list[dict[str, Any]]:
    """The calls of a text of channel "tool_call", as OpenAI's API gives them; in streams numbered from `first` on."""
    found = [msgspec.json.decode(line) for line in text.splitlines() if line]
    return [
        ({} if first is None else {"index": first + number})
        | {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": call}
        for number, call in enumerate(found)
    ]
