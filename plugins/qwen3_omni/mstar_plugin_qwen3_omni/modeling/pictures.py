"""Pictures and frames to patches: resized, normalised, cut in the order that the encoder takes. Runs on CPU."""

from __future__ import annotations

import math

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mstar_plugin_qwen3_omni.config.media import PictureConfig
from mstar_plugin_qwen3_omni.config.thinker import VisionConfig
from mstar_plugin_qwen3_omni.modeling.vision import Grid

LONGEST = 200
"""No picture is longer than so many times its other side."""


def fitted_size(height: int, width: int, *, unit: int, pixels: tuple[int, int]) -> tuple[int, int]:
    """Height and width that a picture is resized to: multiples of `unit`, (fewest, most) pixels, of like shape."""
    fewest, most = pixels
    fitted = round(height / unit) * unit, round(width / unit) * unit
    if math.prod(fitted) > most:
        scale = math.sqrt(height * width / most)
        return max(unit, int(height / scale / unit) * unit), max(unit, int(width / scale / unit) * unit)
    if math.prod(fitted) < fewest:
        scale = math.sqrt(fewest / (height * width))
        return math.ceil(height * scale / unit) * unit, math.ceil(width * scale / unit) * unit
    return fitted


def patches(frames: np.ndarray, vision: VisionConfig, *, size: tuple[int, int]) -> Tensor:
    """Frames uint8 (T, H, W, 3), brought to `size` (height, width) -> (patches, patch_dim) uint8.

    A picture is one frame, or a video whose last frame lasts until a patch is full.
    """
    resized = torch.from_numpy(np.stack([_resized(frame, size) for frame in frames]))
    whole = torch.cat((resized, resized[-1:].expand(-len(frames) % vision.frames, -1, -1, -1)))
    merge, side = vision.merge, vision.patch_size
    cut = whole.unflatten(2, (-1, merge, side)).unflatten(1, (-1, merge, side)).unflatten(0, (-1, vision.frames))
    # (frames, in a patch, rows, merge, side, columns, merge, side, colours)
    return cut.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).flatten(5).flatten(0, 4).contiguous()


def normalised(cut: Tensor, config: PictureConfig) -> Tensor:
    """What `patches` gave -> the same in float32, as the encoder takes it."""
    mean, std = (torch.tensor(values, device=cut.device)[:, None] for values in (config.mean, config.std))
    colours = cut.unflatten(1, (len(config.mean), -1))
    return ((colours.float() / 255 - mean) / std).flatten(1)


def grid(num_frames: int, vision: VisionConfig, *, size: tuple[int, int]) -> Grid:
    """Of what `patches` gives."""
    return -(-num_frames // vision.frames), size[0] // vision.patch_size, size[1] // vision.patch_size


def num_tokens(shape: Grid, vision: VisionConfig) -> int:
    """Tokens that stand for a picture or video in a prompt."""
    return math.prod(shape) // vision.merge**2


def _resized(frame: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    if frame.shape[:2] == size:
        return frame
    return np.asarray(Image.fromarray(frame).resize(size[::-1], Image.Resampling.BICUBIC))
