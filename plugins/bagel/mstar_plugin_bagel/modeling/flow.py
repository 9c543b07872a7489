"""Latents as tokens of the language model, and the velocities it gives back: head, layout and guidance."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from mstar.layers.linear import Embedding, Linear
from mstar_plugin_bagel.config import BagelConfig

FREQUENCIES = 128
RENORMS = ("global", "channel", "text_channel")


class FlowHead(nn.Module):
    """Into the language model and out of it; fill it with `weights.load_flow`."""

    def __init__(self, config: BagelConfig) -> None:
        super().__init__()
        wide = config.language.hidden_size
        self.time1 = Linear(2 * FREQUENCIES, wide)
        self.time2 = Linear(wide, wide)
        self.enter = Linear(config.latent_dim, wide)
        self.leave = Linear(wide, config.latent_dim)
        self.places = Embedding(config.latent_side**2, wide)

    def embed(self, tokens: Tensor, t: Tensor, position_ids: Tensor, *, owners: Tensor | None = None) -> Tensor:
        """Latent tokens as the language model takes them.

        Args:
            tokens: (N, latent_dim).
            t: times 0..1: of each token (N,), of all of them () or (1,), or of each request (B,) with `owners`.
            position_ids: (N,) int64, from `preprocess.grid_positions`.
            owners: (N,) int64, the entry of `t` that is each token's.

        Returns: (N, hidden).
        """
        time = self.time(t.reshape(-1))
        time = time if owners is None else time.index_select(0, owners)
        return self.enter(tokens.to(self.enter.weight.dtype)) + time + self.places(position_ids)

    def time(self, t: Tensor) -> Tensor:
        """Times (N,) -> (N, hidden). The waves are float32."""
        exponents = torch.arange(FREQUENCIES, dtype=torch.float32, device=t.device) / FREQUENCIES
        angles = t.float()[:, None] * torch.exp(-math.log(10000.0) * exponents)
        waves = torch.cat((angles.cos(), angles.sin()), dim=-1)
        return self.time2(functional.silu(self.time1(waves.to(self.time1.weight.dtype))))

    def velocity(self, hidden: Tensor) -> Tensor:
        """Hidden states of latent tokens (N, hidden) -> float32 (N, latent_dim), from data to noise."""
        return self.leave(hidden).float()


# ---- layout ---------------------------------------------------------------------------------------------


def patchify(latents: Tensor, patch: int) -> Tensor:
    """(z, h * p, w * p) -> tokens (h * w, p * p * z), row by row. Rows and columns that fill no patch are left out."""
    height, width = (extent // patch * patch for extent in latents.shape[1:])
    squares = latents[:, :height, :width].unflatten(2, (-1, patch)).unflatten(1, (-1, patch))  # (z, h, p, w, p)
    return squares.permute(1, 3, 2, 4, 0).flatten(2).flatten(0, 1)


def unpatchify(tokens: Tensor, height: int, width: int, patch: int) -> Tensor:
    """Tokens (h * w, p * p * z) of `height` h times `width` w -> (z, h * p, w * p)."""
    squares = tokens.unflatten(1, (patch, patch, -1)).unflatten(0, (height, width))  # (h, w, p, p, z)
    return squares.permute(4, 0, 2, 1, 3).flatten(3).flatten(1, 2)


# ---- guidance -------------------------------------------------------------------------------------------


def guide(
    v: Tensor,
    v_text: Tensor | None,
    v_img: Tensor | None,
    *,
    cfg_text_scale: float,
    cfg_img_scale: float,
    renorm_type: str,
    renorm_min: float,
) -> Tensor:
    """The velocity that one request's step goes along.

    Args:
        v: (N, D) float32, of the whole context.
        v_text: without the last text; None where `schedule.branches` says that it does not matter.
        v_img: without images; likewise.
        renorm_type: "global" keeps the guided velocity of the request no longer than `v`, "channel" that of each token;
            "text_channel" that of each token after guidance by text, and leaves what images add alone.
        renorm_min: how much may be left of the guided velocity at least.
    """
    if v_text is None:
        return v
    assert renorm_type in RENORMS, f"renorm_type is {renorm_type!r}; known: {', '.join(RENORMS)}"
    guided = v_text + cfg_text_scale * (v - v_text)
    if renorm_type == "text_channel":
        guided = _shortened(guided, v, -1, renorm_min)
    if v_img is not None:
        guided = v_img + cfg_img_scale * (guided - v_img)
    if renorm_type == "text_channel":
        return guided
    return _shortened(guided, v, None if renorm_type == "global" else -1, renorm_min)


def _shortened(guided: Tensor, v: Tensor, dim: int | None, least: float) -> Tensor:
    norms = (torch.linalg.vector_norm(x, dim=dim, keepdim=True) for x in (v, guided))
    own, other = norms
    return guided * (own / (other + 1e-8)).clamp(min=least, max=1.0)
