"""Compiled methods that fail leave no trace, and fail whom they must; by Python functions in place of compiled code."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mstar_plugin_echo.oracle import expected, make_request
from native_calls import PythonCode
from torch import Tensor

from mstar.ipc.messages import Emit, Failed
from mstar.layers.sampling.native import NOT_FINITE
from mstar.plugin.program import Run
from mstar.worker.finish import Columns, Running, Step, finish
from mstar.worker.modules import MethodCode, Output
from mstar.worker.scheduler import Batch
from mstar.worker.tape import Call, Tape
from mstar.worker.taped import Taper

CODE = Output("code", torch.int64, ())
PARAMS: dict[str, Any] = {"temperature": 1.0, "depth_temperature": 1.0, "max_frames": 1}


def put(worker: Any, function: Callable[..., list[Tensor]]) -> dict[str, MethodCode]:
    """Let `function(draws, number, code)` run in place of `depth.step`, alone of its unit."""
    depth = worker.modules["depth"]
    code = PythonCode(function).method(["draws", "slot number", "port code"], [CODE], ["depth"])
    depth.codes["step"] = MethodCode(code, None, most_rows=32)
    worker.runner.taper = Taper(worker.runner, queue=None)
    return depth.codes  # type: ignore[no-any-return]


def run_two(worker: Any) -> list[str]:
    names = [worker.open("nested", "the same length", seed=seed, **PARAMS) for seed in (1, 2)]
    while worker.step() is not None:
        pass
    return names


def test_batches_that_compiled_code_cannot_do_run_eagerly_and_are_told_once(
    parts: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    worker = parts()
    caplog.set_level("INFO", logger="mstar.worker")

    def never(*_: Tensor) -> list[Tensor]:
        raise AssertionError("it ran")

    code = put(worker, never)["step"]
    code.most_rows = 1
    names = run_two(worker)
    assert not worker.messages(Failed)
    assert code.num_eager > 1 and not code.num_runs
    assert [message for message in caplog.messages if "eagerly" in message] == [
        "depth.step is compiled, but runs eagerly in some batches: 2 rows; compiled code takes at most 1"
    ]
    assert not any(map(worker.is_open, names))


def test_a_method_whose_input_is_absent_is_told_by_its_port(
    parts: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    worker = parts()
    put(worker, lambda draws, number, code: [code])
    caplog.set_level("INFO", logger="mstar.worker")
    ops = [op for program in worker.router.programs.values() for op in program.ops if isinstance(op, Run)]
    run = next(run for op in ops for run in op.runs if run.key == ("depth", "step"))
    for _ in range(2):
        assert worker.runner.taper.call(run, SimpleNamespace(num_rows=2), {"code": None}, [], None) is None
    assert caplog.messages == [
        "depth.step is compiled, but runs eagerly in some batches: its input 'code' is absent, or not of the shape and "
        "dtype that its code takes"
    ]


DROPPED = """
import gc, sys, time, weakref
from dataclasses import replace
sys.path[:0] = sys.argv[1:]
from conftest import Parts
from native_calls import PythonCode
from test_taped import CODE, PARAMS
from mstar.worker.modules import MethodCode
from mstar.worker.tape import Queue
from mstar.worker.taped import Taper

seen, gone = [], []

def slow(draws, number, code):
    time.sleep(0.3)
    seen.append(len(gone))
    return [code]

class Program:
    def __init__(self, code):
        self.code = code

class Launched(Exception):
    pass

def start():
    worker = Parts(enforce_eager=True)
    code = PythonCode(slow).method(["draws", "slot number", "port code"], [CODE], ["depth"])
    code = replace(code, program=Program(code.program.code))
    weakref.finalize(code.program, gone.append, 1)  # as compiled code is deleted
    worker.modules.queue = queue = Queue(threads=1)
    worker.modules["depth"].codes["step"] = MethodCode(code, None, most_rows=32)
    worker.runner.taper = Taper(worker.runner, queue=queue)
    usual = worker.runner.run

    def run(batch):
        if batch.key != ("depth", "step"):
            return usual(batch)
        worker.steps = [worker.runner.launch(batch)]
        raise Launched

    worker.runner.run = run
    worker.open("nested", "the same length", **PARAMS)
    try:
        while True:
            worker.step()
    except Launched:
        assert not worker.steps[0].running.tape.is_done
    return weakref.ref(worker.modules), weakref.ref(queue)

