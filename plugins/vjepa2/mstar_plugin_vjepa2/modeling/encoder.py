"""The video encoder: tubelets of patches through a transformer in which all tokens of a clip see each other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mstar.layers.linear import Linear
from mstar.layers.norm import LayerNorm
from mstar_plugin_vjepa2.config import VJEPA2ACConfig, VJEPA2Config
from mstar_plugin_vjepa2.modeling.blocks import Block, full_attention, normalized, place, rotary


class Encoder(nn.Module):
    """Both releases' encoder; they differ in how positions are counted on frames of another size than trained on."""

    def __init__(self, config: VJEPA2Config | VJEPA2ACConfig) -> None:
        super().__init__()
        self.config = encoder = config.encoder
        self.patch = Linear(encoder.channels * encoder.tubelet_size * encoder.patch_size**2, encoder.blocks.dim)
        self.blocks = nn.ModuleList(Block(encoder.blocks) for _ in range(encoder.blocks.depth))
        self.norm = LayerNorm(encoder.blocks.dim, eps=encoder.blocks.eps)

    def forward(self, pixels: Tensor) -> Tensor:
        """Tokens of clips, tubelet by tubelet and row by row.

        Args:
            pixels: (B, T, 3, H, W) floats, normalised. A clip shorter than a tubelet is repeated; frames and pixels
                that do not fill a tubelet or patch are left out.

        Returns: (B, T // tubelet_size * H // patch_size * W // patch_size, dim), after the final norm.
        """
        x, cos, sin = self._embed(pixels)
        for block in self.blocks:
            x = block(x, cos, sin, full_attention)
        return self.norm(x)

    def layers(self, pixels: Tensor) -> list[Tensor]:
        """What goes into the first block and comes out of each, (B, N, dim), before the final norm."""
        x, cos, sin = self._embed(pixels)
        outputs = [x]
        for block in self.blocks:
            outputs.append(block(outputs[-1], cos, sin, full_attention))
        return outputs

    def _embed(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, C, H, W) -> patches (B, N, dim), and cosines and sines (N, 1, head_dim) of their positions."""
        time, size = self.config.tubelet_size, self.config.patch_size
        if pixels.shape[1] < time:
            pixels = pixels.repeat(1, time, 1, 1, 1)
        frames, _, height, width = pixels.shape[1:]
        pixels = pixels[:, : frames // time * time, :, : height // size * size, : width // size * size]
        x = pixels.unflatten(4, (-1, size)).unflatten(3, (-1, size)).unflatten(1, (-1, time))
        x = x.permute(0, 1, 4, 6, 3, 2, 5, 7)  # (B, T/t, h, w, C, t, p, p)
        x = self.patch(x.flatten(4).flatten(1, 3).to(self.patch.weight.dtype))
        rows, columns = (self.config.grid,) * 2 if self.config.fixed_grid else (height // size, width // size)
        ids = torch.arange(x.shape[1], device=x.device)
        tables = rotary(*place(ids, height=rows, width=columns), head_dim=self.config.blocks.head_dim)
        cos, sin = (table[:, None].to(x.dtype) for table in tables)
        return x, cos, sin

    def encode_frames(self, frames: Tensor) -> Tensor:
        """Latents of single frames, as the action-conditioned predictor takes and gives them.

        Args:
            frames: (B, 3, S, S); each fills a tubelet of its own and sees no other.

        Returns: (B, patches, dim), every token normalised.
        """
        return normalized(self(frames[:, None].expand(-1, self.config.tubelet_size, -1, -1, -1)))
