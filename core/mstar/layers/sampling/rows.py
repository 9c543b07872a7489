"""The draws of `plain`, row by row on the CPU, without sorting the vocabulary where the likeliest tokens decide.

One custom op, so that a compiled step may hold it: what it computes depends on the data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mstar.layers.sampling.noise import uniform64
from mstar.layers.sampling.plain import BLOCK, argmax, in_blocks, inverse_cdf, keep_likely
from mstar.layers.sampling.state import SamplingState

WIDE = 4096  # vocabularies below sort in less time than the steps of a row take
_MARGIN = 1e-5  # closer to a threshold than float32 rounding may move it: decide by the plain rule's own arithmetic


_NUMBERS = ("temperature", "top_k", "tail", "min_p", "repetition", "presence", "frequency")


_Operands = tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def operands(state: SamplingState) -> _Operands:
    """A state as `sample_rows` takes it."""
    numbers = [getattr(state, name) for name in _NUMBERS]
    bias = state.bias_index, state.bias_value
    return numbers, *bias, state.key, state.step, state.counts, state.prompt_mask


@torch.library.custom_op("mstar::sample_rows", mutates_args=(), device_types="cpu")
def sample_rows(
    logits: Tensor,
    rows: Tensor,
    numbers: Sequence[Tensor],
    bias_index: Tensor,
    bias_value: Tensor,
    key: Tensor,
    step: Tensor,
    counts: Tensor | None,
    prompt_mask: Tensor | None,
) -> Tensor:
    """`sample` without recording: (B, V) and (B,) int64 -> (B,) int64. `numbers` are the columns of `_NUMBERS`."""
    draws = uniform64(key[rows], step[rows])
    num_biased = (bias_index[rows] >= 0).sum(-1)
    columns = [column.tolist() for column in (rows, draws, num_biased, *(number[rows] for number in numbers))]
    ids = torch.empty(len(rows), dtype=torch.int64)
    for index, (row, draw, biased, heat, k, tail, min_p, *penalties) in enumerate(zip(*columns, strict=True)):
        scores = logits[index].to(torch.float32, copy=True)
        scores.index_add_(0, bias_index[row, :biased], bias_value[row, :biased])
        _penalise_row(scores, counts, prompt_mask, row, *penalties)
        if heat == 0:
            ids[index] = argmax(scores[None])[0]
            continue
        scores /= heat
        if k == 0 and tail < 0 and min_p == 0:
            weights = torch.exp(scores - scores.amax())
            ids[index] = inverse_cdf(weights[None], draws[index : index + 1])[0]
        else:
            kept, values = kept_row(scores, k=k, tail=tail, min_p=min_p)
            cumulative = np.exp(values.astype(np.float64) - values.max()).cumsum()
            place = np.searchsorted(cumulative, draw * cumulative[-1], side="right")
            ids[index] = int(kept[min(int(place), len(kept) - 1)])
    return ids


@sample_rows.register_fake
def _(logits: Tensor, rows: Tensor, *operands: Any) -> Tensor:
    return rows.new_empty(logits.shape[0])


def _penalise_row(
    scores: Tensor,
    counts: Tensor | None,
    prompt_mask: Tensor | None,
    row: int,
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    if repetition != 1:
        assert counts is not None
        assert prompt_mask is not None
        seen = (prompt_mask[row] | (counts[row] > 0)).nonzero()[:, 0]
        values = scores[seen]
        scores[seen] = torch.where(values < 0, values * repetition, values / repetition)
    if presence != 0 or frequency != 0:
        assert counts is not None
        drawn = counts[row].nonzero()[:, 0]
        scores[drawn] -= counts[row, drawn] * frequency + presence


def kept_row(scores: Tensor, *, k: int, tail: float, min_p: float) -> tuple[np.ndarray, np.ndarray]:
    """Ids, ascending, and scores of the tokens that top-k, top-p and min-p keep of one row (V,) on the CPU."""
    likeliest = _likeliest(scores)
    kept = likeliest and _decide(*likeliest, scores, k=k, tail=tail, min_p=min_p)
    if kept is not None:
        return kept
    limits = {"top_k": k, "tail": tail, "min_p": min_p}
    masked = keep_likely(scores[None], **{name: torch.tensor([[value]]) for name, value in limits.items()})[0].numpy()
    ids = np.flatnonzero(masked != -np.inf)
    return ids, masked[ids]


def _likeliest(scores: Tensor) -> tuple[np.ndarray, np.ndarray, float] | None:
    """All tokens above some score (the third value), as ids ascending and scores: from the 64 blocks with the highest
    maxima, the floor being the 65th maximum."""
    blocks = in_blocks(scores)
    if blocks.shape[0] <= 2 * BLOCK:
        return None
    top = blocks.amax(-1).topk(BLOCK + 1)
    chosen = top.indices[:BLOCK].sort().values
    ids, values = (chosen[:, None] * BLOCK + torch.arange(BLOCK)).flatten().numpy(), blocks[chosen].flatten().numpy()
    floor = float(top.values[-1])
    return ids[values > floor], values[values > floor], floor


def _decide(
    ids: np.ndarray, values: np.ndarray, floor: float, scores: Tensor, *, k: int, tail: float, min_p: float
) -> tuple[np.ndarray, np.ndarray] | None:
    """What is kept, from the likeliest tokens alone; None where they do not suffice or a threshold is too near."""
    if k > len(ids):
        return None
    descending = np.sort(values)[::-1].astype(np.float64)
    best = descending[0]
    if k > 0:
        kept = values >= descending[k - 1]
        ids, values = ids[kept], values[kept]
        descending = descending[: len(ids)]
        floor = -math.inf
    if tail >= 0:
        masses = np.exp(descending - best)
        total = masses.sum() if k > 0 else float(torch.exp(scores - scores.amax()).sum())
        remaining = 1 - (masses.cumsum()[:-1]) / total - tail  # of the second token on: kept while above zero
        num_kept = 1 + int((remaining > 0).sum())
        if (np.abs(remaining) < _MARGIN).any() or (k == 0 and num_kept == len(ids)):
            return None
        threshold = descending[num_kept - 1]
        kept = values > threshold
        kept[np.flatnonzero(values == threshold)[kept.sum() - num_kept :]] = True  # of equal scores the highest ids
        ids, values = ids[kept], values[kept]
        floor = -math.inf
    if min_p > 0:
        ratio = np.exp(values.astype(np.float64) - best) / min_p
        if (np.abs(ratio - 1) < _MARGIN).any() or math.exp(floor - best) / min_p > 1 - _MARGIN:
            return None
        ids, values = ids[ratio > 1], values[ratio > 1]
    return ids, values
