"""`--quantization int4` as workers apply it: what is served by four bits, what the log says, what is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import served
import torch

from mstar.errors import ConfigError
from mstar.layers import quantized
from mstar.server.convert import convert
from mstar.server.native import GenerateRequest
from mstar.types import TextChunk


def text_of(engine: served.Served, text: str) -> str:
    request = {"task": "generate", "inputs": [{"type": "text", "text": text}], "params": {"max_tokens": 6}, "seed": 1}

    async def ask() -> str:
        handle = await engine.engine.submit(convert(request, GenerateRequest))
        return "".join([chunk.text async for chunk in handle if isinstance(chunk, TextChunk)])

    answer: str = engine.run(ask())
    return answer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_request_is_served_by_weights_of_four_bits(
    dtype: str, batch_invariant: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if quantized.kernel(torch.float32) is None:
        pytest.skip("no C++ compiler")
    settings: dict[str, Any] = {"plugin": "echo", "dtype": dtype, "batch_invariant": batch_invariant}
    with caplog.at_level(logging.INFO, logger="mstar.worker"):
        engine = served.Served(quantization="int4", **settings)
    try:
        assert text_of(engine, "hello") == text_of(engine, "hello")
        modules = engine.worker.modules
        words = [name for name in modules["lm"].node.state_dict() if name.endswith(".words")]
        quantised = modules["lm"].weights_bytes
    finally:
        engine.close()
    assert words
    messages = [record.getMessage() for record in caplog.records]
    assert sum(message.startswith(f"lm: {len(words)} linear layers are quantised") for message in messages) == 1
    assert any("no linear layer is quantised" in message for message in messages)
    plain = served.Served(**settings)
    try:
        assert quantised < plain.worker.modules["lm"].weights_bytes
    finally:
        plain.close()


def test_a_dtype_without_a_kernel_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="--quantization int4 cannot be had with dtype float16"):
        served.Served(plugin="echo", dtype="float16", quantization="int4")
