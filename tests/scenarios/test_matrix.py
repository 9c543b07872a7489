"""The same scenarios in every mode of execution: eager, fused, compiled, overlapped, compiled and overlapped.

What a request gives is the oracle's word in each, pools and slots are whole afterwards, and nothing is compiled once an
engine is up. The first test that needs compiled code waits for it; it lies where kernels do (MSTAR_CACHE).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from mstar_plugin_echo.oracle import SessionMemory
from mstar_plugin_echo.processing import EchoProcessor

from mstar.errors import RequestError
from mstar.layers import shims
from mstar.plugin import Encoded, Request

MODES = ("eager", "fused", "compiled", "overlapped", "compiled_overlapped")
COMPILED = ("lm.decode", "lm.push", "lm.frame", "depth.start", "depth.step", "depth.sum", "mix.combine")
"""What must be compiled; more may be."""
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.5}
DRAWN = {"temperature": 1.1, "top_k": 60, "top_p": 0.95}
FRAMES = {"temperature": 0.9, "depth_temperature": 1.1, "depth_top_k": 12}
FAILURES = {
    "method": 500,
    "prepare": 500,
    "finish": 500,
    "predicate": 500,
    "shape": 500,
    "missing": 500,
    "request": 422,
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    if "compiled" in request.param and not shims.load():
        pytest.skip("no C++ compiler")
    return str(request.param)


@pytest.fixture
def start(engines: Callable[[str], Any], mode: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`start(pool)`: the mode's engine, clean before and after; from then on nothing can be traced or compiled."""
    used: list[Any] = []

    def get(pool: str = "large") -> Any:
        used.append(engines(f"{mode}, {pool} pool"))
        monkeypatch.setattr(torch.export, "export", None)
        monkeypatch.setattr(torch, "compile", None)
        used[-1].assert_clean()
        return used[-1]

    yield get
    for served in used:
        served.assert_clean()


def num_runs(served: Any) -> dict[str, int]:
    return {name: code.num_runs for name, code in served.worker.compilation.compiled.items()}


@pytest.mark.parametrize(
    "task", ["generate", "nested", "branches", "fanout", "spans", "chunks", "chunks_each", "states"]
)
def test_every_case_of_a_task_alone_and_together(
    start: Callable[..., Any], cases: Callable[..., Any], task: str
) -> None:
    """Sampling in every way, `n` samples; loops in loops; Parallel and When; Each in Each; forks, guidance and spans;
    streams with every chunk policy; walks in a row."""
    served = start()
    for ask in cases(task):
        served.oracle.check(ask, served.ask(ask))
    served.check_all(cases(task)[::-1], stagger_s=0.002)


def test_all_that_can_be_compiled_is_and_runs(
    start: Callable[..., Any],
    engines: Callable[[str], Any],
    mode: str,
    cases: Callable[..., Any],
    make: Callable[..., Any],
) -> None:
    served, eager = start(), engines("eager, large pool")
    compilation, before = served.worker.compilation, num_runs(served)
    assert ("compiled" in mode) == bool(before)
    assert "compiled" not in mode or set(COMPILED) <= set(compilation.compiled), compilation.eager
    served.check_all(cases())
    hold_a_talk(served, make, "talk", ["one", "two"])
    chat = make("chat", "go on", seed=5, max_tokens=6, **DRAWN)
    assert served.ask(chat).token_ids() == eager.ask(chat).token_ids() != []
    assert not [name for name, runs in num_runs(served).items() if runs == before[name]]


def test_greedy_seeded_and_penalised_rows_share_a_batch(start: Callable[..., Any], make: Callable[..., Any]) -> None:
    served = start()
    kinds: list[dict[str, Any]] = [{}, DRAWN, PENALTIES, {**DRAWN, **PENALTIES}, {"logit_bias": {"101": 3.0}}]
    asks = [
        make("generate", "the same start"[: 4 + i], seed=i, max_tokens=2 + i, **kinds[i % len(kinds)])
        for i in range(10)
    ]
    served.check_all(asks)
    served.check_all(asks[::-1], stagger_s=0.003)


