"""The times of a drawing, and which branches of guidance each of them needs. Imports no torch.

All arithmetic is float32, as the model's authors have it, to the bit: the borders of the interval depend on it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Guidance:
    """How a drawing is guided, and at which times it is."""

    num_timesteps: int
    shift: float
    text_scale: float
    img_scale: float
    interval: tuple[float, float]
    renorm_type: str
    renorm_min: float

    def branches(self, step: int | None = None) -> tuple[bool, bool]:
        """Whether a step needs the branch without text, and that without images; None: whether any step does."""
        times = schedule(self.num_timesteps, self.shift)[0]
        needed = [
            branches(t, self.text_scale, self.img_scale, self.interval)
            for t in (times if step is None else times[step : step + 1])
        ]
        return any(text for text, _ in needed), any(img for _, img in needed)


_PUBLISHED: Mapping[str, tuple[Any, Any]] = {
    "cfg_img_scale": (1.0, 2.0),
    "cfg_interval": ((0.4, 1.0), (0.0, 1.0)),
    "cfg_renorm_type": ("global", "text_channel"),
}
"""What parameters are when left out: of a drawing, and of an edit."""


def guidance(params: Any, *, num_images: int) -> Guidance:
    """What a request's parameters come to; with images it is an edit."""
    given = {name: getattr(params, name) for name in _PUBLISHED}
    chosen = {name: pair[num_images > 0] if given[name] is None else given[name] for name, pair in _PUBLISHED.items()}
    low, high = chosen["cfg_interval"]
    return Guidance(
        num_timesteps=params.num_timesteps,
        shift=params.timestep_shift,
        text_scale=params.cfg_text_scale,
        img_scale=chosen["cfg_img_scale"],
        interval=(low, high),
        renorm_type=chosen["cfg_renorm_type"],
        renorm_min=params.cfg_renorm_min,
    )
