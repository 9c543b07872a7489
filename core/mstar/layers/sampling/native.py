"""Drawing on CPUs by a kernel of our own, `sampler.cpp`. Runs in workers; gives the tokens of `plain`.

A state has one `Addresses` for its life, so that code which draws without Python may keep where that lies.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from operator import attrgetter, is_
from pathlib import Path

import torch
from torch import Tensor

from mstar.errors import PluginError
from mstar.layers.kernels import library
from mstar.layers.sampling.state import SamplingState

SOURCE = Path(__file__).with_name("sampler.cpp")
NOT_FINITE = "a sampler got logits that are not finite (NaN or infinity): are the weights right?"
_SERIAL = 1 << 17  # logits that are not worth waking a thread for
_TENSORS = (
    "temperature", "top_k", "tail", "min_p", "repetition", "presence", "frequency",
    "key", "step", "bias_index", "bias_value", "counts", "prompt_mask",
)  # fmt: skip
_tensors_of = attrgetter(*_TENSORS)


class Addresses(ctypes.Structure):
    """`SamplerState` of the kernel: where a state's tensors lie, as of the last `refresh`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _TENSORS),
        *((name, ctypes.c_int64) for name in ("rows", "vocab_size", "max_bias")),
    ]
    tensors: tuple[Tensor | None, ...] = ()


def available() -> bool:
    """Whether the kernel is built or can be; False comes with one warning."""
    return kernel() is not None


@functools.cache
def kernel() -> Callable[..., int] | None:
    """`sampler_draw`, as `sampler.cpp` declares it; None where it cannot be built."""
    found = library(SOURCE)
    if found is None:
        return None
    entry: Callable[..., int] = found.sampler_draw
    arguments = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 3
    entry.argtypes, entry.restype = (*arguments, ctypes.c_int32), ctypes.c_int32  # type: ignore[attr-defined]
    return entry


def struct_of(state: SamplingState) -> Addresses:
    """A CPU state's addresses, refreshed: the same object, at the same place, each time."""
    if state.addresses is None:
        state.addresses = Addresses()
    refresh(state)
    found: Addresses = state.addresses
    return found


def address_of(state: SamplingState) -> int:
    """Where `struct_of` lies, for code that draws without Python."""
    return ctypes.addressof(struct_of(state))


def refresh(state: SamplingState) -> None:
    """Follow tensors that were allocated or replaced since. For states that `struct_of` has seen."""
    addresses, tensors = state.addresses, _tensors_of(state)
    if len(addresses.tensors) == len(tensors) and all(map(is_, addresses.tensors, tensors)):
        return
    for name, tensor in zip(_TENSORS, tensors, strict=True):
        assert tensor is None or (tensor.is_contiguous() and tensor.device.type == "cpu")
        setattr(addresses, name, None if tensor is None else tensor.data_ptr())
    addresses.rows, addresses.max_bias = state.bias_index.shape
    addresses.vocab_size = state.vocab_size
    addresses.tensors = tensors


def draw(logits: Tensor, state: SamplingState, rows: Tensor) -> Tensor:
    """Draw one id per row and record it: (B, V) of any float dtype and stride, (B,) int64 -> (B,) int64.

    Raises PluginError, and records nothing, for logits of another width than the sampler's vocabulary, or not finite
    where a row draws by chance.
    """
    entry = kernel()
    assert entry is not None and rows.dtype == torch.int64
    if logits.shape != (len(rows), state.vocab_size):
        raise PluginError(
            f"a sampler got logits of shape {tuple(logits.shape)}; {len(rows)} rows of its vocabulary are "
            f"{(len(rows), state.vocab_size)}: give it (rows, vocab_size)"
        )
    if logits.dtype not in (torch.float32, torch.bfloat16):
        logits = logits.float()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, ids = rows.contiguous(), rows.new_empty(len(rows))
    threads = torch.get_num_threads() if logits.numel() > _SERIAL else 1
    check(
        entry(
            address_of(state), logits.data_ptr(), logits.dtype == torch.bfloat16, logits.stride(0),
            len(rows), rows.data_ptr(), ids.data_ptr(), None, threads,
        )
    )  # fmt: skip
    return ids


def check(status: int) -> None:
    """Raise for what the kernel returned, unless that is 0."""
    if status == 1:
        raise PluginError(NOT_FINITE)
    assert status == 0, "a row outside the sampling state"
