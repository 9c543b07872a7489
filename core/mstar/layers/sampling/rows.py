"""The draws of `plain`, row by row on the CPU, without sorting the vocabulary where the likeliest tokens decide.

One custom op, so that a compiled step may hold it: what it computes depends on the data.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from mstar.layers.sampling.noise import uniform64
from mstar.layers.sampling.plain import BLOCK, argmax, inverse_cdf
from mstar.layers.sampling.state import SamplingState

WIDE = 4096  # vocabularies below sort in less time than the steps of a row take
_MARGIN = 1e-5  # closer to a threshold than float32 rounding may move it: decide by the plain rule's own arithmetic


def operands(state: SamplingState) -> tuple[Tensor | None, ...]:
    return (
        state.temperature,
        state.top_k,
        state.tail,
        state.min_p,
        state.repetition if state.uses("repetition") else None,
        state.presence if state.uses("additive") else None,
        state.frequency if state.uses("additive") else None,
        state.bias_index if state.uses("bias") else None,
        state.bias_value if state.uses("bias") else None,
        state.counts,
        state.prompt_mask,
        state.key,
        state.step,
    )


@torch.library.custom_op("mstar::sample_rows", mutates_args=(), device_types="cpu")
def sample_rows(
    logits: Tensor,
    rows: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    tail: Tensor,
    min_p: Tensor,
    repetition: Tensor | None,
    presence: Tensor | None,
    frequency: Tensor | None,
    bias_index: Tensor | None,
    bias_value: Tensor | None,
    counts: Tensor | None,
    prompt_mask: Tensor | None,
    key: Tensor,
    step: Tensor,
) -> Tensor:
    draws = uniform64(key[rows], step[rows])
    columns = zip(*(column[rows].tolist() for column in (temperature, top_k, tail, min_p)), strict=True)
    ids = torch.empty(logits.shape[0], dtype=torch.int64)
    for index, (row, (heat, k, rest, least)) in enumerate(zip(rows.tolist(), columns, strict=True)):
        scores = logits[index].to(torch.float32, copy=True)
        if bias_index is not None and bias_value is not None:
            used = bias_index[row] >= 0
            scores.index_add_(0, bias_index[row][used], bias_value[row][used])
        if repetition is not None and counts is not None and prompt_mask is not None:
            _repeat_row(scores, prompt_mask[row] | (counts[row] > 0), penalty=float(repetition[row]))
        if presence is not None and frequency is not None and counts is not None:
            _add_row(scores, counts[row], presence=float(presence[row]), frequency=float(frequency[row]))
        if heat == 0:
            ids[index] = argmax(scores[None])[0]
            continue
        scores /= heat
        if k == 0 and rest < 0 and least == 0:
            weights = torch.exp(scores - scores.amax())
            ids[index] = inverse_cdf(weights[None], draws[index : index + 1])[0]
        else:
            kept, values = kept_row(scores, k=k, tail=rest, min_p=least)
            cumulative = np.exp(values.astype(np.float64) - values.max()).cumsum()
            place = np.searchsorted(cumulative, float(draws[index]) * cumulative[-1], side="right")
            ids[index] = int(kept[min(int(place), len(kept) - 1)])
    return ids


@sample_rows.register_fake
def _(logits: Tensor, rows: Tensor, *operands: Tensor | None) -> Tensor:
    return rows.new_empty(logits.shape[0])


def _repeat_row(scores: Tensor, seen: Tensor, *, penalty: float) -> None:
    if penalty != 1:
        ids = seen.nonzero()[:, 0]
        values = scores[ids]
        scores[ids] = torch.where(values < 0, values * penalty, values / penalty)


def _add_row(scores: Tensor, counts: Tensor, *, presence: float, frequency: float) -> None:
    if presence != 0 or frequency != 0:
        ids = counts.nonzero()[:, 0]
        scores[ids] = scores[ids] - counts[ids] * frequency - presence


def kept_row(scores: Tensor, *, k: int, tail: float, min_p: float) -> tuple[np.ndarray, np.ndarray]:
    """Ids, ascending, and scores of the tokens that top-k, top-p and min-p keep of one row (V,) on the CPU."""
    prefix = _likeliest(scores)
    kept = None if prefix is None else _decide(*prefix, scores, k=k, tail=tail, min_p=min_p)
    return kept if kept is not None else _decide_exactly(scores, k=k, tail=tail, min_p=min_p)


def _likeliest(scores: Tensor) -> tuple[np.ndarray, np.ndarray, float] | None:
    """All tokens above some score (the third value), as ids ascending and scores: from the 64 blocks with the highest
    maxima, the floor being the 65th maximum."""
    width = scores.shape[0]
    whole = width // BLOCK * BLOCK
    blocks = scores[:whole].view(-1, BLOCK)
    if blocks.shape[0] <= 2 * BLOCK:
        return None
    top = blocks.amax(-1).topk(BLOCK + 1)
    floor = float(top.values[-1])
    chosen = top.indices[:BLOCK].sort().values
    ids = (chosen[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
    ids = torch.cat((ids, torch.arange(whole, width)))
    values = torch.cat((blocks[chosen].flatten(), scores[whole:]))
    above = (values > floor).numpy()
    return ids.numpy()[above], values.numpy()[above], floor


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
        ids, values = _keep_highest(ids, values, num_kept, descending[num_kept - 1])
        floor = -math.inf
    if min_p > 0:
        ratio = np.exp(values.astype(np.float64) - best) / min_p
        if (np.abs(ratio - 1) < _MARGIN).any() or math.exp(floor - best) / min_p > 1 - _MARGIN:
            return None
        ids, values = ids[ratio > 1], values[ratio > 1]
    return ids, values


def _keep_highest(
    ids: np.ndarray, values: np.ndarray, num_kept: int, threshold: float
) -> tuple[np.ndarray, np.ndarray]:
    """The `num_kept` highest; of those equal to the threshold the highest ids, as ascending stable sorting has it."""
    kept = values > threshold
    missing = num_kept - int(kept.sum())
    kept[np.flatnonzero(values == threshold)[-missing:]] = True
    return ids[kept], values[kept]


def _decide_exactly(scores: Tensor, *, k: int, tail: float, min_p: float) -> tuple[np.ndarray, np.ndarray]:
    """The same with the arithmetic of `process_logits`, float32 over the sorted vocabulary; sorts values only."""
    values = scores.numpy()
    ascending = np.sort(values)
    ids = np.arange(len(values))
    if 0 < k <= len(values):
        kth = ascending[-k]
        ids = np.flatnonzero(values >= kth)
        values = values[ids]
        ascending[ascending < kth] = -math.inf
    if tail >= 0:
        cumulative = torch.from_numpy(ascending).softmax(-1).cumsum(-1)
        num_kept = max(len(ascending) - int((cumulative <= tail).sum()), 1)
        ids, values = _keep_highest(ids, values, num_kept, ascending[-num_kept])
    if min_p > 0:
        masked = torch.full_like(scores, -torch.inf)
        masked[torch.from_numpy(ids)] = torch.from_numpy(values)
        probabilities = masked.softmax(-1)
        above = (probabilities >= min_p * probabilities.amax()).numpy()[ids]
        ids, values = ids[above], values[above]
    return ids, values
