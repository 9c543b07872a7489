from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import av
import msgspec
import numpy as np
import pytest

from mstar.config import ServerConfig
from mstar.errors import RequestError
from mstar.media.encode import FORMATS
from mstar.plugin.spec import ModelSpec
from mstar.server.app import create_app
from mstar.server.openai import (
    SpeechForm,
    SpeechRequest,
    list_models,
    list_voices,
    read_speech,
    speech_error,
    speech_form,
)
from mstar.server.results import Outputs, Result, error_fields
from mstar.types import AudioChunk, Chunk, ProgressChunk, Request, TextChunk

REQUEST = Request(id="r", model="m", task="speech", parts=(), outputs=("audio",), seed=7)
RESULT = Result(
    finish_reason="length", indices={0: "length"}, usage={"prompt_tokens": 5, "completion_tokens": 30}, counts={},
    counters={}, prompt_token_ids=[], seed=7,
)  # fmt: skip
TONE = (0.3 * np.sin(np.arange(24000) / 5)).astype(np.float32)
CHUNKS = [AudioChunk(piece, 24000) for piece in np.split(TONE, 10)]
CONTENT_TYPES = {
    "wav": "audio/wav", "pcm": "audio/pcm", "mp3": "audio/mpeg", "flac": "audio/flac", "opus": "audio/ogg",
    "aac": "audio/aac",
}  # fmt: skip
STREAMED = ("wav", "pcm", "mp3", "opus", "aac")


def test_a_speech_request_becomes_a_native_one(parrot_spec: ModelSpec) -> None:
    body = {"model": "parrot", "input": "hi", "voice": "amy", "temperature": 0.5, "max_tokens": 9, "seed": 3}
    speech, wire = read_speech(body, spec=parrot_spec)
    assert speech.response_format == "wav" and not speech.is_streamed
    assert wire.task == "speech" and wire.outputs == ["audio"] and wire.seed == 3 and wire.model == "parrot"
    assert wire.params == {"temperature": 0.5, "max_tokens": 9, "voice": "amy"}


def test_absent_voice_is_the_models_default_and_null_is_none(parrot_spec: ModelSpec) -> None:
    assert "voice" not in read_speech({"input": "hi"}, spec=parrot_spec)[1].params
    assert read_speech({"input": "hi", "voice": None}, spec=parrot_spec)[1].params["voice"] is None


@pytest.mark.parametrize(
    ("fields", "is_streamed"),
    [
        ({"stream": True}, True),
        ({"stream_format": "audio"}, True),
        ({"stream_format": "sse"}, True),
        ({"stream": True, "stream_format": "audio"}, True),
        ({"stream": True, "stream_format": "sse", "response_format": "mp3"}, True),
        ({"stream": False, "stream_format": None}, False),
        ({"stream": False, "response_format": "flac"}, False),
        ({}, False),
    ],
)
def test_streaming_is_asked_for_in_two_ways(parrot_spec: ModelSpec, fields: dict[str, Any], is_streamed: bool) -> None:
    speech, wire = read_speech({"input": "hi", **fields}, spec=parrot_spec)
    assert speech.is_streamed == wire.stream == is_streamed


def test_a_deadline_is_passed_on(parrot_spec: ModelSpec) -> None:
    assert read_speech({"input": "hi", "timeout_s": 2.5}, spec=parrot_spec)[1].timeout_s == 2.5
    assert read_speech({"input": "hi"}, spec=parrot_spec)[1].timeout_s is None


def test_null_instructions_are_none(parrot_spec: ModelSpec) -> None:
    assert read_speech({"input": "hi", "instructions": None}, spec=parrot_spec)[0].input == "hi"


