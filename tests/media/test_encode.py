from __future__ import annotations

import io
import random
import struct
import wave
from collections.abc import Iterable
from dataclasses import replace

import av
import numpy as np
import pytest

from mstar.errors import RequestError
from mstar.media.audio import encode_pcm, encode_wav, to_int16
from mstar.media.encode import FORMATS, check_format, open_encoder

RATE = 24000
LOSSY = ("mp3", "opus", "aac")
STREAMED = [name for name, kind in FORMATS.items() if kind.can_stream]
MAGIC = {"wav": (b"RIFF",), "flac": (b"fLaC",), "opus": (b"OggS",), "aac": (b"\xff\xf1",), "mp3": (b"ID3", b"\xff\xfb")}


def voice(num_samples: int = 2 * RATE, *, rate: int = RATE) -> np.ndarray:
    """Something like a voice: harmonics of a pitch that wanders, louder and softer."""
    t = np.arange(num_samples) / rate
    phase = np.cumsum(2 * np.pi * 130 * (1 + 0.15 * np.sin(2 * np.pi * 2.3 * t)) / rate)
    tones = sum(np.sin(k * phase) / k for k in range(1, 12))
    return (0.2 * tones * (0.5 + 0.5 * np.sin(2 * np.pi * 3.1 * t))).astype(np.float32)


def pieces(samples: np.ndarray, *, seed: int = 0) -> Iterable[np.ndarray]:
    draw = random.Random(seed)
    while len(samples):
        size = draw.randint(0, 3000)
        yield samples[:size]
        samples = samples[size:]


def encode(name: str, parts: Iterable[np.ndarray], *, rate: int = RATE, num_samples: int | None = None) -> list[bytes]:
    encoder = open_encoder(name, sample_rate=rate, num_samples=num_samples)
    return [*map(encoder.feed, parts), encoder.finish()]


def whole(name: str, samples: np.ndarray, *, rate: int = RATE) -> bytes:
    return b"".join(encode(name, [samples], rate=rate, num_samples=len(samples)))


def decode(data: bytes) -> tuple[np.ndarray, int]:
    """int16 samples and rate of a file that must decode without any complaint."""
    with av.open(io.BytesIO(data), options={"err_detect": "explode"}) as file:
        resampler = av.AudioResampler(format="s16", layout="mono")
        blocks = [b.to_ndarray()[0] for f in [*file.decode(audio=0), None] for b in resampler.resample(f)]
        return np.concatenate(blocks), file.streams.audio[0].rate


def loudness(samples: np.ndarray) -> float:
    return float(np.sqrt(np.mean((samples.astype(np.float64) / 32767) ** 2)))


def pitch(samples: np.ndarray, *, rate: int) -> float:
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(np.argmax(spectrum) * rate / len(samples))


def test_wav_and_pcm_are_the_usual_bytes() -> None:
    samples = voice(5000)
    assert whole("wav", samples) == encode_wav(samples, sample_rate=RATE)
    assert whole("pcm", samples) == encode_pcm(samples)
    assert whole("wav", samples[:0]) == encode_wav(samples[:0], sample_rate=RATE)


@pytest.mark.parametrize("name", ["mp3", "flac", "opus", "aac"])
def test_compressed_files_hold_what_a_wav_holds(name: str) -> None:
    samples = voice()
    data = whole(name, samples)
    assert data.startswith(MAGIC[name]) and len(data) < len(encode_wav(samples, sample_rate=RATE))
    heard, rate = decode(data)
    assert rate == (48000 if name == "opus" else RATE)  # what Opus is always decoded to
    assert len(heard) / rate == pytest.approx(len(samples) / RATE, abs=0.1)
    assert loudness(heard) == pytest.approx(loudness(to_int16(samples)), rel=0.1)
    assert pitch(heard, rate=rate) == pytest.approx(pitch(samples, rate=RATE), abs=3)


