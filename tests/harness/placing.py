"""Whether a model that is split between workers gives what one worker gives: for each plugin's example placements."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from asking import Answer, Asked
from msgspec.structs import replace

from mstar.errors import RequestError
from mstar.placement import examples, read
from mstar.plugin import loader
from mstar.server.native import GenerateRequest
from mstar.server.results import Outputs
from mstar.types import AudioChunk, ImageChunk, Request, TensorChunk, TextChunk, ToolCallChunk

NEAR = 1e-4


def placements(plugin: str, *, split: bool = False) -> list[str]:
    """Short names of a plugin's placements, those with (or without) groups of several processes a worker."""
    found = examples(loader.load(plugin).spec)
    return [name for name, path in found.items() if split == any(group.tensor_parallel > 1 for group in read(path))]


@contextlib.contextmanager
def asking(**settings: Any) -> Iterator[Asked]:
    """An engine, clean at the end."""
    with contextlib.closing(Asked(**settings)) as served:
        yield served
        served.assert_clean()


def ask_beside(
    served: Asked, wires: Sequence[GenerateRequest], leaving: Sequence[GenerateRequest], *, seed: int = 0
) -> list[Answer]:
    """The answers to `wires`, asked together with requests that hang up after a few chunks."""
    draw = random.Random(seed)
    mixed = [*enumerate(wires), *((None, replace(wire, stream=True)) for wire in leaving)]
    draw.shuffle(mixed)
    aborts = {place: draw.randint(0, 4) for place, (number, _) in enumerate(mixed) if number is None}
    found = served.ask_all(*(wire for _, wire in mixed), apart_s=0.01, abort_after=aborts)
    gone: list[Any] = [found[place] for place in aborts]  # some may have ended before
    assert {error.code for error in gone if not isinstance(error, Answer)} <= {"aborted"}, gone
    assert not leaving or any(isinstance(one, RequestError) for one in gone)
    answers = {number: answer for (number, _), answer in zip(mixed, found, strict=True) if number is not None}
    return [answers[number] for number in range(len(wires))]


def assert_same(
    found: Sequence[Answer], expected: Sequence[Answer], *, atol: float = NEAR, counts: Callable[[str], bool] = bool
) -> None:
    """Assert that answers are equal: ids, texts, reasons, counters and usage exactly, tensors to `atol`.

    Args:
        counts: which counters have to be equal.
    """
    for number, (answer, right) in enumerate(zip(found, expected, strict=True)):
        at = f"request {number}"
        for name in ("finish_reason", "indices", "usage", "counts", "prompt_token_ids"):
            assert getattr(answer.result, name) == getattr(right.result, name), f"{at}: {name}"
        mine, theirs = ({k: v for k, v in a.result.counters.items() if counts(k)} for a in (answer, right))
        assert mine == theirs, f"{at}: counters"
        outputs, wanted = _outputs(answer), _outputs(right)
        assert outputs.keys() == wanted.keys(), at
        for name, value in wanted.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                torch.testing.assert_close(outputs[name], value, atol=atol, rtol=0, msg=lambda m, at=at: f"{at}: {m}")
            elif isinstance(value, torch.Tensor):
                most = 1 if name[0] is ImageChunk and atol else 0
                assert outputs[name].shape == value.shape, f"{at}: {name}"
                assert not value.numel() or (outputs[name].long() - value.long()).abs().max() <= most, f"{at}: {name}"
            else:
                assert outputs[name] == value, f"{at}: {name}"


def _outputs(answer: Answer) -> dict[tuple[Any, ...], Any]:
    """(kind, place, name) -> each whole output of an answer."""
    outputs, found = Outputs(Request(id="", model="", task="", parts=(), outputs=())), dict[tuple[Any, ...], Any]()
    for chunk in answer.chunks:
        outputs.add(chunk)
    for place, whole in enumerate(outputs.joined()):
        key = (type(whole), place, whole.index)
        if isinstance(whole, TextChunk):
            found[*key, whole.channel] = (whole.text, whole.token_ids)
        elif isinstance(whole, ToolCallChunk):
            found[key] = (whole.name, whole.arguments)
        elif isinstance(whole, TensorChunk):
            found[*key, whole.name] = whole.tensor
        else:
            values = whole.samples if isinstance(whole, AudioChunk) else whole.pixels
            found[key] = torch.from_numpy(np.array(values))
    return found
