"""When a worker that waits for memory may say that nobody moves any more."""

from __future__ import annotations

from typing import Any

from mstar.ipc.messages import AskSteps, Steps
from mstar.worker.standstill import PATIENCE_S, Standstill


class Others:
    """Workers 1 and 2 as worker 0 sees them, and a clock that the test turns."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.steps: dict[int, int | None] = {1: 5, 2: 9}  # None: in a step, so no answer
        self.standstill = Standstill(0, send=self._send, clock=lambda: self.now_s)
        self.standstill.ends()

    def _send(self, worker: int, message: Any) -> None:
        assert message == AskSteps(sender=0)
        if (steps := self.steps[worker]) is not None:
            self.standstill.hear(Steps(sender=worker, steps=steps))

    def seconds_until_total(self, *, most_s: float = 60.0, is_patient: bool = False) -> float:
        started = self.now_s
        while not self.standstill.is_total({1, 2}, is_patient=is_patient):
            self.now_s += 0.05
            if self.now_s - started > most_s:
                return float("inf")
        return self.now_s - started


def test_nobody_moves_for_a_while() -> None:
    others = Others()
    assert PATIENCE_S <= others.seconds_until_total() < PATIENCE_S + 2
    others.standstill.eases()
    assert 0.5 < others.seconds_until_total() < 2  # what a failed request held did not help


def test_who_waits_for_others_waits_as_long_as_they_run_something() -> None:
    others = Others()
    for step in range(100):
        others.steps[2] = 10 + step
        assert others.seconds_until_total(most_s=PATIENCE_S / 2) == float("inf")
    others.steps[2] = None
    assert others.seconds_until_total() == float("inf")
    others.steps[2] = 200
    assert PATIENCE_S <= others.seconds_until_total() < PATIENCE_S + 2


def test_a_step_here_begins_it_anew() -> None:
    others = Others()
    assert others.seconds_until_total(most_s=PATIENCE_S - 1) == float("inf")
    others.standstill.ends()
    assert others.seconds_until_total() >= PATIENCE_S


def test_where_nobody_else_has_a_part_only_time_counts() -> None:
    now_s = [0.0]
    alone = Standstill(3, send=lambda worker, message: None, clock=lambda: now_s[0])
    alone.ends()
    assert not alone.is_total(())
    now_s[0] = PATIENCE_S
    assert alone.is_total(())


def test_answers_say_who_and_how_many() -> None:
    sent: list[Any] = []
    standstill = Standstill(3, send=lambda worker, message: sent.append((worker, message)))
    standstill.answer(AskSteps(sender=1), num_steps=7)
    standstill.eases()
    standstill.answer(AskSteps(sender=1), num_steps=7)
    assert sent == [(1, Steps(sender=3, steps=7)), (1, Steps(sender=3, steps=8))]


def test_who_holds_nothing_that_cannot_be_moved_leaves_it_to_others() -> None:
    others = Others()
    assert others.seconds_until_total(is_patient=True) >= 2 * PATIENCE_S
