"""Every backend against the plain reference, over every mode; the plan; the op as `torch.compile` sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar.errors import ConfigError
from mstar.layers.attention import AttentionPlan, KVBatch, build_plan, choose_backend, varlen_attention
from mstar.layers.attention.plain import PlainBackend

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@dataclass(kw_only=True)
class Scene:
    """A batch of random rows over a pool whose unused slots are NaN: nobody may read them."""

    query_lens: list[int]
    context_lens: list[int]
    heads: int = 6
    kv_heads: int = 2
    dim: int = 8
    page_size: int = 4
    dtype: torch.dtype = torch.float32
    write: bool = True
    full: list[bool] | None = None
    spans: list[Any] | None = None
    batch_invariant: bool = False
    seed: int = 0
    page_table: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        rows = len(self.query_lens)
        needed = [-(-(c + n) // self.page_size) for c, n in zip(self.context_lens, self.query_lens, strict=True)]
        num_pages = sum(needed) + 3
        order = torch.randperm(num_pages - 1, generator=generator).numpy().astype(np.int32) + 1
        self.page_table = np.zeros((rows, max(needed, default=0) + 2), dtype=np.int32)
        for row, count in enumerate(needed):
            self.page_table[row, :count], order = order[:count], order[count:]
        tokens = sum(self.query_lens)
        draw = lambda *shape: torch.randn(*shape, generator=generator).to(self.dtype)  # noqa: E731
        self.q = draw(tokens, self.heads, self.dim)
        self.k, self.v = draw(tokens, self.kv_heads, self.dim), draw(tokens, self.kv_heads, self.dim)
        pool = (num_pages, self.kv_heads, self.page_size, self.dim)
        self.keys, self.values = (torch.full(pool, torch.nan, dtype=self.dtype) for _ in range(2))
        for row, context in enumerate(self.context_lens):
            for position in range(context):
                page, offset = self.page_table[row, position // self.page_size], position % self.page_size
                self.keys[page, :, offset] = draw(self.kv_heads, self.dim)
                self.values[page, :, offset] = draw(self.kv_heads, self.dim)

    def plan(self) -> AttentionPlan:
        return build_plan(
            query_lens=np.array(self.query_lens, dtype=np.int32),
            context_lens=np.array(self.context_lens, dtype=np.int32),
            page_table=self.page_table,
            page_size=self.page_size,
            device="cpu",
            write=self.write,
            full=None if self.full is None else np.array(self.full),
            spans=self.spans,
            batch_invariant=self.batch_invariant,
        )

    def run(self, backend: Any, *, window: int | None = None, scale: float | None = None) -> tuple[Tensor, ...]:
        keys, values = self.keys.clone(), self.values.clone()
        batch = KVBatch(self.plan(), [keys], [values], backend)
        return batch.attend(0, self.q, self.k, self.v, window=window, scale=scale), keys, values


def assert_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    tolerance = TOLERANCE[expected[0].dtype]
    assert not expected[0].isnan().any()
    torch.testing.assert_close(actual[0], expected[0], atol=tolerance, rtol=tolerance)
    for pool, expected_pool in zip(actual[1:], expected[1:], strict=True):
        torch.testing.assert_close(pool, expected_pool, atol=0, rtol=0, equal_nan=True)


MODES: dict[str, dict[str, Any]] = {
    "decode": {"query_lens": [1, 1, 1], "context_lens": [9, 0, 4]},
    "prefill": {"query_lens": [7, 3], "context_lens": [0, 0]},
    "chunk": {"query_lens": [5, 4], "context_lens": [6, 3]},
    "mixed": {"query_lens": [1, 6, 0, 1, 2], "context_lens": [8, 2, 5, 0, 7]},
    "no rows with tokens": {"query_lens": [0, 0], "context_lens": [3, 0]},
    "full": {"query_lens": [5, 3, 1], "context_lens": [4, 0, 2], "full": [True, False, True]},
    "spans": {
        "query_lens": [9, 4, 6],
        "context_lens": [3, 0, 5],
        "spans": [np.array([[1, 4], [4, 6], [8, 9]]), None, np.array([[0, 6]])],
    },
    "no-write": {"query_lens": [4, 3, 0, 2], "context_lens": [6, 0, 4, 8], "write": False, "full": [True] * 4},
    "no-write causal": {"query_lens": [3, 1], "context_lens": [5, 7], "write": False},
    "no-write one token": {"query_lens": [1, 1], "context_lens": [5, 8], "write": False},
    "no-write spans": {
        "query_lens": [6, 2],
        "context_lens": [0, 3],
        "write": False,
        "spans": [np.array([[1, 3]]), None],
    },
}


@pytest.fixture(scope="module")
def reference() -> Any:
    return choose_backend("cpu", "reference")


@pytest.fixture(scope="module")
def cpu() -> Any:
    return choose_backend("cpu", "cpu")


@pytest.fixture(scope="module", params=["cpu", "plain"])
def backend(request: pytest.FixtureRequest, cpu: Any) -> Any:
    return cpu if request.param == "cpu" else PlainBackend()


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_agrees_with_the_reference(
    mode: str, window: int | None, dtype: torch.dtype, batch_invariant: bool, backend: Any, reference: Any
) -> None:
    scene = Scene(**MODES[mode], dtype=dtype, batch_invariant=batch_invariant)
    assert_same(scene.run(backend, window=window), scene.run(reference, window=window))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("dim", [8, 64, 72])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("mode", ["decode", "mixed", "no-write"])
def test_every_shape_agrees_with_the_reference(
    mode: str, group: int, dim: int, page_size: int, batch_invariant: bool, backend: Any, reference: Any
) -> None:
    scene = Scene(**MODES[mode], heads=2 * group, dim=dim, page_size=page_size, batch_invariant=batch_invariant)
    assert_same(scene.run(backend, scale=0.2), scene.run(reference, scale=0.2))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lens", [[1, 1, 1], [150, 1, 3]], ids=["decode", "prefill"])
def test_rows_too_large_to_gather_together_agree(
    lens: list[int], dtype: torch.dtype, window: int | None, backend: Any, reference: Any
) -> None:
    scene = Scene(query_lens=lens, context_lens=[300, 7, 260], dim=64, kv_heads=2, page_size=16, dtype=dtype)
    assert_same(scene.run(backend, window=window), scene.run(reference, window=window))


def test_padding_rows_may_share_the_scratch_page(backend: Any, reference: Any) -> None:
    scene = Scene(query_lens=[1, 1, 1], context_lens=[6, 0, 0])
    scene.page_table[1:] = 0
    actual, expected = scene.run(backend), scene.run(reference)
    torch.testing.assert_close(actual[0][0], expected[0][0])
    assert torch.equal(actual[1][1:].nan_to_num(), expected[1][1:].nan_to_num())


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lens", [[5, 0, 9, 1], [6, 6], []], ids=str)
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [1, 3])
def test_varlen_agrees_with_the_reference(
    group: int, dtype: torch.dtype, batch_invariant: bool, lens: list[int], causal: bool, window: int | None
) -> None:
    tokens = sum(lens)
    q = torch.randn(tokens, 2 * group, 72).to(dtype)
    k, v = (torch.randn(tokens, 2, 72).to(dtype) for _ in range(2))
    starts = torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32)
    results = [
        varlen_attention(
            q,
            k,
            v,
            starts,
            max_len=max(lens, default=0),
            causal=causal,
            window=window,
            batch_invariant=batch_invariant,
            backend=choose_backend("cpu", name),
        )
        for name in ("cpu", "reference")
    ]
    torch.testing.assert_close(*results, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_inputs_may_be_slices_of_a_fused_projection(backend: Any, reference: Any) -> None:
    scene = Scene(**MODES["mixed"])
    fused = torch.cat([x.flatten(1) for x in (scene.q, scene.k, scene.v)], dim=1)
    parts = fused.split([scene.heads * scene.dim, scene.kv_heads * scene.dim, scene.kv_heads * scene.dim], dim=1)
    scene.q, scene.k, scene.v = (part.unflatten(1, (-1, scene.dim)) for part in parts)
    assert_same(scene.run(backend), scene.run(reference))


# ---- the plan -------------------------------------------------------------------------------------------


def test_plan_of_a_mixed_batch() -> None:
    plan = build_plan(
        query_lens=np.array([1, 3, 0], dtype=np.int32),
        context_lens=np.array([5, 2, 4], dtype=np.int32),
        page_table=np.array([[7, 3, 0, 0], [2, 9, 0, 0], [1, 0, 0, 0]], dtype=np.int32),
        page_size=4,
        device="cpu",
    )
    assert plan.query_starts.tolist() == [0, 1, 4, 4]
    assert plan.context_lens.tolist() == [5, 2, 4]
    assert plan.visible_end.tolist() == [6, 3, 4, 5]
    assert plan.slot_mapping.tolist() == [3 * 4 + 1, 2 * 4 + 2, 2 * 4 + 3, 9 * 4]
    assert plan.page_table.tolist() == [[7, 3], [2, 9], [1, 0]]
    assert [plan.slot_mapping.dtype, plan.visible_end.dtype, plan.page_table.dtype] == [
        torch.int64,
        torch.int32,
        torch.int32,
    ]
    assert (plan.decode, plan.host.max_query_len, plan.host.max_kv_len) == (False, 3, 6)


def test_plan_opens_spans_and_blocks() -> None:
    plan = build_plan(
        query_lens=np.array([4, 2], dtype=np.int32),
        context_lens=np.array([1, 3], dtype=np.int32),
        page_table=np.arange(6, dtype=np.int32).reshape(2, 3),
        page_size=4,
        device="cpu",
        full=np.array([False, True]),
        spans=[np.array([[1, 3]]), None],
    )
    assert plan.visible_end.tolist() == [2, 4, 4, 5, 5, 5]
    assert not plan.host.causal


def test_plan_copies_the_page_table_and_maps_nothing_without_write() -> None:
    table = np.array([[5, 6]], dtype=np.int32)
    plan = build_plan(
        query_lens=np.array([3], dtype=np.int32),
        context_lens=np.array([4], dtype=np.int32),
        page_table=table,
        page_size=4,
        device="cpu",
        write=False,
    )
    table[:] = 0
    assert plan.page_table.tolist() == [[5]]
    assert plan.slot_mapping.tolist() == [0, 0, 0]


def test_plan_refuses_a_table_that_is_too_short() -> None:
    with pytest.raises(AssertionError, match="1 pages cannot hold 5 tokens"):
        build_plan(
            query_lens=np.array([1], dtype=np.int32),
            context_lens=np.array([4], dtype=np.int32),
            page_table=np.array([[1]], dtype=np.int32),
            page_size=4,
            device="cpu",
        )


# ---- the op ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["mixed", "no-write"])
def test_op_passes_torchs_own_checks(mode: str, cpu: Any) -> None:
    scene = Scene(**MODES[mode])
    plan = scene.plan()
    keys, values = scene.keys.nan_to_num(), scene.values.nan_to_num()
    args = (scene.q, scene.k, scene.v, keys, values)
    args += (plan.query_starts, plan.context_lens, plan.page_table, plan.slot_mapping, plan.visible_end)
    args += (0.3, 0, 0, False, plan.write, plan.decode, False, "cpu")
    torch.library.opcheck(torch.ops.mstar.attention.default, args)


def test_varlen_op_passes_torchs_own_checks() -> None:
    q, k, v = (torch.randn(5, 2, 8) for _ in range(3))
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    args = (q, k, v, None, None, starts, None, None, None, None, 0.3, 0, 3, True, False, False, False, "cpu")
    torch.library.opcheck(torch.ops.mstar.attention.default, args)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_compiled_step_writes_the_pool_and_agrees(compiler: str, cpu: Any) -> None:
    scene = Scene(**MODES["chunk"])

    def step(kv: KVBatch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = kv.attend(0, q, k, v)
        return kv.attend(1, first, k, v, window=3) * 2

    results = []
    with torch.no_grad():
        for function in (step, torch.compile(step, backend=compiler, fullgraph=True)):
            pools = [[pool.clone() for _ in range(2)] for pool in (scene.keys, scene.values)]
            results.append((function(KVBatch(scene.plan(), *pools, cpu), scene.q, scene.k, scene.v), *pools[0]))
    torch._dynamo.reset()
    assert_same(results[1], results[0])


def test_a_compiled_encoder_agrees(cpu: Any) -> None:
    q, k, v = (torch.randn(5, 2, 8) for _ in range(3))
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)

    def encode(q: Tensor) -> Tensor:
        return varlen_attention(q, k, v, starts, max_len=3) + 1

    with torch.no_grad():
        compiled = torch.compile(encode, backend="eager", fullgraph=True)(q)
    torch._dynamo.reset()
    torch.testing.assert_close(compiled, encode(q))


# ---- choosing -------------------------------------------------------------------------------------------


def test_auto_on_a_cpu_is_the_cpu_backend() -> None:
    assert choose_backend("cpu").name == "cpu"
    assert choose_backend(torch.device("cpu"), "auto").name == "cpu"


@pytest.mark.parametrize(
    ("device", "name", "message"),
    [
        ("cpu", "flashinfer", "needs a CUDA device"),
        ("cuda", "cpu", "cannot run on 'cuda'"),
        ("cpu", "sparse", "unknown attention backend 'sparse'"),
    ],
)
def test_a_backend_that_cannot_work_is_a_config_error(device: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_backend(device, name)
