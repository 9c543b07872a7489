"""Text to ids and back. What a client writes cannot spell control tokens; what the model says may."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from mstar.errors import ConfigError
from mstar.plugin.text import Vocabulary
from mstar_plugin_bagel.config import CHECKPOINT, BagelConfig

PAD = "<|image_pad|>"
"""Stands in a prompt's ids for what is no token."""
OPENING, CLOSING = "<think>", "</think>"


class Words(Vocabulary):
    """The checkpoint's tokenizer. Special tokens are shown as the model's authors show them: but for text's frame."""

    def __init__(self, config: BagelConfig) -> None:
        raw = _read(config.folder)
        self._whole = Tokenizer.from_str(raw)
        self._plain = Tokenizer.from_str(json.dumps(json.loads(raw) | {"added_tokens": []}))
        self._frame = (config.tokens.bos, config.tokens.eos)
        super().__init__(self._whole)
        pad = self._whole.token_to_id(PAD)
        self.pad: int = config.tokens.image_start if pad is None else pad

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of a text; `special`: control tokens in it are such."""
        tokenizer = self._whole if special else self._plain
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def shown(self, token: int) -> bytes:
        return b"" if token in self._frame else self.spelling(token)


def _read(folder: Path) -> str:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ConfigError(f"{folder} has no tokenizer.json; copy the one of {CHECKPOINT} there")
    return path.read_text(encoding="utf-8")


class Thoughts:
    """Parts what a model says between its tags from the answer behind them. Without an opening tag all is answer."""

    def __init__(self) -> None:
        self._held = ""
        self._place = "before"  # the opening tag, in the thought, or behind it

    @property
    def is_over(self) -> bool:
        """Whether what comes is the answer."""
        return self._place == "behind"

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
