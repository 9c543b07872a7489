"""From decoded frames to what the encoder takes.

`vjepa2` checkpoints follow transformers' processor: bytes are resized with antialiasing, as torchvision does it for it,
and rounded to bytes again, before the centre crop. The action-conditioned release cuts the largest centred square out
first and resizes floats without antialiasing or rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mstar_plugin_vjepa2.config import PreprocessConfig


def preprocess(frames: Tensor, config: PreprocessConfig) -> Tensor:
    """Frames (T, H, W, 3) uint8 -> (T, 3, size, size) float32, normalised."""
    pixels = frames.permute(0, 3, 1, 2)
    height, width = pixels.shape[-2:]
    short, long = min(height, width), max(height, width)
    if config.short_side is None:
        pixels = _resize(_crop(pixels, short).float(), (config.size, config.size), config)
    else:
        sides = config.short_side, config.short_side * long // short
        pixels = _crop(_resize(pixels, sides if height <= width else sides[::-1], config), config.size).float()
    mean, std = (torch.tensor(values) / config.scale for values in (config.mean, config.std))
    return (pixels - mean[:, None, None]) / std[:, None, None]


def _crop(pixels: Tensor, side: int) -> Tensor:
    """The centred square of (..., H, W)."""
    top, left = ((extent - side) // 2 for extent in pixels.shape[-2:])
    return pixels[..., top : top + side, left : left + side]


def _resize(pixels: Tensor, sides: tuple[int, int], config: PreprocessConfig) -> Tensor:
    """(T, C, H, W) of any dtype -> (T, C, *sides) of the same."""
    if pixels.shape[-2:] == sides:
        return pixels
    if config.resampling == "nearest-exact":
        return functional.interpolate(pixels, sides, mode=config.resampling)
    return functional.interpolate(
        pixels, sides, mode=config.resampling, antialias=config.antialias, align_corners=False
    )