def test_flac_loses_nothing_and_states_its_length() -> None:
    samples = voice(10_001)
    data = whole("flac", samples)
    assert np.array_equal(decode(data)[0], to_int16(samples))
    with av.open(io.BytesIO(data)) as file:
        assert file.streams.audio[0].duration == len(samples)


def test_a_whole_mp3_is_heard_to_the_sample() -> None:
    assert len(decode(whole("mp3", voice(30_000)))[0]) == 30_000


@pytest.mark.parametrize("name", STREAMED)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_stream_is_one_file_however_it_was_fed(name: str, seed: int) -> None:
    samples = voice()
    parts = encode(name, pieces(samples, seed=seed))
    data = b"".join(parts)
    assert sum(1 for part in parts if part) > 10  # it came as it was made
    assert b"".join(encode(name, [samples])) == data
    if name == "pcm":
        assert data == encode_pcm(samples)
        return
    assert data.startswith(MAGIC[name])
    heard, rate = decode(data)
    assert len(heard) / rate == pytest.approx(len(samples) / RATE, abs=0.1)
    assert loudness(heard) == pytest.approx(loudness(to_int16(samples)), rel=0.1)


@pytest.mark.parametrize("name", ["opus", "aac"])
def test_streamed_and_whole_files_are_equal_where_no_header_states_a_length(name: str) -> None:
    samples = voice(20_000)
    assert b"".join(encode(name, pieces(samples))) == whole(name, samples)


def test_a_streamed_wav_has_one_header_of_unknown_sizes() -> None:
    samples = voice(9000)
    data = b"".join(encode("wav", pieces(samples)))
    assert data.count(b"RIFF") == 1 and data[44:] == encode_pcm(samples)
    assert struct.unpack_from("<I", data, 4) == struct.unpack_from("<I", data, 40) == (0xFFFFFFFF,)
    assert data[8:40] == encode_wav(samples, sample_rate=RATE)[8:40]


def test_an_ogg_stream_is_one_logical_stream() -> None:
    data = b"".join(encode("opus", pieces(voice())))
    assert data.count(b"OpusHead") == data.count(b"OpusTags") == 1


@pytest.mark.parametrize("name", LOSSY)
def test_the_first_sound_is_given_soon(name: str) -> None:
    encoder = open_encoder(name, sample_rate=RATE)
    assert len(encoder.feed(voice(4096))) > 300


@pytest.mark.parametrize(
    ("name", "rate", "written"),
    [("opus", 44100, 48000), ("opus", 22050, 24000), ("mp3", 9000, 11025), ("aac", 9000, 11025), ("flac", 9000, 9000)],
)
def test_a_rate_a_codec_does_not_take_is_raised_to_one_it_takes(name: str, rate: int, written: int) -> None:
    samples = voice(rate, rate=rate)
    assert open_encoder(name, sample_rate=rate).sample_rate == written
    heard, found = decode(whole(name, samples, rate=rate))
    assert found == (48000 if name == "opus" else written)
    assert len(heard) / found == pytest.approx(1.0, abs=0.2)
    assert pitch(heard, rate=found) == pytest.approx(pitch(samples, rate=rate), abs=3)


def test_a_wav_of_another_program_is_read_back() -> None:
    with wave.open(io.BytesIO(whole("wav", voice(100)))) as file:
        assert file.getnframes() == 100


def test_a_format_that_cannot_be_streamed_is_refused_with_those_that_can() -> None:
    check_format("flac", is_streamed=False, param="response_format")
    with pytest.raises(RequestError, match="wav, pcm, mp3, opus, aac") as caught:
        check_format("flac", is_streamed=True, param="response_format")
    assert (caught.value.status, caught.value.param) == (400, "response_format")


def test_a_missing_encoder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "mp3", replace(FORMATS["mp3"], codec="libnothing"))
    with pytest.raises(RequestError, match=r"'libnothing'.*wav, pcm, flac, opus, aac") as caught:
        check_format("mp3", is_streamed=False, param="response_format")
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "response_format", "encoder_missing")
