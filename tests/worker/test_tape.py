"""Tapes run calls in order, at once or in a queue; what fails says so, and nothing stays behind."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from native_calls import PythonCode
from torch import Tensor

from mstar.worker.tape import Call, Later, Queue, Tape, now


class Maker:
    """Makes tapes of Python functions: (function, registers it reads, registers it writes)."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __call__(
        self, *calls: tuple[Callable[..., list[Tensor]], list[int], list[int]], values: list[Any], registers: int,
        **more: Any,
    ) -> Tape:  # fmt: skip
        made = [PythonCode(function).call(reads, writes, charge=i) for i, (function, reads, writes) in enumerate(calls)]
        self.kept += [kept for _, kept in made]
        return Tape((Call * len(made))(*(call for call, _ in made)), values, num_registers=registers,
                    num_times=len(made), **more)  # fmt: skip


@pytest.fixture
def tape() -> Maker:
    return Maker()


@pytest.fixture
def queue() -> Iterator[Queue]:
    made = Queue(threads=1)
    yield made
    made.wait()


def doubled(x: Tensor) -> list[Tensor]:
    return [2 * x]


def broken(*_: Tensor) -> list[Tensor]:
    raise ValueError("index out of bounds")


def later(tape: Tape, register: int) -> Later:
    return Later(tape, register, shape=(2,), dtype=torch.float32)


@pytest.mark.parametrize("is_queued", [False, True])
def test_calls_run_in_order_over_registers(tape: Maker, queue: Queue, is_queued: bool) -> None:
    def both(x: Tensor, y: Tensor) -> list[Tensor]:
        return [x + y, x - y]

    made = tape((doubled, [0], [1]), (both, [1, 0], [2, 3]), (doubled, [2], [4]), values=[torch.ones(2)], registers=5)
    made.put(queue) if is_queued else made.run()
    assert [made.take(i).tolist() for i in range(5)] == [[1, 1], [2, 2], [3, 3], [1, 1], [6, 6]]
    assert made.is_done
    assert made.seconds == pytest.approx(made.nanoseconds.sum() * 1e-9)
    assert (made.nanoseconds > 0).all()
    assert not is_queued or queue.busy_s >= made.seconds


def test_a_call_may_give_what_it_got(tape: Maker) -> None:
    value = torch.ones(2)
    made = tape((lambda x: [x], [0], [1]), values=[value], registers=2)
    made.run()
    taken = made.take(1)
    del made
    gc.collect()
    assert taken.data_ptr() == value.data_ptr()
    assert taken.tolist() == [1, 1]


def test_tapes_take_what_earlier_ones_make_without_waiting(tape: Maker, queue: Queue) -> None:
    gate = threading.Event()

    def slow(x: Tensor) -> list[Tensor]:
        gate.wait(10)
        return [x + 1]

    first = tape((slow, [0], [1]), values=[torch.zeros(2)], registers=2)
    first.put(queue)
    value = later(first, 1)
    for _ in range(3):
        after = tape((doubled, [0], [1]), values=[value], registers=2)
        after.put(queue)
        value = later(after, 1)
    assert value.source == (after, 1)
    assert not (first.is_done or after.is_done)
    gate.set()
    assert value.get().tolist() == [8, 8]
    assert value.source is None
    assert value.get() is value.get() is now(value)
    assert first.is_done


def test_a_queue_runs_tapes_in_the_order_they_came_and_waits_for_all(tape: Maker, queue: Queue) -> None:
    seen: list[int] = []

    def noted(x: Tensor) -> list[Tensor]:
        time.sleep(0.001)
        seen.append(int(x[0]))
        return []

    for number in range(20):
        tape((noted, [0], []), values=[torch.tensor([number])], registers=1).put(queue)
    queue.wait()
    assert seen == list(range(20))


