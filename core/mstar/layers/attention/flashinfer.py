"""Attention on CUDA with FlashInfer, by its documented wrappers: `plan` on the host once a step, `run` once a layer.

FlashInfer knows causal requests and requests where every query sees everything. So each row is cut into runs, causal
ones and bidirectional spans, and a run is a request of its own whose KV ends where the run does. Uncached rows are two
attentions, over the new tokens and over the cached context, merged by their log-sum-exp.

In CUDA graphs decoding has wrappers of its own, one per number of rows, whose page lists stay where they are. What
`plan` decides lies there too, so it runs before every replay (`refresh`).

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
from mstar.layers.attention.plain import PlainBackend, write_kv
from mstar.layers.attention.plan import AttentionPlan, HostPlan, Pool, Varlen

logger = logging.getLogger(__name__)

_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.float16, torch.bfloat16)
_LAYOUT = "HND"  # the pool's (num_pages, Hkv, page_size, D)
_DECODE = "BatchDecodeWithPagedKVCacheWrapper"
_PAGED = "BatchPrefillWithPagedKVCacheWrapper"
_RAGGED = "BatchPrefillWithRaggedKVCacheWrapper"


class _Shape(NamedTuple):
    """What a wrapper is planned for, besides the requests."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    window: int


@dataclass(frozen=True, slots=True, eq=False)
class _Requests:
    """What one wrapper computes in one run.

    Args:
        kind: the wrapper's name.
        layout: int32 tensors on the host, the first arguments of its `plan`.
        options: keywords of its `plan`.
        queries: tokens, in order, on the device; None: all, as they are.
        keys: likewise the new tokens that are read, if the pool is not.
    """

    kind: str
    layout: tuple[Tensor, ...]
    options: dict[str, Any]
    queries: Tensor | None
    keys: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Runs:
    """Consecutive tokens [begins, ends) of one row that see as far as `kv_lens`: all of them, or causally the last."""

    rows: NDArray[np.integer[Any]]
    begins: NDArray[np.integer[Any]]
    ends: NDArray[np.integer[Any]]
    kv_lens: NDArray[np.integer[Any]]

    def where(self, chosen: NDArray[np.bool_]) -> Runs:
        return Runs(self.rows[chosen], self.begins[chosen], self.ends[chosen], self.kv_lens[chosen])


def cut_runs(host: HostPlan) -> tuple[Runs, Runs]:
    """The causal runs and the bidirectional ones of a batch, each in order of tokens."""
    row_of, visible = host.row_of, host.visible_end
    # Causal tokens see ever further, tokens of a span equally far: equal neighbours are a span.
    as_before = np.zeros(len(row_of) + 1, dtype=np.bool_)
    as_before[1:-1] = (row_of[1:] == row_of[:-1]) & (visible[1:] == visible[:-1])
    in_span = as_before[:-1] | as_before[1:]
    new_run = np.ones(len(row_of), dtype=np.bool_)
    new_run[1:] = (row_of[1:] != row_of[:-1]) | (in_span[1:] != in_span[:-1]) | (in_span[1:] & ~as_before[1:-1])
    begins = np.flatnonzero(new_run)
    ends = np.append(begins[1:], len(row_of))
    runs = Runs(row_of[begins], begins, ends, visible[ends - 1])
    return runs.where(~in_span[begins]), runs.where(in_span[begins])


