"""What one step's attention does: ragged rows, pages, and how far each query sees.

Built by the worker on the host with numpy, before the step; the tensors go to the device, the numpy twins stay so
that backends plan without waiting for it. Knows nothing of layers, heads or kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IntArray = NDArray[np.int32]
Spans = Sequence[NDArray[np.integer[Any]] | None]
Pool = tuple[Tensor, Tensor]
"""One layer's keys and values, each (num_pages, Hkv, page_size, D), contiguous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Varlen:
    """How ragged sequences without a cache attend; `window` 0 is none."""

    max_len: int
    causal: bool
    window: int
    scale: float
    batch_invariant: bool


@dataclass(frozen=True, slots=True, eq=False)
class HostPlan:
    """Numpy twins of `AttentionPlan`'s tensors, and what follows from them.

    Args:
        query_lens: (B,) int32, new tokens of each row.
        row_of: (T,) the row of each new token.
        positions: (T,) int32, where each new token stands in its row's KV.
    """

    query_starts: IntArray
    context_lens: IntArray
    page_table: IntArray
    visible_end: IntArray
    query_lens: IntArray
    row_of: NDArray[np.intp]
    return row_of, np.add((contexts - starts[:-1])[row_of], np.arange(len(row_of)), dtype=np.int32)


def _to_device(parts: Sequence[NDArray[Any]], *, device: torch.device) -> list[Tensor]:
    """The arrays, 64-bit ones first, as tensors: by one copy, or on a CPU by none."""
    tensors = [torch.from_numpy(part) for part in parts]
    if device.type == "cpu":
        return tensors
    buffer = torch.cat([tensor.view(-1).view(torch.int32) for tensor in tensors]).pin_memory()
    pieces = buffer.to(device, non_blocking=True).split([part.nbytes // 4 for part in parts])
    return [piece.view(tensor.dtype).view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
