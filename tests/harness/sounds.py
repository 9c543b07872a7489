"""Sounds for tests: tones, and files of any codec, rate and layout, with pictures or without."""

from __future__ import annotations

import io
from fractions import Fraction
from typing import Any

import av
import numpy as np


def wave(seconds: float, *, rate: int = 16000, hertz: float = 440) -> np.ndarray:
    """float32 (samples,), one tone."""
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def sound_file(
    samples: np.ndarray, *, rate: int = 16000, layout: str = "mono", codec: str = "pcm_s16le", kind: str = "wav"
) -> bytes:
    """A file of float32 samples (channels, n)."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        _add_sound(container, samples, rate=rate, layout=layout, codec=codec)
    return file.getvalue()


def _add_sound(container: Any, samples: np.ndarray, *, rate: int, layout: str, codec: str) -> None:
    stream = container.add_stream(codec, rate=rate, layout=layout)
    resampler = av.AudioResampler(format=stream.codec_context.format, layout=layout, rate=rate)
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples, dtype=np.float32), format="fltp", layout=layout)
    frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
    size, fifo = stream.codec_context.frame_size or 4096, av.AudioFifo()
    for one in resampler.resample(frame):
        fifo.write(one)
    while (block := fifo.read(size, partial=True)) is not None:
        container.mux(stream.encode(block))
    container.mux(stream.encode(None))


def film_file(seconds: float = 3.0, *, rate: int = 10, with_sound: bool = True, grey: int = 0) -> bytes:
    """A clip of 64x64, frame i of grey `grey` + 4 * i, and a tone of the same length."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        if with_sound:
            _add_sound(container, wave(seconds, rate=44100)[None], rate=44100, layout="mono", codec="aac")
        for i in range(round(seconds * rate)):
            pixels = np.full((64, 64, 3), (grey + 4 * i) % 256, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()
