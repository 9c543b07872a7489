"""Parts thoughts from answers: what a processor may use where a model writes what it thinks between tags."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mstar.types import TextChunk

OPENING, CLOSING = "<think>", "</think>"


class ThoughtReader:
    """Parts `<think>a thought</think>an answer` as the text comes. Text that does not begin so is all answer.

    Args:
        is_open: the prompt ends inside a thought: the text begins with one, whether or not it has the opening tag too.
        trimmed: characters that are left out where a thought begins and ends, and where the answer behind it begins.

    Example:
        reader = ThoughtReader(is_open=True, trimmed="\\n")  # one for each output
        yield from reader.feed(TextChunk(text, (token,)))
        yield from reader.feed(TextChunk(""), final=True)  # at the end
        usage["reasoning_tokens"] = reader.num_tokens
    """

    def __init__(self, *, is_open: bool = False, trimmed: str = "") -> None:
        self._is_open, self._trimmed = is_open, trimmed
        self._held = ""
        self._place = "before"  # the opening tag, in the thought, or behind it
        self._leading = ""  # trimmed off until there is more
        self.num_tokens = 0
        """Of the thought and its tags, among those that were fed."""

    @property
    def is_over(self) -> bool:
        """Whether what comes is the answer."""
        return self._place == "behind"

    def feed(self, chunk: TextChunk, *, final: bool = False) -> Iterator[TextChunk]:
        """The chunk in its channel, its text shorter or longer by what is held back; as two, where the thought ends."""
        was_over = self.is_over
        thought, answer = self.part(chunk.text, final=final)
        bare, whole = TextChunk("", index=chunk.index), chunk
        if not was_over and not answer:
            self.num_tokens += len(chunk.token_ids)
            bare, whole = whole, bare
        if thought or bare.token_ids:
            yield replace(bare, text=thought, channel="reasoning")
        if answer or whole.token_ids:
            yield replace(whole, text=answer)

    def part(self, text: str, *, final: bool = False) -> tuple[str, str]:
        """(more of the thought, more of the answer). What may be the start of a tag is held back, unless `final`."""
        self._held += text
        thought = answer = ""
        if self._place == "before":
            begun = self._held.lstrip()
            if begun.startswith(OPENING):
                self._place, self._held, self._leading = "in", begun[len(OPENING) :], self._trimmed
            elif final or not OPENING.startswith(begun):
                self._place, self._leading = ("in", self._trimmed) if self._is_open else ("behind", "")
        if self._place == "in":
            self._strip()
            thought, tag, rest = self._held.partition(CLOSING)
            if tag:
                thought, self._held = thought.rstrip(self._trimmed), rest
                self._place, self._leading = "behind", self._trimmed
            elif not final:
                thought = thought[: len(thought) - overlap(thought, CLOSING)].rstrip(self._trimmed)
                self._held = self._held[len(thought) :]
                self._leading = "" if thought else self._leading
            else:
                self._held = ""
        if self._place == "behind":
            self._strip()
            answer, self._held = self._held, ""
            self._leading = "" if answer else self._leading
        return thought, answer

    def _strip(self) -> None:
        self._held = self._held.lstrip(self._leading)


def overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag`."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)
