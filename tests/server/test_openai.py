from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mstar.errors import RequestError
from mstar.plugin.spec import ModelSpec
from mstar.server.openai import SpeechForm, list_models, read_speech, speech_error
from mstar.server.results import error_fields
from mstar.types import AudioChunk, ProgressChunk


def test_a_speech_request_becomes_a_native_one(parrot_spec: ModelSpec) -> None:
    body = {"model": "parrot", "input": "hi", "voice": "amy", "temperature": 0.5, "max_tokens": 9, "seed": 3}
    speech, wire = read_speech(body, spec=parrot_spec)
    assert speech.response_format == "wav" and not speech.is_streamed
    assert wire.task == "speech" and wire.outputs == ["audio"] and wire.seed == 3 and wire.model == "parrot"
    assert wire.params == {"temperature": 0.5, "max_tokens": 9, "voice": "amy"}


def test_absent_voice_is_the_models_default_and_null_is_none(parrot_spec: ModelSpec) -> None:
    assert "voice" not in read_speech({"input": "hi"}, spec=parrot_spec)[1].params
    assert read_speech({"input": "hi", "voice": None}, spec=parrot_spec)[1].params["voice"] is None


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream_format": "audio"}])
def test_streaming_is_asked_for_in_two_ways(parrot_spec: ModelSpec, fields: dict[str, Any]) -> None:
    speech, wire = read_speech({"input": "hi", **fields}, spec=parrot_spec)
    assert speech.is_streamed and wire.stream


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
        ({"input": "a", "response_format": "mp3"}, "response_format", "wav, pcm"),
        ({"input": "a", "response_format": "mpeg"}, "response_format", "wav, pcm"),
        ({"input": "a", "stream_format": "sse"}, "stream_format", "'audio'"),
        ({"input": "a", "speed": 2.0}, "speed", "1.0 only"),
        ({"input": "a", "speed": 9}, "speed", "is 9"),
        ({"input": "a", "seed": -1}, "seed", "is -1"),
        ({"input": "a", "instructions": "shout"}, "instructions", "known: input, model"),
        ({"input": "a", "n": 2}, "n", "unknown"),
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


def test_a_stream_has_one_header_however_many_chunks() -> None:
    chunk = AudioChunk(np.full(4, 0.5, np.float32), 24000)
    wav, pcm = SpeechForm("wav"), SpeechForm("pcm")
    data = wav.piece(chunk) + wav.piece(ProgressChunk(1, 2)) + wav.piece(chunk)
    assert data.count(b"RIFF") == 1 and len(data) == 44 + 16
    assert data[4:8] == data[40:44] == b"\xff" * 4
    assert pcm.piece(chunk) + pcm.piece(chunk) == data[44:]


def test_models_and_errors_have_openai_shapes(parrot_spec: ModelSpec) -> None:
    (model,) = list_models(parrot_spec, names=("m",), root="tiny", created=5, max_model_len=100)
    assert model["id"] == "m" and model["object"] == "model" and model["max_model_len"] == 100
    assert model["modalities"]["output"] == ["text", "tensors", "audio"] and "/v1/audio/speech" in model["endpoints"]
    fields = error_fields(RequestError("no", status=429, param="p", code="c"))
    assert fields == {"error": {"message": "no", "type": "rate_limit_error", "param": "p", "code": "c"}}
