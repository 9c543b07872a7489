"""Calls of tools found in texts, however those are cut into chunks."""

from __future__ import annotations

import json

import pytest

from mstar.plugin.tools import ToolCallReader
from mstar.types import TextChunk, ToolCallChunk

LOOK = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
FOUND = ("look_up", {"city": "Köln", "days": 2})


def read(text: str, size: int) -> tuple[str, list[tuple[str, object]], list[int]]:
    """(text without calls, calls, token ids) of a text that comes in pieces of so many characters."""
    reader, said, calls, ids = ToolCallReader(), "", list[tuple[str, object]](), list[int]()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    chunks = [one for number, piece in enumerate(pieces) for one in reader.feed(TextChunk(piece, (number,), 3))]
    for chunk in [*chunks, *reader.flush()]:
        assert chunk.index == 3
        if isinstance(chunk, ToolCallChunk):
            calls.append((chunk.name, json.loads(chunk.arguments)))
        else:
            said += chunk.text
            ids += chunk.token_ids
    assert ids == list(range(len(pieces)))
    return said, calls, ids


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10, 1000])
@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ("plain\n text \n", "plain\n text \n", []),
        (LOOK, "", [FOUND]),
        (f"I look.\n\n{LOOK}\n{LOOK}\n", "I look.", [FOUND, FOUND]),
        (f"{LOOK}\nand more", "\nand more", [FOUND]),
        ("a < b <tool_calls> <tool", "a < b <tool_calls> <tool", []),
        ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
        ("x <tool_call>no json</tool_call> y", "x <tool_call>no json</tool_call> y", []),
        (f"{LOOK}<tool_call>{{cut", "<tool_call>{cut", [FOUND]),
        ('<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
    ],
)
def test_calls_leave_the_text_whatever_the_pieces(text: str, size: int, said: str, calls: list[object]) -> None:
    assert read(text, size)[:2] == (said, calls)


def test_only_what_may_be_a_call_is_held_back() -> None:
    reader = ToolCallReader()
    assert [one.text for one in reader.feed(TextChunk("a <b")) if isinstance(one, TextChunk)] == ["a <b"]
    assert [one.text for one in reader.feed(TextChunk("c <to")) if isinstance(one, TextChunk)] == ["c"]
    assert [one.text for one in reader.feed(TextChunk("uch")) if isinstance(one, TextChunk)] == [" <touch"]
    assert list(reader.flush()) == []
