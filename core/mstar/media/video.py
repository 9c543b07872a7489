"""Video files to frames with timestamps: only frames asked for become pixels, only what they need is decoded.

Works on bytes in memory; FFmpeg is given neither paths nor URLs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mstar.errors import RequestError
from mstar.media.container import open_container
from mstar.media.policy import Budget
from mstar.types import UsualFrames, VideoPart

_MAX_PACKETS = 1 << 18  # about two hours
# Codecs whose key frames need nothing before them; of others, and of what is irregular, everything is decoded.
_WITH_KEY_FRAMES = frozenset(
    ("h264", "hevc", "av1", "libdav1d", "vp8", "libvpx", "vp9", "libvpx-vp9", "mpeg4", "mjpeg")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Which frames of a clip are wanted: at most one of the first three; none of them: every frame, or `usual`.

    Args:
        fps: the frame shown at 0 s, 1 / fps s, 2 / fps s and so on, to the end of the clip.
        num_frames: `np.linspace(0, frames of the clip - 1, num_frames)`, rounded down.
        frame_indices: these, in this order, counted from 0 as they are shown.
        usual: what is taken where the part does not choose.
    """

    fps: float | None = None
    num_frames: int | None = None
    frame_indices: Sequence[int] | None = None
    usual: tuple[int, int] | UsualFrames | None = None

    def check(self, *, param: str) -> None:
        """Raises RequestError if two are given. `param` is the part's."""
        given = [name for name in ("fps", "num_frames", "frame_indices") if getattr(self, name) is not None]
        if len(given) > 1:
            message = f"{' and '.join(given)} exclude each other; give one, or none for every frame"
            raise RequestError(message, param=f"{param}.{given[1]}")

    def pick(self, times: np.ndarray, *, budget: Budget, param: str) -> np.ndarray:
        """Indices int64 of the frames wanted of a clip. Raises RequestError for those it does not have, or too many.

        Args:
            times: (frames,) float64, seconds from 0 on.
        """
        total = len(times)
        length_s = _duration_s(times)
        usual = None if self.usual is None else UsualFrames(*self.usual)
        if self.frame_indices is not None:
            count, name = len(self.frame_indices), "frame_indices"
            if (last := max(self.frame_indices)) >= total:
                message = f"{param}.frame_indices asks for frame {last}; the clip has {total}, the last is {total - 1}"
                raise RequestError(message, param=f"{param}.frame_indices")
        elif self.num_frames is not None:
            count, name = self.num_frames, "num_frames"
            if count > total:
                message = f"{param}.num_frames is {count}; the clip has {total} frames; ask for at most as many"
                raise RequestError(message, param=f"{param}.num_frames")
        elif self.fps is not None:
            count, name = max(1, int(length_s * self.fps + 1e-6)), "fps"
        else:
            count, name = total, "data"
            if usual is not None:
                count = min(total, usual.most)
                if usual.fps is not None:
                    count = min(count, max(usual.least, int(length_s * usual.fps + 1e-6)))
                count -= count % usual.multiple if count > usual.multiple else 0
        if count > (limit := budget.policy.max_video_frames):
            message = f"{param} would be {count} frames, of {total} in the clip; the limit is {limit}; "
            message += "ask for fewer by fps, num_frames or frame_indices, or raise --max-video-frames"
            raise RequestError(message, param=f"{param}.{name}", code="media_too_large")
        if name == "frame_indices":
            return np.array(self.frame_indices, dtype=np.int64)
        if self.fps is not None:
            return np.searchsorted(times, np.arange(count) / self.fps + 1e-4, side="right") - 1
        if name == "data" and usual is not None and usual.fps is not None:
            return np.rint(np.linspace(0, total - 1, count)).astype(np.int64)
        return np.linspace(0, total - 1, count, dtype=np.int64)


def _duration_s(times: np.ndarray) -> float:
    """Of a clip: its last frame is shown as long as the others."""
    return float(times[-1]) * len(times) / max(len(times) - 1, 1)


def decode_video(data: bytes, *, sampling: Sampling, budget: Budget, param: str, decode_all: bool = False) -> VideoPart:
    """The frames wanted of a video file's first video stream, upright, in RGB.

    Args:
        param: the part's; errors name its fields.
        decode_all: decode and count every frame; else this is done only for files that do not say what they hold.

    Raises RequestError for what is no video, damaged, too large or too long, or does not have these frames.
    """
    sampling.check(param=param)
    max_pixels, where = budget.policy.max_image_pixels, f"{param}.data"
    with open_container(data, what="video", max_pixels=max_pixels, param=where) as container:
        streams = [
            stream for stream in container.streams.video if not stream.disposition & stream.disposition.attached_pic
        ]
        if not streams:
            raise RequestError(f"{where} holds no video stream", param=where, code="invalid_media")
        clip = _Clip(container, streams[0], budget=budget, param=where)
        times = None if decode_all else clip.listed_times()
        decode_all = times is None
        times = clip.counted_times() if times is None else times
        if times[-1] > (longest := budget.policy.max_video_s):
            message = f"{where} lasts {times[-1]:.1f} s; the limit is {longest:g} s; send a part of it, "
            message += "or raise --max-video-duration"
            raise RequestError(message, param=where, code="media_too_large")
        picked = sampling.pick(times, budget=budget, param=param)
        wanted, order = np.unique(picked, return_inverse=True)
        frames = clip.frames(wanted, copies=len(picked), decode_all=decode_all)
    if frames is None:  # some listed frames are not there
        return decode_video(data, sampling=sampling, budget=budget, param=param, decode_all=True)
    is_plain = len(order) == len(wanted) and bool((np.diff(order) > 0).all())
    shown = frames if is_plain else frames[order]
    return VideoPart(shown, times[picked].astype(np.float32), duration_s=_duration_s(times))


