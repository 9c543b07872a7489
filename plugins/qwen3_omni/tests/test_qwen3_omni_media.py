"""Sounds, pictures and videos as clients send them: of any rate, length and shape, or refused with a reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from asking import Asked, Part, image, tensor, text
from media_files import clip, data_uri, image_file
from sounds import film_file, sound_file, wave

from mstar.errors import RequestError
from mstar.media.audio import encode_wav
from mstar.media.policy import Budget, MediaPolicy
from mstar.media.video import Sampling, decode_video
from mstar.types import AudioPart, ImagePart, VideoPart
from mstar_plugin_qwen3_omni.plugin import SPEC
from mstar_plugin_qwen3_omni.processing import media
from mstar_plugin_qwen3_omni.processing.prompt import Prompt

ONE = {"temperature": 0, "max_tokens": 1}


def heard(data: bytes) -> Part:
    return {"type": "audio", "data": data_uri(data)}


def watched(data: bytes, **how: Any) -> Part:
    return {"type": "video", "data": data_uri(data)} | how


def refusal(model: Asked, *parts: Part, **request: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        model.ask(*parts, **request)
    assert caught.value.status == 400 and caught.value.param
    return caught.value


def count(model: Asked, golden: Any, *parts: Part, **params: Any) -> dict[str, int]:
    """Tokens of each kind in a prompt."""
    found = model.ask(*parts, params=ONE | params).result
    assert found.finish_reason in ("stop", "length") and len(found.prompt_token_ids) == found.usage["prompt_tokens"]
    tokens = golden.config.thinker.tokens
    return {name: found.prompt_token_ids.count(getattr(tokens, name)) for name in ("audio", "image", "video")}


# ---- sound ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 96000])
def test_sounds_of_any_rate_become_the_same(rate: int) -> None:
    found = media.resampled(wave(2, rate=rate), rate, 16000)
    assert len(found) == 32000 and found.dtype == np.float32
    assert np.abs(found - wave(2))[200:-200].max() < 1e-4
    assert len(media.resampled(np.zeros(7, np.float32), rate, 16000)) == -(-7 * 16000 // rate)


@pytest.mark.parametrize(("rate", "layout", "channels"), [
    (8000, "mono", 1), (22050, "stereo", 2), (44100, "5.1", 6), (96000, "stereo", 2), (16000, "5.1", 6),
])  # fmt: skip
def test_sounds_of_any_rate_and_layout_are_heard(
    model: Asked, golden: Any, rate: int, layout: str, channels: int
) -> None:
    samples = np.stack([wave(1, rate=rate)] * channels)
    assert count(model, golden, heard(sound_file(samples, rate=rate, layout=layout)), text("So?"))["audio"] == 13


@pytest.mark.parametrize(("codec", "kind"), [
    ("pcm_s24le", "wav"), ("pcm_f32le", "wav"), ("pcm_mulaw", "wav"), ("flac", "flac"), ("libmp3lame", "mp3"),
    ("libopus", "ogg"), ("aac", "mp4"), ("libopus", "matroska"),
])  # fmt: skip
def test_sounds_of_common_files_are_heard(model: Asked, golden: Any, codec: str, kind: str) -> None:
    rate = 48000 if codec == "libopus" else 16000
    data = sound_file(wave(2, rate=rate)[None], rate=rate, codec=codec, kind=kind)
    assert 26 <= count(model, golden, heard(data), text("So?"))["audio"] <= 28  # codecs add some silence


def test_channels_are_mixed_and_int16_is_as_a_file(golden: Any) -> None:
    both = np.stack((wave(1), np.zeros(16000, np.float32)))
    mixed = media.hear(AudioPart(both, 16000), golden.config, param="p")
    half = media.hear(AudioPart(both[:1] / 2, 16000), golden.config, param="p")
    assert torch.allclose(mixed.spectrogram, half.spectrogram, atol=1e-6) and mixed.num_tokens == 13
    pcm = (wave(1) * 32767).astype(np.int16)
    part = media.samples_of(torch.from_numpy(pcm), golden.config.sound, param="p")
    assert np.array_equal(part.samples[0], pcm.astype(np.float32) / 32768)


@pytest.mark.parametrize(("seconds", "tokens"), [(1.0, 13), (0.0129, 1), (29, 377), (31, 403)])
def test_silence_is_heard(model: Asked, golden: Any, seconds: float, tokens: int) -> None:
    silence = tensor("audio", torch.zeros(round(seconds * 16000)))
    for part in (silence, {"type": "audio", "samples": silence["tensor"]}):
        assert count(model, golden, part, text("So?"))["audio"] == tokens


@pytest.mark.slow
def test_sixteen_minutes_are_heard_whole(model: Asked, golden: Any) -> None:
    """Or refused at once, where the operator's limit is lower."""
    long = heard(sound_file(np.zeros((1, 960 * 16000), np.float32) + wave(960, hertz=3)))
    assert count(model, golden, long, text("So?"))["audio"] == 960 * 13
    short = Asked(plugin="qwen3_omni", model=str(golden.folder), max_model_len=4096)
    try:
        error = refusal(short, long, text("So?"))
        assert error.code == "context_length_exceeded"
        for wanted in ("12480 of them 960.0 s of sound", "must fit into 4096", "--max-model-len"):
            assert wanted in error.message
        short.assert_clean()
    finally:
        short.close()


