"""Attention on CUDA with FlashInfer, by its documented wrappers: `plan` on the host once a step, `run` once a layer.

FlashInfer knows causal requests and requests where every query sees everything. So each row is cut into runs, causal
ones and bidirectional spans, and a run is a request of its own whose KV ends where the run does. Uncached rows are two
attentions, over the cached context and over the new tokens, merged by their log-sum-exp.

Limits, where plain torch takes over: head dimensions other than 64, 128 and 256, dtypes other than float16 and
bfloat16, uncached queries with a sliding window, and batch invariance, which fixes the order of the arithmetic.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mstar.errors import ConfigError
from mstar.layers.attention.plain import PlainBackend
from mstar.layers.attention.plan import AttentionPlan, HostPlan, IntArray, Pool, Varlen

logger = logging.getLogger(__name__)

_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.float16, torch.bfloat16)
_LAYOUT = "HND"  # the pool's (num_pages, Hkv, page_size, D)


class _Shape(NamedTuple):
    """What a wrapper is planned for, besides the rows."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    window: int


@dataclass(frozen=True, slots=True)
class Requests:
    """Virtual requests of one wrapper.

    Args:
        tokens: the batch's tokens that are its queries, in order; None: all.
        query_starts: (R + 1,).
        kv_starts: (R + 1,) in pages, or in tokens for ragged requests.
        kv_index: pages, in order; for ragged requests the new tokens to read, None: all.
        last_page_lens: (R,) tokens in the last page; empty for ragged requests.
    """

    tokens: IntArray | None
    query_starts: IntArray
    kv_starts: IntArray
    kv_index: IntArray | None
    last_page_lens: IntArray


@dataclass(frozen=True, slots=True)
class _Runs:
    """Consecutive tokens [begins, ends) of one row that are all causal, or all see the same."""

    rows: NDArray[np.integer[Any]]
    begins: NDArray[np.integer[Any]]
    ends: NDArray[np.integer[Any]]
    kv_lens: NDArray[np.integer[Any]]

    def where(self, chosen: NDArray[np.bool_]) -> _Runs:
        return _Runs(self.rows[chosen], self.begins[chosen], self.ends[chosen], self.kv_lens[chosen])


def cut_runs(host: HostPlan) -> tuple[_Runs, _Runs]:
    """The causal runs and the bidirectional ones of a batch, each in order of tokens."""
    starts, visible = host.query_starts, host.visible_end
    rows = np.flatnonzero(host.query_lens)
    if host.causal:
        ends = starts[rows + 1]
        runs = _Runs(rows, starts[rows], ends, visible[ends - 1])
        return runs, runs.where(np.zeros(len(rows), dtype=np.bool_))
    row_of = np.repeat(np.arange(len(host.query_lens)), host.query_lens)
    # Causal tokens see ever further, tokens of a span equally far: equal neighbours are a span.
    as_before = np.zeros(len(row_of) + 1, dtype=np.bool_)
    as_before[1:-1] = (row_of[1:] == row_of[:-1]) & (visible[1:] == visible[:-1])
    in_span = as_before[:-1] | as_before[1:]
    new_run = np.ones(len(row_of), dtype=np.bool_)
    new_run[1:] = (row_of[1:] != row_of[:-1]) | (in_span[1:] != in_span[:-1]) | (in_span[1:] & ~as_before[1:-1])
    begins = np.flatnonzero(new_run)
    ends = np.append(begins[1:], len(row_of))
    runs = _Runs(row_of[begins], begins, ends, visible[ends - 1])
    return runs.where(~in_span[begins]), runs.where(in_span[begins])


