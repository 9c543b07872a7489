"""The action-conditioned predictor: latents of a frame, the action taken and the state -> latents of the next frame.

A frame is a block of tokens, [action, state, patches], that see each other and all earlier frames and nothing later: so
keys and values of earlier frames may be kept. `full_sequence` is the slow twin that keeps nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from mstar.layers.linear import Linear
from mstar.layers.norm import LayerNorm
from mstar_plugin_vjepa2.config import CONDITIONS, VJEPA2ACConfig
from mstar_plugin_vjepa2.modeling.blocks import Block, full_attention, normalized, place, rotary


class AttendPaged(Protocol):
    """Keeps keys and values, (tokens, heads, head_dim) of whole blocks, and attends to those kept and these."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class ACPredictor(nn.Module):
    """A transformer over blocks of frames; h and w are positions on the grid, depth is the frame's number."""

    def __init__(self, config: VJEPA2ACConfig) -> None:
        super().__init__()
        self.grid, self.head_dim = config.grid, config.predictor.head_dim
        dim = config.predictor.dim
        self.embed_patches = Linear(config.dim, dim)
        self.embed_action = Linear(config.action_dim, dim)
        self.embed_state = Linear(config.action_dim, dim)
        self.blocks = nn.ModuleList(Block(config.predictor.blocks) for _ in range(config.predictor.depth))
        self.norm = LayerNorm(dim, eps=config.predictor.blocks.eps)
        self.proj = Linear(dim, config.dim)

    def forward(self, z: Tensor, action: Tensor, state: Tensor, frame: Tensor, attend: AttendPaged) -> Tensor:
        """One frame of each row -> its next one's latents, every token normalised.

        Args:
            z: (B, P, D) normalised latents.
            action, state: (B, A).
            frame: (B,) int64, the frame's number, from 0.
            attend: over B * (P + 2) tokens, row by row, layer by layer.
        """
        return normalized(self.predict(z, action, state, frame, attend))

    def predict(self, z: Tensor, action: Tensor, state: Tensor, frame: Tensor, attend: AttendPaged) -> Tensor:
        """`forward` before the normalisation of its result: (B, P, D)."""
        blocks = self.embed(z, action, state)  # (B, P + 2, dim)
        cos, sin = (table.flatten(0, 1)[:, None].to(blocks.dtype) for table in self.tables(frame))
        x = blocks.flatten(0, 1)
        for layer, block in enumerate(self.blocks):
            x = block(x, cos, sin, partial(attend, layer))
        return self.read(x.unflatten(0, (-1, blocks.shape[1])))

    def embed(self, z: Tensor, action: Tensor, state: Tensor) -> Tensor:
        """z (..., P, D), action and state (..., A) -> blocks (..., P + 2, dim)."""
        dtype = self.embed_patches.weight.dtype
        conditions = self.embed_action(action.to(dtype)), self.embed_state(state.to(dtype))
        return torch.cat((torch.stack(conditions, dim=-2), self.embed_patches(z.to(dtype))), dim=-2)

    def tables(self, frame: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, (B, P + 2, head_dim) float32, of the blocks of frames (B,)."""
        conditions = rotary(frame[:, None].expand(-1, CONDITIONS), None, None, head_dim=self.head_dim)
        ids = torch.arange(self.grid**2, device=frame.device)
        _, row, column = place(ids, height=self.grid, width=self.grid)
        depth = frame[:, None].expand(-1, self.grid**2)
        patches = rotary(depth, row.expand_as(depth), column.expand_as(depth), head_dim=self.head_dim)
        cos, sin = (torch.cat(pair, dim=1) for pair in zip(conditions, patches, strict=True))
        return cos, sin

    def read(self, blocks: Tensor) -> Tensor:
        """Blocks (..., P + 2, dim) after the last layer -> predictions (..., P, D)."""
        return self.proj(self.norm(blocks[..., CONDITIONS:, :]))


def full_sequence(module: ACPredictor, z: Tensor, actions: Tensor, states: Tensor) -> Tensor:
    """Predictions after every frame of a sequence, all computed anew under a frame-causal mask.

    Args:
        z: (B, T, P, D) normalised latents of frames 0 .. T - 1.
        actions, states: (B, T, A).

    Returns: (B, T, P, D), [:, t] of frame t + 1, normalised.
    """
    frames = torch.arange(z.shape[1], device=z.device)
    blocks = module.embed(z, actions, states)
    cos, sin = (table.flatten(0, 1)[:, None].to(blocks.dtype) for table in module.tables(frames))
    of = frames.repeat_interleave(blocks.shape[2])
    hidden = torch.zeros(len(of), len(of), dtype=blocks.dtype, device=z.device)
    hidden.masked_fill_(of[:, None] < of, -torch.inf)  # added to the scores, which is faster than a mask of booleans
    attend = partial(full_attention, mask=hidden)
    x = blocks.flatten(1, 2)
    for block in module.blocks:
        x = block(x, cos, sin, attend)
    return normalized(module.read(x.unflatten(1, blocks.shape[1:3])))
