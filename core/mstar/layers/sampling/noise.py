"""Counter-based random numbers: functions of (key, counter) alone, on every device, in any batch and process."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from mstar.types import Path

_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)  # splitmix64, as signed 64-bit integers that wrap
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def draw_key(seed: int, path: Path, name: str) -> int:
    """63-bit key of the draws of one sampler or noise `name` at one `Each` path. Trailing zeros of a path do not count:
    item 0 draws what a request without `Each` draws."""
    while path and path[-1] == 0:
        path = path[:-1]
    text = f"{seed}/{','.join(map(str, path))}/{name}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def uniform(key: Tensor, counter: Tensor) -> Tensor:
    """One float32 in [0, 1) per (key, counter), int64 tensors that broadcast."""
    return _shift(_bits(key, counter), 40).float() * 2.0**-24


def normal(key: Tensor, counter: Tensor) -> Tensor:
    """One standard normal float32 per (key, counter), int64 tensors that broadcast."""
    bits = _bits(key, counter)
    # float64 inside, so that vector and scalar kernels round to the same float32.
    radius = torch.sqrt(-2.0 * torch.log((_shift(bits, 32).double() + 1.0) * 2.0**-32))
    return (radius * torch.cos((bits & 0xFFFFFFFF).double() * (2.0 * math.pi * 2.0**-32))).float()


def uniform64(key: Tensor, counter: Tensor) -> Tensor:
    """One float64 in [0, 1): a vocabulary has tokens less likely than a float32 can tell."""
    return _shift(_bits(key, counter), 11).double() * 2.0**-53


def _bits(key: Tensor, counter: Tensor) -> Tensor:
    z = key + (counter + 1) * _GAMMA
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return z ^ _shift(z, 31)


def _shift(z: Tensor, places: int) -> Tensor:
    """Logical shift to the right."""
    return (z >> places) & ((1 << (64 - places)) - 1)
