"""A prompt as the language model reads it: texts and images in order, positions, and what tells them apart.

A text is framed by two tokens. An image is a block between two markers that see each other whole and share one
position; one to be drawn from is two blocks, its latents and what is seen of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mstar.plugin.media import content_key
from mstar_plugin_bagel.config import BagelConfig
from mstar_plugin_bagel.modeling import preprocess


@dataclass(slots=True)
class Prompt:
    """What has been read so far.

    Args:
        pad: what stands in `ids` for tokens that are none.
        texts: ids of the texts alone.
        blocks: (start, end, whether it is of latents, image) of each block.
        keys: (start, end, what a block's content is known by).
        position: of the next token.
        text_start: (length, position) before the last text, or of all of it if an image comes last.
    """

    config: BagelConfig
    pad: int
    ids: list[int] = field(default_factory=list)
    texts: list[int] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)
    keys: list[tuple[int, int, bytes]] = field(default_factory=list)
    images: list[dict[str, Tensor]] = field(default_factory=list)
    position: int = 0
    text_start: tuple[int, int] = (0, 0)

    def framed(self, ids: Sequence[int]) -> list[int]:
        return [self.config.tokens.bos, *ids, self.config.tokens.eos]

    def add_text(self, ids: Sequence[int]) -> None:
        """A text's ids, framed if they are to be."""
        self.text_start = len(self.ids), self.position
        self.ids += ids
        self.texts += ids
        self.position += len(ids)

    def add_image(self, pixels: np.ndarray, noise: Tensor | None) -> None:
        """An image (H, W, 3), `resized`; `noise` (z, h, w) for its latents, if it is to be drawn from."""
        taken = preprocess.vit_input(pixels, self.config)
        image = {"patches": taken.patches, "places": taken.positions}
        if noise is not None:
            image |= {"pixels": preprocess.vae_pixels(pixels, self.config), "noise": noise}
            _, height, width = image["pixels"].shape
            image["cells"] = preprocess.latent_positions(height, width, self.config)
            self._add_block(len(image["cells"]), is_drawn=True, content=(pixels, noise.numpy()))
        self._add_block(len(taken.patches), is_drawn=False, content=(pixels,))
        self.images.append(image)
        self.text_start = len(self.ids), self.position

    def _add_block(self, count: int, *, is_drawn: bool, content: tuple[np.ndarray, ...]) -> None:
        marks, start = self.config.tokens, len(self.ids)
        self.ids += [marks.image_start, *[self.pad] * count, marks.image_end]
        self.position += 1
        self.blocks.append([start, len(self.ids), int(is_drawn), len(self.images)])
        self.keys.append((start, len(self.ids), content_key(is_drawn, *content)))

    def inputs(self) -> dict[str, Any]:
        """Walk inputs."""
        blocks = torch.tensor(self.blocks, dtype=torch.int64) if self.blocks else None
        return {
            "images": self.images,
            "prompt": torch.tensor(self.ids),
            "prompt_blocks": blocks,
            "prompt_spans": None if blocks is None else blocks[:, :2].contiguous(),
            "texts": torch.tensor(self.texts, dtype=torch.int64),
            "text_start": list(self.text_start),
        }


def resized(pixels: np.ndarray, config: BagelConfig) -> np.ndarray:
    """An image (H, W, 3) within the autoencoder's limits, where both its blocks begin."""
    return preprocess.first_resize(pixels, config)


def latent_shape(height: int, width: int, config: BagelConfig) -> tuple[int, int, int]:
    """(z, h, w) of the latents of an image."""
    down = config.autoencoder.downsample
    return config.autoencoder.channels, height // down, width // down
