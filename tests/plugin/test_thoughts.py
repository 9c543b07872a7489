"""Thoughts parted from answers, however a text is cut into chunks."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mstar.plugin.thoughts import ThoughtReader
from mstar.types import TextChunk

OPEN = {"is_open": True, "trimmed": "\n"}


def read(reader: ThoughtReader, pieces: list[str]) -> tuple[str, str]:
    """What comes of pieces, each a token; all tokens come out once, in order, and those of the thought are counted."""
    said, ids = {"reasoning": "", "answer": ""}, {"reasoning": list[int](), "answer": list[int]()}
    chunks = [one for number, piece in enumerate(pieces) for one in reader.feed(TextChunk(piece, (number,), 3))]
    for chunk in [*chunks, *reader.feed(TextChunk("", index=3), final=True)]:
        assert chunk.index == 3
        said[chunk.channel] += chunk.text
        ids[chunk.channel] += chunk.token_ids
    assert ids["reasoning"] + ids["answer"] == list(range(len(pieces)))
    assert len(ids["reasoning"]) == reader.num_tokens
    return said["reasoning"], said["answer"]


@pytest.mark.parametrize(
    ("pieces", "thought", "answer"),
    [
        (["<think>a", "b</think>", "c"], "ab", "c"),
        (["<", "think", ">a<", "/b", "</thi", "nk>c", "d"], "a</b", "cd"),
        (["no <think>a</think>"], "", "no <think>a</think>"),
        (["<thin"], "", "<thin"),
        ([" \n<think>a", "</"], "a</", ""),
        (["<think></think>"], "", ""),
    ],
)
def test_thoughts_are_parted_from_answers(pieces: list[str], thought: str, answer: str) -> None:
    assert read(ThoughtReader(), pieces) == (thought, answer)


@pytest.mark.parametrize(
    ("text", "options", "thought", "answer"),
    [
        ("\nwell\n\nthen\n</think>\n\nYes.\n", OPEN, "well\n\nthen", "Yes.\n"),
        ("<think>\nwell</think>\nYes. </think>", OPEN, "well", "Yes. </think>"),
        ("</think>\n\nYes.", OPEN, "", "Yes."),
        ("cut < off\n</thi", OPEN, "cut < off\n</thi", ""),
        ("\n\n", OPEN, "", ""),
        ("<thin", OPEN, "<thin", ""),
        (" <think>\nwell\n</think>\n\nYes.", {"trimmed": "\n"}, "well", "Yes."),
        ("\n\nYes. </think>", {"trimmed": "\n"}, "", "\n\nYes. </think>"),
        (" <think>\n a \n</think> b", {}, "\n a \n", " b"),
    ],
)
def test_every_cut_of_a_text_is_read_alike(text: str, options: dict[str, object], thought: str, answer: str) -> None:
    cuts = [(0, len(text)), (0, *range(1, len(text)), len(text))]
    cuts += [(0, first, second, len(text)) for first in range(1, len(text)) for second in range(first + 1, len(text))]
    for cut in cuts:
        pieces = [text[start:end] for start, end in pairwise(cut)]
        assert read(ThoughtReader(**options), pieces) == (thought, answer)  # type: ignore[arg-type]
