"""FlashInfer's planning, on a CPU, against a fake of its documented API that computes what it was planned to."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar.errors import ConfigError
from mstar.layers.attention import (
    AttentionPlan,
    KVBatch,
    build_plan,
    choose_backend,
    decode_plan,
    varlen_attention,
)
from mstar.layers.attention.flashinfer import FlashInferBackend, cut_runs

CALLS: list[str] = []


def attend(q: Tensor, keys: Tensor, values: Tensor, *, causal: bool, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """q (n, H, D) aligned to the end of keys and values (S, Hkv, D) -> output, log-sum-exp in base 2."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("nhd,shd->hns", q.float(), keys) * options["sm_scale"]
    position = torch.arange(len(q))[:, None] + len(keys) - len(q)
    column = torch.arange(len(keys))[None]
    hidden = (column > position) if causal else torch.zeros(len(q), len(keys), dtype=torch.bool)
    if options["window_left"] >= 0:
        hidden = hidden | (column < position - options["window_left"])
    scores = scores.masked_fill(hidden, -torch.inf)
    out = torch.einsum("hns,shd->nhd", scores.softmax(-1), values)
    return out.to(q.dtype), (scores.logsumexp(-1) / np.log(2)).T.contiguous()


class FakeWrapper:
    """What the wrappers share: a workspace, a layout, a plan on the host, a run per layer."""

    def __init__(self, workspace: Tensor, kv_layout: str = "NHD", **options: Any) -> None:
        assert workspace.dtype == torch.uint8
        assert kv_layout == "HND"
        self.fixed: tuple[Tensor, ...] | None = None
        if options.pop("use_cuda_graph", False):
            self.fixed = tuple(
                options.pop(f"paged_kv_{name}_buffer") for name in ("indptr", "indices", "last_page_len")
            )
            assert len(self.fixed[0]) == len(self.fixed[2]) + 1
        assert set(options) <= {"use_tensor_cores"}

    def accept(self, *arrays: Tensor, heads: tuple[int, int, int], options: dict[str, Any]) -> None:
        assert all(a.dtype == torch.int32 and a.device.type == "cpu" and a.is_contiguous() for a in arrays)
        assert set(options) == {"pos_encoding_mode", "window_left", "sm_scale", "q_data_type", "kv_data_type"}
        CALLS.append(f"{type(self).__name__}.plan")
        self.heads, self.options = heads, options

    def check(self, q: Tensor, kv_heads: int) -> None:
        assert q.is_contiguous()
        assert self.heads == (q.shape[1], kv_heads, q.shape[2])
        assert q.dtype == self.options["q_data_type"]
        CALLS.append(f"{type(self).__name__}.run")

    def read_pages(self, pool: tuple[Tensor, Tensor], request: int) -> list[Tensor]:
        starts, pages, last = self.paging
        mine = pages[starts[request] : starts[request + 1]]
        assert 1 <= last[request] <= self.page_size
        length = (len(mine) - 1) * self.page_size + int(last[request])
        return [cache[mine.long()].transpose(1, 2).flatten(0, 1)[:length] for cache in pool]


class Prefill(FakeWrapper):
    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        **options: Any,
    ) -> None:
        self.paging = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self.accept(qo_indptr, *self.paging, heads=(num_qo_heads, num_kv_heads, head_dim_qk), options=options)
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        self.starts, self.page_size, self.causal = qo_indptr, page_size, causal

    def run(self, q: Tensor, pool: tuple[Tensor, Tensor], *, return_lse: bool = False) -> Any:
        self.check(q, pool[0].shape[1])
        assert len(q) == self.starts[-1]
        parts = [
            attend(part, *self.read_pages(pool, request), causal=self.causal, options=self.options)
            for request, part in enumerate(q.split(self.starts.diff().tolist()))
        ]
        out, lse = (torch.cat(x) for x in zip(*parts, strict=True))
        return (out, lse) if return_lse else out


