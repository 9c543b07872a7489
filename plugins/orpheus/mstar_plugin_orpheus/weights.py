"""Checkpoint names -> parameters, strictly: a missing or unexpected name is an error that says so."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from mstar.layers.decoder import Decoder, DecoderConfig, decoder_rename
from mstar.layers.weights import Weights, load_into
from mstar_plugin_orpheus.config import OrpheusConfig, SnacConfig
from mstar_plugin_orpheus.modeling.snac import SnacDecoder

LANGUAGE_IGNORED = (r".*\.rotary_emb\.inv_freq",)  # stored by old checkpoints, a function of the configuration
CODEC_IGNORED = (r"encoder\..*", r"quantizer\.quantizers\.\d+\.in_proj\..*")  # what only encodes


def decoder_config(config: OrpheusConfig) -> DecoderConfig:
    """The language model's sizes."""
    return DecoderConfig.read(config.language)


def load_language_model(decoder: Decoder, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
    """Fill the language model. Tied checkpoints may carry lm_head.weight all the same."""
    load_into(
        decoder, Weights.open(folder), rename=decoder_rename(), ignore=LANGUAGE_IGNORED, dtype=dtype, device=device
    )


def load_codec(decoder: SnacDecoder, folder: Path, *, device: torch.device) -> None:
    """Fill the codec's decoder in float32, and fold its weight norm into plain weights."""
    normed = [module for module in decoder.modules() if isinstance(module, nn.Conv1d | nn.ConvTranspose1d)]
    for module in normed:
        parametrizations.weight_norm(module)
    load_into(
        decoder,
        Weights.open(folder),
        rename=codec_rename(decoder.config),
        ignore=CODEC_IGNORED,
        dtype=torch.float32,
        device=device,
    )
    for module in normed:
        parametrize.remove_parametrizations(module, "weight")


def codec_rename(config: SnacConfig) -> dict[str, str]:
    """Rules from the released codec's names to those of a `SnacDecoder` with weight norm."""
    entry = 2 if config.depthwise else 1
    blocks = len(config.decoder_rates)
    rules = {
        r"quantizer\.quantizers\.(\d+)\.codebook\.(.*)": r"codebooks.\1.\2",
        r"quantizer\.quantizers\.(\d+)\.out_proj\.(.*)": r"projections.\1.\2",
        rf"decoder\.model\.{entry + blocks}\.(.*)": r"snake.\1",
        rf"decoder\.model\.{entry + blocks + 1}\.(.*)": r"exit.\1",
    }
    rules |= {rf"decoder\.model\.{index}\.(.*)": rf"entry.{index}.\1" for index in range(entry)}
    first_unit = 3 if config.noise else 2
    for block in range(blocks):
        theirs, ours = rf"decoder\.model\.{entry + block}\.block", f"blocks.{block}"
        rules[rf"{theirs}\.0\.(.*)"] = rf"{ours}.snake.\1"
        rules[rf"{theirs}\.1\.(.*)"] = rf"{ours}.upsample.\1"
        if config.noise:
            rules[rf"{theirs}\.2\.linear\.(.*)"] = rf"{ours}.noise_gain.\1"
        for unit in range(3):
            for index, name in enumerate(("snake_in", "over_time", "snake_out", "over_channels")):
                rules[rf"{theirs}\.{first_unit + unit}\.block\.{index}\.(.*)"] = rf"{ours}.residuals.{unit}.{name}.\1"
    return rules
