"""Sequences that move while they are written: the same answers as at the end, and as in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mstar.ipc.messages import Pages

PREFILL_APART = [["*"], ["lm.prefill", "lm.read"]]
CHUNKS = {"max_num_batched_tokens": 7, "block_size": 4}
OVERLAP = {"overlap": True, **CHUNKS}
EXACT = {"batch_invariant": True, **CHUNKS}
TASKS = ("generate", "nested", "spans", "fanout", "states")


@pytest.fixture(scope="module")
def mesh(make_mesh: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """`mesh(**settings)`: prompts read apart, kept for all tests of this file."""
    started: dict[str, Any] = {}

    def get(**settings: Any) -> Any:
        name = str(settings)
        if name not in started:
            started[name] = make_mesh(PREFILL_APART, settings)
        return started[name]

    yield get
    for served in started.values():
        served.close()


async def _some_aborted(served: Any, asks: list[Any], *, stop: int) -> None:
    answers = [served.answer(ask, abort_after=stop if n % 2 else None) for n, ask in enumerate(asks)]
    found = await asyncio.gather(*answers, return_exceptions=True)
    for ask, answer in zip(asks[::2], found[::2], strict=True):
        served.oracle.check(ask, answer)


def num_come(mesh: Any) -> int:
    return int(mesh.workers[0].ahead.num_come)


@pytest.mark.parametrize(
    ("way", "settings"),
    [("layers", {}), ("layers", CHUNKS), ("chunks", CHUNKS), ("layers", {"overlap": True}), ("chunks", OVERLAP)],
)
def test_what_goes_on_elsewhere_is_there_when_its_prefill_ends(
    mesh: Any, make: Callable[..., Any], way: str, settings: dict[str, Any]
) -> None:
    served = mesh(kv_transfer=way, enable_prefix_caching=False, **settings)
    before = num_come(served)
    for n in range(4):
        ask = make("generate", "a prompt of many a token, " * 3, n=2, max_tokens=4, seed=n)
        served.oracle.check(ask, served.ask(ask))
    assert num_come(served) > before
    served.assert_clean()


def test_at_the_end_nothing_comes_before(mesh: Any, make: Callable[..., Any]) -> None:
    served = mesh(kv_transfer="end", **CHUNKS)
    ask = make("generate", "a prompt of many a token", max_tokens=4)
    served.oracle.check(ask, served.ask(ask))
    assert num_come(served) == 0


@pytest.mark.parametrize("way", ["layers", "chunks", "end"])
def test_all_ways_give_the_bits_that_one_process_gives(
    mesh: Any, fresh: Callable[..., Any], cases: Callable[..., Any], way: str
) -> None:
    one, split = fresh(**EXACT), mesh(kv_transfer=way, **EXACT)
    asks = cases(*TASKS)
    for whole, apart in zip(map(one.ask, asks), split.ask_all(asks), strict=True):
        assert apart.everything() == whole.everything()
        assert apart.tensors.keys() == whole.tensors.keys()
        assert all(torch.equal(apart.tensors[name], whole.tensors[name]) for name in whole.tensors)
        assert torch.equal(apart.samples, whole.samples)
    split.assert_clean()


@pytest.mark.parametrize("way", ["layers", "chunks"])
def test_layers_leave_as_they_are_written(mesh: Any, make: Callable[..., Any], way: str) -> None:
    served = mesh(kv_transfer=way, enable_prefix_caching=False, **CHUNKS)
    parts: list[tuple[int, int, int]] = []

    def spy(worker: Any) -> None:
        def send(to: int, message: Any) -> None:
            if isinstance(message, Pages) and message.content is not None:
                parts.append((message.start, message.first_layer, message.content.shape[1]))
            worker.end.send_to(to, message)

        worker.ahead.send = send

    served.on_each(spy)
    for n in range(20):  # some are asked for only when their last step runs
        parts.clear()
        ask = make("generate", "a prompt of many a token, " * 3, max_tokens=2, seed=n)
        served.oracle.check(ask, served.ask(ask))
        starts = {start for start, _, _ in parts}
        if len(starts) > 4:
            break
    sizes = [size for _, _, size in parts]
    assert len(starts) > 4 and sorted(starts) == [start for start, first, _ in parts if first == 0]
    assert (1 in sizes) if way == "layers" else (set(sizes) == {2})
    assert sizes[-1] == (1 if way == "layers" else 2)  # at the end the last layer alone was missing


def test_what_is_asked_for_too_late_comes_whole(mesh: Any, cases: Callable[..., Any]) -> None:
    served = mesh(kv_transfer="layers", max_num_batched_tokens=2000)  # one step, during which nobody looks
    served.on_each(lambda worker: setattr(worker.ahead, "glance", lambda: None))
    for ask in cases(*TASKS):
        served.oracle.check(ask, served.ask(ask))
    served.check_all(cases(*TASKS))
    served.assert_clean()


@pytest.mark.parametrize("way", ["layers", "chunks"])
def test_what_is_given_up_comes_at_the_end(mesh: Any, cases: Callable[..., Any], way: str) -> None:
    served = mesh(kv_transfer=way, enable_prefix_caching=False, max_model_len=512, **CHUNKS)
    given_up: list[int] = []

    def give_up_each_second(worker: Any) -> None:
        take, count = worker.ahead.take, [0]

        def taken(scope: Any, message: Any) -> None:
            count[0] += 1
            if count[0] % 3 == 0 and (message.module, message.label) not in scope.arrivals:
                given_up.append(len(scope.coming))
                worker.ahead.drop(scope, list(scope.coming))
            take(scope, message)

        worker.ahead.take = taken

    served.on_each(give_up_each_second)
    for ask in cases(*TASKS):
        served.oracle.check(ask, served.ask(ask))
    served.check_all(cases(*TASKS))
    assert sum(given_up) > 5
    served.assert_clean()


def test_an_older_request_takes_the_room_of_what_comes_for_younger_ones(mesh: Any, make: Callable[..., Any]) -> None:
    """And nothing is lost where requests end in the middle of a transfer."""
    small = {"block_size": 4, "max_model_len": 64, "kv_cache_memory_bytes": 64 * 2 * 2 * 2 * 8 * 4}
    served = mesh(kv_transfer="chunks", max_num_batched_tokens=7, **small)
    asks = [make("generate", "x" * (20 + n), max_tokens=25, seed=n) for n in range(8)]
    served.check_all(asks)
    for stop in (0, 1, 2):
        served.run(_some_aborted(served, asks, stop=stop))
    served.assert_clean()
