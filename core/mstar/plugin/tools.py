"""Finds calls of tools in what a model says: what a processor may use where its chat template writes them as text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from mstar.plugin.thoughts import overlap
from mstar.types import TextChunk, ToolCallChunk

_START, _END = "<tool_call>", "</tool_call>"


class ToolCallReader:
    """Takes calls of the form `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` out of one text as it comes.

    What does not read as a call stays text. Blanks before a call, and after the last one, belong to nothing. Every
    chunk that is fed comes out with its token ids and log-probabilities, its text maybe shorter, or longer by what was
    held back.

    Example:
        reader = ToolCallReader()  # one for each output, if `request.tools`
        yield from reader.feed(TextChunk(text, (token,)))
        yield from reader.flush()  # at the end
    """

    def __init__(self) -> None:
        self._held = ""
        self._index = 0
        self._has_called = False

    def feed(self, chunk: TextChunk) -> Iterator[TextChunk | ToolCallChunk]:
        """The chunk without calls, and the calls that have ended with it."""
        self._held, self._index = self._held + chunk.text, chunk.index
        text, calls = "", list[ToolCallChunk]()
        while (start := self._held.find(_START)) >= 0 and (end := self._held.find(_END, start)) >= 0:
            before, body = self._held[:start], self._held[start + len(_START) : end]
            self._held = self._held[end + len(_END) :]
            if (call := _parsed(body, index=chunk.index)) is None:
                text += f"{before}{_START}{body}{_END}"
            else:
                text += before.rstrip()
                calls.append(call)
                self._has_called = True
        kept = start if start >= 0 else len(self._held) - overlap(self._held, _START)
        kept = len(self._held[:kept].rstrip())
        text, self._held = text + self._held[:kept], self._held[kept:]
        yield replace(chunk, text=text)
        yield from calls

    def flush(self) -> Iterator[TextChunk]:
        """What is left at the end: blanks, or a call that did not end, as text."""
        rest, self._held = self._held.rstrip() if self._has_called else self._held, ""
        if rest:
            yield TextChunk(rest, index=self._index)


def _parsed(body: str, *, index: int) -> ToolCallChunk | None:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    name = found.get("name") if isinstance(found, dict) else None
    if not isinstance(name, str) or not name:
        return None
    arguments = found.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCallChunk(name, text, index)
