"""Checkpoint names -> parameters, strictly: a missing or unexpected name is an error that says so."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from mstar_plugin_orpheus.config import SnacConfig

# weight_norm's two spellings of (length, direction)
_LENGTHS = {".parametrizations.weight.original0": ".parametrizations.weight.original1", ".weight_g": ".weight_v"}

CODEC_IGNORED = r"encoder\..*|quantizer\.quantizers\.\d+\.in_proj\..*"
"""Parts of the released codec that only encode."""


def fold_weight_norm(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Plain weights from lengths and directions of their rows; all else as it is."""
    folded = dict(tensors)
    for name in tensors:
        for length, direction in _LENGTHS.items():
            stem = name.removesuffix(length)
            if stem != name and stem + direction in folded:
                rows, lengths = folded.pop(stem + direction).float(), folded.pop(name).float()
                # Rounded as torch's own weight norm rounds: the codec amplifies the difference a hundredfold.
                folded[f"{stem}.weight"] = torch._weight_norm(rows, lengths, 0)
    return folded


def codec_rename(config: SnacConfig) -> list[tuple[str, str]]:
    """(pattern, replacement) from the released codec's names to those of `SnacDecoder`, for whole names."""
    entry = 2 if config.depthwise else 1
    blocks = len(config.decoder_rates)
    rules = [
        (r"quantizer\.quantizers\.(\d+)\.codebook\.(.*)", r"codebooks.\1.\2"),
        (r"quantizer\.quantizers\.(\d+)\.out_proj\.(.*)", r"projections.\1.\2"),
        (rf"decoder\.model\.{entry + blocks}\.(.*)", r"snake.\1"),
        (rf"decoder\.model\.{entry + blocks + 1}\.(.*)", r"exit.\1"),
    ]
    rules += [(rf"decoder\.model\.{index}\.(.*)", rf"entry.{index}.\1") for index in range(entry)]
    first_unit = 3 if config.noise else 2
    units = ("snake_in", "over_time", "snake_out", "over_channels")
    for block in range(blocks):
        theirs, ours = rf"decoder\.model\.{entry + block}\.block", f"blocks.{block}"
        rules.append((rf"{theirs}\.0\.(.*)", rf"{ours}.snake.\1"))
        rules.append((rf"{theirs}\.1\.(.*)", rf"{ours}.upsample.\1"))
        rules.append((rf"{theirs}\.2\.linear\.(.*)", rf"{ours}.noise_gain.\1"))
        for unit in range(3):
            rules += [
                (rf"{theirs}\.{first_unit + unit}\.block\.{index}\.(.*)", rf"{ours}.residuals.{unit}.{name}.\1")
                for index, name in enumerate(units)
            ]
    return rules


def rename(name: str, rules: list[tuple[str, str]]) -> str:
    """The name by the first rule that matches all of it, else itself."""
    for pattern, replacement in rules:
        if (match := re.fullmatch(pattern, name)) is not None:
            return match.expand(replacement)
    return name
