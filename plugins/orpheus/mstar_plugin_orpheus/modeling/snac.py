"""The decoder half of SNAC: codes at three rates -> waveform. A pure network; always computed in float32.

Weight norm is folded into plain weights when a checkpoint is loaded. Noise comes from outside, so the same codes and
noise always sound the same. B: batch, C: channels, T: time steps at the block's own rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mstar_plugin_orpheus.config import SnacConfig


class Snake(nn.Module):
    """x + sin(alpha * x)^2 / alpha, per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, x: Tensor) -> Tensor:  # (B, C, T)
        return x + (self.alpha + 1e-9).reciprocal() * torch.sin(self.alpha * x).square()


class Residual(nn.Module):
    """A dilated convolution over time and one over channels, added to the input."""

    def __init__(self, channels: int, *, dilation: int, groups: int) -> None:
        super().__init__()
        self.snake_in = Snake(channels)
        self.over_time = nn.Conv1d(channels, channels, 7, dilation=dilation, padding=3 * dilation, groups=groups)
        self.snake_out = Snake(channels)
        self.over_channels = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, T)
        return x + self.over_channels(self.snake_out(self.over_time(self.snake_in(x))))


class UpsampleBlock(nn.Module):
    """Upsamples time by `rate`, halves the channels, adds noise scaled by the signal."""

    def __init__(self, channels: int, *, rate: int, noise: bool, depthwise: bool) -> None:
        super().__init__()
        out_channels = channels // 2
        groups = out_channels if depthwise else 1
        self.snake = Snake(channels)
        self.upsample = nn.ConvTranspose1d(
            channels, out_channels, 2 * rate, stride=rate, padding=math.ceil(rate / 2), output_padding=rate % 2
        )
        self.noise_gain = nn.Conv1d(out_channels, out_channels, 1, bias=False) if noise else None
        self.residuals = nn.ModuleList(
            Residual(out_channels, dilation=dilation, groups=groups) for dilation in (1, 3, 9)
        )

    def forward(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """(B, C, T), noise (B, T * rate) or None for silence -> (B, C / 2, T * rate)."""
        x = self.upsample(self.snake(x))
        if self.noise_gain is not None and noise is not None:
            x = x + noise[:, None, :] * self.noise_gain(x)
        for residual in self.residuals:
            x = residual(x)
        return x


class SnacDecoder(nn.Module):
    """Codes of every level -> audio.

    Example:
        audio = decoder([coarse, middle, fine], noise=None)  # (B, n), (B, 2n), (B, 4n) -> (B, n * samples_per_frame)
    """

    def __init__(self, config: SnacConfig) -> None:
        super().__init__()
        latent, width = config.latent_dim, config.decoder_dim
        self.config = config
        self.strides = config.vq_strides
        self.codebooks = nn.ModuleList(nn.Embedding(config.codebook_size, config.codebook_dim) for _ in self.strides)
        self.projections = nn.ModuleList(nn.Conv1d(config.codebook_dim, latent, 1) for _ in self.strides)
        if config.depthwise:
            self.entry = nn.Sequential(
                nn.Conv1d(latent, latent, 7, padding=3, groups=latent), nn.Conv1d(latent, width, 1)
            )
        else:
            self.entry = nn.Sequential(nn.Conv1d(latent, width, 7, padding=3))
        self.blocks = nn.ModuleList(
            UpsampleBlock(width // 2**index, rate=rate, noise=config.noise, depthwise=config.depthwise)
            for index, rate in enumerate(config.decoder_rates)
        )
        last = width // 2 ** len(config.decoder_rates)
        self.snake = Snake(last)
        self.exit = nn.Conv1d(last, 1, 7, padding=3)
        self.block_steps = _block_steps(config)

    def latents(self, codes: Sequence[Tensor]) -> Tensor:
        """One (B, T_level) int64 tensor per level -> (B, C, T), the sum of the levels at the finest rate."""
        levels = zip(codes, self.codebooks, self.projections, self.strides, strict=True)
        return sum(  # type: ignore[return-value]  # never the empty sum, which is 0
            projection(codebook(level).transpose(1, 2)).repeat_interleave(stride, dim=-1)
            for level, codebook, projection, stride in levels
        )

    def forward(self, codes: Sequence[Tensor], noise: Sequence[Tensor] | None = None) -> Tensor:
        """Codes per level, and standard normal noise (B, T_block) per block or None for none -> (B, samples)."""
        x = self.entry(self.latents(codes))
        for index, block in enumerate(self.blocks):
            x = block(x, None if noise is None else noise[index])
        return torch.tanh(self.exit(self.snake(x)))[:, 0, :]


def _block_steps(config: SnacConfig) -> tuple[int, ...]:
    """Time steps per frame of each block's output, which is also the rate of its noise."""
    steps, total = [], config.vq_strides[0]
    for rate in config.decoder_rates:
        total *= rate
        steps.append(total)
    return tuple(steps)
