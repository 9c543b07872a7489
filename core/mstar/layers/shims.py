"""Our operators inside compiled code for CPUs: how they are traced, and what calls them without Python (`shims.cpp`).

Attention gets addresses of the plan and of the pools, so that no pool is an operand of a graph. A draw goes back to
Python. Runs in workers, while one thread at a time calls compiled code; knows no methods.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mstar.layers import kernels, linear, quantized
from mstar.layers.attention import KVBatch, cpu

SOURCE = Path(__file__).with_suffix(".cpp")
_LIBRARY = torch.library.Library("mstar", "FRAGMENT")
# It says that it changes `step`, so that a call stays where nobody needs the result: it writes to the pools.
_LIBRARY.define("attend(Tensor q, Tensor k, Tensor v, Tensor(a!) step, int layer, float scale, int window) -> Tensor")
_LIBRARY.define("draw(Tensor logits, Tensor? after, int index) -> Tensor")
torch.library.register_fake("mstar::attend", lambda q, *_: q.new_empty(q.shape), lib=_LIBRARY)
torch.library.register_fake(
    "mstar::draw", lambda logits, *_: logits.new_empty(logits.shape[:1], dtype=torch.int64), lib=_LIBRARY
)

_C_DECLARATIONS = {
    "linear": "AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*, int32_t",
    "linear_int4": "AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*",
    "attend": "AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, int64_t, double, int64_t",
    "draw": "AtenTensorHandle, AtenTensorHandle*, int64_t",
}
_TORCH = ("get_data_ptr", "get_dtype", "get_dim", "get_sizes", "get_strides", "empty_strided", "new_tensor_handle")
_DRAW = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(ctypes.c_void_p))

Draw = Callable[[Tensor, int], Tensor]
"""(logits, index) -> ids."""


def compiler_options() -> dict[str, Any]:
    """Settings of inductor with which it calls our operators directly."""
    named = {getattr(torch.ops.mstar, name).default: name for name in _C_DECLARATIONS}
    declared = {
        op: [f"AOTITorchError aoti_torch_cpu_{name}({_C_DECLARATIONS[name]}, AtenTensorHandle*)"]
        for op, name in named.items()
    }
    return {"aot_inductor.custom_ops_to_c_shims": declared}


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


class StepAddresses:
    """One module's `step` operand: kept, as only the plan's address changes from step to step."""

    def __init__(self, num_layers: int) -> None:
        self.tensor = torch.zeros(1 + 2 * num_layers, dtype=torch.int64)
        self._numbers = self.tensor.numpy()
        self._pools: tuple[list[Tensor], list[Tensor]] | None = None

    def point(self, kv: KVBatch) -> Tensor:
        """The operand for a step; the batch must outlive the call."""
        step = kv.plan.derived.get("cpu")
        if step is None:
            step = kv.plan.derived["cpu"] = cpu.step_of(kv.plan)
        self._numbers[0] = ctypes.addressof(step)
        if self._pools is None or self._pools[0] is not kv.keys:
            self._pools = kv.keys, kv.values
            self._numbers[1::2] = [pool.data_ptr() for pool in kv.keys]
            self._numbers[2::2] = [pool.data_ptr() for pool in kv.values]
        return self.tensor


_drawing: list[tuple[Draw, list[BaseException]]] = []


@contextmanager
def draws_by(draw: Draw) -> Iterator[None]:
    """Let compiled code that runs inside draw by a function; what that raises comes up here."""
    torch.get_num_threads()  # tells OpenMP of this thread's number of threads
    errors: list[BaseException] = []
    _drawing.append((draw, errors))
    try:
        yield
    except RuntimeError:
        if errors:
            raise errors[0] from None
        raise
    finally:
        _drawing.pop()


@_DRAW
def _draw(logits: int, index: int, out: Any) -> int:
    draw, errors = _drawing[-1]
    try:
        (tensor,) = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs([_capsule(logits, None, None)])
        (handle,) = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors([draw(tensor, index).contiguous()])
        out[0] = _pointer(handle, None)
    except BaseException as error:  # noqa: BLE001  # there is no way through C++; `draws_by` raises it
        errors.append(error)
        return 1
    return 0


_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


@functools.cache
def load() -> bool:
    """Make the operators known to compiled code; False where they, or our kernels, cannot be built."""
    sources = linear.SOURCE, cpu.SOURCE, quantized.SOURCE
    built = [kernels.library(source) for source in sources]
    found = kernels.library(SOURCE, mode=ctypes.RTLD_GLOBAL)
    if found is None or None in built:
        return False
    ours = [
        getattr(library, f"{source.stem}_{dtype}")
        for library, source in zip(built, sources, strict=True)
        for dtype in ("float32", "bfloat16")
    ]
    runtime = ctypes.CDLL(str(Path(torch.__path__[0]) / "lib" / "libtorch_cpu.so"))
    theirs = [getattr(runtime, f"aoti_torch_{name}") for name in _TORCH]
    pointers = [ctypes.cast(function, ctypes.c_void_p) for function in (*ours, _draw, *theirs)]
    found.set_given((ctypes.c_void_p * len(pointers))(*pointers))
    return True
