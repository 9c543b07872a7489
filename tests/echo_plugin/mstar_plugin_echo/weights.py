"""Parameter names -> values. There is no file: every value is drawn from the configuration's seed and its own name."""

from __future__ import annotations

import math
import zlib

import torch
from torch import nn


def fill(module: nn.Module, *, seed: int, dtype: torch.dtype, device: torch.device) -> None:
    """Give every parameter its value, in place: ones for vectors, normal draws of variance 2 / columns for matrices.

    A value depends on the seed and the parameter's name alone: neither on order nor on dtype (it is rounded to it).
    """
    module.to_empty(device=device)
    module.to(dtype)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.copy_(values * math.sqrt(2.0 / parameter.shape[-1]))
