"""The vision encoder: patches of images of any size, packed, through a transformer and into the language model.

Every image sees itself only. All else runs over the patches of all images together, so nothing is padded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from mstar.layers.activation import activation
from mstar.layers.linear import Embedding, Linear, MergedLinear
from mstar.layers.norm import LayerNorm
from mstar_plugin_bagel.config import BagelConfig, VisionConfig


class Block(nn.Module):
    """Attention within each image and an MLP, each behind its norm and added to its input."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.norm1 = LayerNorm(size, eps=config.eps)
        self.qkv = MergedLinear(size, (size,) * 3, bias=True)
        self.proj = Linear(size, size)
        self.norm2 = LayerNorm(size, eps=config.eps)
        self.fc1 = Linear(size, config.intermediate_size)
        self.activation = activation(config.activation)
        self.fc2 = Linear(config.intermediate_size, size)

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """x (T, hidden), `lengths` of whose rows are each image's -> the same."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(1, 2, 0, 3)  # (3, heads, T, D)
        seen = [
            functional.scaled_dot_product_attention(*image[:, None]).squeeze(0) for image in qkv.split(lengths, dim=2)
        ]
        x = x + self.proj(torch.cat(seen, dim=1).transpose(0, 1).flatten(1))
        return x + self.fc2(self.activation(self.fc1(self.norm2(x))))


class VisionEncoder(nn.Module):
    """Encoder, connector and the positions that the language model sees; fill it with `weights.load_vit`."""

    def __init__(self, config: BagelConfig) -> None:
        super().__init__()
        self.config = vision = config.vision
        wide = config.language.hidden_size
        self.patch = Linear(vision.patch_dim, vision.hidden_size)
        self.position = Embedding(vision.num_positions, vision.hidden_size)
        self.blocks = nn.ModuleList(Block(vision) for _ in range(vision.num_layers))
        self.norm = LayerNorm(vision.hidden_size, eps=vision.eps)
        self.fc1 = Linear(vision.hidden_size, wide)
        self.activation = activation(vision.connector_activation)
        self.fc2 = Linear(wide, wide)
        self.places = Embedding(vision.side**2, wide)

    def forward(self, patches: Sequence[Tensor], positions: Sequence[Tensor]) -> list[Tensor]:
        """What stands for images in a prompt.

        Args:
            patches: per image, (n, patch_dim), from `preprocess`.
            positions: per image, (n,) int64, of each patch on the grid of the tables.

        Returns: per image, (n, hidden of the language model).
        """
        lengths, places = [len(image) for image in patches], torch.cat(list(positions))
        hidden = self.encode(torch.cat(list(patches)), places, lengths)
        return list((self.connect(hidden) + self.places(places)).split(lengths))

    def encode(self, patches: Tensor, positions: Tensor, lengths: Sequence[int]) -> Tensor:
        """Packed patches (T, patch_dim) and positions (T,) -> (T, hidden) after the final norm."""
        x = self.patch(patches.to(self.patch.weight.dtype)) + self.position(positions)
        for block in self.blocks:
            x = block(x, lengths)
        return self.norm(x)

    def connect(self, hidden: Tensor) -> Tensor:
        """(T, hidden) -> (T, hidden of the language model)."""
        return self.fc2(self.activation(self.fc1(hidden)))
