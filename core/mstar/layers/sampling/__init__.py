"""Drawing tokens: per-request parameters as rows of tensors, counter-based uniforms, logits processing.

Used by workers (on the model's device, inside the step) and by nodes that need seeded noise. A row's draw depends on
its own logits, parameters, key and step only: not on its index, its batch or the process. Knows no requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mstar.layers.sampling import native
from mstar.layers.sampling.noise import draw_key, normal, uniform
from mstar.layers.sampling.plain import argmax, logprobs, process_logits, sample_plain
from mstar.layers.sampling.state import RowSnapshot, SamplingState

__all__ = [
    "RowSnapshot",
    "SamplingState",
    "draw_key",
    "logprobs",
    "normal",
    "process_logits",
    "sample",
    "sample_plain",
    "uniform",
    "unsample",
]


def sample(logits: Tensor, state: SamplingState, rows: Tensor) -> Tensor:
    """Draw one id per row and record it in the state.

    logits (B, V) of any float dtype, rows (B,) int64 -> (B,) int64. Temperature 0 takes the likeliest after
    penalties, the lowest id among equals.
    """
    if logits.device.type == "cpu" and not torch.compiler.is_compiling() and native.available():
        return native.draw(logits, state, rows)
    is_plain = not any(state.uses(feature) for feature in ("random", "bias", "repetition", "additive"))
    ids = argmax(logits) if is_plain else sample_plain(logits, state, rows)
    _record(state, rows, ids, 1)
    return ids


def unsample(state: SamplingState, rows: Tensor, ids: Tensor) -> None:
    """Undo what `sample` recorded for rows whose draw came too late. rows and ids are (B,) int64; -1: was not drawn."""
    if ids.device.type == "cpu":  # elsewhere all were, and to look would mean to wait
        rows, ids = rows[ids >= 0], ids[ids >= 0]
    _record(state, rows, ids, -1)


def _record(state: SamplingState, rows: Tensor, ids: Tensor, amount: int) -> None:
    state.step[rows] += amount
    if state.counts is not None:
        state.counts[rows, ids] += amount
