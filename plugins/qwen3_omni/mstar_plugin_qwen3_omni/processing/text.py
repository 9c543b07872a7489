"""Text to ids and back; conversations to prompts. What a client writes cannot spell control tokens.

The chat template is the checkpoint's own. Texts go through it as they are, so that it may look at them; only control
tokens in them are broken by a character that no text of the conversation has, and mended again when the rest has been
read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from mstar.errors import ConfigError, RequestError
from mstar.plugin.text import Vocabulary
from mstar.plugin.thoughts import CLOSING, OPENING
from mstar_plugin_qwen3_omni.config import OmniConfig

NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Never in a text that means anything."""


CALLS = ("<tool_call>", "</tool_call>")
THINKING = "params.chat_template_kwargs.enable_thinking"


class Words(Vocabulary):
    """The checkpoint's tokenizer. Special tokens say nothing, but for those around calls of tools and thoughts.

    Attributes:
        thinks: whether answers may begin with a thought, as the chat template knows of some.
    """

    def __init__(self, config: OmniConfig) -> None:
        path = config.folder / "tokenizer.json"
        try:
            raw = path.read_text(encoding="utf-8")
            whole, parsed = Tokenizer.from_str(raw), json.loads(raw)
        except Exception as error:  # the library raises nothing more definite
            raise ConfigError(f"{path} is no tokenizer that can be read: {error}; download it again") from error
        super().__init__(whole)
        self.thinks = OPENING in config.chat_template or CLOSING in config.chat_template
        shown = (*CALLS, OPENING, CLOSING) if self.thinks else CALLS
        self._shown = {token["id"] for token in parsed["added_tokens"] if token["content"] in shown}
        self._start = config.turns.start
        self.special = {token["content"]: token["id"] for token in parsed["added_tokens"] if token["special"]}
        self._plain = Tokenizer.from_str(raw)
        self._plain.encode_special_tokens = True  # as text; other added tokens stay tokens, with their ids
        longest_first = sorted(self.special, key=len, reverse=True)
        self.control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def shown(self, token: int) -> bytes:
        return self.spelling(token) if token in self._shown else super().shown(token)

    def opens_thought(self, ids: Sequence[int]) -> bool:
        """Whether a prompt ends inside a thought, so that the answer goes on with it."""
        begin = max((place for place, token in enumerate(ids) if token == self._start), default=0)
        told = b"".join(map(self.spelling, ids[begin:])).decode(errors="replace")
        return self.thinks and told.rfind(OPENING) > told.rfind(CLOSING)

    def without_thought(self, ids: list[int]) -> list[int]:
        """A prompt without the empty thought that may end it: what follows is an answer's beginning all the same."""
        head = max((place for place, token in enumerate(ids) if token == self._start), default=0) + 3
        told = b"".join(map(self.spelling, ids[head:])).decode(errors="replace")
        is_empty = self.thinks and not told.replace(OPENING, "").replace(CLOSING, "").strip()
        return ids[:head] if is_empty else ids

    def encode(self, text: str) -> list[int]:
        """Ids of a text in which nothing is special. Tags that are tokens but not special, as the release's of thoughts
        and calls, are such for everybody who writes them."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def guarded(self, text: str, guard: str) -> str:
        """With the guard in each control token, and behind what may be the first part of one."""
        broken = self.control.sub(lambda found: found[0][0] + guard + found[0][1:], text)
        is_open = any(broken.endswith(token[:end]) for token in self.special for end in range(1, len(token)))
        return broken + guard if is_open else broken


class Slot(int):
    """Where the n-th insertion of a conversation goes."""


class ChatTemplate:
    """Turns to a prompt's pieces: ids of control tokens, texts, and slots for what is inserted as ids."""

    def __init__(self, config: OmniConfig, words: Words) -> None:
        self._words = words
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(config.chat_template)
            names = jinja2.meta.find_undeclared_variables(environment.parse(config.chat_template))
        except jinja2.TemplateError as error:
            message = f"the chat template in {config.folder} is not valid: {error}; download the checkpoint again"
            raise ConfigError(message) from error
        self._names = names

    def pieces(
        self, turns: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] = (), enable_thinking: bool | None = None
    ) -> list[int | str | Slot]:
        """What the prompt is made of, the beginning of the answer included.

        Args:
            turns: each with `role` and `content`: a text, or parts {"type": "text", "text"}, {"type": "image"} and so
                on, or {"type": "ids"} for an insertion.
            tools: as OpenAI's API takes them.
            enable_thinking: None: as the template does by itself.

        Raises RequestError for turns that the template refuses, and for what it has no place for.
        """
        if tools and "tools" not in self._names:
            raise RequestError("tools have no place in the model's chat template; leave them out", param="tools")
        if enable_thinking is not None and "enable_thinking" not in self._names:
            message = f"{THINKING} has no place in the model's chat template; leave it out"
            raise RequestError(message, param=THINKING)
        used = set().union(*map(set, _texts(turns)), *map(set, _texts(tools)))
        free = [one for one in NONCHARACTERS if one not in used]
        if len(free) < 2:
            message = "messages use all of U+FDD0 to U+FDEF, which are no characters; leave them out"
            raise RequestError(message, param="messages")
        guard, mark = free[:2]
        places = iter(range(1 << 30))

        def prepared(value: Any) -> Any:
            if isinstance(value, str):
                return self._words.guarded(value, guard)
            if isinstance(value, Mapping):
                if value.get("type") == "ids":
                    return {"type": "text", "text": f"{mark}{next(places)}{mark}"}
                return {key: prepared(item) for key, item in value.items()}
            return [prepared(item) for item in value] if isinstance(value, Sequence) else value

        given = {"messages": prepared(turns), "tools": prepared(tools) or None, "add_generation_prompt": True}
        given |= {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        try:
            prompt = self._template.render(**given)
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
            message = f"the model's chat template does not take these messages: {error}"
            raise RequestError(message, param="messages") from error
        split = re.split(f"({mark}[0-9]+{mark}|{self._words.control.pattern})", prompt)
        return [self._piece(text, guard=guard, mark=mark) for text in split if text]

    def _piece(self, text: str, *, guard: str, mark: str) -> int | str | Slot:
        if text.startswith(mark):
            return Slot(text.strip(mark))
        return self._words.special.get(text, text.replace(guard, ""))


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _texts(value: Any) -> Iterable[str]:
    """All texts in a nested value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item)
