"""Sound to log-mel spectrograms as Whisper takes them (arXiv:2212.04356), on Slaney's mel scale. Runs on CPU."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from mstar_plugin_qwen3_omni.config.media import SoundConfig

HIGHEST_HZ = 8000.0
_FLOOR, _RANGE = 1e-10, 8.0  # least power, and most orders of magnitude below the loudest
_LINEAR_HZ, _PER_HZ, _STEP = 1000.0, 3 / 200, math.log(6.4) / 27  # the mel scale: linear, then logarithmic


def log_mel(samples: Tensor, config: SoundConfig) -> Tensor:
    """Samples (n,) float32 in -1..1, at least `config.fewest` -> (bins, n // hop) float32."""
    window = torch.hann_window(config.frame_size)
    waves = torch.stft(samples, config.frame_size, config.hop, window=window, return_complex=True)
    power = waves[:, :-1].abs().square().contiguous()
    logs = (filters(config).T @ power).clamp(min=_FLOOR).log10()
    return (torch.maximum(logs, logs.max() - _RANGE) + 4.0) / 4.0


@functools.cache
def filters(config: SoundConfig) -> Tensor:
    """Overlapping triangles (frequencies, bins) float32, each of area 1 over hertz."""
    edges = _hertz(torch.linspace(0.0, _mel(HIGHEST_HZ), config.num_bins + 2, dtype=torch.float64))
    frequencies = torch.linspace(0, config.sample_rate // 2, config.frame_size // 2 + 1, dtype=torch.float64)
    distance, width = edges - frequencies[:, None], edges.diff()
    rising, falling = -distance[:, :-2] / width[:-1], distance[:, 2:] / width[1:]
    return (torch.minimum(rising, falling).clamp(min=0) * 2 / (edges[2:] - edges[:-2])).float()


def _mel(hertz: float) -> float:
    return _LINEAR_HZ * _PER_HZ + math.log(hertz / _LINEAR_HZ) / _STEP if hertz > _LINEAR_HZ else hertz * _PER_HZ


def _hertz(mels: Tensor) -> Tensor:
    border = _LINEAR_HZ * _PER_HZ
    return torch.where(mels < border, mels / _PER_HZ, _LINEAR_HZ * torch.exp((mels - border) * _STEP))
