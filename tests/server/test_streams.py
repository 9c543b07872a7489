from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from mstar.server.results import chunk_event
from mstar.server.streams import TextStream
from mstar.types import AudioChunk, Chunk, ImageChunk, ProgressChunk, TensorChunk, TextChunk


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


def decode(chunk: Chunk) -> dict[str, Any]:
    (line,) = chunk_event(chunk).splitlines()
    event: dict[str, Any] = msgspec.json.decode(line)
    return event


def test_chunks_become_ndjson_events() -> None:
    assert decode(TextChunk("a\nb", (1, 2))) == {"event": "text", "text": "a\nb", "token_ids": [1, 2], "index": 0}
    assert decode(ProgressChunk(1, 5)) == {"event": "progress", "step": 1, "total": 5}
    event = decode(ImageChunk(np.zeros((2, 2, 3), np.uint8)))
    assert base64.b64decode(event["data"]).startswith(b"\x89PNG")
    event = decode(TensorChunk("z", torch.ones(2)))
    assert (event["name"], event["dtype"], event["shape"]) == ("z", "float32", [2])
    event = decode(AudioChunk(np.full(3, 0.5, np.float32), 8000))
    assert base64.b64decode(event["data"]) == b"\xff\x3f" * 3 and event["sample_rate"] == 8000