def paged_requests(runs: _Runs, host: HostPlan, *, page_size: int) -> Requests:
    """Requests that read the pages of their run's row, up to the run's `kv_lens`."""
    counts = -(-runs.kv_lens // page_size)
    table = host.page_table[runs.rows]
    pages = table[np.arange(table.shape[1])[None] < counts[:, None]]
    return Requests(
        tokens=_tokens(runs.begins, runs.ends, total=len(host.visible_end)),
        query_starts=_starts(runs.ends - runs.begins),
        kv_starts=_starts(counts),
        kv_index=pages.astype(np.int32),
        last_page_lens=(runs.kv_lens - (counts - 1) * page_size).astype(np.int32),
    )


def context_requests(host: HostPlan, *, page_size: int) -> Requests:
    """Requests in which the new tokens of each row read its cached context, where there is one."""
    rows = np.flatnonzero((host.query_lens > 0) & (host.context_lens > 0))
    runs = _Runs(rows, host.query_starts[rows], host.query_starts[rows + 1], host.context_lens[rows])
    return paged_requests(runs, host, page_size=page_size)


def ragged_requests(runs: _Runs, host: HostPlan) -> Requests:
    """Requests that read their row's new tokens, up to the run's `kv_lens`."""
    begins = host.query_starts[runs.rows]
    lens = runs.kv_lens - host.context_lens[runs.rows]
    return Requests(
        tokens=_tokens(runs.begins, runs.ends, total=len(host.visible_end)),
        query_starts=_starts(runs.ends - runs.begins),
        kv_starts=_starts(lens),
        kv_index=_tokens(begins, begins + lens, total=len(host.visible_end)),
        last_page_lens=np.empty(0, dtype=np.int32),
    )


class FlashInferBackend:
    """FlashInfer's batch wrappers, one per role and shape, sharing one workspace.

    Args:
        strict: the operator named this backend: what it cannot do is an error, not a warning.
        module: the `flashinfer` package; imported when None.
    """

    name = "flashinfer"

    def __init__(
        self, *, device: torch.device, strict: bool, module: Any = None, workspace_bytes: int = 128 << 20
    ) -> None:
        if module is None:
            try:
                module = importlib.import_module("flashinfer")
            except ImportError as error:
                raise ConfigError(f"attention backend 'flashinfer': {error}; install mstar-core[cuda]") from error
        self._module = module
        self._device = device
        self._strict = strict
        self._plain = PlainBackend()
        self._warned: set[str] = set()
        # Zeroed: FlashInfer asks for that before the first use.
        self._workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=device)
        self._wrappers: dict[Hashable, Any] = {}
        self._planned_for: dict[Hashable, object] = {}

    def require(self, *, head_dim: int, dtype: torch.dtype) -> None:
        """Raise ConfigError (`strict`) or warn once when plain torch must do this shape."""
        reason = _unsupported(head_dim=head_dim, dtype=dtype)
        if reason is not None:
            self._fall_back(reason)

    def paged(
        self, q: Tensor, k: Tensor, v: Tensor, pool: Pool, plan: AttentionPlan, *, scale: float, window: int
    ) -> Tensor:
        reason = _unsupported(head_dim=q.shape[2], dtype=q.dtype)
        if window and not plan.write:
            reason = "FlashInfer cannot window queries that are not cached"
        if reason is not None:
            self._fall_back(reason)
        if reason is not None or plan.batch_invariant:
            return self._plain.paged(q, k, v, pool, plan, scale=scale, window=window)
        if q.shape[0] == 0:
            return torch.empty_like(q)
        shape = _Shape(q.shape[1], k.shape[1], q.shape[2], q.dtype, scale, window)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if not plan.write:
            return self._uncached(q, k, v, pool, plan, shape)
        self._append(k, v, pool, plan)
        if plan.decode:
            return self._decode(q, pool, plan, shape)
        return self._cached(q, pool, plan, shape)

    def varlen(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *, how: Varlen) -> Tensor:
        reason = _unsupported(head_dim=q.shape[2], dtype=q.dtype)
        if reason is not None:
            self._fall_back(reason)
        if reason is not None or how.batch_invariant or q.shape[0] == 0:
            return self._plain.varlen(q, k, v, starts, how=how)
        shape = _Shape(q.shape[1], k.shape[1], q.shape[2], q.dtype, how.scale, how.window)
        key = ("varlen", how.causal, shape)
        wrapper = self._wrapper(key, "BatchPrefillWithRaggedKVCacheWrapper")
        if self._planned_for.get(key) is not starts:
            edges = starts.cpu()
            wrapper.plan(edges, edges, *shape[:3], causal=how.causal, **_options(shape))
            self._planned_for[key] = starts
        return wrapper.run(q.contiguous(), k.contiguous(), v.contiguous())  # type: ignore[no-any-return]

    # ---- the three kinds of step over the pool ----------------------------------------------------------

    def _decode(self, q: Tensor, pool: Pool, plan: AttentionPlan, shape: _Shape) -> Tensor:
        # The kernels without tensor cores exist for a few group sizes only.
        key = ("decode", shape)
        wrapper = self._wrapper(
            key, "BatchDecodeWithPagedKVCacheWrapper", use_tensor_cores=shape.heads > shape.kv_heads
        )
        if self._planned_for.get(key) is not plan:
            requests = self._requests(plan, "causal")
            wrapper.plan(
                _tensor(requests.kv_starts),
                _tensor(requests.kv_index),
                _tensor(requests.last_page_lens),
                *shape[:3],
                plan.page_size,
                **_options(shape),
            )
            self._planned_for[key] = plan
        return wrapper.run(q, pool)  # type: ignore[no-any-return]

    def _cached(self, q: Tensor, pool: Pool, plan: AttentionPlan, shape: _Shape) -> Tensor:
        out = torch.empty_like(q)
        for role in ("causal", "open"):
            requests = self._requests(plan, role)
            if len(requests.query_starts) == 1:
                continue
            wrapper = self._plan_paged(role, plan, shape, causal=role == "causal")
            if requests.tokens is None:
                return wrapper.run(q, pool)  # type: ignore[no-any-return]
            tokens = self._index(plan, role, "tokens")
            out.index_copy_(0, tokens, wrapper.run(q.index_select(0, tokens), pool))
        return out

    def _uncached(self, q: Tensor, k: Tensor, v: Tensor, pool: Pool, plan: AttentionPlan, shape: _Shape) -> Tensor:
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        for role in ("new causal", "new open"):
            requests = self._requests(plan, role)
            if len(requests.query_starts) == 1:
                continue
            key = (role, shape)
            wrapper = self._wrapper(key, "BatchPrefillWithRaggedKVCacheWrapper")
            if self._planned_for.get(key) is not plan:
                edges = _tensor(requests.query_starts), _tensor(requests.kv_starts)
                wrapper.plan(*edges, *shape[:3], causal=role == "new causal", **_options(shape))
                self._planned_for[key] = plan
            tokens, read = self._index(plan, role, "tokens"), self._index(plan, role, "kv_index")
            new = wrapper.run(
                q.index_select(0, tokens), k.index_select(0, read), v.index_select(0, read), return_lse=True
            )
            out.index_copy_(0, tokens, new[0])
            lse.index_copy_(0, tokens, new[1])
        if len(self._requests(plan, "context").query_starts) > 1:
            wrapper = self._plan_paged("context", plan, shape, causal=False)
            tokens = self._index(plan, "context", "tokens")
            old = wrapper.run(q.index_select(0, tokens), pool, return_lse=True)
            merged, _ = self._module.merge_state(*old, out.index_select(0, tokens), lse.index_select(0, tokens))
            out.index_copy_(0, tokens, merged)
        return out

    def _append(self, k: Tensor, v: Tensor, pool: Pool, plan: AttentionPlan) -> None:
        args = plan.derived.get("flashinfer append")
        if args is None:
            host, size = plan.host, plan.page_size
            rows = np.repeat(np.arange(len(host.query_lens), dtype=np.int32), host.query_lens)
            local = np.arange(len(rows), dtype=np.int32) - host.query_starts[rows]
            kv_lens = host.context_lens + host.query_lens
            counts = -(-kv_lens // size)
            pages = host.page_table[np.arange(host.page_table.shape[1])[None] < counts[:, None]]
            arrays = (rows, host.context_lens[rows] + local, pages, _starts(counts), kv_lens - (counts - 1) * size)
            args = plan.derived["flashinfer append"] = tuple(_tensor(a).to(self._device) for a in arrays)
        rows_of, positions, *paging = args
        self._module.append_paged_kv_cache(k, v, rows_of, positions, pool, *paging, kv_layout=_LAYOUT)

    # ---- planning ---------------------------------------------------------------------------------------

    def _requests(self, plan: AttentionPlan, role: str) -> Requests:
        requests = plan.derived.get(("flashinfer", role))
        if requests is None:
            if role == "context":
                requests = context_requests(plan.host, page_size=plan.page_size)
            else:
                runs = cut_runs(plan.host)[role.endswith("open")]
                if role.startswith("new"):
                    requests = ragged_requests(runs, plan.host)
                else:
                    requests = paged_requests(runs, plan.host, page_size=plan.page_size)
            plan.derived["flashinfer", role] = requests
        return requests  # type: ignore[no-any-return]

    def _index(self, plan: AttentionPlan, role: str, field: str) -> Tensor:
        """`Requests.tokens` or `kv_index` on the device."""
        index = plan.derived.get(("flashinfer", role, field))
        if index is None:
            array = getattr(self._requests(plan, role), field)
            if array is None:
                array = np.arange(len(plan.host.visible_end), dtype=np.int32)
            index = plan.derived["flashinfer", role, field] = _tensor(array).long().to(self._device)
        return index  # type: ignore[no-any-return]

    def _plan_paged(self, role: str, plan: AttentionPlan, shape: _Shape, *, causal: bool) -> Any:
        key = (role, shape)
        wrapper = self._wrapper(key, "BatchPrefillWithPagedKVCacheWrapper")
        if self._planned_for.get(key) is not plan:
            requests = self._requests(plan, role)
            wrapper.plan(
                _tensor(requests.query_starts),
                _tensor(requests.kv_starts),
                _tensor(requests.kv_index),
                _tensor(requests.last_page_lens),
                *shape[:3],
                plan.page_size,
                causal=causal,
                **_options(shape),
            )
            self._planned_for[key] = plan
        return wrapper

    def _wrapper(self, key: Hashable, kind: str, **options: Any) -> Any:
        wrapper = self._wrappers.get(key)
        if wrapper is None:
            wrapper = self._wrappers[key] = getattr(self._module, kind)(self._workspace, _LAYOUT, **options)
        return wrapper

    def _fall_back(self, reason: str) -> None:
        if self._strict:
            raise ConfigError(f"attention backend 'flashinfer': {reason}; use 'auto' to let plain torch do it")
        if reason not in self._warned:
            self._warned.add(reason)
            logger.warning("attention falls back to plain torch: %s", reason)


def _unsupported(*, head_dim: int, dtype: torch.dtype) -> str | None:
    if head_dim not in _HEAD_DIMS:
        return f"FlashInfer has no kernel for head dimension {head_dim}, only for {_HEAD_DIMS}"
    if dtype not in _DTYPES:
        return f"FlashInfer has no kernel for {dtype}, only for float16 and bfloat16"
    return None


def _options(shape: _Shape) -> dict[str, Any]:
    """Keywords that every wrapper's plan takes. FlashInfer's window counts the keys before the query."""
    return {
        "pos_encoding_mode": "NONE",
        "window_left": shape.window - 1 if shape.window else -1,
        "sm_scale": shape.scale,
        "q_data_type": shape.dtype,
        "kv_data_type": shape.dtype,
    }


def _starts(lens: NDArray[np.integer[Any]]) -> IntArray:
    starts = np.zeros(len(lens) + 1, dtype=np.int32)
    np.cumsum(lens, out=starts[1:])
    return starts


def _tokens(begins: NDArray[np.integer[Any]], ends: NDArray[np.integer[Any]], *, total: int) -> IntArray | None:
    """The tokens of [begins, ends), concatenated; None when they are all tokens in order."""
    starts = _starts(ends - begins)
    if starts[-1] == total and (begins == starts[:-1]).all():
        return None
    return (np.arange(starts[-1]) + np.repeat(begins - starts[:-1], ends - begins)).astype(np.int32)


def _tensor(array: IntArray | None) -> Tensor:
    assert array is not None
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32))
