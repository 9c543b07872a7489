"""Tools that a model may call, and its calls in earlier turns: wire types, and what is checked of them.

The shapes are OpenAI's, for native requests and for chat alike. Nothing here calls a tool, or knows how models write
calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

from msgspec import Meta, Struct

from mstar.errors import RequestError

MAX_TOOLS = 128
MAX_TEXT = 1 << 20
"""Most characters of one text, and most token ids; what the model takes may be less."""
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
ToolName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
CallId = Annotated[str, Meta(min_length=1, max_length=256)]


class CalledFunction(Struct, kw_only=True, forbid_unknown_fields=True):
    name: ToolName
    arguments: Text


class ToolCallInput(Struct, kw_only=True, forbid_unknown_fields=True):
    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolFunction(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`parameters`: JSON Schema."""

    name: ToolName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: ToolFunction


class Turn(Protocol):
    """What is looked at of a message."""

    role: str
    tool_calls: list[ToolCallInput]
    tool_call_id: str | None


def check_tools(turns: Sequence[Turn], tools: Sequence[Tool], *, is_chat: bool, takes_tools: bool) -> None:
    """Raises RequestError for tools that a task does not take, and for calls and answers that do not fit together."""
    called: dict[str, None] = {}
    for place, turn in enumerate(turns):
        at = f"messages.{place}"
        if turn.tool_calls and not (takes_tools and turn.role == "assistant"):
            problem = "only an assistant's message has some" if takes_tools else "this model calls no tools"
            raise RequestError(f"{at}.tool_calls: {problem}; leave them out", param=f"{at}.tool_calls")
        called |= {call.id: None for call in turn.tool_calls}
        if turn.tool_call_id is not None and (turn.role != "tool" or turn.tool_call_id not in called):
            given, known = turn.tool_call_id[:60], ", ".join(called)[:200] or "none"
            message = f"{at}.tool_call_id is {given!r}, in a message of the role {turn.role[:60]!r}; it tells a tool's "
            message += f"message which call before it this answers: {known}"
            raise RequestError(message, param=f"{at}.tool_call_id")
    if tools and not (is_chat and takes_tools):
        problem = "come with messages; give those" if takes_tools else "cannot be called by this model; leave them out"
        raise RequestError(f"tools {problem}", param="tools", code="unsupported_parameter")
    for name, times in Counter(tool.function.name for tool in tools).items():
        if times > 1:
            raise RequestError(f"tools has {name!r} {times} times; give each once", param="tools")
