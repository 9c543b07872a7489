"""Whether nothing moves any more: not a worker whose ready work all waits for memory, and nobody it works with.

Memory may be held here by what waits for other workers, for as long as those have other things to do. Only when they
too have run nothing for a while is the wait without end. Owned by the worker's thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection

from mstar.ipc.messages import AskSteps, Steps

PATIENCE_S = 10.0  # without a step anywhere
_AGAIN_S = 1.0  # after a request has been failed for it
_ASK_S = 0.5


class Standstill:
    """How long one worker and the others have run nothing.

    Args:
        worker: its number.
        send: to another worker.
        clock: in seconds.
    """

    def __init__(
        self, worker: int, *, send: Callable[[int, AskSteps | Steps], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._worker = worker
        self._send = send
        self._clock = clock
        self._since_s = 0.0
        self._num_eased = 0
        self._asked_s = -math.inf
        self._steps: dict[int, int] = {}  # of other workers, as they last said
        self._heard_s: dict[int, float] = {}

    def ends(self) -> None:
        """Something has run here, or might have."""
        self._since_s = self._clock()
        self._steps.clear()
        self._heard_s.clear()

    def eases(self) -> None:
        """A request has been failed for it: others get a moment to go on with what that held."""
        self._since_s = self._clock() - PATIENCE_S + _AGAIN_S
        self._num_eased += 1  # for others it is as good as a step

    def answer(self, question: AskSteps, *, num_steps: int) -> None:
        """Another worker asks."""
        self._send(question.sender, Steps(sender=self._worker, steps=num_steps + self._num_eased))

    def hear(self, answer: Steps) -> None:
        """Another worker has said how many steps it has run: one more, and there is hope."""
        self._heard_s[answer.sender] = self._clock()
        if self._steps.get(answer.sender) != answer.steps:
            self._steps[answer.sender] = answer.steps
            self._since_s = self._clock()

    def is_total(self, others: Collection[int], *, is_patient: bool = False) -> bool:
        """Whether nobody has run a step for `PATIENCE_S`. Asks the others; who is in a step does not answer.

        Args:
            is_patient: for twice as long: what holds memory here could be moved, so it should end elsewhere.
        """
        now = self._clock()
        if now - self._asked_s >= _ASK_S:
            self._asked_s = now
            for other in others:
                self._send(other, AskSteps(sender=self._worker))
        end_s = self._since_s + PATIENCE_S * (2 if is_patient else 1)
        return now >= end_s and all(self._heard_s.get(other, -math.inf) >= end_s for other in others)
