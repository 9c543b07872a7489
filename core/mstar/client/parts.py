"""Parts of `inputs` and of messages, from arrays and files: what JSON wants in base64. A string is a part already."""

from __future__ import annotations

import base64
import io
import wave
from pathlib import Path
from typing import Any, Literal

import numpy as np


def tensor(name: str, value: Any) -> dict[str, Any]:
    """A named tensor, from NumPy, torch, or what NumPy makes an array of."""
    if hasattr(value, "detach"):  # torch's; NumPy has no bfloat16
        import torch

        flat = value.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
        dtype, data = str(value.dtype).removeprefix("torch."), flat.view(torch.uint8).numpy().tobytes()
        shape = list(value.shape)
    else:
        array = np.asarray(value)
        dtype, shape = array.dtype.name, list(array.shape)
        data = array.astype(array.dtype.newbyteorder("<")).tobytes()
    fields = {"dtype": dtype, "shape": shape, "data": base64.b64encode(data).decode()}
    return {"type": "tensor", "name": name, "tensor": fields}


def media(kind: Literal["audio", "image", "video"], source: bytes | Path | str, **fields: Any) -> dict[str, Any]:
    """An audio, image or video file, its bytes, or a URL that the server may fetch. `fields`: what the part takes."""
    if isinstance(source, str):
        if not source.startswith(("http://", "https://", "data:")):
            raise TypeError(f"{source[:60]!r} is no URL; give a file as pathlib.Path")
        return {"type": kind, "data": source, **fields}
    data = source.read_bytes() if isinstance(source, Path) else source
    uri = f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"
    return {"type": kind, "data": uri, **fields}


def image(source: Any) -> dict[str, Any]:
    """An image: what `media` takes, a PIL image, or uint8 (H, W, 3), from NumPy or torch; these are sent as PNG."""
    if isinstance(source, bytes | Path | str):
        return media("image", source)
    from PIL import Image

    file = io.BytesIO()
    (source if isinstance(source, Image.Image) else Image.fromarray(np.asarray(source))).save(file, "PNG")
    return media("image", file.getvalue())


def audio(source: Any, *, sample_rate: int | None = None) -> dict[str, Any]:
    """A sound: what `media` takes, or samples (n,) or (channels, n), int16 or float, and their rate; sent as WAV of 16
    bits.
    """
    if isinstance(source, bytes | Path | str):
        if sample_rate is not None:
            raise TypeError("sample_rate is for samples; a file tells its own: leave it out")
        return media("audio", source)
    samples = np.atleast_2d(np.asarray(source))
    if samples.dtype != np.int16:
        samples = (samples.clip(-1, 1) * 32767).round().astype(np.int16)
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((len(samples), 2, sample_rate or 16000, 0, "NONE", ""))
        sound.writeframes(samples.T.astype("<i2").tobytes())
    return media("audio", file.getvalue())


def video(source: Any, **fields: Any) -> dict[str, Any]:
    """A video: what `media` takes, or frames, uint8 (T, H, W, 3), from NumPy or torch, which are sent as they are.

    Args:
        fields: of a file one of `fps`, `num_frames` and `frame_indices`, or none for what the task usually takes; of
            frames `fps`, their rate.
    """
    if isinstance(source, bytes | Path | str):
        return media("video", source, **fields)
    return {"type": "video", "frames": tensor("frames", source)["tensor"], **fields}