def test_frames_of_any_number_and_end_share_a_batch(start: Callable[..., Any], make: Callable[..., Any]) -> None:
    served = start()
    ends: list[dict[str, int]] = [{}, {"end_at": 0}, {"end_at": 3}]
    asks = [
        make("nested", "frames"[: 1 + i % 6], seed=i, max_frames=1 + i % 7, **ends[i % 3], **(FRAMES if i % 4 else {}))
        for i in range(14)
    ]
    served.check_all(asks)
    served.check_all(asks, stagger_s=0.003)


@pytest.mark.parametrize("eos_at", [0, 1, 4])
def test_loops_that_end_late_leave_no_trace(start: Callable[..., Any], make: Callable[..., Any], eos_at: int) -> None:
    served = start()
    asks = [
        make("generate", "ends", seed=i, eos_at=eos_at + i % 2, n=1 + i % 3, **DRAWN, **PENALTIES) for i in range(4)
    ]
    asks += [make("nested", "ends", seed=i, end_at=eos_at + i % 2, max_frames=9, **FRAMES) for i in range(3)]
    served.check_all(asks)
    served.check_all(asks)  # the same again: draws, slots and cached pages are as they were


def hold_a_talk(served: Any, make: Callable[..., Any], name: str, texts: list[str], *beside: Any) -> None:
    memory = SessionMemory()
    for number, text in enumerate(texts):
        ask = make("session", text, seed=number, session=name, amount=number + 2, max_tokens=3)
        right = served.oracle.expected(ask, memory=memory, resumed=number > 0)
        answer, *others = served.ask_all([ask, *beside])
        assert answer.token_ids() == right.texts[0], f"turn {number}"
        assert answer.tensors["total"].tolist() == right.tensors["total"].tolist()
        for other, got in zip(beside, others, strict=True):
            served.oracle.check(other, got)
    served.drop_session(name)


@pytest.mark.parametrize("pool", ["large", "swap", "recompute"])
def test_sessions_go_on_among_other_requests(start: Callable[..., Any], make: Callable[..., Any], pool: str) -> None:
    served = start(pool)
    beside = [make("generate", f"beside {i}", seed=i, max_tokens=12, **DRAWN) for i in range(3)]
    hold_a_talk(served, make, "busy place", ["opening", "second", "x"], *beside)


@pytest.mark.parametrize("pool", ["swap", "recompute"])
def test_requests_are_moved_out_of_a_small_pool_and_back(
    start: Callable[..., Any], make: Callable[..., Any], pool: str
) -> None:
    served = start(pool)
    scheduler = served.worker.scheduler
    before = scheduler.num_swaps, scheduler.num_rebuilds
    served.check_all(
        [make("generate", "penalised " * 2, seed=i, max_tokens=24, **DRAWN, **PENALTIES) for i in range(4)]
    )
    served.check_all([make("nested", "frames", seed=i, max_frames=24, **FRAMES) for i in range(3)])
    moved = scheduler.num_swaps > before[0], scheduler.num_rebuilds > before[1]
    assert moved == (pool == "swap", pool == "recompute")


@pytest.mark.parametrize("pool", ["large", "swap"])
def test_requests_aborted_in_any_phase_disturb_nobody(
    start: Callable[..., Any], make: Callable[..., Any], pool: str
) -> None:
    served = start(pool)
    stay = [
        make("generate", "stays", seed=1, max_tokens=20, **DRAWN, **PENALTIES),
        make("nested", "stays", seed=2, max_frames=9, **FRAMES),
        make("branches", "stays", third=True),
    ]
    leave = [make("generate", "leaves", seed=i, max_tokens=30, n=1 + i % 2, **DRAWN) for i in range(5)]
    leave += [make("nested", "leaves", seed=i, max_frames=20, **FRAMES) for i in range(5)]
    leave += [make("chunks", "x", counts=[[1] * 9]), make("fanout", "one|two", "three", reply_tokens=[6])]

    async def gather() -> list[Any]:
        works = [served.answer(ask, abort_after=i % 5) for i, ask in enumerate(leave)]
        return await asyncio.gather(*works, *map(served.answer, stay), return_exceptions=True)

    for _ in range(2):
        answers = served.run(gather())
        assert all(not isinstance(a, RequestError) or a.status == 499 for a in answers[: len(leave)])
        for ask, answer in zip(stay, answers[len(leave) :], strict=True):
            served.oracle.check(ask, answer)
        served.assert_clean()


