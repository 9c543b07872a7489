"""Token ids to text as they come: what a processor may use on tokens. Imports `tokenizers`.

Works on the bytes that tokens stand for, so that what is given never changes and no character is cut.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from mstar.errors import PluginError
from mstar.types import Logprob, TokenLogprob

_DECODERS = ("ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace")


class Vocabulary:
    """What each token of a tokenizer says, in bytes. One serves all requests.

    Args:
        hidden: ids that say nothing to a reader, besides the tokenizer's special tokens.

    Raises PluginError for a tokenizer whose decoder works on more than one token at a time.
    """

    def __init__(self, tokenizer: Tokenizer, *, hidden: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._hidden = {token for token, content in added.items() if content.special}.union(hidden)
        self._bytes: dict[int, bytes] = {}
        self.leading_spaces = 0
        """Spaces that are no part of a text when it begins with them."""
        decoder: Any = {"type": "none"} if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
        self._steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        for step in self._steps:
            self._check(step)

    def _check(self, step: dict[str, Any]) -> None:
        kind = step["type"]
        is_known = kind in _DECODERS
        if kind == "Replace":
            is_known = "String" in step["pattern"]
        elif kind == "Strip":
            is_known = step["content"] == " " and step["stop"] == 0
            self.leading_spaces = step["start"]
        elif kind == "Metaspace":
            self.leading_spaces = int(step["prepend_scheme"] != "never")
        if not is_known:
            raise PluginError(f"the tokenizer's decoder has a step {step}; known are {', '.join(_DECODERS)}")

    def spelling(self, token: int) -> bytes:
        """The bytes of a token, special ones included; none for an id that the tokenizer does not know."""
        if (known := self._bytes.get(token)) is None:
            text = self._tokenizer.id_to_token(token)
            known = self._bytes[token] = b"" if text is None else self._spelled(text)
        return known

    def shown(self, token: int) -> bytes:
        """The same of a token that belongs to a text; none for special ones."""
        return b"" if token in self._hidden else self.spelling(token)

    def logprob(self, token: int, logprob: float, *, top: Iterable[tuple[int, float]] = ()) -> TokenLogprob:
        """What `TextChunk.logprobs` holds, of ids and logarithms."""
        likeliest = tuple(Logprob(*self._named(other, value)) for other, value in top)
        return TokenLogprob(*self._named(token, logprob), likeliest)

    def _named(self, token: int, logprob: float) -> tuple[str, float, tuple[int, ...]]:
        data = self.spelling(token)
        return data.decode(errors="replace"), logprob, tuple(data)

    def _spelled(self, text: str) -> bytes:
        for step in self._steps:
            if step["type"] == "ByteLevel":
                known = self._byte_of
                return bytes(map(known.__getitem__, text)) if known.keys() >= set(text) else text.encode()
            if step["type"] == "ByteFallback" and re.fullmatch("<0x[0-9A-Fa-f]{2}>", text):
                return bytes([int(text[3:5], 16)])
            if step["type"] == "Replace":
                text = text.replace(step["pattern"]["String"], step["content"])
            elif step["type"] == "Metaspace":
                text = text.replace(step["replacement"], " ")
        return text.encode()

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """Characters that stand for bytes: printable Latin-1 for themselves, the others from U+0100 on."""
        printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
        others = [byte for byte in range(256) if byte not in printable]
        return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


class Detokenizer:
    """One text as its tokens come. What `feed` and `flush` give, put together, is the whole text.

    Example:
        detokenizer = Detokenizer(vocabulary)
        yield TextChunk(detokenizer.feed([token]), (token,))  # may be "", in the middle of a character
        yield TextChunk(detokenizer.flush())  # at the end
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._leading_spaces = vocabulary.leading_spaces

    def feed(self, tokens: Iterable[int]) -> str:
        """The text that is certain by now. Bytes that belong to no character become U+FFFD."""
        text = self._decoder.decode(b"".join(map(self._vocabulary.shown, tokens)))
        spaces = min(len(text) - len(text.lstrip(" ")), self._leading_spaces)
        self._leading_spaces = 0 if text[spaces:] else self._leading_spaces - spaces
        return text[spaces:]

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was not finished."""
        return self._decoder.decode(b"", final=True)
