"""What speaks: the talker, the code predictor and the codec's decoder."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import nn

from mstar.layers.decoder import decoder_rename as plain_decoder
from mstar.layers.weights import Rename, Weights, load_into
from mstar.plugin.spec import Checkpoint
from mstar_plugin_qwen3_omni.modeling.code2wav import Code2Wav
from mstar_plugin_qwen3_omni.modeling.predictor import Predictor
from mstar_plugin_qwen3_omni.modeling.talker import Talker
from mstar_plugin_qwen3_omni.weights.decoder import decoder_rename

_KIND = r"\.(weight|bias)"
TALKER = {
    r"thinker\.model\.embed_tokens\.weight": "text_embedding.weight",
    r"talker\.model\.codec_embedding\.weight": "codec_embedding.weight",
    r"talker\.codec_head\.weight": "codec_head.weight",
    r"talker\.(text|hidden)_projection\.linear_(fc[12])" + _KIND: r"\1_projection.\2.\3",
}
PREDICTOR = {
    **plain_decoder(prefix="talker.code_predictor.model."),
    r"talker\.code_predictor\.model\.codec_embedding\.(\d+)\.weight": r"embeddings.weight[\1]",
    r"talker\.code_predictor\.lm_head\.(\d+)\.weight": r"heads.weight[\1]",
}
_LAYER = r"code2wav\.pre_transformer\.layers\.(\d+)\."
_BLOCK, _STAGE = r"code2wav\.decoder\.(\d+)\.block\.(\d+)\.", r"stages.\1.\2."
VOCODER = {
    r"code2wav\.code_embedding\.weight": "embedding.weight",
    r"code2wav\.pre_transformer\.norm\.weight": "norm.weight",
    _LAYER + r"input_layernorm\.weight": r"layers.\1.attention_norm.weight",
    _LAYER + r"post_attention_layernorm\.weight": r"layers.\1.mlp_norm.weight",
    _LAYER + r"self_attn\.q_proj" + _KIND: r"layers.\1.qkv.\2[0]",
    _LAYER + r"self_attn\.k_proj" + _KIND: r"layers.\1.qkv.\2[1]",
    _LAYER + r"self_attn\.v_proj" + _KIND: r"layers.\1.qkv.\2[2]",
    _LAYER + r"self_attn\.o_proj" + _KIND: r"layers.\1.output.\2",
    _LAYER + r"mlp\.gate_proj\.weight": r"layers.\1.gate_up.weight[0]",
    _LAYER + r"mlp\.up_proj\.weight": r"layers.\1.gate_up.weight[1]",
    _LAYER + r"mlp\.down_proj\.weight": r"layers.\1.down.weight",
    _LAYER + r"self_attn_layer_scale\.scale": r"layers.\1.attention_scale",
    _LAYER + r"mlp_layer_scale\.scale": r"layers.\1.mlp_scale",
    r"code2wav\.upsample\.(\d+)\.0\.conv" + _KIND: r"upsample.\1.0.\2",
    r"code2wav\.upsample\.(\d+)\.1\.dwconv\.conv" + _KIND: r"upsample.\1.1.dwconv.\2",
    r"code2wav\.upsample\.(\d+)\.1\.(norm|pwconv[12])" + _KIND: r"upsample.\1.1.\2.\3",
    r"code2wav\.upsample\.(\d+)\.1\.gamma": r"upsample.\1.1.gamma",
    r"code2wav\.decoder\.(\d+)\.conv" + _KIND: r"stages.\1.\2",
    r"code2wav\.decoder\.(\d+)\.(alpha|beta)": r"stages.\1.\2",
    _BLOCK + r"conv" + _KIND: _STAGE + r"\3",
    _BLOCK + r"(alpha|beta)": _STAGE + r"\3",
    _BLOCK + r"(act[12])\.(alpha|beta)": _STAGE + r"\3.\4",
    _BLOCK + r"(conv[12])\.conv" + _KIND: _STAGE + r"\3.\4",
}


def load_talker(module: Talker, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
    """Fill the talker, and its copy of the thinker's embedding. Raises ConfigError that lists what does not fit."""
    own, layers = _rules(TALKER), decoder_rename(prefix="talker.model.", to="decoder.")
    mine = r"thinker\.model\.embed_tokens\.weight|talker\.(?!code_predictor\.).*"
    _load(module, checkpoint, mine, lambda name: own(name) or layers(name), dtype=dtype, device=device)


def load_predictor(module: Predictor, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
    """Fill the code predictor. Raises ConfigError that lists what does not fit."""
    _load(module, checkpoint, r"talker\.code_predictor\..*", PREDICTOR, dtype=dtype, device=device)


def load_vocoder(module: Code2Wav, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
    """Fill the codec's decoder. Raises ConfigError that lists what does not fit."""
    _load(module, checkpoint, r"code2wav\..*", VOCODER, dtype=dtype, device=device)


def _load(
    module: nn.Module,
    checkpoint: Checkpoint,
    mine: str,
    rename: Rename,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    others = rf"(?!(?:{mine})$)(thinker|talker|code2wav)\..*"
    load_into(module, Weights.open(checkpoint.folder), rename=rename, ignore=(others,), dtype=dtype, device=device)


def _rules(rules: Mapping[str, str]) -> Callable[[str], str | None]:
    compiled = [(re.compile(pattern), template) for pattern, template in rules.items()]

    def rename(name: str) -> str | None:
        matches = ((pattern.fullmatch(name), template) for pattern, template in compiled)
        return next((match.expand(template) for match, template in matches if match), None)

    return rename
