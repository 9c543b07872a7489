"""Outputs that are copied to the host before the next step begins: the same results, and no wait for that step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch

from mstar.ipc.messages import Emit, Failed
from mstar.worker import runner
from mstar.worker.finish import HostCopies

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("nested", {"temperature": 1.0, "depth_temperature": 1.0, "max_frames": 3}),
    ("generate", {"temperature": 1.0, "max_tokens": 5}),
    ("branches", {}),
]


class Event:
    """As `torch.cuda.Event`: what has been recorded can be waited for."""

    made: ClassVar[list[Event]] = []

    def __init__(self) -> None:
        self.num_records = self.num_waits = 0
        self.made.append(self)

    def record(self) -> None:
        self.num_records += 1

    def synchronize(self) -> None:
        assert self.num_records == 1
        self.num_waits += 1


def test_a_copy_is_given_once_its_event_has_passed_and_other_tensors_have_none() -> None:
    one, two = torch.arange(6.0).reshape(3, 2).T, torch.arange(3)
    copies = HostCopies([one, two, one], event=Event)
    event = Event.made[-1]
    assert event.num_records == 1 and event.num_waits == 0
    assert copies.get(torch.ones(1)) is None and event.num_waits == 0
    for tensor in (one, two):
        copy = copies.get(tensor)
        assert copy is not None and torch.equal(copy, tensor)
        assert copy.data_ptr() != tensor.data_ptr() and copy.dtype == tensor.dtype
    assert event.num_waits == 2


@pytest.mark.parametrize("is_eager", [False, True])
def test_results_are_the_same_with_copies(
    parts: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, is_eager: bool
) -> None:
    monkeypatch.setattr(runner, "HostCopies", partial(HostCopies, event=Event))

    def emitted(*, copies_early: bool) -> list[Any]:
        worker = parts(enforce_eager=is_eager)
        worker.runner.copies_early = copies_early
        for name, params in REQUESTS:
            worker.open(name, "the same length", seed=3, **params)
        while worker.step() is not None:
            pass
        assert not worker.messages(Failed)
        sent = [(message.request_id, message.name, message.value, message.final) for message in worker.messages(Emit)]
        return [
            (*head, torch.as_tensor(value).tolist() if value is not None else None, final)
            for *head, value, final in sent
        ]

    Event.made.clear()
    right = emitted(copies_early=False)
    assert not Event.made
    assert emitted(copies_early=True) == right
    assert any(event.num_waits for event in Event.made)
