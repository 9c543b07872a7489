"""The thinker's shares of a checkpoint: its decoder with embedding and head, and its two encoders.

Each loader takes its share and leaves the others' out; a name that is nobody's share is unexpected.
"""

from __future__ import annotations

import torch
from torch import nn

from mstar.layers.weights import Entry, Rename, Weights, load_into
from mstar.plugin.spec import Checkpoint
from mstar_plugin_qwen3_omni.modeling.audio import AudioEncoder
from mstar_plugin_qwen3_omni.modeling.thinker import Thinker
from mstar_plugin_qwen3_omni.modeling.vision import VisionEncoder
from mstar_plugin_qwen3_omni.weights.decoder import decoder_rename

SHARES = {
    "decoder": r"thinker\.(model|lm_head)\..*",
    "audio": r"thinker\.audio_tower\..*",
    "vision": r"thinker\.visual\..*",
    "speech": r"(talker|code2wav)\..*",
}
_KIND = r"\.(weight|bias)"
_AUDIO, _AUDIO_LAYER = r"thinker\.audio_tower\.", r"thinker\.audio_tower\.layers\.(\d+)\."
AUDIO = {
    _AUDIO + r"conv2d([123])" + _KIND: r"conv\1.\2",
    _AUDIO + r"conv_out\.weight": "enter.weight",
    _AUDIO + r"ln_post" + _KIND: r"norm.\1",
    _AUDIO + r"proj([12])" + _KIND: r"fc\1.\2",
    _AUDIO_LAYER + r"self_attn_layer_norm" + _KIND: r"blocks.\1.attention_norm.\2",
    _AUDIO_LAYER + r"self_attn\.q_proj" + _KIND: r"blocks.\1.qkv.\2[0]",
    _AUDIO_LAYER + r"self_attn\.k_proj" + _KIND: r"blocks.\1.qkv.\2[1]",
    _AUDIO_LAYER + r"self_attn\.v_proj" + _KIND: r"blocks.\1.qkv.\2[2]",
    _AUDIO_LAYER + r"self_attn\.out_proj" + _KIND: r"blocks.\1.proj.\2",
    _AUDIO_LAYER + r"final_layer_norm" + _KIND: r"blocks.\1.mlp_norm.\2",
    _AUDIO_LAYER + r"(fc[12])" + _KIND: r"blocks.\1.\2.\3",
}
_VISION, _VISION_LAYER = r"thinker\.visual\.", r"thinker\.visual\.blocks\.(\d+)\."
_PATCH = "thinker.visual.patch_embed.proj.weight"
VISION = {
    _VISION + r"patch_embed\.proj" + _KIND: r"patch.\1",
    _VISION + r"pos_embed\.weight": "position.weight",
    _VISION_LAYER + r"(norm[12])" + _KIND: r"blocks.\1.\2.\3",
    _VISION_LAYER + r"attn\.(qkv|proj)" + _KIND: r"blocks.\1.\2.\3",
    _VISION_LAYER + r"mlp\.linear_(fc[12])" + _KIND: r"blocks.\1.\2.\3",
    _VISION + r"merger\.ln_q" + _KIND: r"merger.norm.\1",
    _VISION + r"merger\.mlp\.0" + _KIND: r"merger.fc1.\1",
    _VISION + r"merger\.mlp\.2" + _KIND: r"merger.fc2.\1",
    _VISION + r"merger_list\.(\d+)\.ln_q" + _KIND: r"tapped.\1.norm.\2",
    _VISION + r"merger_list\.(\d+)\.mlp\.0" + _KIND: r"tapped.\1.fc1.\2",
    _VISION + r"merger_list\.(\d+)\.mlp\.2" + _KIND: r"tapped.\1.fc2.\2",
}
_ENDS = {"thinker.model.embed_tokens.weight": "embedding.weight", "thinker.lm_head.weight": "head.weight"}


def load_thinker(module: Thinker, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
    """Fill decoder, embedding and head. Raises ConfigError that lists what does not fit."""
    layers = decoder_rename(prefix="thinker.model.", to="decoder.")
    _load(module, checkpoint, "decoder", lambda name: _ENDS.get(name) or layers(name), dtype=dtype, device=device)


def load_audio(module: AudioEncoder, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
    """Fill the audio encoder. Raises ConfigError that lists what does not fit."""
    _load(module, checkpoint, "audio", AUDIO, dtype=dtype, device=device)


def load_vision(module: VisionEncoder, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
    """Fill the vision encoder. Raises ConfigError that lists what does not fit."""
    _load(module, checkpoint, "vision", VISION, dtype=dtype, device=device)


def _load(
    module: nn.Module, checkpoint: Checkpoint, share: str, rename: Rename, *, dtype: torch.dtype, device: torch.device
) -> None:
    weights = Weights.open(checkpoint.folder)
    others = [pattern for name, pattern in SHARES.items() if name != share]
    if share == "vision" and (patch := weights.entries.get(_PATCH)) is not None:  # a convolution without overlap
        flat = Entry(patch.file, patch.tensor.flatten(1))
        weights = Weights(weights.source, {**weights.entries, _PATCH: flat})
    load_into(module, weights, rename=rename, ignore=others, dtype=dtype, device=device)
