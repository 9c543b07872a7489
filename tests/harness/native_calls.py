"""Python functions behind the C signatures of compiled code, for tests of tapes without a compiler."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from mstar.worker.modules import Code, Output
from mstar.worker.tape import Call
from mstar_compile_cache.aoti import handles, tensors_of

_P = ctypes.POINTER(ctypes.c_void_p)
_RUN = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, _P, ctypes.c_size_t, _P, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p
)
_ERROR = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(ctypes.c_char_p))


class PythonCode:
    """What `CompiledCode` is to a tape: `function` takes tensors and returns a list; what it raises fails the call."""

    def __init__(self, function: Callable[..., list[Tensor]]) -> None:
        self._function, self._error = function, b""
        self._run, self._say = _RUN(self._called), _ERROR(self._said)
        addresses = (ctypes.cast(one, ctypes.c_void_p).value for one in (self._run, self._say))
        self.run_address, self.error_address = addresses
        self.container = 1

    def _called(self, _: Any, given: Any, num_in: int, made: Any, num_out: int, *__: Any) -> int:
        inputs = tensors_of([given[i] for i in range(num_in)])
        try:
            outputs = self._function(*inputs)
            assert len(outputs) == num_out
        except Exception as error:  # noqa: BLE001  # as compiled code does
            self._error = str(error).encode()
            return 1
        for i, handle in enumerate(handles(outputs)):
            made[i] = handle
        return 0

    def _said(self, text: Any) -> int:
        text[0] = self._error
        return 0

    def call(self, reads: list[int], writes: list[int], *, charge: int = 0) -> tuple[Call, Any]:
        """The call, and what must outlive it."""
        numbers = [np.array(registers, dtype=np.int64) for registers in (reads, writes)]
        call = Call.of(self, reads=numbers[0], writes=numbers[1], charge=charge)  # type: ignore[arg-type]
        return call, (self, numbers)

    def method(self, operands: list[str], outputs: list[Output], samplers: list[str]) -> Code:
        """As a method's compiled code."""
        program: Any = type("Program", (), {"code": self})
        return Code(program, operands, outputs, samplers)
