"""Fills the networks from a checkpoint, strictly: a tensor that is missing, unexpected or misshapen is an error.

`ema.safetensors`, whole or in shards, holds everything but the autoencoder. Each loader takes its share and leaves the
others' out; a name that is nobody's share is unexpected.
"""

from __future__ import annotations

import torch

from mstar.layers.weights import Weights, load_into
from mstar.plugin.spec import Checkpoint
from mstar_plugin_bagel.config import weights_file
from mstar_plugin_bagel.modeling.flow import FlowHead
from mstar_plugin_bagel.modeling.llm import MoT
from mstar_plugin_bagel.modeling.vae import Autoencoder
from mstar_plugin_bagel.modeling.vit import VisionEncoder

_KIND = r"\.(weight|bias)"
_SHARES = {
    "llm": r"language_model\..*",
    "vit": r"(vit_model|connector|vit_pos_embed)\..*",
    "flow": r"(time_embedder|vae2llm|llm2vae|latent_pos_embed)\..*",
}


def _expert(suffix: str, ours: str) -> dict[str, str]:
    """Rules for one expert, whose modules' names end in `suffix`."""
    layer, home = r"language_model\.model\.layers\.(\d+)\.", rf"layers.\1.{ours}."
    rules = {
        rf"language_model\.model\.norm{suffix}\.weight": f"norm.{ours}.weight",
        layer + rf"input_layernorm{suffix}\.weight": home + "attention_norm.weight",
        layer + rf"post_attention_layernorm{suffix}\.weight": home + "mlp_norm.weight",
        layer + rf"self_attn\.([qk]_norm){suffix}\.weight": home + r"\2.weight",
        layer + rf"self_attn\.o_proj{suffix}" + _KIND: home + r"output.\2",
        layer + rf"mlp{suffix}\.down_proj" + _KIND: home + r"down.\2",
    }
    for part, name in enumerate(("q_proj", "k_proj", "v_proj")):
        rules[layer + rf"self_attn\.{name}{suffix}" + _KIND] = home + rf"qkv.\2[{part}]"
    for part, name in enumerate(("gate_proj", "up_proj")):
        rules[layer + rf"mlp{suffix}\.{name}" + _KIND] = home + rf"gate_up.\2[{part}]"
    return rules


LLM = {
    r"language_model\.model\.embed_tokens\.weight": "embedding.weight",
    r"language_model\.lm_head\.weight": "head.weight",
    **_expert("", "und"),
    **_expert("_moe_gen", "gen"),
}
_VIT, _LAYER = r"vit_model\.vision_model\.", r"vit_model\.vision_model\.encoder\.layers\.(\d+)\."
VIT = {
    _VIT + r"embeddings\.patch_embedding" + _KIND: r"patch.\1",
    _VIT + r"embeddings\.position_embedding\.weight": "position.weight",
    _VIT + r"post_layernorm" + _KIND: r"norm.\1",
    _LAYER + r"layer_norm([12])" + _KIND: r"blocks.\1.norm\2.\3",
    _LAYER + r"mlp\.(fc[12])" + _KIND: r"blocks.\1.\2.\3",
    _LAYER + r"self_attn\.q_proj" + _KIND: r"blocks.\1.qkv.\2[0]",
    _LAYER + r"self_attn\.k_proj" + _KIND: r"blocks.\1.qkv.\2[1]",
    _LAYER + r"self_attn\.v_proj" + _KIND: r"blocks.\1.qkv.\2[2]",
    _LAYER + r"self_attn\.out_proj" + _KIND: r"blocks.\1.proj.\2",
    r"connector\.(fc[12])" + _KIND: r"\1.\2",
    r"vit_pos_embed\.pos_embed": "places.weight",
}
FLOW = {
    r"time_embedder\.mlp\.0" + _KIND: r"time1.\1",
    r"time_embedder\.mlp\.2" + _KIND: r"time2.\1",
    r"vae2llm" + _KIND: r"enter.\1",
    r"llm2vae" + _KIND: r"leave.\1",
    r"latent_pos_embed\.pos_embed": "places.weight",
}


def load_llm(module: MoT, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
    """Fill the decoder. Raises ConfigError that lists what does not fit."""
    _load(module, checkpoint, "llm", LLM, dtype=dtype, device=device)


def load_vit(module: VisionEncoder, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
    """Fill encoder, connector and its positions. Raises ConfigError that lists what does not fit."""
    _load(module, checkpoint, "vit", VIT, dtype=dtype, device=device)


def load_flow(module: FlowHead, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
    """Fill what is around the decoder when it draws. Raises ConfigError that lists what does not fit."""
    _load(module, checkpoint, "flow", FLOW, dtype=dtype, device=device)


def load_vae(module: Autoencoder, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
    """Fill the autoencoder from its own file. Raises ConfigError that lists what does not fit."""
    load_into(module, Weights.open(weights_file(checkpoint.folder, "ae")), dtype=dtype, device=device)


def _load(
    module: torch.nn.Module,
    checkpoint: Checkpoint,
    share: str,
    rules: dict[str, str],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    weights = Weights.open(weights_file(checkpoint.folder, "ema"))
    others = [pattern for name, pattern in _SHARES.items() if name != share]
    load_into(module, weights, rename=rules, ignore=others, dtype=dtype, device=device)
