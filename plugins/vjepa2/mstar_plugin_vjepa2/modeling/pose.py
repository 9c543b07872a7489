"""How a robot's pose follows from an action. Poses are [x, y, z, Euler angles about fixed axes x, y, z, gripper]."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_SINGULAR = 1e-7  # radians


def integrate(state: Tensor, action: Tensor) -> Tensor:
    """The pose after an action: positions add, rotations compose, the gripper adds within 0 .. 1.

    Args:
        state, action: (B, 7); the action's angles are a rotation applied after the state's.

    Returns: (B, 7) in the state's dtype, computed in float64.
    """
    pose, change = state.double(), action.double()
    position = pose[:, :3] + change[:, :3]
    angles = to_euler(compose(from_euler(change[:, 3:6]), from_euler(pose[:, 3:6])))
    gripper = (pose[:, 6:] + change[:, 6:]).clamp(0, 1)
    return torch.cat((position, angles, gripper), dim=1).to(state.dtype)


def action_between(start: Tensor, end: Tensor) -> Tensor:
    """The action that takes one pose to another, (B, 7) each: `integrate` the other way round, gripper unclipped."""
    before, after = start.double(), end.double()
    back = from_euler(before[:, 3:6]) * before.new_tensor([-1, -1, -1, 1])
    angles = to_euler(compose(from_euler(after[:, 3:6]), back))
    difference = after - before
    return torch.cat((difference[:, :3], angles, difference[:, 6:]), dim=1).to(start.dtype)


def from_euler(angles: Tensor) -> Tensor:
    """Angles (B, 3) about the fixed axes x, then y, then z -> unit quaternions (B, 4), scalar last."""
    sin, cos = (angles / 2).sin(), (angles / 2).cos()
    zero = torch.zeros_like(cos[:, 0])
    about_x = torch.stack((sin[:, 0], zero, zero, cos[:, 0]), dim=1)
    about_y = torch.stack((zero, sin[:, 1], zero, cos[:, 1]), dim=1)
    about_z = torch.stack((zero, zero, sin[:, 2], cos[:, 2]), dim=1)
    return compose(about_z, compose(about_y, about_x))


def compose(second: Tensor, first: Tensor) -> Tensor:
    """The quaternion (B, 4) of one rotation after another."""
    v, w = second[:, :3], second[:, 3:]
    u, s = first[:, :3], first[:, 3:]
    vector = w * u + s * v + torch.linalg.cross(v, u)
    return torch.cat((vector, w * s - (v * u).sum(1, keepdim=True)), dim=1)


def to_euler(quaternion: Tensor) -> Tensor:
    """The inverse of `from_euler`, angles in -pi .. pi; where the middle one is a right angle the last one is 0."""
    x, y, z, w = quaternion.unbind(1)
    a, b, c, d = w - y, x + z, y + w, z - x
    half_sum, half_difference = torch.atan2(b, a), torch.atan2(d, c)
    middle = 2 * torch.atan2(torch.hypot(c, d), torch.hypot(a, b))
    low, high = middle <= _SINGULAR, (middle - math.pi).abs() <= _SINGULAR
    first = torch.where(low, 2 * half_sum, torch.where(high, -2 * half_difference, half_sum - half_difference))
    last = torch.where(low | high, 0.0, half_sum + half_difference)
    angles = torch.stack((first, middle - math.pi / 2, last), dim=1)
    angles = torch.where(angles < -math.pi, angles + 2 * math.pi, angles)
    return torch.where(angles > math.pi, angles - 2 * math.pi, angles)