def test_a_queue_that_goes_first_runs_what_it_holds(tape: Maker) -> None:
    seen: list[int] = []
    queue = Queue(threads=1)
    for _ in range(3):
        tape((lambda _: (time.sleep(0.005), seen.append(1), [])[2], [0], []), values=[torch.ones(1)], registers=1).put(
            queue
        )
    del queue
    gc.collect()
    assert len(seen) == 3


@pytest.mark.parametrize("is_queued", [False, True])
def test_a_failed_call_ends_its_tape_with_its_words(tape: Maker, queue: Queue, is_queued: bool) -> None:
    ran: list[int] = []
    calls = (doubled, [0], [1]), (broken, [1], [2]), (lambda _: (ran.append(1), [])[1], [2], [])
    made = tape(*calls, values=[torch.ones(2)], registers=3)
    value = later(made, 2)
    for attempt in range(2):
        with pytest.raises(RuntimeError, match="compiled code failed: index out of bounds"):
            if attempt == 0 and not is_queued:
                made.run()
            else:
                made.put(queue) if attempt == 0 else None
                value.get()
    assert not ran


def test_tapes_that_need_a_failed_one_fail_and_others_run(tape: Maker, queue: Queue) -> None:
    failed = tape((broken, [0], [1]), values=[torch.ones(2)], registers=2)
    failed.put(queue)
    after = tape((doubled, [0], [1]), values=[later(failed, 1)], registers=2)
    after.put(queue)
    last = tape((doubled, [0], [1]), values=[later(after, 1)], registers=2)
    last.put(queue)
    other = tape((doubled, [0], [1]), values=[torch.ones(2)], registers=2)
    other.put(queue)
    assert other.take(1).tolist() == [2, 2]
    for one in (after, last):
        with pytest.raises(RuntimeError, match="the step before it failed"):
            one.wait()


def test_rows_are_kept_as_they_were_when_the_tape_began(tape: Maker, queue: Queue) -> None:
    slots, rows, kept = torch.arange(8.0).reshape(4, 2), torch.tensor([3, 1]), torch.zeros(2, 2)

    def change(x: Tensor) -> list[Tensor]:
        x += 10
        return []

    tape((change, [0], []), values=[slots], registers=1).put(queue)
    saves = [(slots, rows, kept)]
    tape((change, [0], []), values=[slots], registers=1, saves=saves).put(queue)
    queue.wait()
    assert kept.tolist() == [[16, 17], [12, 13]]
    assert slots[3].tolist() == [26, 27]


def test_rows_are_kept_even_where_the_tape_cannot_begin(tape: Maker, queue: Queue) -> None:
    """Whoever takes the step back puts them back."""
    slots, kept = torch.ones(2, 1), torch.full((1, 1), 7.0)
    failed = tape((broken, [0], [1]), values=[torch.ones(2)], registers=2)
    failed.put(queue)
    saves = [(slots, torch.tensor([1]), kept)]
    tape((doubled, [0], [1]), values=[later(failed, 1)], registers=2, saves=saves).put(queue)
    queue.wait()
    assert kept.tolist() == [[1]]


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays_of_thousands_of_tapes(tape: Maker, queue: Queue, fails: bool) -> None:
    """Handles are gone when what they hold is: each tape has 1 MB."""
    alive = weakref.WeakSet[Any]()
    made = PythonCode(broken if fails else lambda x: [x.clone()])
    call, _kept = made.call([0], [1])
    calls, last = (Call * 1)(call), None

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    for number in range(2000):
        value = torch.ones(1 << 18) if last is None or fails else last
        one = Tape(calls, [value], num_registers=2, num_times=1)
        alive.add(one)
        one.put(queue)
        last = Later(one, 1, shape=(1 << 18,), dtype=torch.float32)
        if number % 8 == 7:
            queue.wait()
            if not fails:
                last.get()
        if number == 100:
            before = resident()
    queue.wait()
    assert resident() - before < 64 << 20
    del one, last, value
    queue.wait()
    assert len(alive) <= 1