class FlashInferBackend:
    """FlashInfer's batch wrappers, one per use and shape, sharing one workspace.

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
        self._strict = strict
        self._plain = PlainBackend()
        self._warned: set[str] = set()
        # Zeroed: FlashInfer asks for that before the first use.
        self._workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=device)
        self._wrappers: dict[Hashable, Any] = {}
        self._planned_for: dict[Hashable, object] = {}
        self._copied: dict[Any, torch.cuda.Event] = {}  # wrapper -> when the device has its plan

    def require(self, *, head_dim: int, dtype: torch.dtype) -> None:
        """Raise ConfigError (`strict`) or warn once when plain torch must do this shape."""
        self._can(head_dim=head_dim, dtype=dtype)

    def can_capture(self, *, head_dim: int, dtype: torch.dtype) -> bool:
        """Whether decoding such heads can be in a CUDA graph."""
        return head_dim in _HEAD_DIMS and dtype in _DTYPES

    def refresh(self, fixed: AttentionPlan, live: AttentionPlan) -> None:
        """Before a replay: let what was captured with the plan `fixed` do what the step's own plan says.

        Both are decode plans of as many rows; the pages of `live` fit into `fixed.page_table`.
        """
        fixed.slot_mapping.copy_(live.slot_mapping, non_blocking=True)
        requests = _step_requests(live)["causal"]
        for shape, wrapper in (fixed.held or {}).items():
            self._plan(wrapper, requests.layout, shape, **requests.options)

    def paged(
        self, q: Tensor, k: Tensor, v: Tensor, pool: Pool, plan: AttentionPlan, *, scale: float, window: int
    ) -> Tensor:
        can = self._can(head_dim=q.shape[2], dtype=q.dtype, uncached_window=window > 0 and not plan.write)
        if not can or plan.batch_invariant or q.shape[0] == 0:
            assert plan.held is None, "plain attention cannot be captured"
            return self._plain.paged(q, k, v, pool, plan, scale=scale, window=window)
        if plan.write:
            write_kv(plan, k=k, v=v, pool=pool)
        shape = _Shape(q.shape[1], k.shape[1], q.shape[2], q.dtype, scale, window)
        if plan.held is not None:
            return self._captured(plan, shape).run(q.contiguous(), pool)  # type: ignore[no-any-return]
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        for role, requests in _step_requests(plan).items():
            key, tokens = (role, requests.kind, shape), requests.queries
            wrapper = self._planned(key, requests.kind, requests, requests.layout, shape, **requests.options)
            if tokens is None:
                return wrapper.run(q.contiguous(), pool)  # type: ignore[no-any-return]
            queries = q.index_select(0, tokens)
            if plan.write:
                out.index_copy_(0, tokens, wrapper.run(queries, pool))
                continue
            read = (pool,) if requests.keys is None else (x.index_select(0, requests.keys) for x in (k, v))
            mixed, weight = wrapper.run(queries, *read, return_lse=True)
            if role == "context":  # comes last: these queries have seen the new tokens already
                mixed, weight = self._module.merge_state(mixed, weight, out[tokens], lse[tokens])
            out.index_copy_(0, tokens, mixed)
            lse.index_copy_(0, tokens, weight)
        return out

    def varlen(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *, how: Varlen) -> Tensor:
        can = self._can(head_dim=q.shape[2], dtype=q.dtype)
        if not can or how.batch_invariant or q.shape[0] == 0:
            return self._plain.varlen(q, k, v, starts, how=how)
        shape = _Shape(q.shape[1], k.shape[1], q.shape[2], q.dtype, how.scale, how.window)
        key = ("varlen", how.causal, shape)
        # The edges are fetched from the device only to be planned.
        edges = () if self._planned_for.get(key) is starts else (starts.cpu(),) * 2
        wrapper = self._planned(key, _RAGGED, starts, edges, shape, causal=how.causal)
        return wrapper.run(q.contiguous(), k.contiguous(), v.contiguous())  # type: ignore[no-any-return]

    def _planned(
        self, key: Hashable, kind: str, source: object, layout: tuple[Tensor, ...], shape: _Shape, **options: Any
    ) -> Any:
        """The wrapper of this use and shape, planned for the source unless it already is."""
        wrapper = self._wrapper(key, kind, shape)
        if self._planned_for.get(key) is not source:
            self._plan(wrapper, layout, shape, **options)
            self._planned_for[key] = source
        return wrapper

    def _captured(self, plan: AttentionPlan, shape: _Shape) -> Any:
        """The wrapper for graphs of so many rows; planned here only when the plan first meets the shape."""
        assert plan.held is not None and plan.decode and plan.write
        if shape not in plan.held:
            rows, width = plan.page_table.shape
            device = self._workspace.device
            sizes = {"indptr": rows + 1, "indices": rows * width, "last_page_len": rows}
            fixed = {
                f"paged_kv_{name}_buffer": torch.zeros(size, dtype=torch.int32, device=device)
                for name, size in sizes.items()
            }
            key = "graph", rows, width, shape
            wrapper = plan.held[shape] = self._wrapper(key, _DECODE, shape, use_cuda_graph=True, **fixed)
            requests = _step_requests(plan)["causal"]
            self._plan(wrapper, requests.layout, shape, **requests.options)
        return plan.held[shape]

    def _wrapper(self, key: Hashable, kind: str, shape: _Shape, **fixed: Any) -> Any:
        if key not in self._wrappers:
            # Decode kernels without tensor cores exist for a few group sizes only.
            own = {"use_tensor_cores": shape.heads > shape.kv_heads} if kind == _DECODE else {}
            self._wrappers[key] = getattr(self._module, kind)(self._workspace, _LAYOUT, **own, **fixed)
        return self._wrappers[key]

    def _plan(self, wrapper: Any, layout: tuple[Tensor, ...], shape: _Shape, **options: Any) -> None:
        if wrapper in self._copied:  # its staging memory on the host is still being read until then
            self._copied[wrapper].synchronize()
        wrapper.plan(
            *layout,
            *shape[:3],
            pos_encoding_mode="NONE",
            window_left=shape.window - 1,  # counts the keys before the query; -1 is none
            sm_scale=shape.scale,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
            **options,
        )
        if self._workspace.is_cuda:
            self._copied.setdefault(wrapper, torch.cuda.Event()).record()

    def _can(self, *, head_dim: int, dtype: torch.dtype, uncached_window: bool = False) -> bool:
        """Whether FlashInfer has a kernel; if not, an error or one warning says so."""
        if head_dim not in _HEAD_DIMS:
            reason = f"FlashInfer has no kernel for head dimension {head_dim}, only for {_HEAD_DIMS}"
        elif dtype not in _DTYPES:
            reason = f"FlashInfer has no kernel for {dtype}, only for float16 and bfloat16"
        elif uncached_window:
            reason = "FlashInfer cannot window queries that are not cached"
        else:
            return True
        if self._strict:
            raise ConfigError(f"attention backend 'flashinfer': {reason}; use 'auto' to let plain torch do it")
        if reason not in self._warned:
            self._warned.add(reason)
            logger.warning("attention falls back to plain torch: %s", reason)
        return False


def _step_requests(plan: AttentionPlan) -> dict[str, _Requests]:
    """By their role, in order: of new tokens, causal and open, and of the context of uncached ones."""
    requests: dict[str, _Requests] | None = plan.derived.get("flashinfer")
    if requests is None:
        host, requests = plan.host, {}
        for role, runs in zip(("causal", "open"), cut_runs(host), strict=True):
            if len(runs.rows):
                of_runs = _paged_requests if plan.write else _ragged_requests
                requests[role] = of_runs(runs, plan, causal=role == "causal")
        rows = np.flatnonzero((host.query_lens > 0) & (host.context_lens > 0))
        if len(rows) and not plan.write:
            context = Runs(rows, host.query_starts[rows], host.query_starts[rows + 1], host.context_lens[rows])
            requests["context"] = _paged_requests(context, plan, causal=False)
        plan.derived["flashinfer"] = requests
    return requests


def _paged_requests(runs: Runs, plan: AttentionPlan, *, causal: bool) -> _Requests:
    """Requests that read the pages of their run's row, up to the run's `kv_lens`."""
    counts = -(-runs.kv_lens // plan.page_size)
    table = plan.host.page_table[runs.rows]
    pages = table[np.arange(table.shape[1]) < counts[:, None]]
    paging = _starts(counts), _on_host(pages), _on_host(runs.kv_lens - (counts - 1) * plan.page_size)
    is_whole = plan.write and (runs.ends - runs.begins).sum() == len(plan.host.row_of)
    queries = None if is_whole else _tokens(runs.begins, runs.ends, plan)
    if plan.decode and plan.write:
        return _Requests(_DECODE, paging, {"page_size": plan.page_size}, queries)
    layout = _starts(runs.ends - runs.begins), *paging
    return _Requests(_PAGED, layout, {"page_size": plan.page_size, "causal": causal}, queries)


def _ragged_requests(runs: Runs, plan: AttentionPlan, *, causal: bool) -> _Requests:
    """Requests that read their row's new tokens, up to the run's `kv_lens`."""
    begins = plan.host.query_starts[runs.rows]
    lens = runs.kv_lens - plan.host.context_lens[runs.rows]
    layout = _starts(runs.ends - runs.begins), _starts(lens)
    queries, keys = _tokens(runs.begins, runs.ends, plan), _tokens(begins, begins + lens, plan)
    return _Requests(_RAGGED, layout, {"causal": causal}, queries, keys)


def _on_host(array: NDArray[np.integer[Any]]) -> Tensor:
    return torch.from_numpy(array.astype(np.int32))


def _starts(lens: NDArray[np.integer[Any]]) -> Tensor:
    return _on_host(np.append(0, np.cumsum(lens)))


def _tokens(begins: NDArray[np.integer[Any]], ends: NDArray[np.integer[Any]], plan: AttentionPlan) -> Tensor:
    """The tokens of [begins, ends), concatenated, on the device."""
    lens = ends - begins
    steps = np.arange(lens.sum()) + np.repeat(begins - np.cumsum(lens) + lens, lens)
    return torch.from_numpy(steps.astype(np.int64)).to(plan.query_starts.device)
