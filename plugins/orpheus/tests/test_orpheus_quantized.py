"""Speech by weights of four bits: served in either dtype, in any batch, eager and compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mstar.layers import quantized, shims

SETTINGS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "quantization": "int4"}


@pytest.fixture(autouse=True)
def _kernel() -> None:
    if quantized.kernel(torch.float32) is None:
        pytest.skip("no C++ compiler")


def requests(speech: Any) -> list[dict[str, Any]]:
    return [speech(f"Say {number}.", seed=number, max_tokens=28, ignore_eos=True, top_k=20) for number in range(3)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_requests_together_say_what_each_says_alone(serving: Any, tiny_folder: Path, speech: Any, dtype: str) -> None:
    with serving(tiny_folder, dtype=dtype, batch_invariant=True, **SETTINGS) as served:
        alone = [served.ask(request) for request in requests(speech)]
        together = served.ask_all(requests(speech))
        assert all(len(answer.samples) for answer in alone)
        assert [answer.ids for answer in alone] == [answer.ids for answer in together]
        served.assert_clean()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_code_calls_the_same_kernel(serving: Any, tiny_folder: Path, speech: Any, dtype: str) -> None:
    if not shims.load():
        pytest.skip("no C++ compiler")
    with serving(tiny_folder, dtype=dtype, **SETTINGS) as eager:
        right = [eager.ask(request).ids for request in requests(speech)]
    with serving(tiny_folder, dtype=dtype, compile=True, **SETTINGS) as served:
        assert set(served.worker.compilation.compiled) == {"lm.decode"}
        answers = [answer.ids for answer in served.ask_all(requests(speech))]
        assert list(map(len, answers)) == list(map(len, right))
        assert answers == right or dtype == "bfloat16"  # there, compiled code rounds otherwise between the kernels
        served.assert_clean()
