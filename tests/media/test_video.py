"""Video files to frames: the same however they are decoded, no more than allowed, nothing that is not in the file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from media_files import animation, clip, image_file, listening, response

from mstar.errors import RequestError
from mstar.media.audio import decode_audio, encode_wav
from mstar.media.policy import Budget, MediaPolicy
from mstar.media.video import Sampling, decode_video
from mstar.types import UsualFrames, VideoPart

OPEN_GROUPS = {"x265-params": "open-gop=1:keyint=12:log-level=none"}
KINDS: dict[str, dict[str, Any]] = {
    "h264": {"options": {"bf": "3"}},
    "hevc": {"codec": "libx265", "options": OPEN_GROUPS},
    "vp9": {"codec": "libvpx-vp9", "kind": "webm"},
    "vp8": {"codec": "libvpx", "kind": "webm", "options": {"auto-alt-ref": "1", "lag-in-frames": "10"}},
    "mpeg4 avi": {
        "codec": "mpeg4",
        "kind": "avi",
        "options": {"bf": "2"},
    },  # its packets do not say when they are shown
    "mjpeg": {"codec": "mjpeg", "kind": "avi", "pixels": "yuvj420p"},
    "ffv1": {"codec": "ffv1", "kind": "matroska"},
    "gif": {"codec": "gif", "kind": "gif", "pixels": "rgb8"},
}
CLIP = clip()


def decode(
    data: bytes = CLIP, *, decode_all: bool = False, policy: MediaPolicy | None = None, **wanted: Any
) -> VideoPart:
    budget = Budget(policy or MediaPolicy())
    return decode_video(data, sampling=Sampling(**wanted), budget=budget, param="inputs.0", decode_all=decode_all)


def refusal(data: bytes = CLIP, **options: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decode(data, **options)
    assert caught.value.status == 400 and caught.value.param is not None
    assert caught.value.param.startswith("inputs.0.") and len(caught.value.message) < 500
    return caught.value


def greys(part: VideoPart) -> list[int]:
    return [round(float(value) / 4) for value in part.frames[:, -16:, -16:].mean(axis=(1, 2, 3))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "wanted", [{}, {"num_frames": 5}, {"fps": 3.0}, {"frame_indices": [59, 0, 13, 13, 11, 12, 30]}], ids=str
)
def test_leaving_out_what_is_not_needed_changes_nothing(kind: str, wanted: dict[str, Any]) -> None:
    data = clip(**KINDS[kind])
    part, whole = decode(data, **wanted), decode(data, decode_all=True, **wanted)
    assert part.frames.dtype == np.uint8 and part.timestamps.dtype == np.float32
    assert np.array_equal(part.frames, whole.frames) and np.array_equal(part.timestamps, whole.timestamps)
    found = np.round(part.timestamps * 10).astype(int)
    assert np.abs(np.array(greys(part)) - found).max() <= (9 if kind == "gif" else 1)  # a GIF has few greys


def test_frames_are_those_asked_for() -> None:
    assert greys(decode()) == list(range(60))
    assert greys(decode(num_frames=5)) == [0, 14, 29, 44, 59] == list(np.linspace(0, 59, 5, dtype=int))
    assert greys(decode(num_frames=1)) == [0] and len(decode(num_frames=60).frames) == 60
    assert greys(decode(fps=2.5)) == list(range(0, 60, 4)) and len(decode(fps=20.0).frames) == 120
    assert greys(decode(fps=0.01)) == [0]
    assert greys(decode(frame_indices=[7, 3, 7])) == [7, 3, 7]
    assert np.allclose(decode(frame_indices=[7, 3, 7]).timestamps, [0.7, 0.3, 0.7])


def test_only_what_is_needed_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    from mstar.media import video

    decoded: list[int] = []
    plain = video._Clip._decoded

    def counted(self: Any, packets: Any) -> Any:
        decoded.append(len(packets))
        return plain(self, packets)

    monkeypatch.setattr(video._Clip, "_decoded", counted)
    assert greys(decode(frame_indices=[2, 40])) == [2, 40]
    assert len(decoded) == 2 and sum(decoded) < 20


def test_a_clip_is_turned_as_it_is_shown() -> None:
    upright = decode(num_frames=1).frames[0]
    turned = decode(clip(rotation=90), num_frames=1).frames[0]
    assert turned.shape == (64, 48, 3)
    assert np.array_equal(turned, np.rot90(upright)) and turned[-8, 8, 0] > 200 > turned[8, 8, 0]


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"num_frames": 5, "fps": 1.0}, "num_frames", "fps and num_frames exclude each other"),
        ({"num_frames": 5, "frame_indices": [1]}, "frame_indices", "exclude each other"),
        ({"frame_indices": [0, 60]}, "frame_indices", "frame 60; the clip has 60, the last is 59"),
        ({"num_frames": 61}, "num_frames", "is 61; the clip has 60 frames"),
        ({"policy": MediaPolicy(max_video_frames=59)}, "data", "60 frames, of 60 in the clip; the limit is 59"),
        ({"policy": MediaPolicy(max_video_frames=9), "fps": 2.0}, "fps", "12 frames, of 60 in the clip"),
        ({"policy": MediaPolicy(max_image_pixels=3071)}, "data", "64x48, 3072 pixels; the limit is 3071"),
        ({"policy": MediaPolicy(memory_bytes=50_000), "num_frames": 6}, "data", "6 frames of 64x48"),
        ({"policy": MediaPolicy(timeout_s=1e-6)}, "data", "--media-timeout"),
    ],
)
def test_what_cannot_be_had_is_told(options: dict[str, Any], param: str, words: str) -> None:
    error = refusal(**options)
    assert error.param == f"inputs.0.{param}" and words in error.message


@pytest.mark.parametrize(
    "data",
    [
        b"", b"not a video", CLIP[: len(CLIP) // 2], CLIP[:100], image_file(),
        encode_wav(np.zeros(800), sample_rate=8000), clip(kind="matroska")[:600], b"\0" * 5000, b"GIF89a",
    ],
    ids=range(9),
)  # fmt: skip
def test_what_is_no_whole_video_is_the_clients_fault(data: bytes) -> None:
    assert refusal(data).param == "inputs.0.data"


def test_damaged_frames_are_not_passed_on() -> None:
    data = bytearray(CLIP)
    start = data.index(b"mdat") + 2000
    data[start : start + 400] = b"\x55" * 400
    assert refusal(bytes(data)).code == "invalid_media"


def test_any_bytes_end_in_frames_or_a_refusal() -> None:
    draw = np.random.default_rng(0)
    refused = 0
    for whole in (clip(num_frames=6, size=(32, 32)), clip(kind="matroska", num_frames=6, size=(32, 32)),
                  clip("mpeg4", "avi", num_frames=6, size=(32, 32)), animation("GIF", 6)):  # fmt: skip
        for _ in range(60):
            data = bytearray(whole)
            for at in draw.integers(0, len(data), 3):
                data[at] = draw.integers(0, 256)
            try:
                decode(bytes(data), policy=MediaPolicy(max_image_pixels=1 << 16))
            except RequestError:
                refused += 1
    assert 0 < refused < 240


def test_a_table_of_a_hundred_million_frames_is_refused_soon() -> None:
    data = bytearray(CLIP)
    at = data.index(b"stsz") + 8
    data[at : at + 8] = (1).to_bytes(4) + (100_000_000).to_bytes(4)  # of one byte each
    at = data.index(b"stsc") + 8
    data[at + 8 : at + 12] = (100_000_000).to_bytes(4)  # all in one chunk
    started = time.monotonic()
    refusal(bytes(data))
    assert time.monotonic() - started < 5


# ---- nothing but what is in the file --------------------------------------------------------------------------------


def playlists(target: str) -> dict[str, bytes]:
    return {
        "hls": f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{target}\n#EXT-X-ENDLIST\n".encode(),
        "hls key": f'#EXTM3U\n#EXT-X-KEY:METHOD=AES-128,URI="{target}"\n#EXTINF:10,\n{target}\n'.encode(),
        "master": f"#EXTM3U\n#EXT-X-STREAM-INF:BANDWIDTH=1\n{target}\n".encode(),
        "concat": f"ffconcat version 1.0\nfile '{target}'\n".encode(),
        "dash": (
            '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"><Period><AdaptationSet '
            f'mimeType="video/mp4"><Representation id="1" bandwidth="1"><BaseURL>{target}</BaseURL></Representation>'
            "</AdaptationSet></Period></MPD>"
        ).encode(),
        "sdp": b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n",
        "imf": f"<?xml version='1.0'?><CompositionPlaylist>{target}</CompositionPlaylist>".encode(),
        "pattern": b"image2:" + target.encode(),
    }


@pytest.mark.parametrize("kind", playlists(""))
@pytest.mark.parametrize("is_audio", [False, True], ids=["video", "audio"])
def test_playlists_open_neither_files_nor_connections(tmp_path: Path, kind: str, is_audio: bool) -> None:
    secret = tmp_path / "secret.mp4"
    secret.write_bytes(CLIP)
    with listening(response(CLIP)) as canary:
        for target in (
            f"http://127.0.0.1:{canary.port}/x.ts",
            f"file://{secret}",
            str(secret),
            "data:video/mp4;base64,AA",
        ):
            with pytest.raises(RequestError):
                if is_audio:
                    decode_audio(playlists(target)[kind], param="p")
                else:
                    decode(playlists(target)[kind])
        time.sleep(0.01)
        assert canary.num_connections == 0


def test_audio_counts_against_the_memory_of_its_request() -> None:
    sound = encode_wav(np.zeros(8000, dtype=np.float32), sample_rate=8000)
    budget = Budget(MediaPolicy(memory_bytes=40_000))
    assert decode_audio(sound, budget=budget)[0].shape == (1, 8000)
    with pytest.raises(RequestError, match="--media-memory-bytes"):
        decode_audio(sound, budget=budget, param="p")


@pytest.mark.parametrize(("frames", "count"), [(1, 1), (3, 3), (7, 4), (9, 8), (30, 8)])
def test_a_clip_of_unstated_frames_is_as_long_as_the_task_usually_takes(frames: int, count: int) -> None:
    times, budget = np.arange(frames) / 10, Budget(MediaPolicy())
    picked = Sampling(usual=(8, 4)).pick(times, budget=budget, param="inputs.0")
    assert picked.tolist() == np.linspace(0, frames - 1, count, dtype=int).tolist()
    assert len(Sampling(num_frames=1, usual=(8, 4)).pick(times, budget=budget, param="inputs.0")) == 1


@pytest.mark.parametrize("rate", [2, 10, 24, 30])
@pytest.mark.parametrize("total", [1, 2, 3, 9, 20, 47, 60])
def test_usual_frames_are_so_many_a_second_at_nearest_places(rate: int, total: int) -> None:
    usual = UsualFrames(most=16, multiple=2, fps=2.0, least=4)
    shown = decode(clip(num_frames=total, rate=rate), usual=usual)
    number = min(max(total / rate * 2.0, 4), 16, total)
    number = int(number + 1e-6) // 2 * 2 or 1
    assert greys(shown) == np.rint(np.linspace(0, total - 1, number)).astype(int).tolist()
    assert shown.duration_s == pytest.approx(total / rate if total > 1 else 0, abs=1e-3)


def test_a_clip_that_lasts_too_long_is_refused() -> None:
    assert decode(policy=MediaPolicy(max_video_s=6), num_frames=1).frames.shape[0] == 1
    error = refusal(policy=MediaPolicy(max_video_s=5.5), num_frames=1)
    assert error.param == "inputs.0.data" and error.code == "media_too_large"
    assert "lasts 5.9 s; the limit is 5.5 s" in error.message and "--max-video-duration" in error.message
