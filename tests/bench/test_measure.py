"""Playback, bytes to seconds, and what counts as a failure, against a server in the same loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from mstar.bench.measure import Job, Meter, Playback, Sample, measure
from mstar.client import AsyncClient
from mstar.media.audio import encode_wav, wav_header

RATE = 8000
SECOND = bytes(2 * RATE)


# ---- playback -----------------------------------------------------------------------------------------------------


def played(*arrivals: tuple[float, float]) -> Playback:
    playback = Playback()
    for now, seconds in arrivals:
        playback.add(seconds, now=now)
    return playback


def test_audio_that_comes_in_time_never_starves_the_player() -> None:
    playback = played((5.0, 1.0), (5.5, 1.0), (7.0, 0.5))
    assert (playback.first, playback.audio_s, playback.underrun_s, playback.num_late_chunks) == (5.0, 2.5, 0.0, 0)


def test_the_player_waits_for_late_audio_and_goes_on_from_there() -> None:
    playback = played((5.0, 1.0), (6.5, 1.0), (7.4, 1.0), (9.0, 1.0))
    assert playback.underrun_s == pytest.approx(1.0)  # half a second twice
    assert (playback.num_chunks, playback.num_late_chunks) == (4, 2)


def test_a_header_is_no_audio() -> None:
    playback = played((5.0, 0.0), (6.0, 1.0))
    assert playback.first == 6.0 and playback.underrun_s == 0.0 and playback.num_chunks == 1


# ---- bytes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 43, 44, 45, 10_000])
def test_wav_counts_without_its_header_however_it_is_cut(size: int) -> None:
    data = encode_wav(np.zeros(RATE // 2), sample_rate=RATE)
    meter = Meter(is_wav=True, bytes_per_s=1)
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    assert sum(map(meter.feed, pieces)) == pytest.approx(0.5) and meter.shortfall is None


@pytest.mark.parametrize(
    ("is_wav", "data", "problem"),
    [
        (False, b"abc", "last sample"),
        (True, wav_header(sample_rate=RATE, data_bytes=100) + bytes(98), "states 100 bytes of audio, 98 came"),
        (True, wav_header(sample_rate=RATE, data_bytes=None)[:30], "header is incomplete"),
        (True, wav_header(sample_rate=RATE, data_bytes=None) + bytes(98), None),
    ],
)
def test_what_is_missing_at_the_end_is_seen(is_wav: bool, data: bytes, problem: str | None) -> None:
    meter = Meter(is_wav=is_wav, bytes_per_s=2 * RATE)
    meter.feed(data)
    assert meter.shortfall == problem or (problem is not None and problem in str(meter.shortfall))


def test_requests_go_through_the_texts_with_seeds_of_their_own() -> None:
    job = Job(texts=("a", "b"), seed=10, format="wav", fields={"voice": "amy"})
    assert [job.request(n)["input"] for n in range(3)] == ["a", "b", "a"]
    assert job.request(2) == {"input": "a", "seed": 12, "response_format": "wav", "voice": "amy"}


# ---- one request --------------------------------------------------------------------------------------------------

Script = list[bytes | float]


def head(kind: str = "audio/pcm", *, status: int = 200, more: str = "Transfer-Encoding: chunked") -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nX-Sample-Rate: {RATE}\r\n{more}\r\n\r\n".encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


END = b"0\r\n\r\n"


@contextlib.asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[str]:
    """A server that sends bytes and waits seconds, and then hangs up."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            for step in script:
                if isinstance(step, bytes):
                    writer.write(step)
                    await writer.drain()
                else:
                    await asyncio.sleep(step)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def measured(script: Script, **job: Any) -> Sample:
    async def ask() -> Sample:
        async with scripted(script) as url, AsyncClient(url, max_retries=0) as client:
            now = time.perf_counter()
            return await measure(client, Job(texts=("hi",), **job), number=3, due=now, began=now - 1)

    return asyncio.run(ask())


def test_a_stream_is_measured_chunk_by_chunk() -> None:
    sample = measured([head(), 0.1, chunk(SECOND), 0.1, chunk(SECOND[:1600]), END])
    assert sample.failure is None and sample.number == 3 and sample.start_s == pytest.approx(1)
    assert sample.audio_s == pytest.approx(1.1) and sample.num_chunks == 2
    assert sample.first_audio_s is not None and 0.1 <= sample.first_audio_s < sample.latency_s - 0.09
    assert sample.underrun_s == 0 and sample.rtf == pytest.approx(sample.latency_s / 1.1)


def test_a_header_that_comes_early_does_not_count_as_audio() -> None:
    header = wav_header(sample_rate=RATE, data_bytes=None)
    sample = measured([head("audio/wav"), chunk(header), 0.2, chunk(SECOND), END], format="wav")
    assert sample.first_audio_s is not None and sample.first_audio_s >= 0.2 and sample.audio_s == 1.0


def test_a_starved_player_is_seen() -> None:
    sample = measured([head(), chunk(SECOND[:1600]), 0.4, chunk(SECOND), END])
    assert 0.2 < sample.underrun_s < 2 and sample.num_late_chunks == 1


def test_a_whole_answer_has_no_first_audio() -> None:
    data = wav_header(sample_rate=RATE, data_bytes=len(SECOND)) + SECOND
    script: Script = [head("audio/wav", more=f"Content-Length: {len(data)}"), data]
    sample = measured(script, format="wav", is_streamed=False)
    assert sample.failure is None and sample.audio_s == 1.0 and sample.first_audio_s is None


@pytest.mark.parametrize(
    ("script", "job", "failure", "detail"),
    [
        ([head(), END], {}, "broken", "without any audio"),
        ([head(), chunk(SECOND)], {}, "broken", "broke off"),
        ([head(), chunk(SECOND + b"x"), END], {}, "short", "last sample"),
        ([head("application/json"), chunk(b'{"error": "none"}'), END], {}, "not_audio", "application/json"),
        ([head("audio/wav"), chunk(wav_header(sample_rate=RATE, data_bytes=None)), END], {"format": "wav"},
         "no_audio", "no audio"),
        ([head(status=429), END], {}, "http_429", "status 429"),
        ([head(), chunk(SECOND), 5.0, END], {"timeout_s": 0.2}, "timeout", "0.2 s"),
        ([], {}, "connection", "RemoteProtocolError"),
        ([head("audio/mpeg"), chunk(b"no mp3"), END], {"format": "mp3", "is_streamed": False}, "not_audio", "decoded"),
        ([head("audio/wav"), chunk(wav_header(sample_rate=RATE, data_bytes=9) + SECOND[:4]), END],
         {"format": "wav", "is_streamed": False}, "short", "states 9 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_does_not_end_as_it_should_is_a_failure(
    script: Script, job: dict[str, Any], failure: str, detail: str
) -> None:
    sample = measured(script, **job)
    assert sample.failure == failure and sample.detail is not None and detail in sample.detail
