"""The autoencoder between pixels and latents. Modules are named as in the checkpoint.

Whole images at once. What is inside has the weights' dtype; what goes in and comes out is float32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mstar_plugin_bagel.config import GROUPS, AutoencoderConfig


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(GROUPS, channels, eps=1e-6)


def _activated(norm: nn.Module, x: Tensor) -> Tensor:
    return functional.silu(norm(x), inplace=True)


class Residual(nn.Module):
    """Two convolutions, added to their input."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm1 = _norm(channels)
        self.conv1 = nn.Conv2d(channels, out, 3, padding=1)
        self.norm2 = _norm(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.nin_shortcut = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:  # (B, channels, H, W) -> (B, out, H, W)
        inner = self.conv1(_activated(self.norm1, x))
        return self.conv2(_activated(self.norm2, inner)).add_(self.nin_shortcut(x))


class Attention(nn.Module):
    """Every pixel sees every other, with one head."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W) -> the same
        normed = self.norm(x)
        q, k, v = (part(normed).flatten(2).transpose(1, 2)[:, None] for part in (self.q, self.k, self.v))
        seen = functional.scaled_dot_product_attention(q.contiguous(), k.contiguous(), v.contiguous())
        return x + self.proj_out(seen.squeeze(1).transpose(1, 2).unflatten(2, x.shape[2:]))


class Middle(nn.Module):
    """What runs at the lowest resolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block_1 = Residual(channels, channels)
        self.attn_1 = Attention(channels)
        self.block_2 = Residual(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class Downsample(nn.Module):
    """Half as high and wide."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(functional.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    """Twice as high and wide."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(functional.interpolate(x, scale_factor=2.0, mode="nearest"))


class Level(nn.Module):
    """The blocks of one resolution, and the way to the next."""

    def __init__(self, channels: int, out: int, num_blocks: int) -> None:
        super().__init__()
        self.block = nn.ModuleList(Residual(channels if index == 0 else out, out) for index in range(num_blocks))
        self.downsample: nn.Module = nn.Identity()
        self.upsample: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.block:
            x = block(x)
        return self.upsample(self.downsample(x))


class Encoder(nn.Module):
    """Pixels (B, 3, H, W) -> means and log variances (B, 2 * channels, h, w)."""

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        widths = [config.width, *(config.width * multiplier for multiplier in config.multipliers)]
        self.conv_in = nn.Conv2d(3, widths[0], 3, padding=1)
        self.down = nn.ModuleList(Level(*pair, config.num_blocks) for pair in zip(widths, widths[1:], strict=False))
        for level, width in zip(list(self.down)[:-1], widths[1:], strict=False):
            level.downsample = Downsample(width)
        self.mid = Middle(widths[-1])
        self.norm_out = _norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], 2 * config.channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        return self.conv_out(_activated(self.norm_out, self.mid(x)))


class Decoder(nn.Module):
    """Latents (B, channels, h, w) -> pixels (B, 3, H, W). `up` counts from the highest resolution."""

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        widths = [config.width * multiplier for multiplier in config.multipliers]
        below = [*widths[1:], widths[-1]]
        self.conv_in = nn.Conv2d(config.channels, widths[-1], 3, padding=1)
        self.mid = Middle(widths[-1])
        self.up = nn.ModuleList(Level(*pair, config.num_blocks + 1) for pair in zip(below, widths, strict=True))
        for level, width in zip(list(self.up)[1:], widths[1:], strict=True):
            level.upsample = Upsample(width)
        self.norm_out = _norm(widths[0])
        self.conv_out = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(self.conv_in(x))
        for level in reversed(list(self.up)):
            x = level(x)
        return self.conv_out(_activated(self.norm_out, x))


class Autoencoder(nn.Module):
    """Both ways; fill it with `weights.load_vae`."""

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    def moments(self, pixels: Tensor) -> Tensor:
        """Pixels (B, 3, H, W) in -1..1 -> means and log variances of their latents (B, 2 * channels, h, w)."""
        return self.encoder(pixels.to(self.encoder.conv_in.weight.dtype)).float()

    def encode(self, pixels: Tensor, noise: Tensor) -> Tensor:
        """Pixels (B, 3, H, W) -> a sample of their latents (B, channels, h, w), drawn with standard normal `noise`."""
        mean, log_variance = self.moments(pixels).chunk(2, dim=1)
        return self.config.scale * (mean + torch.exp(0.5 * log_variance) * noise - self.config.shift)

    def decode(self, latents: Tensor) -> Tensor:
        """Latents (B, channels, h, w) -> pixels (B, 3, H, W), about -1..1."""
        unscaled = latents.float() / self.config.scale + self.config.shift
        return self.decoder(unscaled.to(self.decoder.conv_in.weight.dtype)).float()
