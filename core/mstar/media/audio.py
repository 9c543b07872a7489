"""Audio: float32 samples to 16-bit PCM and WAV, audio files to float32. Used in every process.

One conversion everywhere: clamp to -1..1, times 32767, truncation toward zero.
"""

from __future__ import annotations

import struct

import av
import numpy as np

from mstar.errors import RequestError
from mstar.media.container import open_container
from mstar.media.policy import Budget

STREAMED_BYTES = 0xFFFFFFFF
"""The size a WAV header states when the length is not known yet."""


def to_int16(samples: np.ndarray) -> np.ndarray:
    """float32 samples as int16: clamped to -1..1, times 32767, truncated toward zero; NaN becomes 0."""
    clamped = np.clip(np.nan_to_num(np.asarray(samples, dtype=np.float32), nan=0.0), -1.0, 1.0)
    return (clamped * np.float32(32767)).astype("<i2")


def encode_pcm(samples: np.ndarray) -> bytes:
    """Little-endian signed 16-bit PCM, mono, without a header."""
    return to_int16(samples).tobytes()


def wav_header(*, sample_rate: int, data_bytes: int | None) -> bytes:
    """A 44-byte header of mono 16-bit WAV. `data_bytes` None: a stream, both sizes are 0xFFFFFFFF."""
    riff_bytes, payload = (STREAMED_BYTES, STREAMED_BYTES) if data_bytes is None else (36 + data_bytes, data_bytes)
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        b"RIFF", riff_bytes, b"WAVE", b"fmt ", 16, 1, 1, sample_rate, sample_rate * 2, 2, 16, b"data", payload,
    )  # fmt: skip


def encode_wav(samples: np.ndarray, *, sample_rate: int) -> bytes:
    """A whole mono 16-bit WAV file."""
    data = encode_pcm(samples)
    return wav_header(sample_rate=sample_rate, data_bytes=len(data)) + data


def has_audio(data: bytes, *, param: str | None = None) -> bool:
    """Whether a file holds a sound track."""
    with open_container(data, what="video", param=param) as container:
        return bool(container.streams.audio)


def decode_audio(
    data: bytes, *, max_s: float = 3600.0, budget: Budget | None = None, param: str | None = None
) -> tuple[np.ndarray, int]:
    """Samples (channels, n) as float32 and the sample rate of an audio file of any common format.

    Raises RequestError for what is no audio file, holds no samples or some that are no numbers, is longer than `max_s`
    seconds, or is more than the budget has left.
    """
    blocks: list[np.ndarray] = []
    num_samples, rate = 0, 0
    with open_container(data, what="audio", param=param) as container:
        if not container.streams.audio:
            raise RequestError("the file holds no audio stream", param=param)
        resampler = av.AudioResampler(format="fltp")
        for frame in container.decode(audio=0):
            rate = frame.sample_rate
            num_samples += frame.samples
            if num_samples > max_s * rate:
                message = f"{param or 'the audio'} is longer than {max_s:g} s, which is the limit; "
                message += "send a shorter part, or raise --max-audio-duration"
                raise RequestError(message, param=param, code="media_too_large")
            if budget is not None:
                budget.left_s(param)
                budget.take(4 * frame.samples * frame.layout.nb_channels, "more samples", param)
            blocks += [block.to_ndarray() for block in resampler.resample(frame)]
    if not num_samples:
        raise RequestError("the audio holds no samples", param=param)
    samples = np.ascontiguousarray(np.concatenate(blocks, axis=1), dtype=np.float32)
    if not np.isfinite(samples).all():
        raise RequestError("the audio holds NaN or infinity; all samples must be finite", param=param)
    return samples, rate
