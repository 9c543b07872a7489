from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mstar.errors import RequestError
from mstar.media.audio import encode_wav
from mstar.plugin.spec import ModelSpec
from mstar.server.convert import convert
from mstar.server.native import GenerateRequest, parse_json, read_request
from mstar.types import AudioPart, Request, TensorPart, TextPart


def read(body: dict[str, Any], spec: ModelSpec, *, base: Path | None = None) -> Request:
    wire = convert(body, GenerateRequest)
    return read_request(wire, spec=spec, model_names=("tiny", "parrot"), request_id="r", seed=11, base=base)


def text(value: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"inputs": [{"type": "text", "text": value}], **fields}


def tensor(dtype: str, shape: list[int], data: bytes) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data": base64.b64encode(data).decode()}


def test_defaults_are_filled_in(parrot_spec: ModelSpec) -> None:
    request = read(text(), parrot_spec)
    assert request.task == "chat" and request.outputs == ("text",) and request.seed == 11 and request.model == "tiny"
    assert request.parts == (TextPart("hi"),) and request.params.temperature == 1.0


@pytest.mark.parametrize(
    ("fields", "task"),
    [({"outputs": ["audio"]}, "speech"), ({"outputs": ["tensor:said"]}, "chat"), ({"task": "speech"}, "speech")],
)
def test_the_task_follows_from_inputs_and_outputs(parrot_spec: ModelSpec, fields: Any, task: str) -> None:
    assert read(text(**fields), parrot_spec).task == task


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (text(task="sing"), "task", "known: chat, speech"),
        (text(outputs=["video"], task="chat"), "outputs.0", "known: text, tensors, tensor:said"),
        (text(outputs=["tensor:x"], task="chat"), "outputs.0", "tensor:said"),
        (text(outputs=["image"]), "outputs.0", "no task takes these inputs"),
        (text(colour=1), "colour", "known: model, task"),
        (text(params={"temprature": 1}), "params.temprature", "known: temperature"),
        (text(**{"k" * 100_000: 1}), "k" * 60, "... (100002 characters) is unknown; known: model"),
        (text(params={"k" * 100_000: 2**70}), "params." + "k" * 60, "fit 64 bits"),
        (text(params={"temperature": -1}), "params.temperature", "is -1: must be float >= 0"),
        (text(params={"temperature": True}), "params.temperature", "float, got bool"),
        (text(params={"temperature": math.nan}), "params.temperature", "must be finite"),
        (text(params={"temperature": math.inf}), "params.temperature", "must be finite"),
        (text(params={"max_tokens": 0}), "params.max_tokens", "is 0"),
        (text(params={"max_tokens": 2.5}), "params.max_tokens", "is 2.5"),
        (text(params={"max_tokens": 10**30}), "params.max_tokens", "fit 64 bits"),
        (text(params={"stop": [""]}), "params.stop", "empty"),
        (text(params={"stop": ""}), "params.stop", "empty"),
        (text(seed=-1), "seed", "is -1: must be int >= 0"),
        (text(seed=2**63), "seed", "fit 64 bits"),
        (text(seed=True), "seed", "int"),
        (text(timeout_s=0), "timeout_s", "is 0: must be float > 0"),
        (text(timeout_s=-1.5), "timeout_s", "> 0"),
        (text(timeout_s=86401), "timeout_s", "is 86401: must be float <= 86400"),
        (text(timeout_s=float("nan")), "timeout_s", "finite"),
        (text(timeout_s="5"), "timeout_s", "must be float"),
        (text(stream="yes"), "stream", "bool"),
        (text(model="gpt"), "model", "does not exist; served: tiny, parrot"),
        ({}, "inputs", "exactly one"),
        (text(messages=[{"role": "user", "content": "x"}]), "inputs", "exactly one"),
        ({"inputs": []}, "inputs", "empty"),
        ({"inputs": [{"type": "smell"}]}, "inputs.0.type",
         "is 'smell': must be one of text, token_ids, audio, image, video, tensor"),
        ({"inputs": [{"type": "text"}]}, "inputs.0.text", "missing"),
        (text("a\udc80"), "inputs.0.text", "valid Unicode"),
        (text(params={"stop": ["\ud800"]}), "params.stop.0", "valid Unicode"),
        (text(task="speech", session="s"), "session", "keeps no sessions"),
        ({"inputs": [{"type": "text", "text": 3}]}, "inputs.0.text", "is 3: must be str"),
        ({"inputs": [{"type": "text", "text": "a", "x": 1}]}, "inputs.0.x", "is unknown; known: text"),
        ({"inputs": [{"type": "video", "dat": "a"}]}, "inputs.0.dat", "did you mean data? known: data, frames"),
        (text(params={"temprature": 1}), "params.temprature", "is unknown; did you mean temperature? known: "),
        ({"inputs": [{"type": "token_ids", "ids": [1, -1]}]}, "inputs.0.ids.1", "is -1"),
        ({"task": "speech", "inputs": [{"type": "token_ids", "ids": [1]}]}, "inputs.0", "no token_ids part; known"),
        ({"messages": [{"role": "user", "content": "x"}], "task": "speech"}, "messages", "takes 'inputs'"),
        ({"inputs": [{"type": "tensor", "name": "x", "tensor": {}}]}, "inputs.0.name", "known: bias"),
        ({"inputs": [{"type": "audio", "data": "http://host/a.wav"}]}, "inputs.0.data", "data URI"),
    ],
)  # fmt: skip
def test_mistakes_name_the_parameter_and_what_is_known(
    parrot_spec: ModelSpec, body: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        read(body, parrot_spec)
    assert caught.value.status == (404 if param == "model" else 400)
    assert caught.value.param == param and words in caught.value.message
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize("body", [b"", b"{", b"nul", b"[" * 5000, b'{"a": NaN}', b"\xff", b'{"a": 1e999}'])
def test_what_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="not valid JSON"):
        parse_json(body)


