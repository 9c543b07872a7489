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
