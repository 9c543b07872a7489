"""Tapes: a launch as calls of compiled code that run one after the other without Python (`tape.cpp`).

A tape runs at once, or in a `Queue`: a thread that is to a CPU what a stream is to an accelerator. Then its outputs are
`Later`s, which the next tape takes without waiting. Owned by the worker's thread; knows tensors, not methods.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mstar.errors import ConfigError
from mstar.layers import kernels
from mstar_compile_cache.aoti import CompiledCode, handles, tensors_of

SOURCE = Path(__file__).with_suffix(".cpp")
MOST_OPERANDS = 256  # of a call
_Pointers = ctypes.POINTER(ctypes.c_void_p)


class Call(ctypes.Structure):
    """One call: numbers of the registers it reads and writes; `charge`: which of a tape's times it adds to."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("run", "last_error", "container", "reads", "writes")),
        *((name, ctypes.c_int64) for name in ("num_in", "num_out", "charge")),
    )

    @classmethod
    def of(cls, code: CompiledCode, *, reads: np.ndarray, writes: np.ndarray, charge: int) -> Call:
        """`reads` and `writes` are (n,) int64 and must outlive it."""
        assert max(len(reads), len(writes)) <= MOST_OPERANDS
        addresses = reads.ctypes.data, writes.ctypes.data
        return cls(code.run_address, code.error_address, code.container, *addresses, len(reads), len(writes), charge)


class _Save(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("source", "to", "rows")),
        *((name, ctypes.c_int64) for name in ("num_rows", "row_bytes")),
    )


class _Link(ctypes.Structure):
    _fields_ = (("tape", ctypes.c_void_p), ("source", ctypes.c_int64), ("target", ctypes.c_int64))


class _Tape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("calls", "saves", "links", "registers", "nanoseconds")),
        *((f"num_{name}", ctypes.c_int64) for name in ("calls", "saves", "links", "registers")),
        ("failed", ctypes.c_int64),
        ("is_done", ctypes.c_int64),
        ("error", ctypes.c_char * 1024),
    )


