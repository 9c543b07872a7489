"""The times of a drawing, and which branches of guidance each of them needs. Imports no torch.

All arithmetic is float32, as the model's authors have it, to the bit: the borders of the interval depend on it.
"""

from __future__ import annotations

import functools

import numpy as np


@functools.lru_cache(maxsize=256)
def schedule(num_timesteps: int, shift: float) -> tuple[np.ndarray, np.ndarray]:
    """Times of the steps, from 1 on down, and how far each step goes: both float32 (num_timesteps - 1,), read-only.

    Args:
        num_timesteps: times from 1 to 0, both included, so one more than steps; at least 2.
        shift: above 1 more of the steps are near time 1.
    """
    step = np.float64(np.float32(-1.0 / (num_timesteps - 1)))
    index = np.arange(num_timesteps)
    # Half from either end, each rounded once.
    near = np.where(index < num_timesteps // 2, 1.0 + step * index, -step * (num_timesteps - 1 - index))
    times = near.astype(np.float32)
    times = np.float32(shift) * times / (np.float32(1) + np.float32(shift - 1) * times)
    starts, lengths = times[:-1], times[:-1] - times[1:]
    for array in (starts, lengths):
        array.flags.writeable = False
    return starts, lengths


def branches(
    t: float | np.float32, cfg_text_scale: float, cfg_img_scale: float, interval: tuple[float, float]
) -> tuple[bool, bool]:
    """Whether a step at time `t` needs the branch without text, and that without images, besides the main one.

    Without guidance by text there is none by images either.
    """
    low, high = (np.float32(border) for border in interval)
    guided = bool(low < np.float32(t) <= high) and cfg_text_scale > 1
    return guided, guided and cfg_img_scale > 1
