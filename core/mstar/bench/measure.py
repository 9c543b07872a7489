"""One request for speech, measured as a listener meets it. What does not end as it should is a failure, by kind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mstar.client import APIError, AsyncClient, ClientError, StreamBroken
from mstar.errors import RequestError
from mstar.media.audio import STREAMED_BYTES, decode_audio

STREAMED_FORMATS = ("pcm", "wav")  # formats whose bytes say how much can be played
PCM_RATE = 24000  # where no header tells


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is asked for. Request n says text n, over and over, with seed + n."""

    texts: tuple[str, ...]
    format: str = "pcm"
    is_streamed: bool = True
    seed: int = 0
    timeout_s: float = 300.0
    fields: Mapping[str, Any] = field(default_factory=dict)

    def request(self, number: int) -> dict[str, Any]:
        own = {"seed": max(self.seed + number, 0), "response_format": self.format}
        return {"input": self.texts[number % len(self.texts)], **own, **self.fields}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request. Seconds; `start_s` counts from the first request, `first_audio_s` and `latency_s` from `start_s`.

    Args:
        first_audio_s: to the first audio after any header; None of whole answers.
        underrun_s: how long a player that began at the first audio had nothing to play.
        failure: kind of failure; None: it ended well.
    """

    number: int
    start_s: float
    latency_s: float
    first_audio_s: float | None = None
    audio_s: float = 0.0
    underrun_s: float = 0.0
    num_chunks: int = 0
    num_late_chunks: int = 0
    failure: str | None = None
    detail: str | None = None

    @property
    def rtf(self) -> float:
        """Seconds waited for a second of audio."""
        return self.latency_s / self.audio_s


class Playback:
    """A player that begins at the first audio, and waits when it has nothing to play."""

    def __init__(self) -> None:
        self.audio_s = self.underrun_s = self._played_at = 0.0
        self.first: float | None = None
        self.num_chunks = self.num_late_chunks = 0

    def add(self, seconds: float, *, now: float) -> None:
        """Audio arrives."""
        if not seconds:
            return
        if self.first is None:
            self.first = self._played_at = now
        late = max(0.0, now - self._played_at)
        self.underrun_s += late
        self.num_late_chunks += late > 0
        self.num_chunks += 1
        self._played_at = max(now, self._played_at) + seconds
        self.audio_s += seconds


class Meter:
    """Counts the audio in bytes of pcm or wav, without its header.

    Args:
        bytes_per_s: of pcm; of wav the header says it.
    """

    def __init__(self, *, is_wav: bool, bytes_per_s: int) -> None:
        self._head = bytearray() if is_wav else None
        self._bytes_per_s = bytes_per_s
        self._declared: int | None = None
        self._num_bytes = 0

    def feed(self, data: bytes) -> float:
        """Seconds of audio in the next bytes."""
        if self._head is not None:
            self._head += data
            at = self._head.find(b"data")
            if at < 0 or len(self._head) < at + 8:
                return 0.0
            format_at = self._head.index(b"fmt ")
            self._bytes_per_s = int.from_bytes(self._head[format_at + 16 : format_at + 20], "little")
            self._declared = int.from_bytes(self._head[at + 4 : at + 8], "little")
            data, self._head = bytes(self._head[at + 8 :]), None
        self._num_bytes += len(data)
        return len(data) / self._bytes_per_s

    @property
    def shortfall(self) -> str | None:
        """What is missing at the end."""
        if self._head:
            return "the WAV header is incomplete"
        if self._declared not in (None, STREAMED_BYTES) and self._declared != self._num_bytes:
            return f"the header states {self._declared} bytes of audio, {self._num_bytes} came"
        return "the last sample is cut" if self._num_bytes % 2 else None


class _Failure(Exception):
    """Kind and detail of a failure that only a listener notices."""


async def measure(client: AsyncClient, job: Job, *, number: int, due: float, began: float) -> Sample:
    """Make request `number`. Times are those of `time.perf_counter`."""
    playback, ended, failure, detail = Playback(), None, None, None
    try:
        async with asyncio.timeout(job.timeout_s):
            ended = await (_listen if job.is_streamed else _fetch)(client, job, number=number, playback=playback)
            if not playback.audio_s:
                raise _Failure("no_audio", "the answer ended well and holds no audio")
    except _Failure as error:
        failure, detail = error.args
    except TimeoutError:
        failure, detail = "timeout", f"no end after {job.timeout_s:g} s"
    except APIError as error:
        failure, detail = f"http_{error.status}", str(error)
    except ClientError as error:
        failure, detail = "broken" if isinstance(error, StreamBroken) else "connection", str(error)
    ended = ended or time.perf_counter()
    first = None if playback.first is None or not job.is_streamed else playback.first - due
    return Sample(
        number=number, start_s=due - began, latency_s=ended - due, first_audio_s=first, audio_s=playback.audio_s,
        underrun_s=playback.underrun_s, num_chunks=playback.num_chunks, num_late_chunks=playback.num_late_chunks,
        failure=failure, detail=detail,
    )  # fmt: skip


async def _listen(client: AsyncClient, job: Job, *, number: int, playback: Playback) -> float:
    async with client.stream_speech(**{"stream_format": "audio"} | job.request(number)) as stream:
        _check_type(stream.answer.content_type)
        meter = Meter(is_wav=job.format == "wav", bytes_per_s=2 * (stream.answer.sample_rate or PCM_RATE))
        async for piece in stream:
            playback.add(meter.feed(piece), now=time.perf_counter())
    return _ended(meter)


async def _fetch(client: AsyncClient, job: Job, *, number: int, playback: Playback) -> float:
    speech = await client.speech(**job.request(number))
    now = time.perf_counter()
    _check_type(speech.content_type)
    if job.format in STREAMED_FORMATS:
        meter = Meter(is_wav=job.format == "wav", bytes_per_s=2 * (speech.sample_rate or PCM_RATE))
        playback.add(meter.feed(speech), now=now)
        return _ended(meter)
    try:
        samples, rate = await asyncio.to_thread(decode_audio, bytes(speech))
    except RequestError as error:
        raise _Failure("not_audio", error.message) from error
    playback.add(samples.shape[1] / rate, now=now)
    return now


def _ended(meter: Meter) -> float:
    if meter.shortfall:
        raise _Failure("short", meter.shortfall)
    return time.perf_counter()


def _check_type(content_type: str) -> None:
    if not content_type.startswith(("audio/", "application/octet-stream", "text/event-stream")):
        raise _Failure("not_audio", f"the answer is {content_type or 'of no type'}")