class _Clip:
    """One video stream, whose packets are read at once and decoded as needed."""

    def __init__(self, container: Any, stream: Any, *, budget: Budget, param: str) -> None:
        self._budget = budget
        self._param = param
        self._context = stream.codec_context
        self._seconds = stream.time_base
        self._rate = float(stream.average_rate or stream.guessed_rate or 25)
        if self._context is None:
            raise self._refused("is of a codec that is not known here")
        self._context.thread_count = 1
        self._check_size(self._context)
        self._packets: list[Any] = []
        for packet in container.demux(stream):
            budget.left_s(param)
            if packet.is_corrupt:
                raise self._refused("is damaged, or its end is missing")
            if packet.size:
                self._packets.append(packet)
            if len(self._packets) > _MAX_PACKETS:
                raise self._refused(f"has more than {_MAX_PACKETS} frames, which is the limit; send a part of it")
        # Where each group of packets begins that can be decoded without those before it.
        can_skip = self._context.codec.name in _WITH_KEY_FRAMES
        self._starts = [i for i, packet in enumerate(self._packets) if i == 0 or (can_skip and packet.is_keyframe)]

    def listed_times(self) -> np.ndarray | None:
        """Seconds (frames,) float64 at which frames are shown, from 0 on, by the packets; None: they do not say."""
        shown = [packet.pts for packet in self._packets if not packet.is_discard]
        if None in shown or len(set(shown)) < len(shown) or not shown:
            return None
        self._pts = sorted(shown)
        return (np.array(self._pts) - self._pts[0]) * float(self._seconds)

    def counted_times(self) -> np.ndarray:
        """The same by decoding every frame, and by the frame rate where a frame has no time."""
        pts = [frame.pts for frame in self._decoded(self._packets)]
        if not pts:
            raise self._refused("holds no frames")
        if None in pts or min(np.diff(pts), default=1) <= 0:
            return np.arange(len(pts)) / self._rate
        return (np.array(pts) - pts[0]) * float(self._seconds)

    def frames(self, wanted: np.ndarray, *, copies: int, decode_all: bool) -> np.ndarray | None:
        """uint8 (len(wanted), H, W, 3); None: not all that are listed are there.

        Args:
            wanted: indices, ascending.
            copies: how many frames the client gets in all.
        """
        numbered = enumerate(self._decoded(self._packets)) if decode_all else self._listed(wanted)
        rows, made = {int(index): row for row, index in enumerate(wanted)}, None
        for index, frame in numbered:
            if (row := rows.pop(index, None)) is None:
                continue
            pixels = np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90) % 4)
            if made is None:
                height, width, _ = pixels.shape
                num_bytes = pixels.size * (copies if copies == len(wanted) else copies + len(wanted))
                self._budget.take(num_bytes, f"{copies} frames of {width}x{height}", self._param)
                made = np.empty((len(wanted), height, width, 3), dtype=np.uint8)
            if pixels.shape != made.shape[1:]:
                raise self._refused("changes its size on the way, which is not supported; send it at one size")
            made[row] = pixels
            if not rows:
                return made
        return None

    def _listed(self, wanted: np.ndarray) -> Iterator[tuple[int, Any]]:
        """Frames with their indices, some twice: those wanted, and what is decoded on the way to them."""
        index_of = {pts: index for index, pts in enumerate(self._pts)}
        for run in self._runs({self._pts[index] for index in wanted}):
            yield from ((index_of[frame.pts], frame) for frame in self._decoded(run) if frame.pts in index_of)

    def _runs(self, asked: set[int]) -> Iterator[list[Any]]:
        """Packets to decode for these times: from a key frame to the last one asked for before the next key frame."""
        packets, starts = self._packets, self._starts
        if 2 * len(asked) > len(packets):
            yield packets
            return
        for group, (start, end) in enumerate(zip(starts, [*starts[1:], len(packets)], strict=True)):
            if here := [i for i in range(start, end) if packets[i].pts in asked]:
                # What is shown before its own key frame may need the group before.
                is_early = group > 0 and any(packets[i].pts < packets[start].pts for i in here)
                yield packets[starts[group - 1] if is_early else start : here[-1] + 1]

    def _decoded(self, packets: Sequence[Any]) -> Iterator[Any]:
        """Frames as they are shown, from a decoder that knows nothing before these packets."""
        self._context.flush_buffers()
        for packet in (*packets, None):
            self._budget.left_s(self._param)
            for frame in self._context.decode(packet):
                if frame.is_corrupt:
                    raise self._refused("is damaged, or a part of it is missing")
                self._check_size(frame)
                yield frame

    def _check_size(self, of: Any) -> None:
        pixels, limit = of.width * of.height, self._budget.policy.max_image_pixels
        if pixels > limit:
            message = f"has frames of {of.width}x{of.height}, {pixels} pixels; the limit is {limit}; "
            raise self._refused(message + "send it smaller, or raise --max-image-pixels", code="media_too_large")

    def _refused(self, problem: str, *, code: str = "invalid_media") -> RequestError:
        return RequestError(f"{self._param} {problem}", param=self._param, code=code)
