from __future__ import annotations

import numpy as np
import pytest
import torch

from mstar.ipc.messages import Begin, Emit, Open, Ready, WalkDone
from mstar.ipc.tensors import decode, encode
from mstar.types import SamplingParams


def roundtrip(value: object) -> object:
    return decode(encode(Begin(request_id="r", walks={"main": "w"}, inputs={"x": value}))).inputs["x"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).to(torch.bfloat16),
        torch.randn(2, 2).half(),
        torch.tensor([True, False]),
        torch.arange(5),
        torch.tensor(7),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.empty(0, 4),
        torch.arange(12).reshape(3, 4).t(),
        torch.arange(12, dtype=torch.int16)[::3],
        torch.ones(2, requires_grad=True),
    ],
    ids=lambda t: f"{t.dtype}-{tuple(t.shape)}",
)
def test_tensor_crosses_unchanged(tensor: torch.Tensor) -> None:
    got = roundtrip(tensor)
    assert got.dtype == tensor.dtype and got.shape == tensor.shape
    assert torch.equal(got, tensor.detach())
    got.clone().zero_()  # it owns writable memory


def test_nested_values_cross_unchanged() -> None:
    value = {"items": [{"ids": torch.arange(3), "n": 4}, None, "text"], "scale": 0.5}
    got = roundtrip(value)
    assert torch.equal(got["items"][0]["ids"], torch.arange(3))
    assert got["items"][1:] == [None, "text"] and got["scale"] == 0.5


@pytest.mark.parametrize("value", [np.int64(3), np.float32(3), np.float64(3), np.zeros(2), object()])
def test_other_objects_are_refused_by_name(value: object) -> None:
    with pytest.raises(TypeError, match=f"{type(value).__name__} cannot cross"):
        roundtrip(value)


def test_every_kind_of_message_keeps_its_type() -> None:
    messages = [
        Open(
            request_id="r", task="t", seed=2**63 - 1, arrival=1.5, params={"a": None}, fields={"n": 2},
            samplers={"main": SamplingParams(temperature=0.0)}, sampler_prompts={"main": [1, 2]},
            content_keys={"ids": [(0, 3, b"key")]}, outputs=("text",),
        ),
        Emit(request_id="r", name="id", path=(0, 2), value=3),
        WalkDone(request_id="r", lane="main", walk="w", outputs={}, reasons={"": "stop"}, counters={}, counts={}),
        Ready(plan=[("lm", 1, 2, 3)], max_model_len=5),
    ]  # fmt: skip
    assert [decode(encode(message)) for message in messages] == messages
