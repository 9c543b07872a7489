from __future__ import annotations

import pytest

from mstar.server.streams import TextStream
from mstar.types import TextChunk


def feed(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, list[int], TextStream]:
    stream, text, tokens = TextStream(stops), "", []
    for index, piece in enumerate(pieces):
        chunk = stream.feed(TextChunk(piece, (index,)))
        if chunk is not None:
            text += chunk.text
            tokens += chunk.token_ids
    return text + stream.flush(), tokens, stream


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "num_tokens"),
    [
        (("END",), ["a", "E", "N", "D", "b"], "a", 4),
        (("END",), ["aEN", "x", "END", "b"], "aENx", 3),
        (("aab",), ["a", "a", "a", "b", "c"], "a", 4),
        (("b", "abc"), ["a", "b", "c"], "a", 2),
        (("xyz",), ["x", "y"], "xy", 2),
        (("é",), ["caf", "é", "!"], "caf", 2),
        (("one\n\n",), ["one", "\n", "\nrest"], "", 3),
    ],
)
def test_text_is_cut_at_the_first_stop_string(
    stops: tuple[str, ...], pieces: list[str], text: str, num_tokens: int
) -> None:
    got, tokens, stream = feed(stops, pieces)
    assert got == text and tokens == list(range(num_tokens))
    assert stream.num_dropped == len(pieces) - num_tokens


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    stream = TextStream(("STOP",))
    assert [stream.feed(TextChunk(piece)).text for piece in ("aS", "T", "x")] == ["a", "", "STx"]  # type: ignore[union-attr]
