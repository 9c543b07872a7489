from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from mstar.errors import ConfigError
from mstar.layers.decoder import Decoder, DecoderConfig, decoder_rename
from mstar.layers.linear import set_batch_invariant
from mstar.layers.weights import Weights, load_into

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 131,
    "max_position_embeddings": 512,
}
LONG = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


class GrowingCache:
    """Causal attention of one sequence over everything it was given before."""

    def __init__(self) -> None:
        self.past: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, window: int | None = None
    ) -> Tensor:
        if layer in self.past:
            k, v = torch.cat((self.past[layer][0], k)), torch.cat((self.past[layer][1], v))
        self.past[layer] = (k, v)
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        heads = (part.transpose(0, 1) for part in (q, k, v))
        return functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True).transpose(0, 1)


def saved(folder: Path, kind: str, **settings: object) -> nn.Module:
    torch.manual_seed(3)
    configs = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    config, model = configs[kind]
    reference = model(config(**SIZES, attn_implementation="eager", **settings)).eval()
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=0.3)
    reference.save_pretrained(folder)
    return reference


def loaded(folder: Path, config: DecoderConfig, *, dtype: torch.dtype = torch.float32) -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(config)
    load_into(decoder, Weights.open(folder), rename=decoder_rename(), dtype=dtype)
    return decoder


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"rope_parameters": LONG, "tie_word_embeddings": True}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3}),
        ("qwen3", {}),
    ],
)
def test_logits_equal_those_of_transformers(tmp_path: Path, kind: str, settings: dict[str, object]) -> None:
    reference = saved(tmp_path, kind, **settings)
    decoder = loaded(tmp_path, DecoderConfig.read(reference.config.to_dict(), qk_norm=kind == "qwen3"))
    ids = torch.randint(131, (70,), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        expected = reference(ids[None], output_hidden_states=True)
        cache = GrowingCache()
        chunks = [decoder(decoder.embed(part), torch.arange(70)[start : start + len(part)], cache)
                  for start, part in ((0, ids[:33]), (33, ids[33:69]), (69, ids[69:]))]  # fmt: skip
        hidden = torch.cat(chunks)
        torch.testing.assert_close(hidden, expected.hidden_states[-1][0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(decoder.logits(hidden), expected.logits[0], atol=1e-4, rtol=1e-5)


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    reference = saved(tmp_path, "llama")
    decoder = loaded(tmp_path, DecoderConfig.read(reference.config.to_dict()), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.bfloat16}
    assert decoder.rotary.frequencies.dtype == torch.float32
    ids = torch.arange(20)
    with torch.inference_mode():
        hidden = decoder(decoder.embed(ids), torch.arange(20), GrowingCache())
        expected = reference.to(torch.bfloat16)(ids[None]).logits[0]
        torch.testing.assert_close(decoder.logits(hidden), expected, atol=0.6, rtol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_batch_invariant_decoder_do_not_depend_on_their_number(tmp_path: Path, dtype: torch.dtype) -> None:
    reference = saved(tmp_path, "llama")
    decoder = loaded(tmp_path, DecoderConfig.read(reference.config.to_dict()), dtype=dtype)
    set_batch_invariant(decoder)

    class Alone:
        """Every token attends to itself."""

        def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

    ids = torch.randint(131, (112,), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        whole = decoder.logits(decoder(decoder.embed(ids), torch.arange(112), Alone()))
        for rows in (16, 32, 48, 96):
            part = decoder.logits(decoder(decoder.embed(ids[:rows]), torch.arange(rows), Alone()))
            assert torch.equal(part, whole[:rows])


def test_configurations_it_cannot_serve_are_refused() -> None:
    with pytest.raises(ConfigError, match="hidden_act is 'gelu'"):
        DecoderConfig.read({"hidden_act": "gelu"})
    with pytest.raises(ConfigError, match="lacks 'num_attention_heads'"):
        DecoderConfig.read({})
    with pytest.raises(ConfigError, match="'yarn' is not supported; known: 'default', 'linear'"):
        Decoder(DecoderConfig.read(SIZES | {"rope_scaling": {"rope_type": "yarn"}}))
