"""Audio files as they are made: samples in, the bytes of one file out, whole or streamed. Used in the server process.

wav and pcm are written here, all others by FFmpeg's encoders and muxers. Knows nothing about HTTP.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import av
import numpy as np

from mstar.errors import RequestError
from mstar.media import audio


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioFormat:
    """How a format is written.

    Args:
        codec: FFmpeg's name of the encoder; None: 16-bit samples as they are.
        container: FFmpeg's name of the muxer.
        can_stream: whether a file is right although its header was written before its end was known.
    """

    media_type: str
    codec: str | None = None
    container: str | None = None
    bit_rate: int | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    can_stream: bool = True


FORMATS: dict[str, AudioFormat] = {
    "wav": AudioFormat(media_type="audio/wav"),
    "pcm": AudioFormat(media_type="audio/pcm"),
    "mp3": AudioFormat(media_type="audio/mpeg", codec="libmp3lame", container="mp3", bit_rate=128_000),
    # Its header states length and checksum: without them a cut file looks like a complete one.
    "flac": AudioFormat(media_type="audio/flac", codec="flac", container="flac", can_stream=False),
    # A page holds a second of sound if nobody objects, and a stream would be late by it.
    "opus": AudioFormat(
        media_type="audio/ogg", codec="libopus", container="ogg", bit_rate=64_000, options={"page_duration": "40000"}
    ),
    "aac": AudioFormat(media_type="audio/aac", codec="aac", container="adts", bit_rate=96_000),
}
"""`response_format` -> how it is written; pcm is mono signed 16-bit little-endian."""


def check_format(name: str, *, is_streamed: bool, param: str) -> None:
    """Raises RequestError 400 for a format that this server cannot write, or not as a stream."""
    if is_streamed and not FORMATS[name].can_stream:
        known = ", ".join(other for other, kind in FORMATS.items() if kind.can_stream)
        message = f"{param} is {name}, which cannot be streamed: its header states the length and a checksum; "
        raise RequestError(f"{message}ask for it whole, or for one of {known}", param=param)
    if not _has_encoder(name):
        known = ", ".join(filter(_has_encoder, FORMATS))
        message = f"{param} is {name}, but the server's FFmpeg lacks the encoder {FORMATS[name].codec!r}; "
        raise RequestError(f"{message}ask for one of {known}", param=param, code="encoder_missing")


def _has_encoder(name: str) -> bool:
    codec = FORMATS[name].codec
    try:
        return codec is None or av.Codec(codec, "w").is_encoder
    except av.codec.codec.UnknownCodecError:
        return False


class AudioEncoder(ABC):
    """One file in the making. What `feed` and `finish` give, put together, is the file.

    Args:
        sample_rate: of the file; not always that of the samples.
    """

    sample_rate: int

    @abstractmethod
    def feed(self, samples: np.ndarray) -> bytes:
        """Take mono float32 samples in; what can be given of the file by now."""

    @abstractmethod
    def finish(self) -> bytes:
        """The rest of the file, when there are no more samples."""


def open_encoder(name: str, *, sample_rate: int, num_samples: int | None = None) -> AudioEncoder:
    """A new file of a format of `FORMATS`.

    Args:
        num_samples: how many samples will come in all; None: not known, the file is given piece by piece.
    """
    if FORMATS[name].codec is None:
        return _PlainEncoder(sample_rate=sample_rate, num_samples=num_samples, has_header=name == "wav")
    return _CodecEncoder(FORMATS[name], sample_rate=sample_rate, is_streamed=num_samples is None)


class _PlainEncoder(AudioEncoder):
    def __init__(self, *, sample_rate: int, num_samples: int | None, has_header: bool) -> None:
        self.sample_rate = sample_rate
        size = None if num_samples is None else 2 * num_samples
        self._header = audio.wav_header(sample_rate=sample_rate, data_bytes=size) if has_header else b""

    def feed(self, samples: np.ndarray) -> bytes:
        header, self._header = self._header, b""
        return header + audio.encode_pcm(samples)

    def finish(self) -> bytes:
        return self._header


class _CodecEncoder(AudioEncoder):
    """A file of FFmpeg's. Samples enter as in pcm and wav: as 16-bit integers; equal ones give equal bytes."""

    def __init__(self, kind: AudioFormat, *, sample_rate: int, is_streamed: bool) -> None:
        self._rate_in, self._num_in = sample_rate, 0
        self._sink = _Pieces() if is_streamed else io.BytesIO()
        options = {"fflags": "+bitexact", "flush_packets": "1", **kind.options}
        self._container = av.open(self._sink, "w", format=kind.container, options=options)
        assert kind.codec is not None
        self.sample_rate = _nearest_rate(sample_rate, av.Codec(kind.codec, "w").audio_rates)
        self._stream = self._container.add_stream(kind.codec, rate=self.sample_rate, layout="mono")
        if kind.bit_rate is not None:
            self._stream.bit_rate = kind.bit_rate

    def feed(self, samples: np.ndarray) -> bytes:
        if len(samples):
            frame = av.AudioFrame.from_ndarray(audio.to_int16(samples)[None], format="s16", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = self._rate_in, self._num_in, Fraction(1, self._rate_in)
            self._num_in += len(samples)
            self._container.mux(self._stream.encode(frame))
        return self._taken()

    def finish(self) -> bytes:
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._sink.getvalue() if isinstance(self._sink, io.BytesIO) else self._taken()

    def _taken(self) -> bytes:
        return self._sink.take() if isinstance(self._sink, _Pieces) else b""


class _Pieces:
    """Where FFmpeg writes a stream: nothing can be changed later, and what was written is taken away."""

    def __init__(self) -> None:
        self._data = bytearray()

    def write(self, data: bytes) -> int:
        self._data += data
        return len(data)

    def take(self) -> bytes:
        data, self._data = bytes(self._data), bytearray()
        return data


def _nearest_rate(rate: int, supported: list[int] | None) -> int:
    """The rate itself, or else the next higher one that a codec takes, or else its highest."""
    if not supported or rate in supported:
        return rate
    return min((one for one in supported if one > rate), default=max(supported))
