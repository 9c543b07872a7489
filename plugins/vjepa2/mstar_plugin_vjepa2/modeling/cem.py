"""Planning by the cross-entropy method: draw action sequences, keep the best, draw closer to those.

Pure functions over R requests at once, float32. A distribution is a mean and a standard deviation, (R, H, 4) each, over
x, y, z and gripper of H actions; actions have 7 columns, of which the three angles stay 0. Limits and momenta are
numbers or (R,) tensors, one a request.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

GRIPPER_LIMIT = 0.75  # of drawn actions
GRIPPER_FLOOR = 0.25  # smaller gripper movements of the plan are left out
COSTS = ("l1", "l2", "cosine")


def begin(
    num_requests: int,
    horizon: int,
    *,
    max_norm: float | Tensor,
    fixed: Mapping[int, float] | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """The first mean and standard deviation, (R, H, 4) each.

    Args:
        max_norm: how far an action moves along an axis at most, and the first deviation.
        fixed: axis 0 .. 3 -> the value it has in every action.
    """
    mean = torch.zeros(num_requests, horizon, 4, device=device)
    std = torch.ones_like(mean)
    std[..., :3] *= _per_request(max_norm, std)
    for axis, value in (fixed or {}).items():
        mean[..., axis] = value
    return mean, std


def propose(
    mean: Tensor,
    std: Tensor,
    noise: Tensor,
    max_norm: float | Tensor,
    *,
    fixed: Mapping[int, float] | None = None,
    close_gripper_at: int | None = None,
) -> Tensor:
    """Draw action sequences.

    Args:
        mean, std: (R, H, 4).
        noise: (R, H, S, 4) standard normal.
        max_norm: x, y and z are clipped to it.
        fixed: axis 0 .. 3 -> the value it has in every action.
        close_gripper_at: from this action on the gripper's is 1.

    Returns: (R, S, H, 7).
    """
    drawn = noise * std[:, :, None] + mean[:, :, None]
    limit = _per_request(max_norm, drawn)
    move = torch.minimum(torch.maximum(drawn[..., :3], -limit), limit)
    drawn = torch.cat((move, drawn[..., 3:].clamp(-GRIPPER_LIMIT, GRIPPER_LIMIT)), dim=-1)
    for axis, value in (fixed or {}).items():
        drawn[..., axis] = value
    if close_gripper_at is not None:
        drawn[:, close_gripper_at:, :, 3] = 1.0
    return _to_actions(drawn).transpose(1, 2)


def costs(z: Tensor, goal: Tensor, kind: str = "l1") -> Tensor:
    """How far latents are from the goal's.

    Args:
        z, goal: (..., P, D), broadcast.
        kind: "l1" is the mean distance of all values, "l2" the mean squared one, "cosine" 1 - the tokens' mean cosine.

    Returns: (...) float32.
    """
    z, goal = z.float(), goal.float()
    if kind == "l1":
        return (z - goal).abs().flatten(-2).mean(-1)
    if kind == "l2":
        return (z - goal).square().flatten(-2).mean(-1)
    assert kind == "cosine", f"cost {kind!r}; known: {COSTS}"
    return 1 - functional.cosine_similarity(z, goal, dim=-1).mean(-1)


def select(
    actions: Tensor,
    costs: Tensor,
    mean: Tensor,
    std: Tensor,
    topk: int,
    *,
    momentum_mean: float | Tensor,
    momentum_std: float | Tensor,
    momentum_mean_gripper: float | Tensor,
    momentum_std_gripper: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Move the distribution to the `topk` (2 or more) sequences that cost least.

    Args:
        actions: (R, S, H, 7).
        costs: (R, S).
        mean, std: (R, H, 4), of which a momentum's share is kept.
    """
    assert 2 <= topk <= actions.shape[1], f"topk {topk} of {actions.shape[1]} samples; a deviation needs 2"
    best = costs.topk(topk, dim=1, largest=False).indices
    chosen = actions[torch.arange(len(actions), device=actions.device)[:, None], best][..., (0, 1, 2, 6)]
    keep_mean = _per_axis(momentum_mean, momentum_mean_gripper, mean)
    keep_std = _per_axis(momentum_std, momentum_std_gripper, std)
    mean = chosen.mean(1) * (1 - keep_mean) + mean * keep_mean
    return mean, chosen.std(1) * (1 - keep_std) + std * keep_std


def finish(mean: Tensor) -> Tensor:
    """The plan: (R, H, 4) -> actions (R, H, 7), with gripper movements below GRIPPER_FLOOR left out."""
    gripper = mean[..., 3:]
    return _to_actions(torch.cat((mean[..., :3], gripper.masked_fill(gripper.abs() < GRIPPER_FLOOR, 0.0)), dim=-1))


def _to_actions(drawn: Tensor) -> Tensor:
    still = torch.zeros_like(drawn[..., :3])
    return torch.cat((drawn[..., :3], still, drawn[..., 3:]), dim=-1)


def _per_request(value: float | Tensor, like: Tensor) -> Tensor:
    """A number or (R,) -> what broadcasts against (R, ...)."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).reshape(-1, *[1] * (like.ndim - 1))


def _per_axis(move: float | Tensor, gripper: float | Tensor, like: Tensor) -> Tensor:
    """Momenta of x, y, z and gripper, to broadcast against (R, H, 4)."""
    moves, grippers = torch.broadcast_tensors(_per_request(move, like), _per_request(gripper, like))
    return torch.cat((moves.expand(-1, -1, 3), grippers), dim=-1)
