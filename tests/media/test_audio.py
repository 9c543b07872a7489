from __future__ import annotations

import io
import struct
import wave

import av
import numpy as np
import pytest
from sounds import sound_file

from mstar.errors import RequestError
from mstar.media.audio import decode_audio, encode_pcm, encode_wav, has_audio, to_int16, wav_header

TONE = (np.sin(np.arange(2400) / 10) * 0.5).astype(np.float32)


def test_int16_clamps_and_truncates_toward_zero() -> None:
    samples = np.array([-2.0, -1.0, -0.5, 0.0, 0.99999, 1.0, 7.0, np.nan], dtype=np.float32)
    assert to_int16(samples).tolist() == [-32767, -32767, -16383, 0, 32766, 32767, 32767, 0]


def test_whole_wav_has_right_sizes() -> None:
    data = encode_wav(TONE, sample_rate=24000)
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24000, 1, 2)
        assert file.readframes(file.getnframes()) == encode_pcm(TONE)
    assert struct.unpack_from("<I", data, 4)[0] == len(data) - 8


def test_streamed_wav_header_states_unknown_sizes() -> None:
    header = wav_header(sample_rate=24000, data_bytes=None)
    assert len(header) == 44
    assert header[4:8] == header[40:44] == b"\xff\xff\xff\xff"


def test_decoding_gives_the_encoded_samples_back() -> None:
    samples, rate = decode_audio(encode_wav(TONE, sample_rate=16000))
    assert rate == 16000 and samples.shape == (1, 2400) and samples.dtype == np.float32
    assert np.abs(samples[0] - TONE).max() < 1e-4


@pytest.mark.parametrize("data", [
    b"", b"no audio at all", encode_wav(TONE[:0], sample_rate=8000),
    sound_file(np.full((1, 99), np.nan, np.float32), codec="pcm_f32le"),
])  # fmt: skip
def test_what_is_no_audio_is_the_clients_fault(data: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        decode_audio(data, param="inputs.0.data")
    assert caught.value.status == 400 and caught.value.param == "inputs.0.data"


def test_audio_over_the_limit_is_refused() -> None:
    with pytest.raises(RequestError, match="longer than 0.1 s"):
        decode_audio(encode_wav(TONE, sample_rate=8000), max_s=0.1)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 96000])
@pytest.mark.parametrize(
    ("codec", "kind", "layout", "error"),
    [
        ("pcm_s16le", "wav", "mono", 1e-4), ("pcm_s24le", "wav", "stereo", 1e-6), ("pcm_f32le", "wav", "5.1", 1e-7),
        ("pcm_mulaw", "wav", "mono", 0.02), ("flac", "flac", "stereo", 1e-4), ("pcm_u8", "wav", "mono", 0.01),
    ],
)  # fmt: skip
def test_rates_channels_and_sample_types_are_what_the_file_has(
    rate: int, codec: str, kind: str, layout: str, error: float
) -> None:
    channels = {"mono": 1, "stereo": 2, "5.1": 6}[layout]
    tone = np.stack([TONE * (1 - 0.1 * number) for number in range(channels)])
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(tone, format="fltp", layout=layout)
        frame.sample_rate = rate
        resampler = av.AudioResampler(format=stream.format.name, layout=layout, rate=rate)
        for one in [*resampler.resample(frame), None]:
            container.mux(stream.encode(one))
    samples, found = decode_audio(file.getvalue())
    assert found == rate and samples.shape == tone.shape and samples.dtype == np.float32
    assert np.abs(samples - tone).max() <= error


def test_sixteen_minutes_are_read_and_an_hour_and_more_is_not() -> None:
    quiet = np.zeros(16 * 60 * 8000, np.float32)
    samples, _ = decode_audio(encode_wav(quiet, sample_rate=8000))
    assert samples.shape == (1, len(quiet)) and has_audio(encode_wav(TONE, sample_rate=8000))
    with pytest.raises(RequestError, match="3600 s, which is the limit.*--max-audio-duration"):
        decode_audio(encode_wav(np.zeros(3601 * 1000, np.float32), sample_rate=1000))
