from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from mstar.errors import ConfigError
from mstar.layers.rotary import RotaryEmbedding, apply_rotary, rotate

SCALINGS = [
    {"rope_type": "default", "rope_theta": 10_000.0},
    {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_rotation_equals_that_of_transformers(scaling: dict[str, float]) -> None:
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=dict(scaling))
    positions = torch.tensor([0, 1, 5, 127, 128, 4_000, 100_000])
    q, k = torch.randn(7, 4, 64), torch.randn(7, 2, 64)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    rotary = RotaryEmbedding(64, theta=scaling["rope_theta"], scaling=scaling)
    turned = apply_rotary(q, k, *rotary(positions))
    for ours, theirs in zip(turned, expected, strict=True):
        assert torch.equal(ours.transpose(0, 1)[None], theirs)


def test_positions_may_be_fractions() -> None:
    rotary = RotaryEmbedding(8, theta=100.0)
    cos, sin = rotary(torch.tensor([1.5]))
    torch.testing.assert_close(cos[0, 0, :4], (1.5 * rotary.frequencies).cos())
    torch.testing.assert_close(sin[0, 0, 4:], (1.5 * rotary.frequencies).sin())


def test_dimensions_beyond_the_rotary_ones_are_left_alone() -> None:
    rotary = RotaryEmbedding(12, theta=100.0, rotary_dim=8)
    x = torch.randn(3, 2, 12)
    cos, sin = rotary(torch.arange(3))
    turned = rotate(x, cos, sin)
    assert torch.equal(turned[..., 8:], x[..., 8:])
    assert torch.equal(turned[..., :8], rotate(x[..., :8], cos, sin))


def test_frequencies_survive_casts_and_the_meta_device() -> None:
    expected = RotaryEmbedding(16, theta=100.0).frequencies
    with torch.device("meta"):
        rotary = RotaryEmbedding(16, theta=100.0)
    assert rotary.frequencies.is_meta
    rotary = rotary.to_empty(device="cpu").to(torch.bfloat16)
    assert rotary.frequencies.dtype == torch.float32
    assert torch.equal(rotary.frequencies, expected)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [({"type": "yarn"}, "'yarn' is not supported; known: 'default'"), ({"rope_type": "linear"}, "lacks 'factor'")],
)
def test_scalings_it_does_not_know_are_refused(scaling: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RotaryEmbedding(16, theta=1e4, scaling=scaling)
