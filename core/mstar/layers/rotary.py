"""Rotary position embedding over (T, H, D), with the frequency scalings checkpoints ask for.

Pure functions of positions: no cache of positions, so any request may be at any length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mstar.errors import ConfigError


def inverse_frequencies(dim: int, *, theta: float, scaling: Mapping[str, Any] | None = None) -> Tensor:
    """(dim / 2,) float32 angles per position, in the order of the first half of the dimensions.

    `scaling` is spelt as checkpoints spell it ("rope_type" and its factors). Raises ConfigError for a type or a
    missing factor this module does not know.
    """
    frequencies = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim))
    if not scaling:
        return frequencies
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return frequencies
    try:
        if kind == "linear":
            return frequencies / float(scaling["factor"])
        if "low_freq_factor" in scaling:  # known by its factors: its type is named after a model
            return _scale_by_wavelength(frequencies, scaling)
    except KeyError as error:
        raise ConfigError(f"rope_scaling of type {kind!r} lacks {error} in the checkpoint's configuration") from error
    raise ConfigError(
        f"rope_scaling type {kind!r} is not supported; known: 'default', 'linear', and scaling by low_freq_factor"
    )


def _scale_by_wavelength(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Long wavelengths are slowed by `factor`, short ones kept, those between interpolated."""
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    length = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * math.pi / frequencies
    smooth = (length / wavelength - low) / (high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelength > length / low, frequencies / factor, frequencies)
    between = (wavelength <= length / low) & (wavelength >= length / high)
    return torch.where(between, blended, scaled)


class RotaryEmbedding(nn.Module):
    """Cosines and sines of positions.

    Args:
        head_dim: D; the first `rotary_dim` dimensions are rotated (default: all).
        theta: base of the frequencies.
        scaling: the checkpoint's `rope_scaling` (or `rope_parameters`), or None.
    """

    def __init__(
        self, head_dim: int, *, theta: float, scaling: Mapping[str, Any] | None = None, rotary_dim: int | None = None
    ) -> None:
        super().__init__()
        self.rotary_dim = rotary_dim or head_dim
        self.theta = theta
        self.scaling = dict(scaling) if scaling else None
        self.frequencies: Tensor
        self.register_buffer("frequencies", torch.empty(0), persistent=False)
        self.reset_buffers()

    def reset_buffers(self, device: torch.device | str | None = None) -> None:
        """Compute the frequencies, on `device` if given; always float32: long positions need every bit."""
        frequencies = inverse_frequencies(self.rotary_dim, theta=self.theta, scaling=self.scaling)
        self.frequencies = frequencies.to(device or self.frequencies.device)

    def _apply(self, fn: Any, recurse: bool = True) -> RotaryEmbedding:
        # Casting and `to_empty` would round or lose them.
        super()._apply(fn, recurse)
        self.reset_buffers()
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(T,) positions, integer or float -> cos and sin, (T, 1, rotary_dim) float32, to broadcast over heads."""
        angles = positions.float()[:, None] * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + d/2) of the first d = cos.shape[-1] dimensions of x (T, H, D)."""
    dim = cos.shape[-1]
    if dim == x.shape[-1]:
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-right, left), dim=-1) * sin
    return torch.cat((rotate(x[..., :dim], cos, sin), x[..., dim:]), dim=-1)


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries (T, H, D) and keys (T, Hkv, D); cos and sin are rounded to their dtype first."""
    cos, sin = cos.to(q.dtype), sin.to(q.dtype)
    return rotate(q, cos, sin), rotate(k, cos, sin)
