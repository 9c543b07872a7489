"""Fills the networks from checkpoints, strictly: a tensor that is missing, unexpected or misshapen is an error.

Knows both layouts: transformers' safetensors, and the .pt of the action-conditioned release, which holds encoder and
predictor and is opened once per process. Nothing in a checkpoint is run.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from mstar.errors import ConfigError
from mstar.layers.weights import Entry, Weights, load_into
from mstar.plugin.spec import Checkpoint
from mstar_plugin_vjepa2.modeling.ac import ACPredictor
from mstar_plugin_vjepa2.modeling.encoder import Encoder
from mstar_plugin_vjepa2.modeling.predictor import Predictor

_KIND = r"\.(weight|bias)"


IDLE: tuple[str, ...] = (r"(predictor_)?pos_embed", r"extrinsics_encoder\..*")
"""What the release may carry and does not use: rotary positions have no table, and no extrinsics are taken."""


def _block(theirs: str, *, attention: str) -> dict[str, str]:
    """Rules for a stack of blocks that the checkpoint calls `theirs`."""
    layer, ours = theirs.replace(".", r"\.") + r"\.(\d+)\.", r"blocks.\1."
    return {
        layer + r"(norm[12])" + _KIND: ours + r"\2.\3",
        layer + r"mlp\.(fc[12])" + _KIND: ours + r"\2.\3",
        layer + attention + r"\.proj" + _KIND: ours + r"proj.\2",
        layer + attention + r"\.qkv" + _KIND: ours + r"qkv.\2",
        layer + attention + r"\.query" + _KIND: ours + r"qkv.\2[0]",
        layer + attention + r"\.key" + _KIND: ours + r"qkv.\2[1]",
        layer + attention + r"\.value" + _KIND: ours + r"qkv.\2[2]",
    }


ENCODER = {
    r"encoder\.embeddings\.patch_embeddings\.proj" + _KIND: r"patch.\1",
    r"encoder\.layernorm" + _KIND: r"norm.\1",
    **_block("encoder.layer", attention="attention"),
}
PREDICTOR = {
    r"predictor\.embeddings\.predictor_embeddings" + _KIND: r"embed.\1",
    r"predictor\.embeddings\.mask_tokens": "mask_tokens",
    r"predictor\.layernorm" + _KIND: r"norm.\1",
    r"predictor\.proj" + _KIND: r"proj.\1",
    **_block("predictor.layer", attention="attention"),
}
AC_ENCODER = {r"patch_embed\.proj" + _KIND: r"patch.\1", **_block("blocks", attention="attn")}
AC_PREDICTOR = {
    r"predictor_embed" + _KIND: r"embed_patches.\1",
    r"(action|state)_encoder" + _KIND: r"embed_\1.\2",
    r"predictor_(norm|proj)" + _KIND: r"\1.\2",
    **_block("predictor_blocks", attention="attn"),
}


def load_encoder(module: Encoder, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
    """Fill the encoder of either layout. Raises ConfigError that lists what does not fit."""
    if checkpoint.config.kind == "ac":
        weights, rules, ignore = _ac_part(checkpoint.config.file, "encoder"), AC_ENCODER, IDLE
    else:
        weights, rules, ignore = Weights.open(checkpoint.folder), ENCODER, (r"predictor\..*",)
    load_into(module, _unfolded(weights), rename=rules, ignore=ignore, dtype=dtype, device=device)


def load_predictor(
    module: Predictor | ACPredictor, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> None:
    """Fill the predictor of either layout. Raises ConfigError that lists what does not fit."""
    if checkpoint.config.kind == "ac":
        weights, rules, ignore = _ac_part(checkpoint.config.file, "predictor"), AC_PREDICTOR, IDLE
    else:
        weights, rules, ignore = Weights.open(checkpoint.folder), PREDICTOR, (r"encoder\..*",)
    load_into(module, weights, rename=rules, ignore=ignore, dtype=dtype, device=device)


def _unfolded(weights: Weights) -> Weights:
    """With the kernel of the patches' convolution, which does not overlap, as the weight of a linear layer."""
    return _changed(weights, lambda name, tensor: (name, tensor.flatten(1) if tensor.ndim == 5 else tensor))


def _changed(weights: Weights, change: Callable[[str, Tensor], tuple[str, Tensor]]) -> Weights:
    changed = {}
    for name, entry in weights.entries.items():
        new_name, tensor = change(name, entry.tensor)
        if new_name in changed:
            raise ConfigError(f"{weights.source} holds {new_name!r} twice, once as {name!r}")
        changed[new_name] = Entry(entry.file, tensor)
    return Weights(weights.source, changed)


def _ac_part(path: Path, part: str) -> Weights:
    """The encoder's or predictor's tensors, by names without what data parallelism and wrappers put before them."""
    opened = _opened(path, path.stat().st_mtime_ns)
    own = {name.removeprefix(part + "."): entry for name, entry in opened.items() if name.startswith(part + ".")}
    if not own:
        tops = ", ".join(sorted({name.partition(".")[0] for name in opened})) or "no tensors"
        raise ConfigError(f"{path} has no {part!r}; it holds {tops}: expected {{'encoder': ..., 'predictor': ...}}")
    return _changed(
        Weights(path, own), lambda name, tensor: (name.replace("module.", "").replace("backbone.", ""), tensor)
    )


@functools.lru_cache(maxsize=1)
def _opened(path: Path, _modified: int) -> Mapping[str, Entry]:
    """All tensors of a .pt, mapped into memory. Encoder and predictor are loaded one after the other."""
    try:
        return Weights.open(path).entries
    except ConfigError as error:
        if isinstance(error.__cause__, pickle.UnpicklingError):
            raise ConfigError(
                f"{path} holds more than tensors and plain values ({_first_line(error.__cause__)}), and code of a "
                "checkpoint is not run: save it again as {'encoder': state_dict, 'predictor': state_dict}"
            ) from error
        raise


def _first_line(error: Exception) -> str:
    """What weights_only=True objected to, without its advice to turn it off."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if "Unsupported" in line or "GLOBAL" in line), lines[0] if lines else "")[:200]
