"""Attention on CPUs by a kernel of our own, `attention.cpp`; by plain torch where it cannot be built, and for dtypes it
does not have.

The kernel gives a query the same bits in any batch, chunk and number of threads: batch invariance costs nothing here.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mstar.layers.attention.plain import PlainBackend
from mstar.layers.attention.plan import AttentionPlan, Pool
from mstar.layers.kernels import function

SOURCE = Path(__file__).with_name("attention.cpp")
_ARGUMENTS = (*[ctypes.c_void_p] * 7, *[ctypes.c_int64] * 7, ctypes.c_float, ctypes.c_int)


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("starts", "contexts", "pages", "visible_end", "slots")),
        *((name, ctypes.c_int64) for name in ("num_rows", "table_width", "page_size", "write")),
    ]


class CpuBackend(PlainBackend):
    """One call of the kernel per layer: it writes the new keys and values, then attends."""

    name = "cpu"

    def require(self, *, head_dim: int, dtype: torch.dtype) -> None:
        """Everything works; builds the kernel now rather than at the first request."""
        _kernel(dtype)

    def paged(
        self, q: Tensor, k: Tensor, v: Tensor, pool: Pool, plan: AttentionPlan, *, scale: float, window: int
    ) -> Tensor:
        keys, values = pool
        kernel = _kernel(q.dtype)
        if kernel is None or not q.dtype == k.dtype == v.dtype == keys.dtype:
            return super().paged(q, k, v, pool, plan, scale=scale, window=window)
        step = plan.derived.get("cpu")
        if step is None:
            step = plan.derived["cpu"] = step_of(plan)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        heads, dim = q.shape[1:]
        q, k, v = (x if x.stride()[1:] == (dim, 1) else x.contiguous() for x in (q, k, v))
        pointers = q.data_ptr(), k.data_ptr(), v.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr()
        strides = q.stride(0), k.stride(0), v.stride(0)
        kernel(step, *pointers, *strides, heads, k.shape[1], dim, window, scale, torch.get_num_threads())
        return out


@functools.cache
def _kernel(dtype: torch.dtype) -> Callable[..., None] | None:
    return function(SOURCE, dtype, _ARGUMENTS)


def step_of(plan: AttentionPlan) -> ctypes.Array[_Step]:
    """The plan as the kernel reads it, while the plan lives."""
    arrays = plan.query_starts, plan.context_lens, plan.page_table, plan.visible_end, plan.slot_mapping
    assert all(array.is_contiguous() for array in arrays)
    assert [array.dtype for array in arrays] == [torch.int32] * 4 + [torch.int64]
    rows, width = plan.page_table.shape
    return (_Step * 1)(_Step(*(array.data_ptr() for array in arrays), rows, width, plan.page_size, plan.write))
