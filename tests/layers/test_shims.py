"""What compiled code calls gives, to the bit, what eager methods get; called by its C interface, nothing compiled."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar.errors import ConfigError
from mstar.layers import kernels, shims
from mstar.layers.attention import KVBatch, build_plan, choose_backend
from mstar.layers.grouped import grouped_linear
from mstar.layers.linear import linear
from mstar.layers.quantized import linear_int4, pack
from mstar.layers.sampling import SamplingState, native, sample
from mstar.types import SamplingParams
from mstar_compile_cache.aoti import handles, tensors_of


@pytest.fixture(autouse=True)
def _loaded() -> None:
    if not shims.load():
        pytest.skip("no C++ compiler")


def call(name: str, *arguments: Any) -> Tensor | None:
    """The result of a shim; None if it refuses its operands."""
    library = kernels.library(shims.SOURCE, mode=ctypes.RTLD_GLOBAL)
    assert library is not None
    out = ctypes.c_void_p()
    if getattr(library, f"aoti_torch_cpu_{name}")(*map(as_c, arguments), ctypes.byref(out)):
        return None
    return tensors_of([out.value])[0]


def as_c(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(handles([argument])[0])
    return ctypes.c_double(argument) if isinstance(argument, float) else argument


def optional(tensor: Tensor) -> Any:
    return ctypes.byref(as_c(tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (5,), (17,), (2, 3)])
def test_a_linear_is_the_eager_one(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight, bias = torch.randn(*shape, 40).to(dtype), torch.randn(24, 40).to(dtype), torch.randn(24).to(dtype)
    plain, biased = call("linear", x, weight, None, 0), call("linear", x, weight, optional(bias), 0)
    assert plain is not None
    assert biased is not None
    assert torch.equal(plain, linear(x, weight))
    assert torch.equal(biased, linear(x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_grouped_product_is_the_eager_one(dtype: torch.dtype) -> None:
    x, weight, group = torch.randn(9, 40).to(dtype), torch.randn(3, 24, 40).to(dtype), torch.randint(0, 3, (9,))
    found = call("grouped_linear", x, weight, group)
    assert found is not None and torch.equal(found, grouped_linear(x, weight, group, invariant=True))
    for wrong in ((x[:8], weight, group), (x, weight[0], group), (x, weight, group.int()), (x.double(), weight, group)):
        assert call("grouped_linear", *wrong) is None


def test_operands_that_a_kernel_would_misread_are_refused() -> None:
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    assert call("linear", x.bfloat16(), weight, None, 0) is None
    assert call("linear", x.double(), weight.double(), None, 0) is None
    assert call("linear", torch.randn(8, 2).t(), weight, None, 0) is None
    assert call("linear", torch.randn(2, 7), weight, None, 0) is None
    q, step = torch.randn(2, 4, 8), torch.zeros(3, dtype=torch.int64)
    assert call("attend", q.transpose(1, 2), q, q, step, 0, 1.0, 0) is None
    assert call("attend", q, q.bfloat16(), q, step, 0, 1.0, 0) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 3])
def test_attention_of_a_layer_is_the_eager_one_and_writes_the_same(dtype: torch.dtype, window: int) -> None:
    """Layer 1 of 2, rows of mixed lengths, keys and values that are parts of one tensor."""
    torch.manual_seed(0)
    pools = [[torch.randn(8, 2, 4, 16).to(dtype) for _ in range(2)] for _ in ("keys", "values")]
    own = [[pool.clone() for pool in layers] for layers in pools]
    plan = build_plan(
        query_lens=np.ones(3, dtype=np.int32),
        context_lens=np.array([0, 3, 9], dtype=np.int32),
        page_table=np.array([[1, 0, 0], [2, 0, 0], [3, 4, 5]], dtype=np.int32),
        page_size=4,
        device="cpu",
    )
    merged = torch.randn(3, 4 + 2 + 2, 16).to(dtype)
    q, k, v = merged.split((4, 2, 2), dim=1)
    backend = choose_backend("cpu", "cpu")
    right = KVBatch(plan, pools[0], pools[1], backend).attend(1, q, k, v, window=window)
    addresses = shims.StepAddresses(own[0], own[1])
    batch = KVBatch(plan, own[0], own[1], backend)
    step = addresses.of(batch)
    result = call("attend", q, k, v, step, 1, 16**-0.5, window)
    assert result is not None
    assert torch.equal(result, right)
    for layers, expected in zip(own, pools, strict=True):
        assert all(map(torch.equal, layers, expected))


def test_a_draw_is_the_eager_one_and_marks_rows_that_are_not_finite() -> None:
    def state() -> SamplingState:
        made = SamplingState.allocate(6, 50, "cpu")
        for row in range(1, 5):
            made.set_row(row, SamplingParams(temperature=0.7 * (row % 2), repetition_penalty=1.2), key=row)
        return made

    logits, rows, flags = torch.randn(4, 50), torch.tensor([1, 2, 3, 4]), torch.zeros(4, dtype=torch.uint8)
    eager, ours, kept = state(), state(), torch.zeros(2, 4, dtype=torch.int64)
    draws = shims.draws_operand()
    addresses = [native.address_of(ours), kept[1].data_ptr()]
    draws[:2] = torch.tensor([rows.data_ptr(), flags.data_ptr()])
    draws[4:6] = torch.tensor(addresses)
    for turn in range(3):
        if turn == 2:
            logits[2] = torch.nan
        ids = call("draw", logits, draws, 1)
        assert ids is not None
        assert torch.equal(kept[1], ids)
        if turn < 2:
            assert torch.equal(ids, sample(logits, eager, rows))
            assert torch.equal(ours.counts, eager.counts)  # type: ignore[arg-type]
            assert torch.equal(ours.step, eager.step)
    assert flags.tolist() == [0, 0, 1, 0]
    assert call("draw", logits.double(), draws, 1) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_a_linear_of_four_bits_is_the_eager_one(dtype: torch.dtype, group_size: int) -> None:
    words, scales = pack(torch.randn(24, 200), group_size=group_size)
    for shape in ((1,), (5,), (2, 3)):
        x, bias = torch.randn(*shape, 200).to(dtype), torch.randn(24).to(dtype)
        plain, biased = (
            call("linear_int4", x, words, scales, None),
            call("linear_int4", x, words, scales, optional(bias)),
        )
        assert plain is not None
        assert biased is not None
        assert torch.equal(plain, linear_int4(x, words, scales))
        assert torch.equal(biased, linear_int4(x, words, scales, bias))
    assert call("linear_int4", torch.randn(2, 100), words, scales, None) is None
    assert call("linear_int4", torch.randn(2, 200).double(), words, scales, None) is None
    assert call("linear_int4", torch.randn(2, 200), words.long(), scales, None) is None
    assert call("linear_int4", torch.randn(2, 200), words, scales.float(), None) is None


def test_what_compiled_code_cannot_have_is_refused_with_a_remedy() -> None:
    shims.check(torch.bfloat16, torch.device("cpu"))
    with pytest.raises(ConfigError, match="--compile is for CPUs, not cuda; leave it out"):
        shims.check(torch.bfloat16, torch.device("cuda"))
    with pytest.raises(ConfigError, match="dtype float16; add --dtype bfloat16 or float32"):
        shims.check(torch.float16, torch.device("cpu"))
