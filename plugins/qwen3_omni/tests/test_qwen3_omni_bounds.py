"""What a request may cost before it is refused: rates, lengths and amounts of media, windows of codes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mstar.errors import RequestError
from mstar.media.audio import decode_audio, encode_wav
from mstar.plugin.spec import Limits
from mstar.server.convert import convert
from mstar.types import AudioPart, ImagePart, Message, Request, TensorPart, TextPart, VideoPart
from mstar_plugin_qwen3_omni.plugin import ChatParams, CodecParams
from mstar_plugin_qwen3_omni.processing import OmniProcessor, media, spoken

NONE = np.zeros((1, 0), np.float32)


@pytest.fixture
def refusal(golden: Any) -> Callable[..., RequestError]:
    def ask(
        *parts: Any, task: str = "chat", params: Any = None, outputs: tuple[str, ...] = ("text",), config: Any = None
    ) -> RequestError:
        checkpoint = dataclasses.replace(golden.checkpoint, config=config or golden.config)
        processor = OmniProcessor(checkpoint, Limits(max_model_len=1000))
        messages = (Message("user", parts),) if task == "chat" else ()
        asked = {"task": task, "params": params or ChatParams(), "outputs": outputs, "seed": 0}
        request = Request(id="r", model="m", parts=() if messages else parts, messages=messages, **asked)
        start = time.monotonic()
        with pytest.raises(RequestError) as caught:
            processor.encode(request)
        assert caught.value.status == 400 and time.monotonic() - start < 1
        return caught.value

    return ask


def wav(count: int, *, rate: int) -> AudioPart:
    data = bytearray(encode_wav(np.zeros(count, np.float32), sample_rate=16000))
    data[24:28] = rate.to_bytes(4, "little")
    return AudioPart(*decode_audio(bytes(data)))


@pytest.mark.parametrize("rate", [768_001, 1_000_000_007, 2**31 - 1])
def test_rates_that_no_filter_is_made_for_are_refused(refusal: Callable[..., RequestError], rate: int) -> None:
    error = refusal(wav(16000, rate=rate))
    assert error.param == "messages.0.content.0" and str(rate) in error.message and "768000" in error.message


def test_media_that_no_prompt_holds_are_refused_before_they_are_read(
    refusal: Callable[..., RequestError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few bytes may be an hour of sound, or a thousand frames, which grow to the least size."""
    monkeypatch.setattr(media, "resampled", None)
    monkeypatch.setattr(media.pictures, "patches", None)
    slow, dot = wav(3600, rate=1), np.zeros((1000, 1, 1, 3), np.uint8)
    error = refusal(slow, slow)
    assert "93600 of them 7200.0 s of sound" in error.message and "must fit into 1000" in error.message
    assert "46800 of them 3600.0 s" in refusal(VideoPart(dot[:1], np.zeros(1), duration_s=1, sound=slow)).message
    assert "1000 of them pictures" in refusal(*[VideoPart(dot, np.zeros(1000), duration_s=500)] * 2).message
    assert "1001 of them pictures" in refusal(*[ImagePart(dot[0])] * 1001).message


def test_amounts_are_those_of_the_prompt(golden: Any) -> None:
    pixels = np.zeros((5, 90, 250, 3), np.uint8)
    for part, look in (
        (ImagePart(pixels[0]), media.see), (VideoPart(pixels, np.arange(5), duration_s=2.5), media.watch),
        (AudioPart(np.zeros((2, 44100 * 3 + 1), np.float32), 44100), media.hear),
    ):  # fmt: skip
        found = media.Amount.of([part], golden.config)
        assert found.seen + found.heard == look(part, golden.config, param="").num_tokens
    thinker = dataclasses.replace(golden.config.thinker, audio=None, vision=None)
    assert media.Amount.of([part], dataclasses.replace(golden.config, thinker=thinker)) == media.Amount()


def test_windows_of_codes_are_bounded(golden: Any, refusal: Callable[..., RequestError]) -> None:
    def ask(frames: int, **params: Any) -> RequestError:
        codes = TensorPart("codes", torch.zeros(16, frames, dtype=torch.uint8))
        return refusal(codes, task="vocode", params=CodecParams(**params), outputs=("audio",))

    most = spoken.MOST_AT_ONCE
    for how in ({}, {"codec_chunk_frames": most + 1}, {"codec_chunk_frames": 2**62}):
        error = ask(most + 1, **how)
        assert error.param == "params.codec_chunk_frames" and f"{most + 1} frames" in error.message
    longest = golden.config.speech.talker.max_positions
    assert str(longest) in ask(longest + 1, codec_chunk_frames=25).message
    codes = torch.zeros(16, most + 1, dtype=torch.uint8)
    assert len(spoken.windows(golden.config.speech, codes, CodecParams(codec_chunk_frames=most))) == 2


@pytest.mark.parametrize(("kind", "value"), [(ChatParams, 0), (ChatParams, 1025), (CodecParams, 1025)])
def test_left_contexts_that_leave_holes_or_cost_much_are_refused(kind: type[CodecParams], value: int) -> None:
    with pytest.raises(RequestError, match="params.codec_left_context is") as caught:
        convert({"codec_left_context": value}, kind, prefix="params.")
    assert caught.value.param == "params.codec_left_context"
    assert convert({"codec_left_context": 1024}, kind).codec_left_context == 1024


def test_a_speaker_of_no_name_is_nobody(refusal: Callable[..., RequestError]) -> None:
    assert "ethan" in refusal(AudioPart(NONE, 16000), params=ChatParams(speaker="")).message


SPEECH = {"speaker": "ethan", "talker_max_tokens": 3, "code_predictor_top_k": 2, "codec_chunk_frames": 4}


@pytest.mark.parametrize(("name", "value"), [*SPEECH.items(), ("speak_last_token", False)])
def test_parameters_of_speech_are_refused_where_nothing_speaks(
    golden: Any, refusal: Callable[..., RequestError], name: str, value: Any
) -> None:
    silent = dataclasses.replace(golden.config, speech=None)
    error = refusal(TextPart("Hi"), params=ChatParams(**{name: value}), config=silent)
    assert (error.param, error.code) == (f"params.{name}", "unsupported_parameter")
