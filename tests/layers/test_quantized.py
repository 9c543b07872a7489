"""Weights of four bits: packing against a plain reference, the kernel against products with unpacked weights."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mstar.errors import ConfigError
from mstar.layers import quantized
from mstar.layers.linear import Head, Linear, MergedLinear, set_batch_invariant
from mstar.layers.quantized import GROUP_SIZES, check, linear_int4, pack, quantize_int4, unpack

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(128, 12), (1, 1), (40, 16), (100, 33), (129, 5), (192, 25), (1000, 14)]  # (K, N)


@pytest.fixture
def _kernel() -> None:
    if quantized.kernel(torch.float32) is None:
        pytest.skip("no C++ compiler")


def weight_of(depth: int, width: int) -> Tensor:
    weight = torch.randn(width, depth, generator=torch.Generator().manual_seed(depth)) / depth**0.5
    weight[0] = 0.25  # groups without a range
    return weight


def rounded(weight: Tensor, *, group_size: int) -> Tensor:
    """What packing and unpacking should give, one group at a time."""
    result = torch.empty_like(weight)
    for row in range(weight.shape[0]):
        for begin in range(0, weight.shape[1], group_size):
            group = weight[row, begin : begin + group_size]
            minimum, scale = group.min().bfloat16().float(), ((group.max() - group.min()) / 15).bfloat16().float()
            numbers = ((group - minimum) / scale).round().clamp(0, 15) if scale > 0 else torch.zeros_like(group)
            result[row, begin : begin + group_size] = minimum + scale * numbers
    return result


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize(("depth", "width"), SHAPES)
def test_unpacking_gives_each_group_rounded_to_sixteen_steps(depth: int, width: int, group_size: int) -> None:
    weight = weight_of(depth, width)
    words, scales = pack(weight, group_size=group_size)
    assert (words.dtype, scales.dtype) == (torch.int32, torch.bfloat16)
    assert words.shape == (width, -(-depth // 128) * 16)
    assert scales.shape == (width, -(-depth // 128) * (128 // group_size), 2)
    assert torch.equal(unpack(words, scales, depth=depth), rounded(weight, group_size=group_size))


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize(("depth", "width"), SHAPES)
def test_kernel_multiplies_with_the_unpacked_weight(
    depth: int, width: int, group_size: int, dtype: torch.dtype
) -> None:
    packed = pack(weight_of(depth, width), group_size=group_size)
    weight, bias = unpack(*packed, depth=depth).double(), torch.randn(width).to(dtype)
    atol, rtol = (2e-5, 1e-5) if dtype == torch.float32 else (1e-2, 8e-3)
    for rows in (0, 1, 2, 3, 4, 7, 35):
        x = torch.randn(rows, depth).to(dtype)
        for shift in (None, bias):
            exact = functional.linear(x.double(), weight, None if shift is None else shift.double())
            result = linear_int4(x, *packed, shift)
            assert result.dtype == dtype
            torch.testing.assert_close(result.double(), exact, atol=atol, rtol=rtol)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_bits_of_rows_do_not_depend_on_their_number_or_on_threads(group_size: int, dtype: torch.dtype) -> None:
    packed = pack(weight_of(1000, 133), group_size=group_size)
    x = torch.randn(70, 1000).to(dtype)
    whole, threads = linear_int4(x, *packed), torch.get_num_threads()
    for rows in (1, 2, 3, 5, 32, 33):
        assert torch.equal(linear_int4(x[:rows], *packed), whole[:rows])
    assert torch.equal(linear_int4(x[6:7], *packed), whole[6:7])
    torch.set_num_threads(2)
    try:
        assert torch.equal(linear_int4(x, *packed), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("_kernel")
def test_leading_dimensions_strides_and_large_inputs_are_kept() -> None:
    packed = pack(weight_of(40, 5))
    x = torch.randn(12, 40) * 1e30
    expected = linear_int4(x, *packed)
    assert torch.equal(linear_int4(x.view(3, 4, 40), *packed), expected.view(3, 4, 5))
    assert torch.equal(linear_int4(torch.stack((x, x), dim=-1)[..., 0], *packed), expected)
    torch.testing.assert_close(expected / 1e30, x / 1e30 @ unpack(*packed, depth=40).t())
    x[0, 0] = torch.nan
    assert linear_int4(x, *packed)[0].isnan().all()
    assert linear_int4(x, *packed)[1:].isfinite().all()


@pytest.mark.usefixtures("_kernel")
def test_operands_that_do_not_fit_are_refused() -> None:
    packed = pack(weight_of(200, 5))
    for x in (torch.zeros(1, 100), torch.zeros(1, 300), torch.zeros(1, 200, dtype=torch.float64)):
        with pytest.raises(AssertionError):
            linear_int4(x, *packed)
    with pytest.raises(AssertionError, match="differ in dtype"):
        linear_int4(torch.zeros(1, 200), *packed, torch.zeros(5, dtype=torch.bfloat16))


@pytest.mark.usefixtures("_kernel")
def test_kernel_can_be_compiled_into_a_step() -> None:
    layer = nn.Sequential(Linear(200, 8))
    quantize_int4(layer)
    x = torch.randn(4, 200)
    with torch.no_grad():
        step = torch.compile(lambda x: layer(x) * 2, fullgraph=True, backend="eager")
        assert torch.equal(step(x), layer(x) * 2)


# ---- modules --------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Layers that are quantised, and after them those that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(200, 96)
        self.second = MergedLinear(96, (150, 50))
        self.narrow = Linear(6, 6)
        self.embedding = nn.Embedding(30, 200)
        self.tied = Linear(200, 30, bias=False)
        self.tied.weight = self.embedding.weight
        self.head = Head(200, 30)
        self.mixing = nn.MultiheadAttention(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(functional.silu(self.first(x)))
        return self.tied(x) + self.head(x)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_a_model_keeps_its_results_but_not_its_weights(dtype: torch.dtype, group_size: int) -> None:
    torch.manual_seed(0)
    model, x = Model().to(dtype).requires_grad_(False), torch.randn(5, 200).to(dtype)
    exact, before = model(x), model.state_dict()
    done = quantize_int4(model, group_size=group_size)
    after = model.state_dict()
    assert list(done.errors) == ["first", "second"]
    assert set(before) - set(after) == {"first.weight", "second.weight"}
    gone = sum(before[name].nbytes for name in set(before) - set(after))
    come = sum(after[name].nbytes for name in set(after) - set(before))
    assert (done.bytes_before, done.bytes_after) == (gone, come)
    assert come < gone / (3 if dtype == torch.float32 else 1.5)
    error = (model(x) - exact).float().norm() / exact.float().norm()
    assert 0.005 < error < 0.15
    for name in done.errors:
        right = rounded(before[f"{name}.weight"].float(), group_size=group_size)
        difference = right - before[f"{name}.weight"].float()
        assert done.errors[name] == pytest.approx(float(difference.norm() / before[f"{name}.weight"].norm()), rel=0.01)
    assert "2 linear layers are quantised" in str(done)


def test_a_model_without_linear_layers_says_so() -> None:
    done = quantize_int4(nn.Sequential(nn.Conv1d(3, 3, 1), nn.Linear(5, 300)))
    assert done.num_layers == 0
    assert "no linear layer is quantised" in str(done)


@pytest.mark.usefixtures("_kernel")
def test_an_invariant_model_stays_so() -> None:
    model, x = nn.Sequential(nn.Linear(200, 70), Linear(70, 300)), torch.randn(40, 200)
    set_batch_invariant(model)
    quantize_int4(model)
    with torch.no_grad():
        assert torch.equal(model(x)[:3], model(x[:3]))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_four_bits_cannot_hold_are_refused_by_name(value: float) -> None:
    layer = nn.Linear(200, 8).requires_grad_(False)
    layer.weight[3, 4] = value
    model = nn.Sequential(layer)
    with pytest.raises(ConfigError, match=r"0\.weight has NaN or infinity"):
        quantize_int4(model)


def test_a_group_size_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="group size is 48; it must be one of 32, 64, 128"):
        quantize_int4(nn.Linear(200, 8), group_size=48)


def test_what_cannot_work_is_refused_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ConfigError, match="is for CPUs, not cuda; add --device cpu"):
        check(torch.bfloat16, torch.device("cuda"), invariant=False)
    with pytest.raises(ConfigError, match="with dtype float16; add --dtype bfloat16"):
        check(torch.float16, cpu, invariant=False)
    monkeypatch.setattr(quantized, "kernel", lambda dtype: None)
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError, match=r"needs a C\+\+ compiler; install g\+\+"):
        check(torch.bfloat16, cpu, invariant=False)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("dtype", DTYPES)
def test_this_machine_keeps_batch_invariance(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    check(dtype, torch.device("cpu"), invariant=True)
    monkeypatch.setattr(quantized, "linear_int4", lambda x, *_: x.float() * len(x))
    with pytest.raises(ConfigError, match="--batch-invariant cannot be kept here with --quantization int4"):
        check(dtype, torch.device("cpu"), invariant=True)
