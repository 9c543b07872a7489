"""Parts of `inputs` and of messages, from arrays and files: what JSON wants in base64. A string is a part already."""

from __future__ import annotations

import base64
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


def media(kind: Literal["audio", "image", "video"], source: bytes | Path, **fields: Any) -> dict[str, Any]:
    """An audio, image or video file, or its bytes. `fields`: what such a part takes besides."""
    data = source.read_bytes() if isinstance(source, Path) else source
    uri = f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"
    return {"type": kind, "data": uri, **fields}