class Ragged(FakeWrapper):
    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        *,
        causal: bool = False,
        **options: Any,
    ) -> None:
        self.accept(qo_indptr, kv_indptr, heads=(num_qo_heads, num_kv_heads, head_dim_qk), options=options)
        self.starts, self.kv_starts, self.causal = qo_indptr, kv_indptr, causal

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False) -> Any:
        self.check(q, k.shape[1])
        assert (len(q), len(k)) == (self.starts[-1], self.kv_starts[-1])
        lens = self.kv_starts.diff().tolist()
        rows = zip(q.split(self.starts.diff().tolist()), k.split(lens), v.split(lens), strict=True)
        parts = [attend(*row, causal=self.causal, options=self.options) for row in rows if len(row[0])]
        out, lse = (torch.cat(x) for x in zip(*parts, strict=True))
        return (out, lse) if return_lse else out


class Decode(FakeWrapper):
    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        self.paging = indptr, indices, last_page_len
        self.accept(*self.paging, heads=(num_qo_heads, num_kv_heads, head_dim), options=options)
        self.page_size = page_size
        if self.fixed is not None:
            assert len(last_page_len) == len(self.fixed[2]), "the batch size of a graph's wrapper is fixed"
            assert len(indices) <= len(self.fixed[1])
            for buffer, given in zip(self.fixed, self.paging, strict=True):
                buffer[: len(given)].copy_(given)
            self.paging = self.fixed  # as the kernels read them

    def run(self, q: Tensor, pool: tuple[Tensor, Tensor]) -> Tensor:
        self.check(q, pool[0].shape[1])
        rows = [
            attend(q[i : i + 1], *self.read_pages(pool, i), causal=True, options=self.options)[0] for i in range(len(q))
        ]
        return torch.cat(rows)


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    assert kv_layout == "HND"
    size = paged_kv_cache[0].shape[2]
    for token, (row, position) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
        page = kv_indices[kv_indptr[row] + position // size]
        assert kv_indptr[row] + position // size < kv_indptr[row + 1]
        for cache, new in zip(paged_kv_cache, (append_key, append_value), strict=True):
            cache[page, :, position % size] = new[token]


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    assert s_a.dtype == s_b.dtype == torch.float32
    total = torch.logaddexp2(s_a, s_b)
    weights = [torch.exp2(s - total)[..., None] for s in (s_a, s_b)]
    return (v_a.float() * weights[0] + v_b.float() * weights[1]).to(v_a.dtype), total


FAKE = SimpleNamespace(
    BatchPrefillWithPagedKVCacheWrapper=Prefill,
    BatchPrefillWithRaggedKVCacheWrapper=Ragged,
    BatchDecodeWithPagedKVCacheWrapper=Decode,
    append_paged_kv_cache=append_paged_kv_cache,
    merge_state=merge_state,
)


@pytest.fixture
def flashinfer() -> FlashInferBackend:
    CALLS.clear()
    return FlashInferBackend(device=torch.device("cpu"), strict=False, module=FAKE, workspace_bytes=16)


def plan_of(lens: list[int], contexts: list[int], **options: Any) -> AttentionPlan:
    size = options.pop("page_size", 4)
    width = max(-(-(c + n) // size) for c, n in zip(contexts, lens, strict=True)) + 1
    table = np.random.default_rng(0).permutation(len(lens) * width).astype(np.int32).reshape(len(lens), width) + 1
    return build_plan(
        query_lens=np.array(lens, dtype=np.int32),
        context_lens=np.array(contexts, dtype=np.int32),
        page_table=table,
        page_size=size,
        device="cpu",
        **options,
    )


def compare(
    plan: AttentionPlan, backend: Any, *, dim: int = 64, dtype: torch.dtype = torch.float16, **call: Any
) -> None:
    torch.manual_seed(0)
    tokens, num_pages = len(plan.visible_end), plan.page_table.numel() * 2 + 2
    q = torch.randn(tokens, 6, dim).to(dtype)
    k, v = (torch.randn(tokens, 2, dim).to(dtype) for _ in range(2))
    pools = [torch.randn(num_pages, 2, plan.page_size, dim).to(dtype) for _ in range(2)]
    results = []
    for chosen in (backend, choose_backend("cpu", "reference")):
        keys, values = (pool.clone() for pool in pools)
        results.append((KVBatch(plan, [keys], [values], chosen).attend(0, q, k, v, **call), keys, values))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=4e-3, rtol=4e-3)


SPANS = [np.array([[1, 4], [4, 6], [8, 9]]), None, np.array([[0, 6]])]
MODES: dict[str, tuple[tuple[Any, ...], dict[str, Any], set[str]]] = {
    "decode": (([1, 1, 1], [9, 0, 4]), {}, {"Decode"}),
    "prefill": (([7, 3], [0, 0]), {}, {"Prefill"}),
    "mixed": (([1, 6, 0, 1, 2], [8, 2, 5, 0, 7]), {}, {"Prefill"}),
    "full": (([5, 3, 1], [4, 0, 2]), {"full": np.array([True, False, True])}, {"Prefill"}),
    "all full": (([5, 3], [4, 0]), {"full": np.array([True, True])}, {"Prefill"}),
    "spans": (([9, 4, 6], [3, 0, 5]), {"spans": SPANS}, {"Prefill"}),
    "no-write": (([4, 3, 0, 2], [6, 0, 4, 8]), {"write": False, "full": np.array([True] * 4)}, {"Prefill", "Ragged"}),
    "no-write causal": (([3, 1], [5, 7]), {"write": False}, {"Prefill", "Ragged"}),
    "no-write spans": (([9, 4, 6], [3, 0, 5]), {"write": False, "spans": SPANS}, {"Prefill", "Ragged"}),
    "no-write alone": (([3, 2], [0, 0]), {"write": False}, {"Ragged"}),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_planned_into_requests_flashinfer_knows(mode: str, flashinfer: FlashInferBackend) -> None:
    rows, options, used = MODES[mode]
    compare(plan_of(*rows, **options), flashinfer, scale=0.3)
    assert {call.split(".")[0] for call in CALLS} == used


@pytest.mark.parametrize("mode", ["decode", "mixed", "spans"])
def test_windows_count_as_flashinfer_counts_them(mode: str, flashinfer: FlashInferBackend) -> None:
    rows, options, _ = MODES[mode]
    compare(plan_of(*rows, **options), flashinfer, window=3)
    assert CALLS


def test_runs_split_at_rows_and_at_adjacent_spans() -> None:
    host = plan_of([9, 4, 6], [3, 0, 5], spans=SPANS).host
    causal, spans = cut_runs(host)
    assert list(zip(causal.rows, causal.begins, causal.ends, strict=True)) == [(0, 0, 1), (0, 6, 9), (1, 9, 13)]
    assert list(zip(spans.begins, spans.ends, spans.kv_lens, strict=True)) == [(1, 4, 7), (4, 6, 9), (13, 19, 11)]


def test_layers_share_one_planning_and_steps_do_not(flashinfer: FlashInferBackend) -> None:
    q, k, v = torch.randn(2, 6, 64).half(), torch.randn(2, 2, 64).half(), torch.randn(2, 2, 64).half()
    pools = [[torch.zeros(30, 2, 4, 64).half() for _ in range(3)] for _ in range(2)]
    first, second = (KVBatch(plan_of([1, 1], [5, 2]), *pools, flashinfer) for _ in range(2))
    for layer in range(3):
        first.attend(layer, q, k, v)
    second.attend(0, q, k, v)
    first.attend(0, q, k, v)
    assert ["Decode.plan", *["Decode.run"] * 3, *["Decode.plan", "Decode.run"] * 2] == CALLS


def test_what_is_captured_follows_the_plan_of_each_replay(flashinfer: FlashInferBackend) -> None:
    """One wrapper per number of rows, with buffers that stay; planned before a replay, never inside."""
    torch.manual_seed(0)
    assert flashinfer.can_capture(head_dim=64, dtype=torch.bfloat16)
    assert not flashinfer.can_capture(head_dim=64, dtype=torch.float32)
    steps = [([1, 1, 1], [5, 2, 9]), ([1, 1, 1], [0, 12, 3]), ([1, 1, 1], [6, 3, 10])]
    fixed = decode_plan(
        context_lens=[0] * 3, slot_mapping=torch.zeros(3, dtype=torch.int64),
        page_table=np.zeros((3, 5), dtype=np.int32), page_size=4,
    )  # fmt: skip
    fixed.held = {}
    q, k, v = torch.randn(3, 6, 64).half(), torch.randn(3, 2, 64).half(), torch.randn(3, 2, 64).half()
    pools = [[torch.randn(60, 2, 4, 64).half() for _ in range(2)] for _ in range(2)]

    def region() -> list[Tensor]:
        fixed.derived.clear()
        batch = KVBatch(fixed, *pools, flashinfer)
        return [batch.attend(0, q, k, v), batch.attend(1, q, k, v), batch.attend(1, q, k, v, window=3)]

    region()  # plans two shapes
    buffers = [wrapper.fixed for wrapper in fixed.held.values()]
    assert len(buffers) == 2
    for rows in steps:
        live = plan_of(*rows)
        CALLS.clear()
        flashinfer.refresh(fixed, live)
        assert CALLS == ["Decode.plan"] * 2
        outs, stored = region(), [pool.clone() for pool in pools[0]]
        assert CALLS[2:] == ["Decode.run"] * 3
        right = KVBatch(live, *pools, choose_backend("cpu", "reference"))
        expected = [right.attend(0, q, k, v), right.attend(1, q, k, v), right.attend(1, q, k, v, window=3)]
        for actual, wanted in zip([*outs, *stored], [*expected, *pools[0]], strict=True):
            torch.testing.assert_close(actual, wanted, atol=4e-3, rtol=4e-3)
    assert [wrapper.fixed for wrapper in fixed.held.values()] == buffers


def test_encoders_use_the_ragged_wrapper_planned_once(flashinfer: FlashInferBackend) -> None:
    q, k, v = torch.randn(9, 6, 64).half(), torch.randn(9, 2, 64).half(), torch.randn(9, 2, 64).half()
    starts = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    for causal in (True, False):
        results = [
            varlen_attention(q, k, v, starts, max_len=5, causal=causal, backend=backend)
            for backend in (flashinfer, flashinfer, choose_backend("cpu", "reference"))
        ]
        torch.testing.assert_close(results[0], results[2], atol=4e-3, rtol=4e-3)
    assert CALLS.count("Ragged.plan") == 2


@pytest.mark.parametrize(
    ("call", "plan", "reason"),
    [
        ({"dim": 72}, {}, "no kernel for head dimension 72"),
        ({"dtype": torch.float32}, {}, r"no kernel for torch.float32"),
        ({"window": 3}, {"write": False}, "cannot window queries that are not cached"),
    ],
)
def test_what_flashinfer_cannot_do_falls_back_with_one_warning(
    call: dict[str, Any],
    plan: dict[str, Any],
    reason: str,
    flashinfer: FlashInferBackend,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            compare(plan_of([3, 1], [5, 7], **plan), flashinfer, **call)
    assert len(caplog.records) == 1
    assert not CALLS
    strict = FlashInferBackend(device=torch.device("cpu"), strict=True, module=FAKE, workspace_bytes=16)
    with pytest.raises(ConfigError, match=reason):
        compare(plan_of([3, 1], [5, 7], **plan), strict, **call)


def test_require_speaks_up_before_any_step() -> None:
    strict = FlashInferBackend(device=torch.device("cpu"), strict=True, module=FAKE, workspace_bytes=16)
    strict.require(head_dim=128, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="head dimension 80"):
        strict.require(head_dim=80, dtype=torch.bfloat16)


def test_batch_invariant_steps_run_in_fixed_tiles(flashinfer: FlashInferBackend) -> None:
    compare(plan_of([3, 1], [5, 7], batch_invariant=True), flashinfer)
    assert not CALLS


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"install mstar-core\[cuda\]"):
        FlashInferBackend(device=torch.device("cpu"), strict=True, workspace_bytes=16)
