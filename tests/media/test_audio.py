from __future__ import annotations

import io
import struct
import wave

import numpy as np
import pytest

from mstar.errors import RequestError
from mstar.media.audio import decode_audio, encode_pcm, encode_wav, to_int16, wav_header

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


@pytest.mark.parametrize("data", [b"", b"no audio at all", encode_wav(TONE[:0], sample_rate=8000)])
def test_what_is_no_audio_is_the_clients_fault(data: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        decode_audio(data, param="inputs.0.data")
    assert caught.value.status == 400 and caught.value.param == "inputs.0.data"


def test_audio_over_the_limit_is_refused() -> None:
    with pytest.raises(RequestError, match="longer than 0.1 s"):
        decode_audio(encode_wav(TONE, sample_rate=8000), max_s=0.1)
