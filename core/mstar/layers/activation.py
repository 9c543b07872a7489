"""The activation functions that checkpoints name: those of `mstar.plugin.fields.ACTIVATIONS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional


def _tanh_gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


_BY_NAME: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "quick_gelu": _quick_gelu,
    "relu": functional.relu,
    "silu": functional.silu,
    "swish": functional.silu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """(any shape) -> the same; of a known name."""
    return _BY_NAME[name]
