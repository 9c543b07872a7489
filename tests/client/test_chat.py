"""What the client makes of chat's events, and of what it is given to send."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

import mstar.client
from mstar.client import APIError, ClientError, StreamBroken, chat

DONE = b"data: [DONE]\n\n"


def sent(index: int = 0, reason: str | None = None, **delta: Any) -> bytes:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice], "usage": None}).encode() + b"\n\n"


def decoder() -> chat.ChatDecoder:
    return chat.ChatDecoder(httpx.Response(200, headers={"X-Seed": "7"}))


def picture(shade: int) -> dict[str, Any]:
    file = io.BytesIO()
    Image.new("RGB", (3, 2), (shade,) * 3).save(file, "PNG")
    return {"type": "image_url", "image_url": {"url": mstar.client.image(file.getvalue())["data"]}}


@pytest.mark.parametrize("at_once", [1, 7, 10**6])
def test_events_come_to_choices_however_the_bytes_fall(at_once: int) -> None:
    usage = b'data: {"choices": [], "usage": {"total_tokens": 3}}\n\n'
    samples = base64.b64encode(np.array([0, 32767], "<i2").tobytes()).decode()
    data = b"".join(
        [
            sent(role="assistant", content=""), sent(reasoning_content="hm"), sent(1, content="b"), sent(content="a"),
            sent(content="é"), sent(images=[picture(1) | {"partial": True}]), sent(images=[picture(2)]),
            sent(audio={"id": "x", "data": samples, "sample_rate": 8000}), sent(reason="length"), sent(1, "stop"),
            usage, DONE,
        ]
    )  # fmt: skip
    found = decoder()
    events = [event for at in range(0, len(data), at_once) for event in found.feed(data[at : at + at_once])]
    found.end()
    assert [type(event).__name__ for event in events] == [*["TextChunk"] * 4, *["ImageChunk"] * 2, "Audio"]
    assert [event.channel for event in events[:4]] == ["reasoning", "answer", "answer", "answer"]
    assert [event.partial for event in events[4:6]] == [True, False] and events[6].samples.tolist() == [0, 1]
    result = found.result
    assert (result.text, result.reasoning, result.finish_reason, result.seed) == ("aé", "hm", "length", 7)
    assert len(result) == 2 and (result[1].text, result[1].finish_reason) == ("b", "stop")
    assert result.usage == {"total_tokens": 3} and result.images[0][0, 0, 0] == 2 and len(result.audio) == 4
    with pytest.raises(AttributeError, match="no 'colour'"):
        _ = result.colour


def test_a_stream_never_ends_early_without_an_error() -> None:
    found = decoder()
    list(found.feed(sent(content="a")))
    with pytest.raises(ClientError, match="not ended yet"):
        _ = found.result
    with pytest.raises(StreamBroken, match=r"without \[DONE\]"):
        found.end()
    with pytest.raises(APIError, match="the node failed"):
        list(found.feed(b'data: {"error": {"message": "the node failed", "type": "server_error"}}\n\n'))
    with pytest.raises(StreamBroken, match="not a JSON object"):
        list(found.feed(b"data: {\n\n"))


def test_parts_of_generate_and_strings_become_those_of_the_route() -> None:
    uri = "data:image/png;base64,AA=="
    video = mstar.client.media("video", "https://x/clip.mp4", fps=2)
    message = {"role": "user", "content": ["look", mstar.client.image(uri), video, picture(1)]}
    body: Any = chat.chat([{"role": "system", "content": "s"}, message], {"n": 2}).body
    assert body["n"] == 2 and body["messages"][0] == {"role": "system", "content": "s"}
    assert body["messages"][1]["content"] == [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": uri}},
        {"type": "video_url", "video_url": {"url": "https://x/clip.mp4"}, "fps": 2},
        picture(1),
    ]
    assert chat.stream_chat("hi", {}).body == {
        "messages": [{"role": "user", "content": "hi"}], "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    for call in (lambda: chat.chat("a", {"stream": True}), lambda: chat.generate_images("a", {"stream": True})):
        with pytest.raises(TypeError, match="stream"):
            call()


def test_only_samples_take_a_rate() -> None:
    assert mstar.client.audio(b"RIFF")["data"].endswith("base64,UklGRg==")
    with pytest.raises(TypeError, match="sample_rate is for samples"):
        mstar.client.audio(b"RIFF", sample_rate=8000)
