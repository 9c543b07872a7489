"""Logits processing and drawing over whole batches, by sorting: readable, traceable, for any device.

The oracle of `rows`, which gives the same tokens faster on CPUs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mstar.layers.sampling.noise import uniform64
from mstar.layers.sampling.state import SamplingState


def sample_plain(logits: Tensor, state: SamplingState, rows: Tensor) -> Tensor:
    """`sample` without recording, whole batch at once, by sorting: the readable twin of the kernel for CPUs."""
    scores = process_logits(logits, state, rows)
    greedy = argmax(scores)
    if not state.uses("random"):
        return greedy
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    drawn = inverse_cdf(weights, uniform64(state.key[rows], state.step[rows]))
    return torch.where(state.temperature[rows] > 0, drawn, greedy)


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
    ascending, order = torch.sort(scores, dim=-1, stable=True)
    top_k = state.top_k[rows, None]
    width = scores.shape[-1]
    kth = ascending.gather(-1, torch.where(top_k > 0, width - top_k, 0).clamp_min(0))
    ascending = ascending.masked_fill(ascending < kth, -torch.inf)
    removed = ascending.softmax(-1).cumsum(-1) <= state.tail[rows, None]
    removed[:, -1] = False
    scores = scores.masked_fill(removed.scatter(-1, order, removed) | (scores < kth), -torch.inf)
    probabilities = scores.softmax(-1)
    floor = state.min_p[rows, None] * probabilities.amax(-1, keepdim=True)
    return scores.masked_fill(probabilities < floor, -torch.inf)


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


BLOCK = 64


def argmax(scores: Tensor) -> Tensor:
    """(B, V) -> (B,) int64, the lowest index among equals.

    By blocks on the CPU, where `torch.argmax` reads one number at a time.
    """
    rows, width = scores.shape
    whole = width // BLOCK * BLOCK
    if scores.device.type != "cpu" or whole < 2 * BLOCK:
        return scores.argmax(-1)
    blocks = scores[:, :whole].unflatten(-1, (-1, BLOCK))
    block = blocks.amax(-1).argmax(-1)
    inside = blocks[torch.arange(rows), block]
    best = block * BLOCK + inside.argmax(-1)
    if whole == width:
        return best
    rest, index = scores[:, whole:].max(-1)
    return torch.where(rest > inside.amax(-1), index + whole, best)


def inverse_cdf(weights: Tensor, draws: Tensor) -> Tensor:
    """The first index whose cumulative weight exceeds draw * total. (B, V) float32, (B,) float64 -> (B,) int64."""
    width = weights.shape[-1]
    blocks = torch.nn.functional.pad(weights, (0, -width % BLOCK)).unflatten(-1, (-1, BLOCK))
    sums = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    target = draws[:, None] * sums[:, -1:]
    block = torch.searchsorted(sums, target, right=True).clamp_max(sums.shape[-1] - 1)
    before = torch.where(block > 0, sums.gather(-1, (block - 1).clamp_min(0)), 0.0)
    inside = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0]
    within = torch.searchsorted(inside.cumsum(-1, dtype=torch.float64), target - before, right=True)
    # Rounding may carry the target past the last weight above zero: take that one.
    last = (inside > 0).long().mul(torch.arange(BLOCK, device=weights.device)).amax(-1, keepdim=True)
    return (block * BLOCK + torch.minimum(within, last))[:, 0]


# ---- the same, row by row on the CPU, without sorting the vocabulary -------------------------------------
