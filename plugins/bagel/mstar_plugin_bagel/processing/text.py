"""Text to ids and back. What a client writes cannot spell control tokens; what the model says may."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

from tokenizers import Tokenizer

from mstar.errors import ConfigError
from mstar_plugin_bagel.config import CHECKPOINT

PAD = "<|image_pad|>"
"""Stands in a prompt's ids for what is no token."""
OPENING, CLOSING = "<think>", "</think>"


class Words:
    """The checkpoint's tokenizer."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ConfigError(f"{folder} has no tokenizer.json; copy the one of {CHECKPOINT} there")
        self._whole = Tokenizer.from_file(str(path))
        raw = json.loads(path.read_text(encoding="utf-8"))
        self._special = {token["id"]: token["content"] for token in raw["added_tokens"]}
        raw["added_tokens"] = []
        self._plain = Tokenizer.from_str(json.dumps(raw))
        self._bytes = _byte_letters()
        self.pad = self._whole.token_to_id(PAD)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of a text; `special`: control tokens in it are such."""
        tokenizer = self._whole if special else self._plain
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def bytes_of(self, token: int) -> bytes:
        """UTF-8 of a token, or a part of a character; none for ids that are no token."""
        if token in self._special:
            return self._special[token].encode()
        letters = self._whole.id_to_token(token) or ""
        if all(letter in self._bytes for letter in letters):
            return bytes(self._bytes[letter] for letter in letters)
        return letters.encode()


class Detokenizer:
    """Ids to text, one after the other: a character is given out when its last byte is there."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        return self._decoder.decode(self._words.bytes_of(token))

    def flush(self) -> str:
        """What was held back, when nothing more can come."""
        return self._decoder.decode(b"", final=True)


class Thoughts:
    """Parts what a model says between its tags from the answer behind them. Without an opening tag all is answer."""

    def __init__(self) -> None:
        self._held = ""
        self._place = "before"  # the opening tag, in the thought, or behind it

    def feed(self, text: str, *, final: bool = False) -> tuple[str, str]:
        """(more of the thought, more of the answer). What may be the start of a tag is held back, unless `final`."""
        self._held += text
        thought = answer = ""
        if self._place == "before":
            begun = self._held.lstrip()
            if begun.startswith(OPENING):
                self._place, self._held = "in", begun[len(OPENING) :]
            elif final or not OPENING.startswith(begun):
                self._place = "behind"
        if self._place == "in":
            thought, tag, rest = self._held.partition(CLOSING)
            if tag:
                self._place, self._held = "behind", rest
            else:
                kept = 0 if final else _overlap(thought, CLOSING)
                self._held, thought = thought[len(thought) - kept :], thought[: len(thought) - kept]
        if self._place == "behind":
            answer, self._held = self._held, ""
        return thought, answer


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag`."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)


def _byte_letters() -> dict[str, int]:
    """The letter that byte-level BPE writes each byte with -> the byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}
