"""The vision encoder: patches of pictures of any size, packed, through a transformer and into the decoder.

Every frame sees itself only. All else runs over the patches of all pictures together, so nothing is padded. Patches lie
in the order of the squares that become one token: `merge` by `merge` patches of each, row by row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mstar.layers.activation import activation
from mstar.layers.linear import Embedding, Linear, MergedLinear
from mstar.layers.norm import LayerNorm
from mstar.layers.rotary import inverse_frequencies, rotate
from mstar_plugin_qwen3_omni.config.thinker import VisionConfig
from mstar_plugin_qwen3_omni.modeling.attention import within

Grid = tuple[int, int, int]
"""Frames (pairs of them, or as many as make a patch), rows and columns of patches of a picture or video."""
_EPS = 1e-6


def places(grid: Grid, *, merge: int) -> Tensor:
    """Row and column of each patch of one frame, (rows * columns, 2) int64, in the order in which patches lie."""
    _, height, width = grid
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    cells = torch.stack((rows, columns), dim=-1).unflatten(1, (-1, merge)).unflatten(0, (-1, merge))
    return cells.transpose(1, 2).flatten(0, 3)


def corners(at: Tensor, grid: Grid, *, side: int) -> tuple[Tensor, Tensor]:
    """Where in a table of `side` by `side` positions patches lie, if a picture's corners lie on the table's.

    Args:
        at: (n, 2), from `places`.

    Returns: rows of the table (n, 4) int64, and how much of each (n, 4) float32.
    """
    extent = torch.tensor(grid[1:]).sub(1).clamp(min=1)
    exact = at.float() * (side - 1) / extent
    low = exact.floor()
    part = exact - low
    ends = torch.stack((low.long(), (low.long() + 1).clamp(max=side - 1)))  # (2, n, 2)
    shares = torch.stack((1 - part, part))
    rows = ends[:, None, :, 0] * side + ends[None, :, :, 1]  # (2, 2, n)
    return rows.flatten(0, 1).T, (shares[:, None, :, 0] * shares[None, :, :, 1]).flatten(0, 1).T


class Block(nn.Module):
    """Attention within each frame and an MLP, each behind its norm and added to its input."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.norm1 = LayerNorm(size, eps=_EPS)
        self.qkv = MergedLinear(size, (size,) * 3, bias=True)
        self.proj = Linear(size, size)
        self.norm2 = LayerNorm(size, eps=_EPS)
        self.fc1 = Linear(size, config.intermediate_size)
        self.activation = activation(config.activation)
        self.fc2 = Linear(config.intermediate_size, size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, lengths: Sequence[int]) -> Tensor:
        """x (T, hidden), cos and sin (T, 1, D) float32; `lengths` of the frames -> (T, hidden)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        q, k = (rotate(part.float(), cos, sin).to(x.dtype) for part in (q, k))
        x = x + self.proj(within(q, k, v, lengths))
        return x + self.fc2(self.activation(self.fc1(self.norm2(x))))


class Merger(nn.Module):
    """The patches of a square to one token.

    Args:
        norm_size: what is normalised together: a patch, or the whole square.
    """

    def __init__(self, config: VisionConfig, *, norm_size: int) -> None:
        super().__init__()
        self.size = config.hidden_size * config.merge**2
        self.norm = LayerNorm(norm_size, eps=_EPS)
        self.fc1 = Linear(self.size, self.size)
        self.activation = activation("gelu")
        self.fc2 = Linear(self.size, config.output_size)

    def forward(self, x: Tensor) -> Tensor:  # (T, hidden) -> (T / merge^2, output)
        squares = self.norm(x.unflatten(0, (-1, self.norm.normalized_shape[0] // x.shape[-1])).flatten(1))
        return self.fc2(self.activation(self.fc1(squares.reshape(-1, self.size))))


class VisionEncoder(nn.Module):
    """Encoder and mergers; fill it with `weights.thinker.load_vision`."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch = Linear(config.patch_dim, config.hidden_size)
        self.position = Embedding(config.side**2, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        whole = config.hidden_size * config.merge**2
        self.merger = Merger(config, norm_size=config.hidden_size)
        self.tapped = nn.ModuleList(Merger(config, norm_size=whole) for _ in config.taps)

    def forward(self, patches: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
        """What stands for pictures in a prompt.

        Args:
            patches: per picture or video, (frames * rows * columns, patch_dim), in 0..1 normalised.
            grids: of each.

        Returns: per picture, (tokens, 1 + taps, output): first what stands in the prompt, then what is added to hidden
            states after each of the decoder's first layers.
        """
        where = [self._where(grid, device=self.patch.weight.device) for grid in grids]
        rows, shares, cos, sin = (torch.cat(column) for column in zip(*where, strict=True))
        x = self.patch(torch.cat(list(patches)).to(self.patch.weight.dtype))
        x = x + (self.position(rows) * shares[..., None]).sum(1).to(x.dtype)
        lengths = [height * width for frames, height, width in grids for _ in range(frames)]
        taps: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            x = block(x, cos[:, None], sin[:, None], lengths)
            if number in self.config.taps:
                taps.append(self.tapped[len(taps)](x))
        tokens = torch.stack((self.merger(x), *taps), dim=1)
        return list(tokens.split([len(one) // self.config.merge**2 for one in patches]))

    def _where(self, grid: Grid, *, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of each patch of a picture: rows of the table of positions and their shares, cos and sin (n, D)."""
        config = self.config
        at = places(grid, merge=config.merge)
        dim = config.hidden_size // config.num_heads
        frequencies = inverse_frequencies(dim // 2, theta=config.rope_theta)
        angles = (at.float()[..., None] * frequencies).flatten(1).repeat(1, 2)
        columns = (*corners(at, grid, side=config.side), angles.cos(), angles.sin())
        one, two, three, four = (column.repeat(grid[0], 1).to(device) for column in columns)
        return one, two, three, four
