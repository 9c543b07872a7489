"""Rows go to their groups' weights, by whichever way, and the kernel's do not depend on the others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mstar.layers import grouped
from mstar.layers.grouped import by_group, grouped_linear, one_by_one

SHAPES = ((1, 40, 16, 5), (7, 33, 50, 3), (48, 128, 96, 8), (100, 64, 48, 4), (0, 8, 8, 2))


def operands(rows: int, depth: int, width: int, count: int, *, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, depth, generator=generator).to(dtype)
    weight = (torch.randn(count, width, depth, generator=generator) / depth**0.5).to(dtype)
    return x, weight, torch.randint(0, count, (rows,), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_ways_give_the_same_products(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    x, weight, group = operands(*shape, dtype=dtype)
    expected = torch.stack(
        [weight[g].double() @ row.double() for row, g in zip(x, group, strict=True)]
        or [torch.zeros(0, dtype=torch.float64)]
    )
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for way in (grouped_linear, grouped._on_cpu, by_group, one_by_one):
        found = way(x, weight, group)
        assert found.shape == (shape[0], shape[2]) and found.dtype == dtype
        torch.testing.assert_close(found.double(), expected.reshape(found.shape), atol=tolerance, rtol=tolerance)


def test_a_rows_bits_do_not_depend_on_the_others() -> None:
    x, weight, group = operands(100, 72, 40, 3, dtype=torch.float32)
    whole = grouped_linear(x, weight, group, invariant=True)
    for start, end in ((0, 1), (3, 9), (20, 100)):
        part = grouped_linear(x[start:end], weight, group[start:end], invariant=True)
        assert torch.equal(part, whole[start:end])


def test_many_rows_go_group_by_group(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(grouped, "by_group", lambda x, weight, group: seen.append(len(x)))
    x, weight, group = operands(65, 8, 8, 2, dtype=torch.float32)
    grouped_linear(x, weight, group)
    grouped_linear(x[:64], weight, group[:64])
    grouped_linear(x, weight, group, invariant=True)
    assert seen == [65]