def test_what_is_too_short_or_empty_is_refused(model: Asked) -> None:
    for samples in (0, 1, 160, 200):
        error = refusal(model, tensor("audio", torch.zeros(samples)), text("So?"))
        assert error.param == "inputs.0" and f"({samples} samples at 16000 Hz)" in error.message
        assert "the least is 0.0126 s" in error.message
    empty = refusal(model, heard(encode_wav(np.zeros(0, np.float32), sample_rate=16000)), text("So?"))
    assert empty.param == "inputs.0.data" and "no samples" in empty.message
    wrong = refusal(model, tensor("audio", torch.zeros(2, 16000)), text("So?"))
    assert "float32 [2, 16000]; it must be int16 or float32 [samples], mono, at 16000 Hz" in wrong.message


def test_limits_of_sound_and_parts_are_told(golden: Any) -> None:
    limits = {"image": 1, "audio": 0}
    strict = Asked(plugin="qwen3_omni", model=str(golden.folder), max_audio_duration_s=1.5, limit_mm_per_prompt=limits)
    picture, film = image(np.zeros((64, 64, 3), np.uint8)), watched(film_file(2))
    try:
        error = refusal(strict, picture, text("and"), picture)
        assert (error.code, error.param) == ("too_many_media", "inputs.2")
        assert "image number 2 of the request; the limit is 1" in error.message
        assert "--limit-mm-per-prompt image=1" in error.message
        assert refusal(strict, heard(sound_file(wave(1)[None]))).code == "too_many_media"
        error = refusal(strict, film, text("?"), params={"use_audio_in_video": True})
        assert (
            "longer than 1.5 s, which is the limit; send a shorter part, or raise --max-audio-duration" in error.message
        )
        strict.ask(picture, film, text("?"), params=ONE)
        strict.assert_clean()
    finally:
        strict.close()


# ---- pictures and videos --------------------------------------------------------------------------------


def test_pictures_too_long_for_their_width_are_refused(model: Asked, golden: Any) -> None:
    error = refusal(model, image(np.zeros((2, 600, 3), np.uint8)), text("So?"))
    assert "600x2; no side may be more than 200 times the other" in error.message and error.param == "inputs.0"
    assert count(model, golden, image(np.zeros((2, 400, 3), np.uint8)), text("So?"))["image"] == 15


def test_equal_bytes_of_other_shape_are_another_picture(golden: Any) -> None:
    pixels = np.arange(64 * 96 * 3, dtype=np.uint32).astype(np.uint8)
    parts = [ImagePart(pixels.reshape(shape)) for shape in ((64, 96, 3), (96, 64, 3))]
    keys = {media.see(part, golden.config, param="p").key for part in parts}
    assert len(keys) == 2


def test_frames_are_taken_as_by_the_authors(model: Asked, golden: Any) -> None:
    """Two a second, at least four and an even number; the sound is left out unless it is asked for."""
    film = watched(film_file(3))
    assert count(model, golden, film, text("So?")) == {"audio": 0, "image": 0, "video": 3 * 4}
    assert count(model, golden, film, text("So?"), use_audio_in_video=True)["audio"] in (39, 40)
    one = model.ask(watched(film_file(1)), text("So?"), params=ONE).result
    assert one.prompt_token_ids.count(golden.config.thinker.tokens.video) == 2 * 4
    assert count(model, golden, watched(film_file(3), num_frames=5), text("So?"))["video"] == 3 * 4
    assert count(model, golden, watched(film_file(3), fps=1), text("So?"))["video"] == 2 * 4


def test_a_video_without_sound_is_watched_all_the_same(model: Asked, golden: Any) -> None:
    silent = watched(film_file(3, with_sound=False))
    assert count(model, golden, silent, text("So?"), use_audio_in_video=True) == {"audio": 0, "image": 0, "video": 12}


def test_positions_follow_the_clip_s_clock(golden: Any) -> None:
    """Six seconds at two frames a second; a second is 13 positions."""
    usual = SPEC.tasks["chat"].video_frames
    data = clip(num_frames=60, rate=10, size=(64, 64))
    part = decode_video(data, sampling=Sampling(usual=usual), budget=Budget(MediaPolicy()), param="p")
    assert isinstance(part, VideoPart) and len(part.frames) == 12 and part.duration_s == pytest.approx(6)
    prompt = Prompt(golden.config)
    prompt.add_sight(media.watch(part, golden.config, param="p"))
    times = prompt.positions.whole()[:, 0].unique().tolist()
    assert times == pytest.approx([13 * second for second in range(6)])


def test_media_that_are_none_are_refused(model: Asked) -> None:
    for part in (heard(image_file()), watched(b"no video"), {"type": "image", "data": data_uri(b"none")}):
        assert refusal(model, part, text("So?")).param == "inputs.0.data"
