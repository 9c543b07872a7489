"""The audio encoder: spectrograms of any length, in chunks, through convolutions and a transformer.

Chunks of all sounds go through the convolutions together; positions start anew in each. Then the tokens of some chunks
in a row, a window, see each other, and nothing else. A sound's last chunk is padded with zeros, that of a sound shorter
than a chunk is not: where zeros end shows in what is beside them, and so it does not depend on other sounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from mstar.layers.activation import activation
from mstar.layers.linear import Linear, MergedLinear
from mstar.layers.norm import LayerNorm
from mstar_plugin_qwen3_omni.config.thinker import AudioConfig
from mstar_plugin_qwen3_omni.modeling.attention import within

_TIMESCALE = 10_000.0


def sinusoids(length: int, size: int) -> Tensor:
    """Positions (length, size) float32: sines, then cosines, of ever longer waves."""
    step = math.log(_TIMESCALE) / (size // 2 - 1)
    angles = torch.arange(length)[:, None] * torch.exp(-step * torch.arange(size // 2).float())
    return torch.cat((angles.sin(), angles.cos()), dim=1)


class Block(nn.Module):
    """Attention within each window and an MLP, each behind its norm and added to its input."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.attention_norm = LayerNorm(size)
        self.qkv = MergedLinear(size, (size,) * 3, bias=True)
        self.proj = Linear(size, size)
        self.mlp_norm = LayerNorm(size)
        self.fc1 = Linear(size, config.intermediate_size)
        self.activation = activation(config.activation)
        self.fc2 = Linear(config.intermediate_size, size)

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """x (T, hidden); `lengths` of the windows -> (T, hidden)."""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        x = x + self.proj(within(q, k, v, lengths))
        return x + self.fc2(self.activation(self.fc1(self.mlp_norm(x))))


class AudioEncoder(nn.Module):
    """Encoder and projection; fill it with `weights.thinker.load_audio`."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.config = config
        channels, bins = config.channels, config.num_bins
        self.conv1 = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.conv3 = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        for _ in range(3):
            bins = (bins + 1) // 2
        self.enter = Linear(channels * bins, config.hidden_size, bias=False)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = LayerNorm(config.hidden_size)
        self.fc1 = Linear(config.hidden_size, config.hidden_size)
        self.activation = activation(config.activation)
        self.fc2 = Linear(config.hidden_size, config.output_size)

    def forward(self, sounds: Sequence[Tensor]) -> list[Tensor]:
        """Spectrograms (bins, frames) -> per sound, what stands for it in a prompt, (tokens, output)."""
        config = self.config
        counts = [config.num_tokens(sound.shape[1]) for sound in sounds]
        x = torch.cat(self._embed([_chunks(sound, config.chunk_frames) for sound in sounds], counts))
        x = self.encode(x, [length for count in counts for length in windows(count, config)])
        return list(x.split(counts))

    def _embed(self, sounds: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        """Chunks (n, bins, frames) of each sound -> its tokens (count, hidden), with positions."""
        found: dict[int, Tensor] = {}
        for frames in {sound.shape[2] for sound in sounds}:
            alike = [place for place, sound in enumerate(sounds) if sound.shape[2] == frames]
            chunks = torch.cat([sounds[place] for place in alike])
            x = torch.cat([self._convolve(part) for part in chunks.split(self.config.batch_chunks)])
            x = x + sinusoids(x.shape[1], self.config.hidden_size).to(x)
            found |= zip(alike, x.split([len(sounds[place]) for place in alike]), strict=True)
        return [found[place].flatten(0, 1)[:count] for place, count in enumerate(counts)]

    def _convolve(self, chunks: Tensor) -> Tensor:
        """(n, bins, frames) -> (n, tokens, hidden)."""
        x = chunks[:, None].to(self.conv1.weight.dtype)
        for convolution in (self.conv1, self.conv2, self.conv3):
            x = functional.gelu(convolution(x))
        return self.enter(x.permute(0, 3, 1, 2).flatten(2))

    def encode(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """Tokens (T, hidden), `lengths` of whose windows see each other -> (T, output)."""
        for block in self.blocks:
            x = block(x, lengths)
        return self.fc2(self.activation(self.fc1(self.norm(x))))


def _chunks(sound: Tensor, frames: int) -> Tensor:
    """A spectrogram (bins, n) -> (chunks, bins, frames, or n if that is less)."""
    width = min(frames, sound.shape[1])
    padded = functional.pad(sound, (0, -sound.shape[1] % width))
    return padded.unflatten(1, (-1, width)).transpose(0, 1)


def windows(num_tokens: int, config: AudioConfig) -> list[int]:
    """Lengths of the windows of a sound."""
    whole, rest = divmod(num_tokens, config.window_tokens)
    return [config.window_tokens] * whole + [rest] * (rest > 0)
