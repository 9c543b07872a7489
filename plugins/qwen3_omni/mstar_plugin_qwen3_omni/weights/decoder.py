"""Names of a decoder's tensors in checkpoints -> in `modeling.decoder.Decoder`."""

from __future__ import annotations

import re
from collections.abc import Callable

Rename = Callable[[str], str | None]

_KIND = r"\.(weight|bias)"
_PROJECTIONS = {"gate_proj": 0, "up_proj": 1}


def decoder_rename(*, prefix: str, to: str) -> Rename:
    """A function for `load_into`, which gives None for names that are not the decoder's.

    Args:
        prefix: what the checkpoint puts before "layers." and "norm.", with a dot at the end.
        to: where the `Decoder` sits in the module that is loaded, likewise.
    """
    layer, home = re.escape(prefix) + r"layers\.(\d+)\.", to + r"layers.\1."
    rules = {
        re.escape(prefix) + r"norm\.weight": to + "norm.weight",
        layer + r"input_layernorm\.weight": home + "attention_norm.weight",
        layer + r"post_attention_layernorm\.weight": home + "mlp_norm.weight",
        layer + r"self_attn\.([qk]_norm)\.weight": home + r"\2.weight",
        layer + r"self_attn\.o_proj" + _KIND: home + r"output.\2",
        layer + r"mlp\.gate\.weight": home + "mlp.router.weight",
        layer + r"mlp\.shared_expert_gate\.weight": home + "mlp.shared_gate.weight",
        layer + r"mlp\.down_proj\.weight": home + "mlp.down.weight",
        layer + r"mlp\.shared_expert\.down_proj\.weight": home + "mlp.shared.down.weight",
        layer + r"mlp\.experts\.(\d+)\.down_proj\.weight": home + r"mlp.down.weight[\2]",
    }
    for part, name in enumerate(("q_proj", "k_proj", "v_proj")):
        rules[layer + rf"self_attn\.{name}" + _KIND] = home + rf"qkv.\2[{part}]"
    for name, part in _PROJECTIONS.items():
        rules[layer + rf"mlp\.{name}\.weight"] = home + f"mlp.gate_up.weight[{part}]"
        rules[layer + rf"mlp\.shared_expert\.{name}\.weight"] = home + f"mlp.shared.gate_up.weight[{part}]"
    compiled = [(re.compile(pattern), template) for pattern, template in rules.items()]
    expert = re.compile(layer + r"mlp\.experts\.(\d+)\.(gate_proj|up_proj)\.weight")

    def rename(name: str) -> str | None:
        if found := expert.fullmatch(name):
            number, index, projection = found.groups()
            return f"{to}layers.{number}.mlp.gate_up.weight[{2 * int(index) + _PROJECTIONS[projection]}]"
        return next(
            (found.expand(template) for pattern, template in compiled if (found := pattern.fullmatch(name))), None
        )

    return rename
