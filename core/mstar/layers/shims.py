"""Our operators inside compiled code for CPUs: how they are traced, and what calls them without Python (`shims.cpp`).

Attention gets addresses of the plan and of the pools, draws those of their samplers, so that neither is an operand of a
graph. Runs in workers; knows no methods.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mstar.errors import ConfigError
from mstar.layers import grouped, kernels, linear, quantized
from mstar.layers.attention import KVBatch, cpu
from mstar.layers.sampling import native

SOURCE = Path(__file__).with_suffix(".cpp")
_LIBRARY = torch.library.Library("mstar", "FRAGMENT")
# They say that they change `step` and `draws`, so that a call stays, and in its place, where nobody needs the result:
# they write to the pools and samplers.
_LIBRARY.define("attend(Tensor q, Tensor k, Tensor v, Tensor(a!) step, int layer, float scale, int window) -> Tensor")
_LIBRARY.define("draw(Tensor logits, Tensor(a!) draws, int index) -> Tensor")
torch.library.register_fake("mstar::attend", lambda q, *_: q.new_empty(q.shape), lib=_LIBRARY)
torch.library.register_fake(
    "mstar::draw", lambda logits, *_: logits.new_empty(logits.shape[:1], dtype=torch.int64), lib=_LIBRARY
)

_C_DECLARATIONS = {
    "linear": "AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*, int32_t",
    "grouped_linear": "AtenTensorHandle, AtenTensorHandle, AtenTensorHandle",
    "linear_int4": "AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*",
    "attend": "AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, int64_t, double, int64_t",
    "draw": "AtenTensorHandle, AtenTensorHandle, int64_t",
}
DTYPES = (torch.float32, torch.bfloat16)
_TORCH = ("get_data_ptr", "get_dtype", "get_dim", "get_sizes", "get_strides", "empty_strided")
_BY_DTYPE = (linear.SOURCE, cpu.SOURCE, quantized.SOURCE)
MOST_DRAWS = 16  # of a call
DRAW_HEADER = 2  # addresses of rows (B,) int64, and of flags (B,) uint8, set where logits are not finite


def compiler_options() -> dict[str, Any]:
    """Settings of inductor with which it calls our operators directly."""
    named = {getattr(torch.ops.mstar, name).default: name for name in _C_DECLARATIONS}
    declared = {
        op: [f"AOTITorchError aoti_torch_cpu_{name}({_C_DECLARATIONS[name]}, AtenTensorHandle*)"]
        for op, name in named.items()
    }
    return {"aot_inductor.custom_ops_to_c_shims": declared}


def check(dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError where no compiled code could call our operators."""
    if device.type != "cpu":
        raise ConfigError(
            f"--compile is for CPUs, not {device}; leave it out (graphs are --cuda-graphs), or --device cpu"
        )
    if dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"--compile cannot be had with dtype {name}; add --dtype bfloat16 or float32, or leave it out"
        )
    if not load():
        raise ConfigError("--compile needs a C++ compiler, and none works here: install g++, set CXX, or leave it out")


class TracedKV:
    """`ctx.kv` while a method is traced."""

    def __init__(self, step: Tensor) -> None:
        self._step = step

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, window: int | None = None
    ) -> Tensor:
        dim = q.shape[-1]
        q, k, v = (x if x.stride()[1:] == (dim, 1) else x.contiguous() for x in (q, k, v))
        scale = dim**-0.5 if scale is None else scale
        return torch.ops.mstar.attend(q, k, v, self._step, layer, scale, window or 0)  # type: ignore[no-any-return]


def step_operand(num_layers: int) -> Tensor:
    """An empty `step`."""
    return torch.zeros(1 + 2 * num_layers, dtype=torch.int64)


def draws_operand() -> Tensor:
    """An empty `draws`: a header, then for each draw the addresses of its sampler's state and of its ids (B,) int64."""
    return torch.zeros(DRAW_HEADER + 2 * MOST_DRAWS, dtype=torch.int64)


class StepAddresses:
    """One module's `step` operands: where its pools are, and a step's plan."""

    def __init__(self, keys: list[Tensor], values: list[Tensor]) -> None:
        pools = [pool.data_ptr() for pair in zip(keys, values, strict=True) for pool in pair]
        self._numbers = np.array([0, *pools], dtype=np.int64)

    def of(self, kv: KVBatch) -> Tensor:
        """The operand for a step; the batch must outlive the call."""
        step = kv.plan.derived.get("cpu")
        if step is None:
            step = kv.plan.derived["cpu"] = cpu.step_of(kv.plan)
        numbers = self._numbers.copy()
        numbers[0] = ctypes.addressof(step)
        return torch.from_numpy(numbers)


@functools.cache
def load() -> bool:
    """Make the operators known to compiled code; False where they, or our kernels, cannot be built."""
    found = kernels.library(SOURCE, mode=ctypes.RTLD_GLOBAL)
    kinds = {source: [f"{source.stem}_{dtype}" for dtype in ("float32", "bfloat16")] for source in _BY_DTYPE}
    kinds[native.SOURCE] = ["sampler_draw"]
    built = {source: kernels.library(source) for source in kinds}
    if found is None or None in built.values():
        return False
    ours = [getattr(built[source], name) for source, names in kinds.items() for name in names]
    ours += [grouped.kernel(dtype) for dtype in DTYPES]
    runtime = ctypes.CDLL(str(Path(torch.__path__[0]) / "lib" / "libtorch_cpu.so"))
    theirs = [getattr(runtime, f"aoti_torch_{name}") for name in _TORCH]
    pointers = [ctypes.cast(function, ctypes.c_void_p) for function in (*ours, *theirs)]
    found.set_given((ctypes.c_void_p * len(pointers))(*pointers))
    return True
