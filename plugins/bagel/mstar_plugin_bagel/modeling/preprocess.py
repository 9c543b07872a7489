"""From decoded images to what the autoencoder and the vision encoder take.

An image is first brought to the autoencoder's limits, even where it is only looked at; both transforms start from
that. Runs in the processor, on CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mstar_plugin_bagel.config import BagelConfig, ResizeConfig


@dataclass(frozen=True, slots=True)
class VisionInput:
    """What `VisionEncoder` takes of one image: patches (n, patch_dim) float32 and positions (n,) int64."""

    patches: Tensor
    positions: Tensor


def first_resize(pixels: np.ndarray, config: BagelConfig) -> np.ndarray:
    """uint8 (H, W, 3) -> uint8 within the autoencoder's limits; the other transforms, and edits' sizes, start here."""
    return _resized(pixels, config.vae_resize)


def vae_pixels(resized: np.ndarray, config: BagelConfig) -> Tensor:
    """What `first_resize` gave -> (3, H, W) float32 in -1..1."""
    return _normalized(_resized(resized, config.vae_resize))


def vae_size(resized: np.ndarray, config: BagelConfig) -> tuple[int, int]:
    """Height and width of what `vae_pixels` gives."""
    return fitted_size(resized.shape[0], resized.shape[1], config.vae_resize)


def vit_input(resized: np.ndarray, config: BagelConfig) -> VisionInput:
    """What `first_resize` gave -> its patches."""
    pixels, size = vit_pixels(resized, config), config.vision.patch_size
    squares = pixels.unflatten(2, (-1, size)).unflatten(1, (-1, size))  # (3, h, p, w, p)
    patches = squares.permute(1, 3, 2, 4, 0).flatten(2).flatten(0, 1)
    height, width = (extent // size for extent in pixels.shape[1:])
    positions = grid_positions(height, width, side=config.vision.side, interpolate=config.interpolate)
    return VisionInput(patches.contiguous(), positions)


def vit_pixels(resized: np.ndarray, config: BagelConfig) -> Tensor:
    """What `first_resize` gave -> (3, H, W) float32 in -1..1, whole patches high and wide."""
    return _normalized(_resized(resized, config.vit_resize))


def latent_grid(height: int, width: int, config: BagelConfig) -> tuple[int, int]:
    """Latent tokens along the sides of an image, in pixels: rows and columns."""
    return height // config.latent_stride, width // config.latent_stride


def latent_positions(height: int, width: int, config: BagelConfig) -> Tensor:
    """Position ids (h * w,) int64 of the latent tokens of an image that is `height` by `width` pixels."""
    rows, columns = latent_grid(height, width, config)
    return grid_positions(rows, columns, side=config.latent_side, interpolate=config.interpolate)


def grid_positions(height: int, width: int, *, side: int, interpolate: bool) -> Tensor:
    """Rows of a table for `side` by `side` positions, (height * width,) int64.

    The grid lies in the table's corner, or is spread over all of it.
    """
    assert interpolate or max(height, width) <= side, f"a grid of {height}x{width} in a table of {side}x{side}"
    rows, columns = (_spread(count, side) if interpolate else torch.arange(count) for count in (height, width))
    return (rows[:, None] * side + columns).flatten()


def _spread(count: int, side: int) -> Tensor:
    borders = torch.arange(1 / side, 1.0, 1 / side)
    return torch.bucketize(torch.arange(0, 1 - 1e-6, 1 / count), borders, right=True)


def to_uint8(pixels: Tensor) -> Tensor:
    """What the autoencoder decoded, (..., 3, H, W) -> uint8 (..., H, W, 3), cut off as the model's authors do."""
    return ((pixels * 0.5 + 0.5).clamp(0, 1).movedim(-3, -1) * 255).to(torch.uint8).contiguous()


# ---- sizes ----------------------------------------------------------------------------------------------


def fitted_size(height: int, width: int, limits: ResizeConfig) -> tuple[int, int]:
    """Height and width that an image is resized to.

    Its shape is kept as far as sides in multiples of the stride, the limits of the long and the short side, and that of
    pixels allow; the limit of the long side wins.
    """
    scale = max(min(limits.max_size / max(height, width), 1.0), limits.min_size / min(height, width))
    height, width = _scaled(height, scale, limits), _scaled(width, scale, limits)
    if height * width > limits.max_pixels:
        scale = limits.max_pixels / (height * width)
        height, width = _scaled(height, scale, limits), _scaled(width, scale, limits)
    if max(height, width) > limits.max_size:
        scale = limits.max_size / max(height, width)
        height, width = _scaled(height, scale, limits), _scaled(width, scale, limits)
    return height, width


def _scaled(extent: int, scale: float, limits: ResizeConfig) -> int:
    return max(limits.stride, round(round(extent * scale) / limits.stride) * limits.stride)


def _resized(pixels: np.ndarray, limits: ResizeConfig) -> np.ndarray:
    height, width = fitted_size(pixels.shape[0], pixels.shape[1], limits)
    if pixels.shape[:2] == (height, width):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))


def _normalized(pixels: np.ndarray) -> Tensor:
    """uint8 (H, W, 3) -> float32 (3, H, W) in -1..1."""
    channels = torch.from_numpy(np.array(pixels)).permute(2, 0, 1).contiguous()
    return (channels.float() / 255).sub_(0.5).div_(0.5)
