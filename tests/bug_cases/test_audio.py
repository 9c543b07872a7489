"""Sound is whole: whoever reads it, however short it is, and where it breaks off the client can tell."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

SPEECH = {"input": "Hi.", "voice": "tara", "seed": 5}
FRAME_BYTES = 2048 * 2


def received(connection: Any, *, piece: int = 65536, pause_s: float = 0.0) -> bytes:
    """All that comes until the server closes, or until the chunked body has ended."""
    data = b""
    while block := connection.recv(piece):
        data += block
        if data.endswith(b"\r\n0\r\n\r\n"):
            break
        time.sleep(pause_s)
    return data


def unchunked(data: bytes) -> bytes:
    """The body of a chunked response, complete or not."""
    head, _, rest = data.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body


# ---- case 35: short answers give audio --------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [{}, {"stream": True}, {"stream_format": "sse"}], ids=["whole", "raw", "events"])
@pytest.mark.parametrize("said", ["Hi.", "A", "<laugh>"])
def test_a_short_input_is_heard(orpheus: Any, said: str, stream: dict[str, Any]) -> None:
    body = {"input": said, "response_format": "pcm", "seed": 3} | stream
    response = orpheus.post("/v1/audio/speech", body)
    assert response.status_code == 200
    data = response.content
    if "stream_format" in stream:
        events = [json.loads(block.removeprefix("data: ")) for block in response.text.split("\n\n")[:-1]]
        data = b"".join(base64.b64decode(event["audio"]) for event in events[:-1])
    assert len(data) / 2 / 24000 > 0.2 and len(data) % FRAME_BYTES == 0 and any(data)


# ---- case 37: a slow reader loses nothing -------------------------------------------------------------------------


def test_a_slow_reader_gets_every_byte_and_holds_up_nobody(orpheus: Any) -> None:
    body = SPEECH | {"response_format": "pcm", "ignore_eos": True, "max_tokens": 490}
    whole = orpheus.post("/v1/audio/speech", body).content
    assert len(whole) > 60 * FRAME_BYTES
    with orpheus.begin("/v1/audio/speech", body | {"stream": True}) as connection:
        connection.recv(1)
        first = time.monotonic()
        quick = orpheus.post("/v1/audio/speech", SPEECH | {"max_tokens": 14})
        assert quick.status_code == 200
        data = received(connection, piece=8192, pause_s=0.02)
        assert time.monotonic() - first > 0.5
    assert data.endswith(b"0\r\n\r\n")
    assert unchunked(data[data.index(b"TTP") :]) == whole


# ---- case 45: a failure in the middle does not look like success --------------------------------------------------


@pytest.fixture
def failing(orpheus: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model, whose decoding fails at the fourth piece of audio of every request."""
    processor = orpheus.served.engine._processor
    decode, heard = processor.decode, {}

    def failing_decode(state: Any, emission: Any) -> Iterator[Any]:
        if emission.name == "audio":
            heard[id(state)] = heard.get(id(state), 0) + 1
            if heard[id(state)] == 4:
                raise RuntimeError("injected")
        yield from decode(state, emission)

    monkeypatch.setattr(processor, "decode", failing_decode)
    return orpheus


def test_a_failure_among_events_is_told_and_nothing_follows(failing: Any) -> None:
    with failing.begin("/v1/audio/speech", SPEECH | {"stream_format": "sse"}) as connection:
        data = received(connection)
    assert data.startswith(b"HTTP/1.1 200") and not data.endswith(b"0\r\n\r\n")
    blocks = unchunked(data).decode().split("\n\n")
    assert blocks.pop() == ""
    *deltas, last = [json.loads(block.removeprefix("data: ")) for block in blocks]
    assert deltas and {event["type"] for event in deltas} == {"speech.audio.delta"}
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert b"[DONE]" not in data and b"audio.done" not in data and b"Traceback" not in data


@pytest.mark.parametrize("response_format", ["wav", "pcm", "mp3", "opus", "aac"])
def test_a_failure_in_raw_audio_breaks_the_connection(failing: Any, response_format: str) -> None:
    body = SPEECH | {"stream": True, "response_format": response_format}
    with failing.begin("/v1/audio/speech", body) as connection:
        data = received(connection)
    assert data.startswith(b"HTTP/1.1 200") and not data.endswith(b"0\r\n\r\n")
    with (
        pytest.raises(httpx.RemoteProtocolError),
        failing.client.stream("POST", "/v1/audio/speech", json=body) as response,
    ):
        response.read()


def test_a_failure_of_a_whole_answer_has_a_status(failing: Any, error_of: Callable[..., Any]) -> None:
    error = error_of(failing.post("/v1/audio/speech", SPEECH), 500)
    assert "injected" not in error["message"]