references = start()
gc.collect()
print(seen, gone, [reference() for reference in references])
"""


def test_a_worker_that_is_dropped_while_a_tape_runs_waits_for_it() -> None:
    folder = Path(__file__).parent
    command = [sys.executable, "-c", DROPPED, str(folder), str(folder.parent / "harness")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert answer.returncode == 0, answer.stderr[-2000:]
    assert answer.stdout == "[0] [1] [None, None]\n"


@pytest.mark.parametrize("num_good", [0, 1])
def test_a_call_that_fails_leaves_draws_and_slots_as_they_were(parts: Callable[..., Any], num_good: int) -> None:
    """Draws that were not made are not taken back, and slots are what they were before the whole unit."""
    worker = parts()
    num_calls = 0

    def fails(draws: Tensor, number: Tensor, code: Tensor) -> list[Tensor]:
        nonlocal num_calls
        num_calls += 1
        if num_calls <= num_good:
            return [code]
        codes.clear()
        raise ValueError("index out of bounds")

    codes = put(worker, fails)
    names = run_two(worker)
    assert num_calls == num_good + 1
    for name, seed in zip(names, (1, 2), strict=True):
        frames = [e.value for e in worker.messages(Emit) if e.request_id == name and e.value is not None]
        right = expected(make_request("nested", "the same length", seed=seed, **PARAMS)).tensors["frames"]
        assert [f.tolist() for f in frames if not f.dtype.is_floating_point] == [right.tolist()]
    assert worker.modules["depth"].slots.tensors["number"].tolist().count(1) == 2


def test_logits_that_are_not_finite_fail_their_request_where_a_unit_is_compiled_in_part(
    parts: Callable[..., Any],
) -> None:
    worker = parts()

    def flags_second(draws: Tensor, number: Tensor, code: Tensor) -> list[Tensor]:
        rows = (ctypes.c_int64 * len(code)).from_address(int(draws[0]))
        flags = (ctypes.c_uint8 * len(code)).from_address(int(draws[1]))
        for at, row in enumerate(rows):
            flags[at] = row == 2
        return [code]

    put(worker, flags_second)
    first, second = run_two(worker)
    second_row_failed = [(f.request_id, f.message) for f in worker.messages(Failed)]
    assert len(second_row_failed) == 1
    assert second_row_failed[0][0] in (first, second)
    assert second_row_failed[0][1] == NOT_FINITE


def test_a_failed_step_fails_none_whose_work_was_taken_back() -> None:
    def broken(_: Tensor) -> list[Tensor]:
        raise ValueError("index out of bounds")

    call, _kept = PythonCode(broken).call([0], [])
    tape = Tape((Call * 1)(call), [torch.ones(1)], num_registers=1, num_times=1)
    with pytest.raises(RuntimeError):
        tape.run()
    works: list[Any] = [
        SimpleNamespace(
            undo=print, is_cancelled=late, request=SimpleNamespace(is_dead=False), op=None,
            scope=SimpleNamespace(tenant=SimpleNamespace(in_flight=1)),
        )
        for late in (True, False)
    ]  # fmt: skip
    columns = Columns((), (), (), (), (), ())
    step = Step(Batch(("lm", "frame"), works), {}, [0, 1, 2], columns, None, running=Running(tape, [[0, 0, 0.0]], None))
    result = finish(step, SimpleNamespace())  # type: ignore[arg-type]
    assert [work for work, _ in result.failed] == [works[1]]
    assert "lm.frame" in str(result.failed[0][1])
    assert [work.scope.tenant.in_flight for work in works] == [0, 0]
