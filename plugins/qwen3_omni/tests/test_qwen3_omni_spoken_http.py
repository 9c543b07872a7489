"""A served Qwen3-Omni as the openai package hears it: whole answers and streams with sound, speakers, refusals."""

from __future__ import annotations

import base64
import io
import wave
from typing import Any

import numpy as np
import openai
import pytest
import torch
from asking import Asked

MODEL = "qwen3_omni"
GREEDY: dict[str, Any] = {
    "talker_temperature": 0, "repetition_penalty": 1, "talker_max_tokens": 15, "speak_last_token": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def client(opened: openai.OpenAI) -> openai.OpenAI:
    return opened


@pytest.fixture
def asked(golden: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": golden.messages("text"),
        "max_tokens": golden.asked["thinker_max_new_tokens"],
        "temperature": 0,
        "modalities": ["text", "audio"],
        "audio": {"voice": "Ethan", "format": "wav"},
        "extra_body": GREEDY,
    }


def pcm(sound: torch.Tensor) -> np.ndarray:
    return (sound.numpy() * 32767).round().astype(np.int16)


def test_an_answer_is_written_and_spoken(model: Asked, client: openai.OpenAI, asked: Any, golden: Any) -> None:
    message = client.chat.completions.create(**asked).choices[0].message
    assert message.audio is not None and message.audio.transcript == message.content
    with wave.open(io.BytesIO(base64.b64decode(message.audio.data))) as sound:
        assert (sound.getframerate(), sound.getnchannels()) == (24000, 1)
        heard = np.frombuffer(sound.readframes(sound.getnframes()), dtype=np.int16)
    expected = pcm(golden.tensors["full.text.wav"])
    assert len(heard) == len(expected) == golden.facts["full"]["text"]["wav_samples"]
    assert np.abs(heard.astype(int) - expected).max() <= 20


def test_a_stream_has_text_and_sound_in_one_choice(model: Asked, client: openai.OpenAI, asked: Any) -> None:
    whole = client.chat.completions.create(**asked).choices[0].message
    asked |= {"audio": {"voice": "ethan", "format": "pcm16"}, "stream": True, "stream_options": {"include_usage": True}}
    words, sound, ids, usage = "", b"", set[str](), None
    for chunk in client.chat.completions.create(**asked):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert choice.index == 0
            words += choice.delta.content or ""
            audio = choice.delta.model_dump().get("audio") or {}
            ids |= {audio["id"]} if audio.get("id") else set()
            sound += base64.b64decode(audio.get("data") or "")
    assert words == whole.content and len(ids) == 1 and usage is not None
    with wave.open(io.BytesIO(base64.b64decode(whole.audio.data))) as kept:
        assert sound == kept.readframes(kept.getnframes())


def test_text_alone_is_not_spoken(model: Asked, client: openai.OpenAI, asked: Any) -> None:
    del asked["modalities"], asked["audio"]
    asked["extra_body"] = {"repetition_penalty": 1}
    assert client.chat.completions.create(**asked).choices[0].message.audio is None


def test_an_unknown_voice_is_refused_with_the_known_ones(model: Asked, client: openai.OpenAI, asked: Any) -> None:
    asked["audio"] = {"voice": "nobody", "format": "wav"}
    with pytest.raises(openai.BadRequestError, match="ethan, aiden, chelsie") as refused:
        client.chat.completions.create(**asked)
    assert refused.value.param == "audio.voice"


def test_voices_are_listed(client: openai.OpenAI) -> None:
    found = client.get("/audio/voices", cast_to=object)
    assert "ethan" in str(found) and "chelsie" in str(found)


def test_speech_says_that_it_is_not_served(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not read text aloud") as refused:
        client.audio.speech.create(model=MODEL, voice="ethan", input="Hello.")
    assert refused.value.code == "unsupported_endpoint"
