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

from mstar.errors import PluginError
from mstar.layers.sampling.noise import uniform64
from mstar.layers.sampling.plain import BLOCK, argmax, in_blocks, inverse_cdf, keep_likely
from mstar.layers.sampling.state import SamplingState

WIDE = 4096  # vocabularies below sort in less time than the steps of a row take
_MARGIN = 1e-5  # closer to a threshold than float32 rounding may move it: decide by the plain rule's own arithmetic
_NUMBERS = ("temperature", "top_k", "tail", "min_p", "repetition", "presence", "frequency")


def operands(state: SamplingState) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
    """A state as `sample_rows` takes it."""
    numbers = [getattr(state, name) for name in (*_NUMBERS, "bias_index", "bias_value", "key", "step")]
    return numbers, state.counts, state.prompt_mask


@torch.library.custom_op("mstar::sample_rows", mutates_args=(), device_types="cpu")
def sample_rows(
    logits: Tensor, rows: Tensor, columns: Sequence[Tensor], counts: Tensor | None, prompt_mask: Tensor | None
) -> Tensor:
    """`sample` without recording: (B, V), (B,) int64 and `operands` -> (B,) int64."""
    *numbers, bias_index, bias_value, key, step = columns
    draws = uniform64(key[rows], step[rows])
    num_biased = (bias_index[rows] >= 0).sum(-1)
    table = [column.tolist() for column in (rows, num_biased, draws, *(number[rows] for number in numbers))]
    ids = []
    for row_logits, values in zip(logits, zip(*table, strict=True), strict=True):
        row, biased, draw, heat, k, tail, min_p, repetition, presence, frequency = values
        scores = row_logits.to(torch.float32, copy=True)
        if biased:
            scores.index_add_(0, bias_index[row, :biased], bias_value[row, :biased])
        if repetition != 1 and counts is not None and prompt_mask is not None:
            seen = (prompt_mask[row] | (counts[row] > 0)).nonzero()[:, 0]
            old = scores[seen]
            scores[seen] = torch.where(old < 0, old * repetition, old / repetition)
        if (presence != 0 or frequency != 0) and counts is not None:
            drawn = counts[row].nonzero()[:, 0]
            scores[drawn] = scores[drawn] - counts[row, drawn] * frequency - presence
        if heat == 0:
            ids.append(int(argmax(scores[None])))
        else:
            ids.append(_draw(scores / heat, draw, k=k, tail=tail, min_p=min_p))
    return torch.tensor(ids, dtype=torch.int64)


@sample_rows.register_fake
def _(logits: Tensor, rows: Tensor, *operands: Any) -> Tensor:
    return rows.new_empty(logits.shape[0])


def _draw(scores: Tensor, draw: float, *, k: int, tail: float, min_p: float) -> int:
    if not math.isfinite(float(scores.amax())):
        raise PluginError("a sampler got logits that are not finite (NaN or infinity): are the weights right?")
    if k == 0 and tail < 0 and min_p == 0:
        weights = torch.exp(scores - scores.amax())
        return int(inverse_cdf(weights[None], torch.tensor([draw], dtype=torch.float64)))
    kept, values = kept_row(scores, k=k, tail=tail, min_p=min_p)
    cumulative = np.exp(values.astype(np.float64) - values.max()).cumsum()
    place = int(np.searchsorted(cumulative, draw * cumulative[-1], side="right"))
    return int(kept[min(place, len(kept) - 1)])


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
    if k > len(ids) or not len(ids):
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
