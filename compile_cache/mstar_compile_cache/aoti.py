"""Calls AOTInductor's code for CPUs through its C interface, as torch's own loader keeps the GIL while code runs.

Has the methods of torch's loader that are used. Not for code that calls operators by way of torch's dispatcher.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


class _Constant(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("tensor", ctypes.c_void_p))


class CompiledCode:
    """The shared object of a package. Several threads may call it; they run one after another."""

    def __init__(self, file: Path) -> None:
        self._code = ctypes.CDLL(str(file))
        self._container = ctypes.c_void_p()
        self._call("CreateWithDevice", ctypes.byref(self._container), ctypes.c_size_t(1), b"cpu", None)
        self._num_outputs = self._ask("GetNumOutputs", ctypes.c_size_t)
        self._outputs = ctypes.c_void_p * self._num_outputs
        self._run = self._code.AOTInductorModelContainerRun
        self.run_address, self.error_address = map(_address, (self._run, self._code.AOTInductorGetLastError))
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._run.argtypes = (pointer, pointer, size, pointer, size, pointer, pointer)
        self._names = {}  # of parameters and buffers -> in the code
        for number in map(ctypes.c_size_t, range(self._ask("GetNumConstants", ctypes.c_size_t))):
            if not self._ask("GetConstantFromFolded", ctypes.c_bool, number):
                name = self._ask("GetConstantOriginalFQN", ctypes.c_char_p, number).decode()
                self._names[name] = self._ask("GetConstantName", ctypes.c_char_p, number)
        self._handles: list[ctypes.c_void_p] = []
        weakref.finalize(self, _free, self._code, self._container, self._handles)

    def get_constant_fqns(self) -> list[str]:
        return list(self._names)

    def get_call_spec(self) -> list[str]:
        specs = ctypes.c_char_p(), ctypes.c_char_p()
        self._call("GetCallSpec", self._container, *map(ctypes.byref, specs))
        return [(spec.value or b"").decode() for spec in specs]

    def load_constants(self, tensors: Mapping[str, torch.Tensor], *_: bool) -> None:
        """Use tensors where they lie; they are kept alive."""
        self._handles += map(ctypes.c_void_p, handles(list(tensors.values())))
        entries = [(self._names[name], handle) for name, handle in zip(tensors, self._handles, strict=True)]
        pairs = (_Constant * len(entries))(*(_Constant(name, handle) for name, handle in entries))
        flags = ctypes.c_bool(False), ctypes.c_bool(True)  # the active buffer, all of them
        count = ctypes.c_size_t(len(entries))
        self._call("UpdateUserManagedConstantBufferPairs", self._container, pairs, count, *flags)

    def boxed_run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        given, made = (ctypes.c_void_p * len(inputs))(*handles(inputs)), self._outputs()
        with torch.no_grad():  # as torch's loader does
            if self._run(self._container, given, len(inputs), made, self._num_outputs, None, None):
                self._fail()
        tensors = iter(tensors_of([one for one in made if one]))
        return [next(tensors) if one else None for one in made]

    @property
    def container(self) -> int:
        """What the function at `run_address` takes first."""
        assert self._container.value is not None
        return self._container.value

    def _ask(self, name: str, kind: Any, *arguments: Any) -> Any:
        answer = kind()
        self._call(name, self._container, *arguments, ctypes.byref(answer))
        return answer.value

    def _call(self, name: str, *arguments: Any) -> None:
        if getattr(self._code, f"AOTInductorModelContainer{name}")(*arguments):
            self._fail()

    def _fail(self) -> None:
        message = ctypes.c_char_p()
        self._code.AOTInductorGetLastError(ctypes.byref(message))
        raise RuntimeError(f"compiled code failed: {(message.value or b'unknown error').decode()}")


def handles(tensors: list[torch.Tensor]) -> list[int | None]:
    """Addresses of new handles, for somebody to take or to delete."""
    return [_capsule_pointer(one, None) for one in torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(tensors)]


def tensors_of(addresses: list[int | None]) -> list[torch.Tensor]:
    """The tensors of handles, which are taken."""
    capsules = [_capsule(one, None, None) for one in addresses]
    return torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(capsules)


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


def _free(code: ctypes.CDLL, container: ctypes.c_void_p, handles: list[ctypes.c_void_p]) -> None:
    code.AOTInductorModelContainerDelete(container)
    for handle in handles:
        code.aoti_torch_delete_tensor_object(handle)
