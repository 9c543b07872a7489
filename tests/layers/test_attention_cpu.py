"""The CPU's kernel against the plain reference where it cuts its work up, and what its bits and its results ignore."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar.layers import kernels
from mstar.layers.attention import AttentionPlan, KVBatch, build_plan
from mstar.layers.attention import cpu as cpu_module
from mstar.layers.attention.cpu import CpuBackend
from mstar.layers.attention.reference import ReferenceBackend

BLOCK = 256  # keys that the kernel takes at once


@pytest.fixture(autouse=True, scope="module")
def _needs_a_compiler() -> None:
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("no compiler")
    assert cpu_module._kernel(torch.float32) is not None


@dataclass(kw_only=True)
class Rows:
    """Rows over a pool of which they own all of their pages, but of the last one only what they need."""

    query_lens: list[int]
    context_lens: list[int]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    write: bool = True
    full: bool = False
    spans: list[Any] | None = None
    unowned: float = float("nan")

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        draw = lambda *shape: torch.randn(*shape, generator=generator).to(self.dtype)  # noqa: E731
        tokens, size = sum(self.query_lens), self.page_size
        self.q = draw(tokens, self.heads, self.dim)
        self.k, self.v = draw(tokens, self.kv_heads, self.dim), draw(tokens, self.kv_heads, self.dim)
        counts = [-(-(c + n) // size) for c, n in zip(self.context_lens, self.query_lens, strict=True)]
        shape = sum(counts) + 1, self.kv_heads, size, self.dim
        order = torch.randperm(shape[0] - 1, generator=generator).numpy().astype(np.int32) + 1
        self.table = np.zeros((len(counts), max(counts, default=0)), dtype=np.int32)
        self.pool = torch.full(shape, self.unowned, dtype=self.dtype), torch.full(shape, self.unowned, dtype=self.dtype)
        for row, (count, context) in enumerate(zip(counts, self.context_lens, strict=True)):
            self.table[row, :count], order = order[:count], order[count:]
            for part in self.pool:
                for page, start in zip(self.table[row, :count], range(0, context, size), strict=False):
                    part[page, :, : context - start] = draw(self.kv_heads, min(size, context - start), self.dim)

    def plan(self) -> AttentionPlan:
        return build_plan(
            query_lens=np.array(self.query_lens, dtype=np.int32),
            context_lens=np.array(self.context_lens, dtype=np.int32),
            page_table=self.table,
            page_size=self.page_size,
            device="cpu",
            write=self.write,
            full=np.full(len(self.query_lens), self.full),
            spans=self.spans,
        )

    def run(self, backend: Any = None, *, plan: AttentionPlan | None = None, **options: Any) -> Tensor:
        layers = [[part.clone()] for part in self.pool]
        batch = KVBatch(plan or self.plan(), *layers, backend or CpuBackend())
        return batch.attend(0, self.q, self.k, self.v, **options)


def assert_agrees(rows: Rows, *, tolerance: float | None = None, **options: Any) -> None:
    actual, expected = rows.run(**options), rows.run(ReferenceBackend(), **options)
    tolerance = tolerance or (2e-6 if rows.dtype == torch.float32 else 1e-2)
    assert expected.isfinite().all()
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


SHORT: dict[str, dict[str, Any]] = {
    "decode": {"query_lens": [1, 1, 1], "context_lens": [19, 0, 4]},
    "mixed": {"query_lens": [1, 20, 0, 3], "context_lens": [8, 2, 5, 17]},
    "no-write": {"query_lens": [4, 3, 2], "context_lens": [6, 0, 18], "write": False, "full": True},
    "spans": {"query_lens": [9, 4], "context_lens": [3, 0], "spans": [np.array([[1, 4], [4, 6], [8, 9]]), None]},
}
LONG: dict[str, dict[str, Any]] = {
    "decode": {"query_lens": [1, 1, 1], "context_lens": [BLOCK - 1, BLOCK, 3 * BLOCK - 7]},
    "prefill": {"query_lens": [BLOCK + 45], "context_lens": [0]},
    "chunk": {"query_lens": [40, 1], "context_lens": [BLOCK - 20, BLOCK + 1]},
    "spans": {"query_lens": [120], "context_lens": [BLOCK - 50], "spans": [np.array([[3, 7], [30, 90]])]},
    "no-write": {"query_lens": [33, 5], "context_lens": [BLOCK - 3, 2 * BLOCK], "write": False, "full": True},
    "block": {"query_lens": [66, 66], "context_lens": [2 * BLOCK + 30, 20], "full": True},
    "no-write causal": {"query_lens": [33], "context_lens": [2 * BLOCK - 20], "write": False},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [1, 2, 3, 7])
@pytest.mark.parametrize("dim", [8, 20, 64, 72, 128])
@pytest.mark.parametrize("mode", SHORT)
def test_every_shape_agrees_with_the_reference(mode: str, dim: int, group: int, dtype: torch.dtype) -> None:
    for page_size, window in ((4, None), (16, 5)):
        rows = Rows(**SHORT[mode], heads=2 * group, dim=dim, page_size=page_size, dtype=dtype)
        assert_agrees(rows, window=window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 40, BLOCK + 30])
@pytest.mark.parametrize("mode", LONG)
def test_rows_of_several_blocks_agree_with_the_reference(mode: str, window: int | None, dtype: torch.dtype) -> None:
    assert_agrees(Rows(**LONG[mode], dtype=dtype, dim=20), window=window)


def test_heads_that_share_one_kv_head_may_fill_several_tiles() -> None:
    assert_agrees(Rows(query_lens=[3, 1], context_lens=[5, 9], heads=71, kv_heads=1))


@pytest.mark.parametrize("scale", [0.0, 40.0, -40.0])
def test_scores_may_be_equal_or_far_apart(scale: float) -> None:
    assert_agrees(Rows(**LONG["chunk"]), scale=scale, tolerance=1e-4)  # float32 scores of several hundred


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    rows = Rows(**SHORT["mixed"])
    plan = rows.plan()
    plan.visible_end[3] = 0
    out = rows.run(plan=plan)
    assert (out[3] == 0).all()
    others = [token for token in range(len(out)) if token != 3]
    assert torch.equal(out[others], rows.run()[others])


# ---- what a result ignores ------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("mode", LONG)
def test_slots_that_a_row_does_not_own_do_not_reach_it(mode: str, window: int | None, poison: float) -> None:
    clean, poisoned = (Rows(**LONG[mode], unowned=value).run(window=window) for value in (0.0, poison))
    assert torch.equal(clean, poisoned)


def test_a_bad_key_or_value_reaches_just_the_queries_that_see_it() -> None:
    for bad, name in ((float("nan"), "k"), (float("nan"), "v"), (float("inf"), "v")):
        rows = Rows(query_lens=[50, 50], context_lens=[BLOCK - 20, 0])
        expected = rows.run(window=10)
        getattr(rows, name)[30] = bad
        actual = rows.run(window=10)
        seeing = torch.zeros(100, dtype=torch.bool)
        seeing[30:40] = True
        assert torch.equal(actual[~seeing], expected[~seeing])
        assert not actual[seeing].isfinite().any()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", LONG)
def test_threads_do_not_change_the_bits(mode: str, dtype: torch.dtype, two_threads: None) -> None:
    rows = Rows(**LONG[mode], dtype=dtype, dim=128, heads=8)
    together = rows.run()
    torch.set_num_threads(1)
    assert torch.equal(together, rows.run())


@pytest.mark.parametrize("window", [None, BLOCK + 10])
@pytest.mark.parametrize("group", [1, 2, 7])
def test_chunks_and_batches_do_not_change_the_bits(group: int, window: int | None, two_threads: None) -> None:
    length, cuts = 2 * BLOCK + 30, (0, 1, 34, BLOCK + 3, 2 * BLOCK, 2 * BLOCK + 29, 2 * BLOCK + 30)
    options: dict[str, Any] = {"heads": group, "kv_heads": 1, "dim": 64}
    alone = Rows(query_lens=[length], context_lens=[0], **options)
    whole = alone.run(window=window)
    beside = Rows(query_lens=[9, length, 1], context_lens=[300, 0, 7], **options)
    for name in ("q", "k", "v"):
        getattr(beside, name)[9 : 9 + length] = getattr(alone, name)
    assert torch.equal(beside.run(window=window)[9 : 9 + length], whole)
    layers = [[part.clone()] for part in alone.pool]
    for begin, end in zip(cuts[:-1], cuts[1:], strict=True):
        alone.query_lens, alone.context_lens = [end - begin], [begin]
        batch = KVBatch(alone.plan(), *layers, CpuBackend())
        chunk = batch.attend(0, alone.q[begin:end], alone.k[begin:end], alone.v[begin:end], window=window)
        assert torch.equal(chunk, whole[begin:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [20, 32, 64])
def test_few_and_many_queries_of_a_block_get_the_same_bits(dim: int, dtype: torch.dtype) -> None:
    context, count = BLOCK + 30, 66
    rows = Rows(query_lens=[count], context_lens=[context], full=True, kv_heads=4, dim=dim, dtype=dtype)
    layers = [[part.clone()] for part in rows.pool]
    whole = KVBatch(rows.plan(), *layers, CpuBackend()).attend(0, rows.q, rows.k, rows.v)
    for few in (1, 7, 30):  # the last ones, which see as much: lanes are dimensions, or rows in other tiles
        rows.query_lens, rows.context_lens = [few], [context + count - few]
        batch = KVBatch(rows.plan(), *layers, CpuBackend())
        assert torch.equal(batch.attend(0, rows.q[-few:], rows.k[-few:], rows.v[-few:]), whole[-few:])


# ---- where there is no kernel ---------------------------------------------------------------------------


def test_without_a_compiler_plain_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_module, "_kernel", cpu_module._kernel.__wrapped__)
    monkeypatch.setattr(kernels, "library", lambda source: None)
    CpuBackend().require(head_dim=8, dtype=torch.float32)
    assert_agrees(Rows(**SHORT["mixed"]))


def test_operands_of_several_dtypes_are_left_to_plain_torch() -> None:
    rows = Rows(**SHORT["mixed"], dtype=torch.bfloat16)
    rows.q, rows.k = rows.q.float(), rows.k.float()
    torch.testing.assert_close(rows.run(), rows.run(ReferenceBackend()), atol=1e-5, rtol=1e-5)