def test_who_fails_fails_alone(start: Callable[..., Any], make: Callable[..., Any]) -> None:
    served = start()
    stay = [
        make("trouble", "stays", watch=True, steps=6),
        make("generate", "stays", seed=9, max_tokens=12, **DRAWN, **PENALTIES),
        make("nested", "stays", seed=4, max_frames=6, **FRAMES),
    ]
    fail = [make("trouble", "t", kind=kind, watch=True, at=at) for kind in FAILURES for at in (0, 2)]
    fail += [make("generate", "no such token", seed=1, logit_bias={"99999": 1.0}), make("states", "x", fail_step=True)]
    answers = served.ask_all([*stay, *fail])
    for ask, answer in zip(stay, answers, strict=False):
        served.oracle.check(ask, answer)
    wanted = [status for status in FAILURES.values() for _ in (0, 2)] + [400, 500]
    assert [getattr(answer, "status", answer) for answer in answers[len(stay) :]] == wanted


class WrongIds(EchoProcessor):
    """A bug in a processor: where it gives an id that no vocabulary has."""

    def encode(self, request: Request) -> Encoded:
        encoded = super().encode(request)
        if getattr(request.params, "eos_at", None) == 99:
            encoded.inputs["last"] = [torch.tensor(10**6)]
        return encoded


def test_an_id_out_of_range_fails_its_request_alone(
    engines: Callable[[str], Any], fresh: Callable[..., Any], mode: str, make: Callable[..., Any]
) -> None:
    """Only the method finds out, while it runs, when other rows may have drawn and a next step may be on its way."""
    settings = engines(f"{mode}, large pool").config  # what it has compiled is found again
    flags = {name: getattr(settings, name) for name in ("compile", "overlap", "enforce_eager")}
    served = fresh(change=lambda spec: replace(spec, processor=f"{__name__}:WrongIds"), **flags)
    stay = [make("generate", "stays", seed=i, max_tokens=8 + i, **DRAWN, **PENALTIES) for i in range(5)]
    served.check_all(stay)
    for number in range(3):
        wrong = make("generate", "is wrong", seed=number, eos_at=99, **DRAWN)
        answers = served.ask_all([*stay[:2], wrong, *stay[2:]], stagger_s=0.002 * number)
        error = answers.pop(2)
        assert isinstance(error, RequestError) and error.status == 500
        assert "lm.decode" in error.message and "frame #" not in error.message and "\n" not in error.message
        for ask, answer in zip(stay, answers, strict=True):
            assert not isinstance(answer, Exception), answer
            served.oracle.check(ask, answer)
    served.assert_clean()


@pytest.mark.parametrize("pool", ["large", "swap"])
def test_everything_at_once(start: Callable[..., Any], cases: Callable[..., Any], pool: str) -> None:
    start(pool).check_all(cases()[::-1], stagger_s=0.004)


def test_batches_of_1_to_16_and_any_length_run_compiled(
    start: Callable[..., Any], mode: str, make: Callable[..., Any]
) -> None:
    served = start()
    for batch in (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16):
        before = num_runs(served)
        asks = [make("generate", "x" * (1 + 5 * i % 19), seed=i, max_tokens=2 + i % 5, **DRAWN) for i in range(batch)]
        asks += [make("nested", "y" * (1 + i % 9), seed=i, max_frames=1 + i % 3, **FRAMES) for i in range(batch)]
        served.check_all(asks)
        ran = {name for name, runs in num_runs(served).items() if runs > before[name]}
        assert "compiled" not in mode or "lm.decode" in ran and len(ran) > 1
