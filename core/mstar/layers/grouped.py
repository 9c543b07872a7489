"""Products whose rows have one of several weights each: routed experts, heads by step. Knows tensors, not requests.

On CPUs by our kernel, whose rows do not depend on their number; where a group has more rows than it is made for, group
by group. Elsewhere in one call that no host has to wait for.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from mstar.layers.kernels import function
from mstar.layers.linear import SOURCE, MergedLinear, linear

_FEW = 32  # rows of a group on average, up to which our kernel is the fastest
_SERIAL = 1 << 18  # multiplications that are not worth waking a thread for
_ARGUMENTS = (*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 4, ctypes.c_int)


def grouped_linear(x: Tensor, weight: Tensor, group: Tensor, *, invariant: bool = False) -> Tensor:
    """x (P, K), row p by weight (G, N, K)[group[p]]^T -> (P, N).

    Args:
        group: (P,) int64.
        invariant: the bits of a row do not depend on the others.
    """
    if x.device.type != "cpu":
        return one_by_one(x, weight, group) if invariant else _on_device(x, weight, group)
    if torch.compiler.is_compiling():
        return _op(x, weight, group)
    return _on_cpu(x, weight, group) if invariant or len(x) <= _FEW * len(weight) else by_group(x, weight, group)


def grouped_share(x: Tensor, weight: Tensor, group: Tensor, *, first: int, invariant: bool = False) -> Tensor:
    """`grouped_linear` where weight holds groups first, first + 1, ... of more; rows of the others are zero."""
    own, count = group - first, len(weight)
    is_own = (own >= 0) & (own < count)
    if x.device.type == "cpu":
        rows = is_own.nonzero()[:, 0]
        found = grouped_linear(x[rows], weight, own[rows], invariant=invariant)
        return x.new_zeros(len(x), weight.shape[1]).index_copy(0, rows, found)
    # Rows behind the last group are not computed, where several are computed in one call.
    outside = count if _is_one_call(x, weight) and not invariant else 0
    found = grouped_linear(x, weight, own.where(is_own, outside), invariant=invariant)
    return found.where(is_own[:, None], 0.0)


class Experts(MergedLinear):
    """Projections of all experts, stacked: checkpoints load into its slices, expert by expert.

    Args:
        widths: of one expert's projections, in order.
    """

    def __init__(self, in_features: int, widths: Sequence[int], *, num_experts: int) -> None:
        super().__init__(in_features, tuple(widths) * num_experts)
        self.num_experts = num_experts

    def product(self, x: Tensor, chosen: Tensor, *, invariant: bool) -> Tensor:
        """x (P, K), each row by its expert, chosen (P,) int64 -> (P, sum of widths)."""
        return grouped_linear(x, self.weight.unflatten(0, (self.num_experts, -1)), chosen, invariant=invariant)


def by_group(x: Tensor, weight: Tensor, group: Tensor) -> Tensor:
    """`grouped_linear`, one product for each group that has rows."""
    order = group.argsort(stable=True)
    counts = torch.bincount(group, minlength=len(weight)).tolist()
    parts = [linear(rows, weight[i]) for i, rows in enumerate(x[order].split(counts)) if len(rows)]
    out = x.new_empty(len(x), weight.shape[1])
    return out.index_copy(0, order, torch.cat(parts)) if parts else out


def one_by_one(x: Tensor, weight: Tensor, group: Tensor) -> Tensor:
    """`grouped_linear`, each row by a copy of its weight."""
    return torch.bmm(weight[group], x[:, :, None])[:, :, 0]


def _is_one_call(x: Tensor, weight: Tensor) -> bool:
    is_aligned = not x.shape[1] % 8 and not weight.shape[1] % 8
    return x.dtype == torch.bfloat16 and is_aligned and hasattr(functional, "grouped_mm")


def _on_device(x: Tensor, weight: Tensor, group: Tensor) -> Tensor:
    if not _is_one_call(x, weight):
        return one_by_one(x, weight, group)
    order = group.argsort(stable=True)
    ends = torch.searchsorted(group[order], torch.arange(len(weight), device=x.device), right=True)
    found = functional.grouped_mm(x[order], weight.transpose(1, 2), offs=ends.to(torch.int32))
    return torch.empty_like(found).index_copy(0, order, found)


# ---- our kernel -----------------------------------------------------------------------------------------


@functools.cache
def kernel(dtype: torch.dtype) -> Callable[..., None] | None:
    """Our kernel for a dtype, which lies beside that of plain products; None where there is none."""
    return function(SOURCE, dtype, _ARGUMENTS, name="grouped")


def _on_cpu(x: Tensor, weight: Tensor, group: Tensor) -> Tensor:
    entry = kernel(x.dtype)
    if entry is None:
        return one_by_one(x, weight, group)
    (rows, depth), (count, width, _) = x.shape, weight.shape
    operands = x.contiguous(), weight.contiguous(), group.contiguous()
    assert weight.dtype == x.dtype and weight.shape[2] == depth, f"input is {x.shape}, weight {weight.shape}"
    assert group.dtype == torch.int64 and len(group) == rows, f"group is {group.dtype} of {len(group)} rows"
    out = x.new_empty(rows, width)
    threads = torch.get_num_threads() if rows * width * depth > _SERIAL else 1
    entry(*(operand.data_ptr() for operand in operands), out.data_ptr(), rows, count, width, depth, threads)
    return out


# What it does depends on the machine: opaque to torch.compile.
_op = torch.library.custom_op("mstar::grouped_linear", _on_cpu, mutates_args=(), device_types="cpu")


@_op.register_fake
def _(x: Tensor, weight: Tensor, group: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])
