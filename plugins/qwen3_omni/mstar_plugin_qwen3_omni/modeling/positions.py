"""Positions of a prompt on three axes, time, height and width, and the order of a video's tokens and its sound's.

A text goes on by one on all axes, as does sound; a picture has one time, and counts rows and columns from it; so does a
video, whose time goes on with the clock. What follows starts behind the furthest position of what was before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mstar_plugin_qwen3_omni.modeling.vision import Grid


@dataclass(slots=True)
class Positions:
    """Those of a prompt as it grows.

    Args:
        merge: patches along each side of the square that a token stands for.
        per_s: how far positions go in a second of video.
        next: of what comes next; not always whole.
    """

    merge: int
    per_s: float
    next: float = 0.0
    parts: list[Tensor] = field(default_factory=list)

    def text(self, count: int) -> None:
        """So many tokens of text, or of sound by itself."""
        self._add(_line(count))

    def picture(self, shape: Grid) -> None:
        self._add(self._seen(shape, seconds_per_frame=0.0))

    def video(self, shape: Grid, *, seconds_per_frame: float) -> None:
        """A video whose patches last so long."""
        self._add(self._seen(shape, seconds_per_frame=seconds_per_frame))

    def film(self, shape: Grid, *, seconds_per_frame: float, num_heard: int) -> Tensor:
        """A video and `num_heard` tokens of its sound, merged by time; of equal times the video's come first.

        Returns: (tokens,) bool: which are sound; the others are video.
        """
        both = torch.cat((self._seen(shape, seconds_per_frame=seconds_per_frame), _line(num_heard)))
        order = both[:, 0].argsort(stable=True)
        is_heard = order >= len(both) - num_heard
        self._add(both[order])
        # As the model was trained, what follows goes on from the last stretch of one kind, not from the furthest.
        tail = len(both) - int((is_heard != is_heard[-1]).nonzero().max()) - 1 if len(is_heard.unique()) > 1 else 0
        self.next = float(self.parts[-1][-tail:].max()) + 1
        return is_heard

    def whole(self) -> Tensor:
        """(tokens, 3) float32."""
        return torch.cat(self.parts) if self.parts else torch.empty(0, 3)

    def _add(self, relative: Tensor) -> None:
        if len(relative):
            self.parts.append(relative + self.next)
            self.next = float(self.parts[-1].max()) + 1

    def _seen(self, shape: Grid, *, seconds_per_frame: float) -> Tensor:
        """(tokens, 3) float32 from 0 on."""
        frames, rows, columns = shape[0], shape[1] // self.merge, shape[2] // self.merge
        times = torch.arange(frames).float() * seconds_per_frame * self.per_s
        axes = torch.meshgrid(times, torch.arange(rows).float(), torch.arange(columns).float(), indexing="ij")
        return torch.stack(axes, dim=-1).flatten(0, 2)


def _line(count: int) -> Tensor:
    return torch.arange(count).float()[:, None].expand(-1, 3)
