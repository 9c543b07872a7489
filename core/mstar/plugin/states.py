"""The state machine of a model: which walks start a request, which follow a finished one, when it is done.

Pure data with pure predicates; the server's engine interprets it between walks. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RequestView:
    """What predicates see of a request: never its tensors.

    Args:
        task: the task's name.
        outputs: the kinds of output asked for ("text", "audio", "image", "video", "tensors", "tensor:NAME").
        params: the task's parameters (the spec's params struct).
        fields: integers named by the graph (loop counts, limits, flags), from `Processor.encode`.
        session: the session's name, if the request has one.
        resumed: the session was open already.
    """

    task: str
    outputs: tuple[str, ...]
    params: Any
    fields: Mapping[str, int]
    session: str | None = None
    resumed: bool = False


Condition = Callable[[RequestView], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start `walk` on `lane` when a request with this task begins (and `when` holds)."""

    walk: str
    lane: str = "main"
    task: str | None = None
    when: Condition | None = None

    def applies(self, request: RequestView) -> bool:
        return _applies(self, request)


@dataclass(frozen=True, slots=True, kw_only=True)
class Then:
    """After walk `after` has finished, run `walk` on the same lane; the first that applies is taken.

    Args:
        step: name of a Processor step to run in between: `Processor.step(name, request, outputs)` returns the
            next walk's inputs.
    """

    after: str
    walk: str
    task: str | None = None
    when: Condition | None = None
    step: str | None = None

    def applies(self, request: RequestView) -> bool:
        return _applies(self, request)


def _applies(rule: Start | Then, request: RequestView) -> bool:
    return (rule.task is None or rule.task == request.task) and (rule.when is None or rule.when(request))


@dataclass(frozen=True, slots=True)
class States:
    """A lane ends when no `Then` applies to its finished walk; the request is done when all its lanes have ended."""

    starts: tuple[Start, ...]
    thens: tuple[Then, ...] = ()

    def start(self, request: RequestView) -> tuple[Start, ...]:
        """The walks a request begins with, at most one per lane: the first that applies."""
        chosen: dict[str, Start] = {}
        for start in self.starts:
            if start.lane not in chosen and start.applies(request):
                chosen[start.lane] = start
        return tuple(chosen.values())

    def after(self, walk: str, request: RequestView) -> Then | None:
        """What follows a finished walk on its lane; None: the lane has ended."""
        return next((t for t in self.thens if t.after == walk and t.applies(request)), None)
