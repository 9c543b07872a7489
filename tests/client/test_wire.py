"""What calls send, and what streamed bytes come to, however they are cut; without sockets."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import numpy as np
import pytest

from mstar.client import APIError, Audio, ClientError, Image, Progress, StreamBroken, Tensor, Text, media, tensor, wire
from mstar.client.wire import EventDecoder, SpeechDecoder

DONE = {
    "event": "done", "id": "1", "model": "m", "task": "t", "finish_reason": "stop", "seed": 3, "usage": {},
    "timings": {}, "counters": {"a.b": 2},
}  # fmt: skip


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def body_of(events: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


def response(**headers: str) -> httpx.Response:
    return httpx.Response(200, headers={name.replace("_", "-"): value for name, value in headers.items()})


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


# ---- calls --------------------------------------------------------------------------------------------------------


def test_strings_are_text_parts_and_other_parts_stay_as_they_are() -> None:
    part = tensor("x", np.array([1, 2], dtype=np.int64))
    call = wire.generate(None, {"inputs": ["hello", part], "task": "t", "timeout_s": 3.0})
    assert call.body == {"inputs": [{"type": "text", "text": "hello"}, part], "task": "t", "timeout_s": 3.0}
    assert wire.stream("hi", {}).body == {"inputs": [{"type": "text", "text": "hi"}], "stream": True}
    messages = [{"role": "user", "content": "hi"}]
    assert wire.generate(None, {"messages": messages}).body == {"messages": messages}


@pytest.mark.parametrize("fields", [{}, {"inputs": [], "messages": []}])
def test_one_of_text_inputs_and_messages_is_asked_for(fields: Any) -> None:
    with pytest.raises(TypeError, match="exactly one"):
        wire.generate(None, fields)
    with pytest.raises(TypeError, match="exactly one"):
        wire.generate("text", {"inputs": ["more"]})


def test_an_unknown_field_is_refused_with_those_known() -> None:
    with pytest.raises(TypeError, match=r"unknown: temperature; known: inputs.*params="):
        wire.generate("text", {"temperature": 1})  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream_format": "sse"}, {"stream_format": "audio"}])
def test_a_whole_file_is_no_stream(fields: Any) -> None:
    with pytest.raises(TypeError, match="are for stream_speech"):
        wire.speech("text", fields)
    assert wire.speech("text", {"stream": False, "stream_format": None}).body["stream"] is False  # type: ignore[index]


def test_the_address_may_be_that_of_openai_s_routes() -> None:
    assert wire.http_options("http://h:1/v1/", "k", 3.0)["base_url"] == "http://h:1"


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "int32", "int16", "uint8", "bool"])
def test_tensors_are_sent_and_read_alike(dtype: str) -> None:
    value = np.arange(6).reshape(3, 2).astype(dtype)[::-1]
    sent = tensor("x", value)["tensor"]
    assert sent["shape"] == [3, 2]
    decoder = EventDecoder(response())
    (event,) = decoder.feed(body_of([{"event": "tensor", "name": "x", "index": 0, **sent}]))
    assert isinstance(event, Tensor) and isinstance(event.tensor, np.ndarray)
    assert event.tensor.dtype == value.dtype and (event.tensor == value).all()


def test_bfloat16_comes_as_a_tensor_of_torch() -> None:
    import torch

    value = torch.tensor([[1.5, -2.0], [0.25, 3.0]], dtype=torch.bfloat16).T
    sent = tensor("x", value)["tensor"]
    assert sent["dtype"] == "bfloat16"
    decoder = EventDecoder(response())
    line = {"event": "tensor", "name": "x", "index": 0, **sent}
    list(decoder.feed(body_of([line, line, DONE])))
    assert torch.equal(decoder.result.tensors["x"], torch.cat([value, value]))


def test_media_become_data_uris(tmp_path: Any) -> None:
    (tmp_path / "a.wav").write_bytes(b"abc")
    for source in (b"abc", tmp_path / "a.wav"):
        part = media("video", source, fps=2)
        assert part == {"type": "video", "data": "data:application/octet-stream;base64,YWJj", "fps": 2}
    assert media("image", "https://a.org/x.png") == {"type": "image", "data": "https://a.org/x.png"}


# ---- events -------------------------------------------------------------------------------------------------------


EVENTS = [
    {"event": "text", "text": "Hé", "token_ids": [1, 2], "index": 0},
    {"event": "progress", "step": 1, "total": 2},
    {"event": "text", "text": "llo", "token_ids": [3], "index": 0},
    {"event": "text", "text": "other", "token_ids": [], "index": 1},
    {"event": "audio", "data": base64_of(b"\x00\x00\xff\x7f"), "format": "pcm", "sample_rate": 8000, "index": 0},
    {"event": "audio", "data": base64_of(b"\x01\x80"), "format": "pcm", "sample_rate": 8000, "index": 0},
    {"event": "tensor", **tensor("x", np.ones((2, 1)))["tensor"], "name": "x", "index": 0},
    {"event": "tensor", **tensor("x", np.zeros((1, 1)))["tensor"], "name": "x", "index": 0},
    {"event": "tensor", **tensor("x", np.zeros((1, 1)))["tensor"], "name": "x", "index": 1},
    DONE,
]


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_events_are_typed_and_joined_however_the_bytes_are_cut(size: int) -> None:
    decoder = EventDecoder(response())
    events = [event for data in cut(body_of(EVENTS), size) for event in decoder.feed(data)]
    decoder.end()
    assert [type(event) for event in events] == [Text, Progress, Text, Text, Audio, Audio, Tensor, Tensor, Tensor]
    result = decoder.result
    assert result.texts == ["Héllo", "other"]
    (audio,) = result.audio
    assert (
        audio.samples.dtype == np.float32 and audio.samples.tolist() == [0.0, 1.0, -1.0] and audio.sample_rate == 8000
    )
    assert {name: value.tolist() for name, value in result.tensors.items()} == {"x": [[1], [1], [0]], "x-1": [[0]]}
    assert (result.finish_reason, result.seed, result.counters) == ("stop", 3, {"a.b": 2})


def test_images_are_pixels_and_previews_are_no_result(tmp_path: Any) -> None:
    from PIL import Image as Pillow

    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    Pillow.fromarray(pixels).save(tmp_path / "x.png")
    image = {"event": "image", "data": base64_of((tmp_path / "x.png").read_bytes()), "format": "png", "index": 0}
    decoder = EventDecoder(response())
    events = list(decoder.feed(body_of([{**image, "partial": True}, image, image, DONE])))
    assert [event.partial for event in events if isinstance(event, Image)] == [True, False, False]
    assert len(decoder.result.images) == 2 and (decoder.result.images[0] == pixels).all()


def test_a_stream_without_its_end_is_broken_and_has_no_result() -> None:
    decoder = EventDecoder(response())
    assert len(list(decoder.feed(body_of(EVENTS[:-1])))) == 9
    with pytest.raises(StreamBroken, match="'done'"):
        decoder.end()
    with pytest.raises(ClientError, match="not ended"):
        _ = decoder.result


def test_an_error_event_is_the_error_it_reports() -> None:
    error = {"message": "it failed", "type": "server_error", "param": "inputs", "code": "oops"}
    decoder = EventDecoder(response(x_request_id="abc"))
    received = []
    with pytest.raises(APIError) as caught:
        for event in decoder.feed(body_of([EVENTS[0], {"event": "error", "error": error}, DONE])):
            received.append(event)
    assert len(received) == 1
    fields = {name: getattr(caught.value, name) for name in error}
    assert fields == error and caught.value.status is None and caught.value.request_id == "abc"


def test_what_this_client_does_not_know_is_not_passed_over() -> None:
    with pytest.raises(ClientError, match="'smell'"):
        list(EventDecoder(response()).feed(b'{"event": "smell"}\n'))
    with pytest.raises(StreamBroken, match="not a JSON object"):
        list(EventDecoder(response()).feed(b"<html>\n"))


# ---- speech -------------------------------------------------------------------------------------------------------


def sse(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


SPOKEN = b": a comment\n\n" + b"".join(
    sse({"type": "speech.audio.delta", "audio": base64_of(piece)}) for piece in (b"ab", b"cd")
)


@pytest.mark.parametrize("size", [1, 9, 10_000])
def test_server_sent_speech_is_its_bytes(size: int) -> None:
    decoder = SpeechDecoder(response(content_type="text/event-stream; charset=utf-8", x_sample_rate="8000", x_seed="5"))
    body = SPOKEN + sse({"type": "speech.audio.done", "finish_reason": "length"})
    assert b"".join(piece for data in cut(body, size) for piece in decoder.feed(data)) == b"abcd"
    decoder.end()
    assert (decoder.sample_rate, decoder.seed, decoder.finish_reason) == (8000, 5, "length")


def test_server_sent_speech_without_its_end_or_with_an_error_is_no_speech() -> None:
    decoder = SpeechDecoder(response(content_type="text/event-stream"))
    assert list(decoder.feed(SPOKEN)) == [b"ab", b"cd"]
    with pytest.raises(StreamBroken, match="done"):
        decoder.end()
    with pytest.raises(APIError, match="it failed"):
        list(decoder.feed(sse({"error": {"message": "it failed", "type": "server_error", "param": None, "code": 1}})))


def test_bare_speech_is_passed_on_and_none_at_all_is_broken() -> None:
    decoder = SpeechDecoder(response(content_type="audio/pcm"))
    with pytest.raises(StreamBroken, match="without any audio"):
        decoder.end()
    assert list(decoder.feed(b"abc")) == [b"abc"]
    decoder.end()
