"""The predictor of masked tokens: from some tokens of a clip to what the encoder would give for others."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mstar.layers.linear import Linear
from mstar.layers.norm import LayerNorm
from mstar_plugin_vjepa2.config import VJEPA2Config
from mstar_plugin_vjepa2.modeling.blocks import Block, full_attention, place, rotary

MASK_TOKEN = 1  # which of the mask tokens stands for what is asked for


class Predictor(nn.Module):
    """A transformer over the context's tokens and one mask token for each token asked for."""

    def __init__(self, config: VJEPA2Config) -> None:
        super().__init__()
        self.grid, self.head_dim = config.grid, config.predictor.blocks.head_dim
        dim = config.predictor.blocks.dim
        self.embed = Linear(config.dim, dim)
        self.mask_tokens = nn.Parameter(torch.zeros(config.predictor.num_mask_tokens, 1, 1, dim))
        self.blocks = nn.ModuleList(Block(config.predictor.blocks) for _ in range(config.predictor.blocks.depth))
        self.norm = LayerNorm(dim, eps=config.predictor.blocks.eps)
        self.proj = Linear(dim, config.dim)

    def forward(self, features: Tensor, context_mask: Tensor, target_mask: Tensor) -> Tensor:
        """Predict tokens of a clip, in the order they are asked for.

        Attention takes tokens in any order, so they are not sorted by position as the original does.

        Args:
            features: (B, N, D), the encoder's.
            context_mask: (B, K) int64, which of the N may be seen, by number; they are also the tokens' positions.
            target_mask: (B, M) int64, numbers of the tokens asked for; N and beyond lie after the clip.

        Returns: (B, M, D).
        """
        seen = features.gather(1, context_mask[..., None].expand(-1, -1, features.shape[-1]))
        mask_token = self.mask_tokens[MASK_TOKEN % len(self.mask_tokens)]
        asked = mask_token.expand(*target_mask.shape, -1)
        x = torch.cat((self.embed(seen.to(self.embed.weight.dtype)), asked), dim=1)
        ids = torch.cat((context_mask, target_mask), dim=1)
        tables = rotary(*place(ids, height=self.grid, width=self.grid), head_dim=self.head_dim)
        cos, sin = (table[:, :, None].to(x.dtype) for table in tables)
        for block in self.blocks:
            x = block(x, cos, sin, full_attention)
        return self.proj(self.norm(x[:, context_mask.shape[1] :]))
