"""What reads and writes: embedding, decoder and head. Media are spliced into its embeddings by whoever calls it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from mstar.layers.linear import Embedding, Head
from mstar_plugin_qwen3_omni.config.thinker import ThinkerConfig
from mstar_plugin_qwen3_omni.modeling.decoder import Attend, Decoder


@dataclass(frozen=True, slots=True)
class Spliced:
    """Media in a stretch of tokens.

    Args:
        at: (n,) int64, their places among the tokens.
        embeddings: (n, hidden), what stands there instead of what ids say.
        seen_at: (m,) int64, the places of pictures' and videos' tokens.
        deepstack: (m, taps, hidden), added there after each of the first layers.
    """

    at: Tensor
    embeddings: Tensor
    seen_at: Tensor
    deepstack: Tensor


class Thinker(nn.Module):
    """The whole of it; build it on the meta device and fill it with `weights.thinker.load_thinker`."""

    def __init__(self, config: ThinkerConfig) -> None:
        super().__init__()
        hidden = config.decoder.hidden_size
        self.embedding = Embedding(config.vocab_size, hidden)
        self.decoder = Decoder(config.decoder)
        self.head = Head(hidden, config.vocab_size)
        if config.tied:
            self.head.tie(self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, hidden) -> (B, vocab)."""
        return self.head(hidden)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        media: Spliced | None = None,
        tap: int | None = None,
        invariant: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states after the final norm.

        Args:
            ids: (T,) int64 of any number of sequences, one after the other.
            positions: (T,) or (T, 3).
            tap: hidden states that enter this layer are wanted too.
            invariant: give a row the same bits in any batch.

        Returns: (T, hidden), and the tap (T, hidden) or None.
        """
        x = self.embedding(ids)
        if media is None:
            return self.decoder(x, positions, attend, tap=tap, invariant=invariant)
        x = x.index_copy(0, media.at, media.embeddings.to(x.dtype))
        steps = [
            lambda hidden, added=added: hidden.index_add(0, media.seen_at, added.to(hidden.dtype))
            for added in media.deepstack.unbind(1)
        ]
        return self.decoder(x, positions, attend, deepstack=steps, tap=tap, invariant=invariant)
