"""Compiled methods that fail leave no trace, and fail whom they must; by Python functions in place of compiled code."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mstar_plugin_echo.oracle import expected, make_request
from native_calls import PythonCode
from torch import Tensor

from mstar.ipc.messages import Emit, Failed
from mstar.layers.sampling.native import NOT_FINITE
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
