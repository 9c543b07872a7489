"""A scene to encode: a square that crosses a gradient, as frames and as a video file."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np


def moving_square(num_frames: int = 16, *, height: int = 96, width: int = 128) -> np.ndarray:
    """uint8 (T, H, W, 3): an orange square moves from the left to the right, over colours that stay."""
    y, x = np.mgrid[:height, :width]
    ground = np.stack([40 + 80 * x / width, 60 + 120 * y / height, 180 - 100 * x / width], axis=-1)
    frames = np.repeat(ground[None], num_frames, axis=0)
    side = height // 3
    for number, frame in enumerate(frames):
        left = round(number * (width - side) / max(num_frames - 1, 1))
        frame[height // 3 : height // 3 + side, left : left + side] = (250, 150, 20)
    return frames.astype(np.uint8)


def write_video(path: Path, frames: np.ndarray, *, rate: int = 8) -> Path:
    """An MP4 file of uint8 (T, H, W, 3), with even sides."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=rate, options={"crf": "12"})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    return path
