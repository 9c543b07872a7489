"""The network of a frame's further codes: each step reads the mean of the states before it and the last code.

It owns no KV; its cache is a dense tensor the caller keeps. B: rows, H: hidden size, K: depth steps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mstar_plugin_echo.config import EchoConfig


class DepthPredictor(nn.Module):
    """One table of code embeddings and one head per place in the frame."""

    def __init__(self, config: EchoConfig) -> None:
        super().__init__()
        self.embeddings = nn.Parameter(torch.empty(config.frame_size, config.num_codes + 1, config.hidden_size))
        self.heads = nn.Parameter(torch.empty(config.depth_steps, config.num_codes, config.hidden_size))
        self.mix = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def embed(self, code: Tensor, *, place: Tensor) -> Tensor:
        """Embeddings (B, H) of codes (B,) int64 that stand at `place` (B,) int64 of their frames."""
        return self.embeddings[place, code]

    def forward(self, cache: Tensor, embedded: Tensor, *, step: Tensor) -> tuple[Tensor, Tensor]:
        """The next state (B, H) and its logits (B, codes).

        Args:
            cache: (B, K + 1, H), states 0..step valid.
            embedded: (B, H), the last code.
            step: (B,) int64, 0-based.
        """
        places = torch.arange(cache.shape[1], device=cache.device)
        valid = (places <= step[:, None]).to(cache.dtype)  # (B, K + 1)
        past = torch.where(valid[..., None] > 0, cache, torch.zeros_like(cache)).sum(1) / valid.sum(1, keepdim=True)
        state = torch.tanh(self.mix(past) + embedded)
        return state, (self.heads[step] * state[:, None]).sum(-1)
