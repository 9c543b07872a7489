"""Logits processing and drawing over whole batches, by sorting: readable, traceable, for any device.

The oracle of `native`, which gives the same tokens faster on CPUs. Scores and their exponentials are float32, sums of
them float64, so that what is kept does not hang on the order in which a vocabulary is summed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mstar.errors import PluginError
from mstar.layers.sampling.native import NOT_FINITE
from mstar.layers.sampling.noise import uniform64
from mstar.layers.sampling.state import SamplingState


def sample_plain(logits: Tensor, state: SamplingState, rows: Tensor) -> Tensor:
    """`sample` without recording. On CPUs, raises PluginError for logits not finite in a row drawn by chance."""
    scores = process_logits(logits, state, rows)
    greedy = argmax(scores)
    if not state.uses("random"):
        return greedy
    best, is_random = scores.amax(-1, keepdim=True), state.temperature[rows] > 0
    _require_finite(best, is_random)
    drawn = inverse_cdf(torch.exp(scores - best), uniform64(state.key[rows], state.step[rows]))
    return torch.where(is_random, drawn, greedy)


def _require_finite(best: Tensor, is_random: Tensor) -> None:
    if best.device.type == "cpu" and not torch.compiler.is_compiling() and not best[is_random].isfinite().all():
        raise PluginError(NOT_FINITE)


def process_logits(logits: Tensor, state: SamplingState, rows: Tensor) -> Tensor:
    """Bias, penalties, temperature, top-k, top-p, min-p, in this order, as `transformers` has it.

    logits (B, V), rows (B,) int64 -> (B, V) float32; what must not be drawn is -inf.
    """
    scores = _penalise(logits.float(), state, rows)
    if not state.uses("random"):
        return scores
    temperature = state.temperature[rows, None]
    scores = scores / torch.where(temperature > 0, temperature, 1.0)
    if not state.uses("filter"):
        return scores
    top_k, tail, min_p = state.top_k[rows, None], state.tail[rows, None], state.min_p[rows, None]
    return keep_likely(scores, top_k=top_k, tail=tail, min_p=min_p)


def keep_likely(scores: Tensor, *, top_k: Tensor, tail: Tensor, min_p: Tensor) -> Tensor:
    """Scores (B, V) float32 with -inf for what top-k, top-p and min-p, each (B, 1), leave out.

    Of equal scores at the border of top-p the highest ids stay.
    """
    ascending, width = _ascending(scores), scores.shape[-1]
    kth = ascending.gather(-1, torch.where(top_k > 0, width - top_k, 0).clamp_min(0))
    ascending = ascending.masked_fill(ascending < kth, -torch.inf)
    masses = torch.exp(ascending - ascending[:, -1:]).cumsum(-1, dtype=torch.float64)
    num_removed = ((masses / masses[:, -1:]).float() <= tail).sum(-1, keepdim=True).clamp_max(width - 1)
    border = ascending.gather(-1, num_removed)
    below, equal = scores < border, scores == border
    removed = below | (equal & (equal.cumsum(-1) <= num_removed - below.sum(-1, keepdim=True)))
    unlikely = scores - scores.amax(-1, keepdim=True) < min_p.double().log()
    return scores.masked_fill(removed | (scores < kth) | unlikely, -torch.inf)


def _ascending(scores: Tensor) -> Tensor:
    if scores.device.type != "cpu" or torch.compiler.is_compiling():
        return scores.sort(-1).values
    return torch.from_numpy(np.sort(scores.numpy(), axis=-1))  # ten times faster than torch's, which sorts indices too


def _penalise(scores: Tensor, state: SamplingState, rows: Tensor) -> Tensor:
    if state.uses("bias"):
        index = state.bias_index[rows]
        value = torch.where(index >= 0, state.bias_value[rows], 0.0)
        scores = scores.scatter_add(-1, index.clamp_min(0), value)
    if state.uses("repetition"):
        assert state.counts is not None
        assert state.prompt_mask is not None
        seen = state.prompt_mask[rows] | (state.counts[rows] > 0)
        penalty = state.repetition[rows, None]
        scores = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
    if state.uses("additive"):
        assert state.counts is not None
        counts = state.counts[rows]
        scores = scores - counts * state.frequency[rows, None]
        scores = scores - (counts > 0) * state.presence[rows, None]
    return scores


def logprobs(logits: Tensor, ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the chosen ids and of the `top` likeliest.

    logits (B, V), ids (B,) -> (B,) float32, and (B, top) int64 ids with their (B, top) float32.
    """
    table = logits.float().log_softmax(-1)
    best, best_ids = table.topk(top, dim=-1)
    return table.gather(-1, ids[:, None])[:, 0], best_ids, best


_BLOCK = 64


def argmax(scores: Tensor) -> Tensor:
    """(B, V) -> (B,) int64, the lowest index among equals.

    By blocks on the CPU, where `torch.argmax` reads one number at a time.
    """
    if scores.device.type != "cpu":
        return scores.argmax(-1)
    blocks = functional.pad(scores, (0, -scores.shape[-1] % _BLOCK), value=-torch.inf).unflatten(-1, (-1, _BLOCK))
    best = blocks.amax(-1).argmax(-1)
    return best * _BLOCK + blocks[torch.arange(len(best)), best].argmax(-1)


def inverse_cdf(weights: Tensor, draws: Tensor) -> Tensor:
    """The first index whose cumulative weight exceeds draw * total. (B, V) float32, (B,) float64 -> (B,) int64."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    found = torch.searchsorted(cumulative, draws[:, None] * total, right=True)
    # Rounding may carry the target to the total: take the last weight above zero. (Of NaN, any.)
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(found, last)[:, 0].clamp_max(weights.shape[-1] - 1)