class Later:
    """A tensor that a tape makes: `shape` and `dtype` are known before it is there."""

    __slots__ = ("_register", "_tape", "_tensor", "dtype", "shape")

    def __init__(self, tape: Tape, register: int, *, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._tape: Tape | None = tape
        self._register = register
        self._tensor: Tensor | None = None
        self.shape, self.dtype = shape, dtype

    @property
    def source(self) -> tuple[Tape, int] | None:
        """The tape and its register, as long as it was not asked for."""
        return None if self._tape is None else (self._tape, self._register)

    def get(self) -> Tensor:
        """The tensor, waiting for it. Raises RuntimeError where the tape failed."""
        if self._tensor is None:
            assert self._tape is not None
            self._tensor = self._tape.take(self._register)
            self._tape = None
        return self._tensor


def now(value: Any) -> Any:
    """The value itself, for what may be a `Later`."""
    return value.get() if type(value) is Later else value


class Tape:
    """One launch.

    Args:
        calls: kept by whoever knows them, as they are the same for every launch.
        values: what the first registers hold.
        num_registers: all of them; calls write to those after `values`.
        saves: (tensor, rows (B,) int64, where they are kept), copied before the first call.
        num_times: how many entries `nanoseconds` has.
        kept: whatever else must live while the tape runs, and knows neither tape nor queue: nothing else of a worker
            that is dropped has to outlive the others.
    """

    def __init__(
        self, calls: ctypes.Array[Call], values: Sequence[Tensor | Later], *, num_registers: int, num_times: int,
        saves: Sequence[tuple[Tensor, Tensor, Tensor]] = (), kept: Any = None,
    ) -> None:  # fmt: skip
        self._library = library()
        self._registers = (ctypes.c_void_p * num_registers)()
        self.nanoseconds = np.zeros(num_times, dtype=np.int64)
        links = [(source, i) for i, value in enumerate(values) if type(value) is Later and (source := value.source)]
        linked = {target for _, target in links}
        there = [i for i in range(len(values)) if i not in linked]
        for i, pointer in zip(there, handles([now(values[i]) for i in there]), strict=True):
            self._registers[i] = pointer
        self._links = (_Link * len(links))(*(_Link(tape.address, register, i) for (tape, register), i in links))
        self._saves = (_Save * len(saves))(*(_save(*one) for one in saves))
        addresses = (ctypes.addressof(array) for array in (calls, self._saves, self._links, self._registers))
        counts = len(calls), len(saves), len(links), num_registers
        self._tape = _Tape(*addresses, self.nanoseconds.ctypes.data, *counts)
        self.address: int = ctypes.addressof(self._tape)
        self._kept: list[Any] = [calls, values, saves, [tape for (tape, _), _ in links], kept]  # until it has run
        self._queue: weakref.ref[Queue] | None = None
        self.runs_in = ctypes.c_void_p()  # the queue
        touched = self._registers, self._links, self._saves, self.nanoseconds, self._kept
        weakref.finalize(self, _clear, self._library, self._tape, self.runs_in, *touched).atexit = False

    def run(self) -> None:
        """Run it now. Raises RuntimeError if a call fails."""
        torch.get_num_threads()  # tells OpenMP of this thread's number of threads
        with torch.no_grad():
            self._library.tape_run(self.address)
        self._tape.is_done = 1
        self.wait()

    def put(self, queue: Queue) -> None:
        """Let it run after what the queue holds."""
        self._queue = weakref.ref(queue)
        queue.put(self)

    @property
    def is_done(self) -> bool:
        return bool(self._tape.is_done)

    def wait(self) -> None:
        """Until it has run. Raises RuntimeError if a call failed."""
        queue = None if self._queue is None else self._queue()
        if queue is not None:  # one that has gone has run it
            queue.wait(self)
        self._queue = None
        self._kept.clear()
        if self._tape.failed:
            why = self._tape.error.decode(errors="replace").partition("\n")[0]  # what follows are addresses
            raise RuntimeError(f"compiled code failed: {why}")

    @property
    def seconds(self) -> float:
        """What its calls took."""
        return float(self.nanoseconds.sum()) * 1e-9

    def take(self, register: int) -> Tensor:
        """What a register holds, waiting for it."""
        self.wait()
        handle = ctypes.c_void_p()
        self._library.copy_handle(self._registers[register], ctypes.byref(handle))
        return tensors_of([handle.value])[0]


def _save(tensor: Tensor, rows: Tensor, to: Tensor) -> _Save:
    assert tensor.is_contiguous()
    row_bytes = tensor[0].numel() * tensor.element_size()
    return _Save(tensor.data_ptr(), to.data_ptr(), rows.data_ptr(), len(rows), row_bytes)


def _clear(library: ctypes.CDLL, tape: _Tape, queue: ctypes.c_void_p, *_: Any) -> None:
    """Give handles back, once it has run: whatever is dropped together goes in any order."""
    address = ctypes.c_void_p(ctypes.addressof(tape))
    if queue and not tape.is_done:
        library.queue_wait(queue, address)
    library.tape_clear(address)


class Queue:
    """A thread that runs tapes in order; they are kept until they have run."""

    def __init__(self, *, threads: int) -> None:
        self._library = library()
        self._queue = ctypes.c_void_p(self._library.queue_new(threads))
        self._tapes: deque[Tape] = deque()
        weakref.finalize(self, _free, self._library, self._queue)

    def put(self, tape: Tape) -> None:
        self._forget()
        self._tapes.append(tape)
        tape.runs_in.value = self._queue.value
        self._library.queue_put(self._queue, ctypes.c_void_p(tape.address))

    def wait(self, tape: Tape | None = None) -> None:
        """Until a tape has run, or all have; other Python threads go on."""
        if tape is None or not tape.is_done:
            self._library.queue_wait(self._queue, None if tape is None else ctypes.c_void_p(tape.address))
        self._forget()

    @property
    def busy_s(self) -> float:
        """How long it has run tapes so far."""
        return float(self._library.queue_busy_ns(self._queue)) * 1e-9

    def _forget(self) -> None:
        while self._tapes and self._tapes[0].is_done:
            self._tapes.popleft()


def _free(library: ctypes.CDLL, queue: ctypes.c_void_p) -> None:
    library.queue_free(queue)


@functools.cache
def library() -> Any:
    """`tape.cpp`; ConfigError where it cannot be built."""
    found: Any = kernels.library(SOURCE)
    if found is None:
        raise ConfigError(f"{SOURCE.name} cannot be built here; install g++, set CXX, or leave out --compile")
    runtime = ctypes.CDLL(str(Path(torch.__path__[0]) / "lib" / "libtorch_cpu.so"))
    names = ("new_tensor_handle", "delete_tensor_object", "grad_mode_set_enabled")
    found.copy_handle = runtime.aoti_torch_new_tensor_handle
    found.copy_handle.argtypes = (ctypes.c_void_p, _Pointers)
    given = [ctypes.cast(getattr(runtime, f"aoti_torch_{name}"), ctypes.c_void_p) for name in names]
    found.set_given((ctypes.c_void_p * len(given))(*given))
    found.queue_new.restype, found.queue_busy_ns.restype = ctypes.c_void_p, ctypes.c_int64
    for name in ("tape_run", "tape_clear"):
        getattr(found, name).argtypes = (ctypes.c_void_p,)
    return found
