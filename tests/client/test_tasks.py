"""Methods of tasks without a model: what they send, what they make of a safetensors body, and what of another one."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from mstar.client import Client, StreamBroken

RESULT: dict[str, Any] = {
    "id": "1", "model": "m", "task": "t", "finish_reason": "stop", "seed": 3, "usage": {}, "timings": {},
    "counters": {}, "outputs": [
        {"type": "tensor", "name": "a", "dtype": "float32", "shape": [2, 3]},
        {"type": "tensor", "name": "b", "dtype": "bfloat16", "shape": [2]},
        {"type": "tensor", "name": "task", "dtype": "int64", "shape": []},
    ],
}  # fmt: skip
TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2).bfloat16(), "task": torch.tensor(7)}


def packed(result: dict[str, Any] | None = None) -> bytes:
    return safetensors.torch.save(TENSORS, metadata={"result": json.dumps(result or RESULT)})


def test_a_body_of_safetensors_is_a_result(canned: Any, answer: Any) -> None:
    canned.answers = [answer(packed()), answer(packed())]
    with Client(canned.url) as client:
        result, in_torch = client.run_task("t"), client.run_task("t", as_torch=True)
    np.testing.assert_array_equal(result.a, TENSORS["a"].numpy())
    assert result.a.flags.writeable and isinstance(result["b"], torch.Tensor)  # which NumPy does not have
    assert result.task == "t" and result["task"] == 7  # what a result has besides comes first
    assert all(isinstance(value, torch.Tensor) for value in in_torch.tensors.values())
    assert torch.equal(in_torch.a, TENSORS["a"]) and torch.equal(in_torch.b, TENSORS["b"])
    assert [asked.headers["accept"] for asked in canned.asked] == ["application/octet-stream"] * 2


def test_keywords_become_fields_inputs_and_parameters(canned: Any, answer: Any) -> None:
    canned.answers = [answer(packed())]
    with Client(canned.url) as client:
        client.run_task(
            "t", video="https://example.org/clip.mp4", num_frames=4, frames=None, session="s", seed=5, model=None,
            timeout_s=2, tensors={"state": [0, 1], "mask": np.array([1]), "target_mask": [3], "goal": None}, cost="l2",
        )  # fmt: skip
    body = canned.asked[0].body
    inputs = body.pop("inputs")
    assert body == {
        "task": "t", "outputs": ["tensors"], "session": "s", "seed": 5, "timeout_s": 2, "params": {"cost": "l2"},
    }  # fmt: skip
    assert inputs[0] == {"type": "video", "data": "https://example.org/clip.mp4", "num_frames": 4}
    tensors = {part["name"]: part["tensor"] for part in inputs[1:]}
    assert {name: (value["dtype"], value["shape"]) for name, value in tensors.items()} == {
        "state": ("float32", [2]), "mask": ("int64", [1]), "target_mask": ("int64", [1]),
    }  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        b"", b"\0" * 40, b'{"id": "1"}', packed()[:60], packed()[:-3],
        packed(RESULT | {"outputs": [{"type": "tensor", "name": "c", "dtype": "float32", "shape": [1]}]}),
        packed(RESULT | {"outputs": [{"type": "tensor", "name": "a", "dtype": "float32", "shape": [7]}]}),
    ],
    ids=["nothing", "zeros", "json", "cut", "short", "missing", "shape"],
)  # fmt: skip
def test_another_body_is_an_answer_that_broke(canned: Any, answer: Any, body: bytes) -> None:
    canned.answers = [answer(body)]
    with Client(canned.url) as client, pytest.raises(StreamBroken, match="safetensors"):
        client.run_task("t")
