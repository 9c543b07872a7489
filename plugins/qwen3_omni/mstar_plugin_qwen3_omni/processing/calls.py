"""Finds in an answer what the model asks to be called: JSON between two tokens."""

from __future__ import annotations

import json
from dataclasses import replace

from mstar.types import TextChunk
from mstar_plugin_qwen3_omni.processing.text import Words

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class Calls:
    """Of one text. What is between the tokens is held back until it is whole; what is no call is text after all."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._ids: list[int] | None = None  # since the opening token

    def feed(self, chunk: TextChunk) -> TextChunk:
        """A chunk of at most one token, the last of none -> what there is to tell by now."""
        token = chunk.token_ids[0] if chunk.token_ids else None
        if self._ids is None:
            if token is None or self._words.id_of(OPENING) != token:
                return chunk
            self._ids = [token]
            return replace(chunk, text="", token_ids=(), logprobs=())
        if token is not None:
            self._ids.append(token)
        if token is not None and token != self._words.id_of(CLOSING):
            return replace(chunk, text="", token_ids=(), logprobs=())
        ids, self._ids = self._ids, None
        inside = ids[1:-1] if token is not None else ids[1:]
        said = b"".join(map(self._words.spelling, inside)).decode(errors="replace")
        call = _call(said) if token is not None else None
        if call is None:
            raw = OPENING + said + (CLOSING if token is not None else "") + chunk.text * (token is None)
            return TextChunk(raw, tuple(ids), chunk.index)
        return TextChunk(call + "\n", tuple(ids), chunk.index, channel="tool_call")


def _call(said: str) -> str | None:
    """A line of JSON: name, and arguments as JSON within; None for what is no call."""
    try:
        found = json.loads(said)
        name, arguments = found["name"], found.get("arguments", {})
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    if not isinstance(name, str):
        return None
    given = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return json.dumps({"name": name, "arguments": given}, ensure_ascii=False)
