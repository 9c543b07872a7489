from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mstar.errors import ConfigError
from mstar.layers import linear as linear_module
from mstar.layers.linear import (
    ROWS,
    Head,
    Linear,
    MergedLinear,
    invariant_linear,
    linear,
    per_item,
    self_check,
    set_batch_invariant,
)

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(40, 16), (16, 40), (17, 5), (100, 33), (1024, 130), (1, 1)]


def operands(rows: int, depth: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(depth)
    parts = [torch.randn(size, generator=generator) for size in ((rows, depth), (width, depth), (width,))]
    return parts[0].to(dtype), (parts[1] / depth**0.5).to(dtype), parts[2].to(dtype)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, threads: int, out: Tensor | None = None, many: bool = False
) -> Tensor:
    """By our kernel for few rows, or for many, whatever their number; all operands are contiguous."""
    entry = (linear_module.product_kernel if many else linear_module.kernel)(x.dtype)[0]
    assert entry is not None
    out = x.new_empty(len(x), len(weight)) if out is None else out
    pointers = (x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr())
    entry(*pointers, len(x), len(weight), x.shape[1], threads)
    return out


@pytest.fixture(params=["kernel", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With our kernel, and as on machines that cannot build it."""
    if request.param == "torch":
        monkeypatch.setattr(linear_module, "kernel", lambda dtype: (None, 0))
    elif linear_module.kernel(torch.float32)[0] is None:
        pytest.skip("no C++ compiler")
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("depth", "width"), SHAPES)
def test_kernel_equals_torch(depth: int, width: int, dtype: torch.dtype, backend: str) -> None:
    for rows in (0, 1, 2, 3, 6, 35):
        x, weight, bias = operands(rows, depth, width, dtype)
        for function in (linear, invariant_linear):
            for shift in (None, bias):
                exact = functional.linear(x.double(), weight.double(), None if shift is None else shift.double())
                tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 8e-3}
                result = function(x, weight, shift)
                assert result.dtype == dtype
                torch.testing.assert_close(result.double(), exact, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("depth", "width"), SHAPES)
def test_bits_of_invariant_rows_do_not_depend_on_their_number(
    depth: int, width: int, dtype: torch.dtype, backend: str
) -> None:
    if backend == "torch" and depth % 8:
        pytest.skip("torch's products need rows of whole vectors")
    x, weight, bias = operands(112, depth, width, dtype)
    whole = invariant_linear(x, weight, bias)
    for rows in (1, 2, 3, 7, 16, 31, 33, 64):
        assert torch.equal(invariant_linear(x[:rows], weight, bias), whole[:rows])
    assert torch.equal(invariant_linear(x[5:6], weight, bias), whole[5:6])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("depth", "width"), [(1, 1), (15, 23), (64, 24), (100, 50), (1030, 77), (4100, 25), (4100, 70)]
)
def test_kernel_sums_in_one_order_for_any_rows_and_threads(depth: int, width: int, dtype: torch.dtype) -> None:
    if linear_module.kernel(dtype)[0] is None:
        pytest.skip("no C++ compiler")
    x, weight, bias = operands(130, depth, width, dtype)
    whole = product(x, weight, bias, threads=1)
    exact = functional.linear(x.double(), weight.double(), bias.double())
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(whole.double(), exact, atol=tolerance, rtol=tolerance)
    assert torch.equal(product(x, weight, None, threads=1), product(x, weight, torch.zeros_like(bias), threads=1))
    for rows in (*range(1, 34), 64, 65, 130):
        assert torch.equal(product(x[-rows:], weight, bias, threads=1), whole[-rows:])
    for rows in (1, 6, 33):
        for threads in (2, 3):
            assert torch.equal(product(x[-rows:], weight, bias, threads=threads), whole[-rows:])


@pytest.mark.parametrize(("depth", "width"), [(1, 1), (15, 23), (64, 24), (300, 130), (1030, 77)])
def test_kernel_for_many_rows_equals_torch_and_sums_in_one_order(depth: int, width: int) -> None:
    if linear_module.product_kernel(torch.float32)[0] is None:
        pytest.skip("no C++ compiler")
    x, weight, bias = operands(230, depth, width, torch.float32)
    whole = product(x, weight, bias, threads=1, many=True)
    exact = functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(whole.double(), exact, atol=2e-5, rtol=2e-5)
    for rows in (1, 7, 8, 9, 17, 24, 33, 66, 96, 97, 160):
        for threads in (1, 2):
            assert torch.equal(product(x[-rows:], weight, bias, threads=threads, many=True), whole[-rows:])
    none, zeros = (product(x, weight, shift, threads=2, many=True) for shift in (None, torch.zeros_like(bias)))
    assert torch.equal(none, zeros)


def test_linear_takes_the_kernel_for_many_rows_unless_bits_must_not_depend_on_their_number() -> None:
    entry, most_rows = linear_module.product_kernel(torch.float32)
    if entry is None:
        pytest.skip("no C++ compiler")
    x, weight, bias = operands(most_rows, 40, 30, torch.float32)
    few = linear_module.kernel(torch.float32)[1]
    assert torch.equal(linear(x, weight, bias), product(x, weight, bias, threads=1, many=True))
    assert torch.equal(linear(x[:few], weight, bias), product(x[:few], weight, bias, threads=1))
    assert torch.equal(invariant_linear(x, weight, bias), product(x, weight, bias, threads=1))


@pytest.mark.parametrize("many", [False, True])
def test_kernel_writes_and_reads_only_its_own(many: bool) -> None:
    dtype = torch.float32 if many else torch.bfloat16
    if linear_module.kernel(dtype)[0] is None:
        pytest.skip("no C++ compiler")
    for rows, width in itertools.product((1, 2, 3, 4, 5, 16), (29, 93)):
        x, weight, bias = operands(rows, 33, width, dtype)
        expected = product(x, weight, bias, threads=1, many=many)
        around = [torch.full((operand.numel() + 64,), torch.nan, dtype=operand.dtype) for operand in (x, weight, bias)]
        inside = [
            frame[32:-32].copy_(operand.flatten()).view_as(operand)
            for frame, operand in zip(around, (x, weight, bias), strict=True)
        ]
        out = torch.full((rows + 2, width), 7.0, dtype=dtype)
        product(*inside, threads=2, out=out[1:-1], many=many)
        assert torch.equal(out[1:-1], expected)
        assert (out[[0, -1]] == 7).all()


def test_leading_dimensions_and_strides_are_kept(backend: str) -> None:
    x, weight, bias = operands(12, 8, 5, torch.float32)
    expected = functional.linear(x, weight, bias)
    torch.testing.assert_close(linear(x.view(3, 4, 8), weight, bias), expected.view(3, 4, 5))
    torch.testing.assert_close(invariant_linear(x.view(3, 4, 8), weight, bias), expected.view(3, 4, 5))
    spread = torch.stack((x, x), dim=-1)[..., 0]
    torch.testing.assert_close(linear(spread, weight.t().contiguous().t(), bias), expected)


def test_nan_and_infinity_pass_through(backend: str) -> None:
    x = torch.tensor([[1.0, torch.inf], [torch.nan, 1.0], [1.0, 2.0]], dtype=torch.bfloat16)
    result = linear(x, torch.ones(1, 2, dtype=torch.bfloat16))[:, 0]
    assert result[0] == torch.inf
    assert result[1].isnan()
    assert result[2] == 3


def test_kernel_can_be_compiled_into_a_step() -> None:
    layer = Linear(32, 8)
    x = torch.randn(4, 32)
    step = torch.compile(lambda x: layer(x) * 2, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(step(x), functional.linear(x, layer.weight, layer.bias) * 2)


def test_merged_projections_come_apart() -> None:
    merged = MergedLinear(8, (4, 2, 2), bias=True)
    x = torch.randn(3, 8)
    q, k, v = merged.split(merged(x))
    torch.testing.assert_close(q, functional.linear(x, merged.weight[:4], merged.bias[:4]))
    torch.testing.assert_close(k, functional.linear(x, merged.weight[4:6], merged.bias[4:6]))
    assert v.shape == (3, 2)


def test_a_tied_head_shares_memory() -> None:
    embedding, head = nn.Embedding(11, 4), Head(4, 11)
    head.tie(embedding)
    assert head.weight is embedding.weight


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_is_made_invariant_from_outside(dtype: torch.dtype, backend: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 8, 5), nn.Flatten(), nn.Linear(64, 40), nn.SiLU(), Linear(40, 16)).to(dtype)
    x = torch.randn(3 * ROWS, 3, 12).to(dtype)
    with torch.no_grad():
        expected = model(x)
        set_batch_invariant(model)
        whole = model(x)
        torch.testing.assert_close(whole, expected, atol=2e-2, rtol=2e-2)
        assert torch.equal(model(x[:ROWS]), whole[:ROWS])


def test_per_item_runs_one_at_a_time() -> None:
    sizes: list[int] = []

    def convolution(x: Tensor) -> Tensor:
        sizes.append(len(x))
        return x + 1

    assert torch.equal(per_item(convolution, torch.zeros(3, 2)), torch.ones(3, 2))
    assert sizes == [1, 1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_this_machine_keeps_batch_invariance(dtype: torch.dtype, backend: str) -> None:
    self_check(dtype, "cpu")


def test_a_machine_that_does_not_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "invariant_linear", lambda x, weight: functional.linear(x, weight) * len(x))
    with pytest.raises(ConfigError, match=r"--batch-invariant cannot be kept here: linear of 16 rows"):
        self_check(torch.float32, "cpu")