def test_a_body_that_is_no_object_is_refused(parrot_spec: ModelSpec) -> None:
    for body in ([], "x", 1, None):
        with pytest.raises(RequestError, match="the request"):
            read(body, parrot_spec)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([[1.5, -2.0], [0.25, 3.0]]),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.tensor([1.5], dtype=torch.float16),
        torch.tensor([[1], [-(2**40)]]),
        torch.tensor([True, False]),
        torch.tensor(7, dtype=torch.int16),
    ],
    ids=lambda v: str(v.dtype),
)
def test_tensors_are_read_little_endian_in_c_order(parrot_spec: ModelSpec, value: torch.Tensor) -> None:
    data = value.reshape(-1).view(torch.uint8).numpy().tobytes()
    wire = tensor(str(value.dtype).removeprefix("torch."), list(value.shape), data)
    (part,) = read({"inputs": [{"type": "tensor", "name": "bias", "tensor": wire}]}, parrot_spec).parts
    assert isinstance(part, TensorPart) and part.tensor.dtype == value.dtype and torch.equal(part.tensor, value)


@pytest.mark.parametrize(
    ("wire", "words"),
    [
        (tensor("float32", [3], b"\0" * 8), r"has 8 bytes; float32 \[3\] needs 12"),
        (tensor("float64", [1], b"\0" * 8), "known: float32"),
        (tensor("float32", [1], np.float32("nan").tobytes()), "NaN"),
        (tensor("bool", [1], b"\2"), "0 and 1"),
        ({"dtype": "uint8", "shape": [1], "data": "!!"}, "base64"),
        ({"dtype": "uint8"}, "needs"),
        ({"dtype": "uint8", "shape": [-1], "data": ""}, "is -1"),
        ({"file": "x.safetensors", "name": "k"}, "'mstar run' only"),
    ],
)
def test_bad_tensors_are_refused(parrot_spec: ModelSpec, wire: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read({"inputs": [{"type": "tensor", "name": "bias", "tensor": wire}]}, parrot_spec)


def test_offline_requests_may_name_files(parrot_spec: ModelSpec, tmp_path: Path) -> None:
    save_file({"k": torch.arange(3)}, tmp_path / "x.safetensors")
    (tmp_path / "a.wav").write_bytes(encode_wav(np.zeros(80, np.float32), sample_rate=8000))
    reference = {"file": "x.safetensors", "name": "k"}
    inputs = [{"type": "tensor", "name": "bias", "tensor": reference}, {"type": "audio", "data": "a.wav"}]
    bias, sound = read({"inputs": inputs}, parrot_spec, base=tmp_path).parts
    assert isinstance(bias, TensorPart) and bias.tensor.tolist() == [0, 1, 2]
    assert isinstance(sound, AudioPart) and sound.samples.shape == (1, 80) and sound.sample_rate == 8000
    for wrong, words in [
        ({"file": "x.safetensors", "name": "q"}, "it has k"),
        ({"file": "no", "name": "k"}, "no file"),
    ]:
        with pytest.raises(RequestError, match=words):
            read({"inputs": [{"type": "tensor", "name": "bias", "tensor": wrong}]}, parrot_spec, base=tmp_path)


def test_messages_hold_text_or_parts(parrot_spec: ModelSpec) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    request = read({"messages": messages}, parrot_spec)
    assert [(m.role, m.parts) for m in request.messages] == [
        ("system", (TextPart("be brief"),)),
        ("user", (TextPart("hi"),)),
    ]