def test_a_format_whose_encoder_is_missing_is_refused_and_not_replaced(
    parrot_spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FORMATS, "mp3", replace(FORMATS["mp3"], codec="libnothing"))
    with pytest.raises(RequestError, match="libnothing") as caught:
        read_speech({"input": "hi", "response_format": "mp3"}, spec=parrot_spec)
    assert (caught.value.status, caught.value.param) == (400, "response_format")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "missing"),
        ({"input": ""}, "input", "blank"),
        ({"input": " \n"}, "input", "blank"),
        ({"input": None}, "input", "str"),
        ({"input": 3}, "input", "is 3"),
        ({"input": ["a"]}, "input", "str"),
        ({"input": "a", "voice": 3}, "voice", "is 3"),
        ({"input": "a", "response_format": "mpeg"}, "response_format", "wav, pcm, mp3, flac, opus, aac"),
        ({"input": "a", "response_format": None}, "response_format", "None"),
        ({"input": "a", "response_format": "flac", "stream": True}, "response_format", "wav, pcm, mp3, opus, aac"),
        ({"input": "a", "response_format": "flac", "stream_format": "sse"}, "response_format", "cannot be streamed"),
        ({"input": "a", "stream_format": "raw"}, "stream_format", "audio, sse"),
        ({"input": "a", "stream": False, "stream_format": "audio"}, "stream", "stream_format is 'audio'"),
        ({"input": "a", "stream": False, "stream_format": "sse"}, "stream", "leave one of them out"),
        ({"input": "a", "timeout_s": 0}, "timeout_s", "> 0"),
        ({"input": "a", "timeout_s": "soon"}, "timeout_s", "'soon'"),
        ({"input": "a", "speed": 2.0}, "speed", "1.0 only"),
        ({"input": "a", "speed": 9}, "speed", "is 9"),
        ({"input": "a", "seed": -1}, "seed", "is -1"),
        ({"input": "a", "instructions": "shout"}, "instructions", "takes no instructions"),
        ({"input": "a", "language": "en"}, "language", "known: input, model"),
        ({"input": "a", "n": 2}, "n", "unknown"),
        ({"input": "a", "extra_body": {}}, "extra_body", "is unknown: what it holds stands beside the other fields"),
    ],
)
def test_mistakes_name_the_field(parrot_spec: ModelSpec, body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_speech(body, spec=parrot_spec)
    assert caught.value.status == 400 and caught.value.param == param and words in caught.value.message


def test_native_errors_are_told_in_the_words_of_speech() -> None:
    error = speech_error(RequestError("params.voice is 'x'; known: amy", param="params.voice"))
    assert (error.param, error.message) == ("voice", "voice is 'x'; known: amy")
    assert speech_error(RequestError("too long", param="inputs.0.text")).param == "input"


# ---- answers ----------------------------------------------------------------------------------------------------


def form(response_format: str, **fields: Any) -> SpeechForm:
    return speech_form(msgspec.convert({"input": "a", "response_format": response_format, **fields}, SpeechRequest))


def streamed(answer: SpeechForm, *, error: RequestError | None = None) -> list[bytes]:
    answer.headers(REQUEST, first=CHUNKS[0], result=None)
    chunks: list[Chunk] = [CHUNKS[0], ProgressChunk(1, 2), *CHUNKS[1:]]
    pieces = [answer.piece(chunk) for chunk in chunks]
    return [*pieces, answer.end(REQUEST, result=None if error else RESULT, error=error)]


def decode(data: bytes) -> np.ndarray:
    with av.open(io.BytesIO(data)) as file:
        resampler = av.AudioResampler(format="flt", layout="mono", rate=24000)
        return np.concatenate([b.to_ndarray()[0] for f in [*file.decode(audio=0), None] for b in resampler.resample(f)])


def events(data: bytes) -> list[dict[str, Any]]:
    """Server-sent events, each one line of data."""
    *blocks, rest = data.decode().split("\n\n")
    assert rest == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def test_every_format_of_the_schema_can_be_written() -> None:
    field = next(f for f in msgspec.structs.fields(SpeechRequest) if f.name == "response_format")
    assert set(get_args(field.type)) == set(FORMATS) == set(CONTENT_TYPES)


@pytest.mark.parametrize("name", CONTENT_TYPES)
def test_a_whole_answer_is_a_file_with_its_content_type(name: str) -> None:
    answer, outputs = form(name), Outputs(REQUEST)
    for chunk in CHUNKS:
        outputs.add(chunk)
    body, headers = answer.whole(outputs, RESULT)
    assert answer.media_type == CONTENT_TYPES[name]
    assert headers == {"X-Sample-Rate": "24000", "X-Seed": "7", "X-Finish-Reason": "length"}
    heard = np.frombuffer(body, "<i2") / 32767 if name == "pcm" else decode(body)
    assert len(heard) == pytest.approx(24000, abs=2048)
    assert np.sqrt(np.mean(heard**2)) == pytest.approx(np.sqrt(np.mean(TONE**2)), rel=0.1)


@pytest.mark.parametrize("name", STREAMED)
def test_a_streamed_answer_is_one_file_too(name: str) -> None:
    data = b"".join(streamed(form(name)))
    assert data.count(b"RIFF") == (name == "wav") and data.count(b"OpusHead") == (name == "opus")
    heard = np.frombuffer(data, "<i2") / 32767 if name == "pcm" else decode(data)
    assert len(heard) == pytest.approx(24000, abs=2048)
    assert form(name).media_type == form(name, stream=True).media_type == CONTENT_TYPES[name]


def test_a_streamed_wav_has_one_header_of_unknown_sizes_and_pcm_none() -> None:
    wav, pcm = b"".join(streamed(form("wav"))), b"".join(streamed(form("pcm")))
    assert wav[4:8] == wav[40:44] == b"\xff" * 4 and len(wav) == 44 + 48000
    assert pcm == wav[44:]


def test_encoders_run_off_the_event_loop() -> None:
    assert not form("wav").runs_in_thread and not form("pcm", stream_format="sse").runs_in_thread
    assert form("mp3").runs_in_thread and form("opus", stream_format="sse").runs_in_thread


@pytest.mark.parametrize("name", STREAMED)
def test_the_deltas_of_events_are_one_file_and_the_last_event_tells_the_rest(name: str) -> None:
    answer = form(name, stream_format="sse")
    assert answer.media_type == "text/event-stream"
    *deltas, done = events(b"".join(streamed(answer)))
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"} and len(deltas) > 5
    assert all(set(delta) == {"type", "audio"} and delta["audio"] for delta in deltas)
    assert b"".join(base64.b64decode(delta["audio"]) for delta in deltas) == b"".join(streamed(form(name)))
    usage = {"input_tokens": 5, "output_tokens": 30, "total_tokens": 35}
    assert done == {"type": "speech.audio.done", "usage": usage, "finish_reason": "length", "seed": 7}


def test_a_failure_among_events_is_an_event_and_no_done_follows() -> None:
    error = RequestError("the node failed", status=500, code="c")
    *deltas, last = events(b"".join(streamed(form("mp3", stream_format="sse"), error=error)))
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    assert last == error_fields(error)


def test_a_failure_in_plain_audio_adds_nothing() -> None:
    assert streamed(form("mp3"), error=RequestError("no", status=500))[-1] == b""


def test_an_answer_without_sound_is_an_error() -> None:
    for answer in (form("mp3"), form("wav", stream_format="sse")):
        assert not answer.begins(TextChunk("a")) and not answer.begins(AudioChunk(TONE[:0], 24000))
        with pytest.raises(RequestError, match="without any audio") as caught:
            answer.headers(REQUEST, first=None, result=RESULT)
        assert (caught.value.status, caught.value.code) == (400, "no_audio")


def test_the_rate_of_the_file_is_told_where_it_is_not_the_models() -> None:
    chunk = AudioChunk(TONE, 44100)
    assert form("opus").headers(REQUEST, first=chunk, result=None)["X-Sample-Rate"] == "48000"
    assert form("mp3").headers(REQUEST, first=chunk, result=None)["X-Sample-Rate"] == "44100"


def test_a_failure_in_the_middle_ends_events_with_the_error_and_the_body_never(serving: Callable[..., Any]) -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def scenario() -> None:
        body = json.dumps({"input": "ab#", "stream_format": "sse", "response_format": "pcm"}).encode()
        inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})
        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http", "method": "POST", "path": "/v1/audio/speech", "headers": headers, "query_string": b"",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
        }  # fmt: skip
        async with serving(step_s=0.2) as served:
            app: Any = create_app(served.engine, root="tiny", config=ServerConfig(), voices=None)
            await app(scope, inbox.get, send)
            await served.settled()

    asyncio.run(asyncio.wait_for(scenario(), 30))
    start, *bodies = sent
    assert start["status"] == 200 and (b"content-type", b"text/event-stream; charset=utf-8") in start["headers"]
    assert all(message["more_body"] for message in bodies)
    *deltas, last = events(b"".join(message["body"] for message in bodies))
    assert deltas and {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    assert last["error"]["message"] == "the node failed" and last["error"]["type"] == "server_error"


# ---- lists ------------------------------------------------------------------------------------------------------


def test_voices_are_listed_in_both_shapes_clients_read() -> None:
    listed = list_voices(["amy", "bert"])
    assert listed["object"] == "list" and listed["voices"] == ["amy", "bert"] and listed["default"] == "amy"
    assert listed["data"][1] == {"id": "bert", "object": "voice", "name": "bert"}
    assert list_voices(())["data"] == [] and list_voices(())["default"] is None


def test_models_and_errors_have_openai_shapes(parrot_spec: ModelSpec) -> None:
    (model,) = list_models(parrot_spec, names=("m",), root="tiny", created=5, max_model_len=100)
    assert model["id"] == "m" and model["object"] == "model" and model["max_model_len"] == 100
    assert model["modalities"]["output"] == ["text", "tensors", "audio"] and "/v1/audio/speech" in model["endpoints"]
    fields = error_fields(RequestError("no", status=429, param="p", code="c"))
    assert fields == {"error": {"message": "no", "type": "rate_limit_error", "param": "p", "code": "c"}}
