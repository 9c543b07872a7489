"""Long text cut where a reader would pause, so that each part is short enough to be spoken well.

Pure functions on text; nothing is added or lost but white space around the cuts. Knows nothing about tokens.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator

MAX_CHARACTERS = 300
"""About 20 seconds of English speech, well inside what the model was trained on."""

_CLOSING = "\"'”’»›)\\]}」』）】*_"
_OPENING = "\"'“‘„«‹(\\[{「『（【*_¿¡-—–"

_SENTENCE_END = re.compile(
    rf"""
    (?<![.!?…‽؟।॥]) (?P<stop>[.!?…‽؟।॥]++) [{_CLOSING}]*+ (?=\s)   # a stop, what closes after it, white space
    | [。！？｡．][。！？…｡．]*+ [{_CLOSING}]*+                         # full-width stops need no white space
    """,
    re.VERBOSE,
)
_PARAGRAPH = re.compile(r"\n\s*\n")
_LINE = re.compile(r"\n")
_CLAUSE = re.compile(rf"(?:[,;:][{_CLOSING}]*+(?=\s)|[，、；：]|\s[—–-](?=\s)|—)")
_SPACE = re.compile(r"\s+")
_LIST_MARK = re.compile(r"(?:^|\n)\s*(?:\d{1,3}|[A-Za-z]|[ivxIVX]+)\.$")
_INITIALS = re.compile(r"(?:^|[^\w.])(?:[^\W\d_]\.)+$")  # "U.S.", "e.g.", "J."
_LAST_WORD = re.compile(r"([\w’'-]+)\.$")

_NEVER_LAST = frozenset(  # abbreviations that more of the same sentence follows
    "mr mrs ms mx dr prof rev hon gen col maj capt lt sgt cpl cmdr adm gov sen rep pres st ste mt messrs mme mlle "
    "vs viz cf bzw ggf sra".split()
)
_BEFORE_NUMBERS = frozenset(  # abbreviations only before a number: some are words otherwise
    "no nos nr art fig figs eq eqs sec ch vol p pp ca approx "
    "jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thur thurs fri sat sun".split()
)
_MAYBE_LAST = frozenset("jr sr esq etc inc ltd co corp bros al ave blvd rd dept ed eds usw phd".split())


def segment(text: str, *, max_characters: int = MAX_CHARACTERS) -> list[str]:
    """Parts of `text`, in order, each at most `max_characters` long and stripped.

    Text that fits is one part. Longer text is cut at paragraph and sentence ends where possible; a sentence that is
    too long by itself is cut at line breaks, then clauses, then words, then anywhere.
    """
    text = text.strip()
    if len(text) <= max_characters:
        return [text] if text else []
    parts: list[str] = []
    for piece in _pieces(text, max_characters=max_characters):
        if parts and len((parts[-1] + piece).strip()) <= max_characters:
            parts[-1] += piece
        else:
            parts.append(piece)
    return [part.strip() for part in parts]


def sentences(text: str) -> list[str]:
    """Sentences with the white space that follows them; joined they are `text`."""
    return _cut(text, (match.end() for match in _SENTENCE_END.finditer(text) if _ends_sentence(text, match)))


def _pieces(text: str, *, max_characters: int) -> Iterator[str]:
    """`text` in pieces that fit, cut by the first of these ways that is fine enough."""
    ways: tuple[Callable[[str], list[str]], ...] = (
        lambda part: _cut_at(_PARAGRAPH, part),
        sentences,
        lambda part: _cut_at(_LINE, part),
        lambda part: _cut_at(_CLAUSE, part),
        lambda part: _cut_at(_SPACE, part),
        lambda part: _cut_anywhere(part, max_characters=max_characters),
    )

    def cut(part: str, *, way: int) -> Iterator[str]:
        for piece in ways[way](part):
            if len(piece.strip()) <= max_characters:
                yield piece
            else:
                yield from cut(piece, way=way + 1)

    return cut(text, way=0)


def _cut_at(pattern: re.Pattern[str], text: str) -> list[str]:
    return _cut(text, (match.end() for match in pattern.finditer(text)))


def _cut(text: str, ends: Iterator[int]) -> list[str]:
    """`text` cut after each end, moved past the white space there; without empty pieces."""
    pieces, start = [], 0
    for end in ends:
        space = _SPACE.match(text, end)
        end = space.end() if space else end
        if start < end < len(text):
            pieces.append(text[start:end])
            start = end
    pieces.append(text[start:])
    return pieces


def _cut_anywhere(text: str, *, max_characters: int) -> list[str]:
    pieces, start = [], 0
    while len(text) - start > max_characters:
        end = start + max_characters
        # A mark, such as a vowel sign, stays with the letter before it.
        while end > start + 1 and unicodedata.category(text[end]).startswith("M"):
            end -= 1
        pieces.append(text[start:end])
        start = end
    pieces.append(text[start:])
    return pieces


def _ends_sentence(text: str, match: re.Match[str]) -> bool:
    """Whether a stop followed by white space ends a sentence, and not an abbreviation, initial or list number."""
    if match["stop"] is None:
        return True
    following = text[match.end() : match.end() + 40].lstrip().lstrip(_OPENING.replace("\\", ""))
    if following[:1].islower():
        return False
    if match["stop"] != ".":
        return True
    before = text[max(0, match.start() - 40) : match.start() + 1]
    if _LIST_MARK.search(before) or _INITIALS.search(before):
        return False
    word = _LAST_WORD.search(before)
    if word is None:
        return True
    name, next_character = word[1].lower(), following[:1]
    if name in _NEVER_LAST:
        return False
    if name in _BEFORE_NUMBERS:
        return not next_character.isdigit()
    return name not in _MAYBE_LAST or not next_character.isdigit()
