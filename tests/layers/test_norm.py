from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from mstar.layers.norm import RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_published_norm_to_the_bit(dtype: torch.dtype) -> None:
    norm, reference = RMSNorm(48, eps=1e-5), LlamaRMSNorm(48, eps=1e-5)
    with torch.no_grad():
        reference.weight.copy_(torch.rand(48) + 0.5)
        norm.weight.copy_(reference.weight)
    norm, reference = norm.to(dtype), reference.to(dtype)
    x = torch.randn(5, 3, 48).to(dtype) * 10
    assert norm(x).dtype == dtype
    assert torch.equal(norm(x), reference(x))
