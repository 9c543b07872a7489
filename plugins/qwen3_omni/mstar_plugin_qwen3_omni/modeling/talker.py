"""The talker: a decoder that draws the first code of each frame of speech, from text and what the thinker saw or heard.

What enters at a position is a sum of two sides: text, projected to its width, and codes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mstar.layers.linear import Embedding, Head, Linear
from mstar_plugin_qwen3_omni.config.speech import TalkerConfig
from mstar_plugin_qwen3_omni.modeling.decoder import Attend, Decoder


class Projection(nn.Module):
    """From the thinker's width to the talker's."""

    def __init__(self, config: TalkerConfig) -> None:
        super().__init__()
        self.fc1 = Linear(config.text_size, config.decoder.intermediate_size)
        self.fc2 = Linear(config.decoder.intermediate_size, config.decoder.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(functional.silu(self.fc1(x)))


class Talker(nn.Module):
    """Decoder, embeddings of codes and of text, projections, head. The text's embedding is the thinker's."""

    def __init__(self, config: TalkerConfig) -> None:
        super().__init__()
        self.config = config
        self.text_embedding = Embedding(config.text_vocab_size, config.text_size)
        self.text_projection = Projection(config)
        self.hidden_projection = Projection(config)
        self.codec_embedding = Embedding(config.vocab_size, config.decoder.hidden_size)
        self.decoder = Decoder(config.decoder)
        self.codec_head = Head(config.decoder.hidden_size, config.vocab_size)

    def text(self, ids: Tensor) -> Tensor:
        """(T,) ids of text -> (T, H), their side of what enters."""
        return self.text_projection(self.text_embedding(ids))

    def codes(self, ids: Tensor) -> Tensor:
        """(T,) ids of codes, -1: none -> (T, H), their side of what enters."""
        found = self.codec_embedding(ids.clamp(min=0))
        return found.where(ids[:, None] >= 0, torch.zeros_like(found))

    def heard(self, taps: Tensor) -> Tensor:
        """(T, text_size) hidden states of the thinker, at tokens of media -> (T, H), in the place of text."""
        return self.hidden_projection(taps)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend, *, invariant: bool = False) -> Tensor:
        """x (T, H) at positions (T,) or (T, 3) -> (T, H) after the final norm."""
        hidden, _ = self.decoder(x, positions, attend, invariant=invariant)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, H) -> (B, num_codes + 1): of what may be drawn, the codes and, last, the end."""
        config = self.config
        every = self.codec_head(hidden)
        return torch.cat((every[:, : config.num_codes], every[:, config.tokens.eos :][:, :1]), dim=1)
