"""With overlap a step may be launched for what has ended already: it leaves no trace. The plain step is the oracle."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from mstar_plugin_echo.oracle import cut

from mstar.errors import RequestError
from mstar.plugin.graph import Call, DynamicLoop, Each, Graph, Sequential, Walk
from mstar.plugin.spec import ModelSpec

ASCII = {str(token): -100.0 for token in range(128, 258)}  # text whose characters are its tokens


def cached_contents(served: Any) -> set[bytes]:
    return served.on_worker(lambda: set(served.worker.modules["lm"].pool._cache._page_of))


@pytest.mark.parametrize(
    "task", ["generate", "nested", "branches", "fanout", "spans", "chunks", "chunks_each", "states"]
)
def test_overlap_gives_all_that_the_plain_step_gives(
    engines: Callable[[str], Any], cases: Callable[..., Any], task: str
) -> None:
    plain, overlap = engines("default"), engines("overlap")
    for ask in cases(task):
        assert overlap.ask(ask).everything() == plain.ask(ask).everything(), str(ask)
    overlap.assert_clean()


def test_steps_are_launched_ahead_and_taken_back(fresh: Callable[..., Any], make: Callable[..., Any]) -> None:
    """The other tests of this file mean something only if this happens."""
    served = fresh(overlap=True)
    taken_back: list[int] = []
    undo = served.worker.runner._undo_work

    def counted(*args: Any, **kwargs: Any) -> None:
        taken_back.append(1)
        undo(*args, **kwargs)

    served.worker.runner._undo_work = counted
    for ask in (make("generate", "ends early", eos_at=3), make("nested", "too", end_at=2)):
        taken_back.clear()
        served.check_all([ask])
        assert taken_back, str(ask)
    served.assert_clean()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_prefix_cache_holds_the_same_after_late_steps(
    fresh: Callable[..., Any], make: Callable[..., Any], prefix_cache: bool
) -> None:
    plain, overlap = (
        fresh(overlap=overlap, block_size=2, enable_prefix_caching=prefix_cache) for overlap in (False, True)
    )
    for served in (plain, overlap):
        for eos_at in range(6):
            served.ask(make("generate", "cached", seed=eos_at, temperature=1.0, eos_at=eos_at))
        served.ask(make("states", "cached too", draft_tokens=3))
        served.assert_clean()
    assert cached_contents(overlap) == cached_contents(plain)
    assert bool(cached_contents(plain)) == prefix_cache


def twice(spec: ModelSpec) -> ModelSpec:
    """`generate`, but every sample goes on with a second loop after the first has ended."""

    def loop() -> DynamicLoop:
        call = Call("lm.decode", inputs={"ids": "last"}, outputs={"token": "last"}, emits={"text": "text"})
        return DynamicLoop("max_tokens", call, carry=("last",))

    def changed(config: Any) -> Graph:
        graph = spec.graph(config)
        samples = Each(Sequential(loop(), loop()), over="last", fork="main")
        section = Sequential(Call("lm.prefill"), samples)
        walk = Walk(name="generate", inputs=("ids", "last", "eos_at"), section=section)
        return dataclasses.replace(graph, walks=(walk, *graph.walks[1:]))

    return dataclasses.replace(spec, graph=changed)


def test_draws_after_a_loop_that_ended_are_those_of_the_plain_step(
    fresh: Callable[..., Any], make: Callable[..., Any]
) -> None:
    plain, overlap = (fresh(change=twice, overlap=overlap, block_size=4) for overlap in (False, True))
    drawn = {"temperature": 1.2, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.8}
    asks = [
        make("generate", f"goes on {eos_at}", seed=eos_at, n=1 + eos_at % 3, eos_at=eos_at, max_tokens=9, **drawn)
        for eos_at in range(8)
    ]
    alone = [plain.ask(ask).everything() for ask in asks]
    assert all(len(answer["ids"][0]) == 2 * eos_at for eos_at, answer in enumerate(alone) if eos_at)
    assert [overlap.ask(ask).everything() for ask in asks] == alone
    assert [answer.everything() for answer in overlap.ask_all(asks)] == alone
    assert [answer.everything() for answer in plain.ask_all(asks)] == alone
    plain.assert_clean()
    overlap.assert_clean()


@pytest.mark.parametrize("length", [1, 2, 4])
def test_a_stop_string_cuts_text_ids_and_usage_at_its_token(both: Any, make: Callable[..., Any], length: int) -> None:
    free = make("generate", "stop here", seed=length, temperature=1.0, logit_bias=ASCII, max_tokens=30)
    text = both.oracle.expected(free).text()
    stop = text[7 : 7 + length]
    ask = make("generate", "stop here", seed=length, temperature=1.0, logit_bias=ASCII, max_tokens=30, stop=stop)
    answer = both.ask(ask)
    num_tokens = text.find(stop) + length
    assert answer.text() == cut(text, [stop])
    assert answer.token_ids() == both.oracle.expected(free).texts[0][:num_tokens]
    assert answer.result.usage["completion_tokens"] == num_tokens
    assert answer.result.finish_reason == "stop"


def test_each_sample_stops_at_its_own_stop_string(both: Any, make: Callable[..., Any]) -> None:
    params = {"temperature": 1.3, "logit_bias": ASCII, "max_tokens": 24, "n": 4}
    right = both.oracle.expected(make("generate", "samples", seed=6, **params))
    stops = [right.text(1)[3:5], right.text(3)[9:11]]
    answers = both.ask_all([make("generate", "samples", seed=6, stop=stops, **params)] * 3)
    for answer in answers:
        for index in range(4):
            text = right.text(index)
            assert answer.text(index) == cut(text, stops)
            assert answer.result.indices[index] == ("stop" if cut(text, stops) != text else "length")


def test_a_stop_string_that_comes_when_the_text_has_ended_changes_nothing(both: Any, make: Callable[..., Any]) -> None:
    params = {"logit_bias": ASCII, "max_tokens": 6}
    right = both.oracle.expected(make("generate", "at the end", **params))
    answer = both.ask(make("generate", "at the end", stop=right.text()[-2:], **params))
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    assert answer.text() == cut(decoder.decode(bytes(right.texts[0])), [right.text()[-2:]])


@pytest.mark.parametrize("setting", ["default", "chunked", "few_rows", "overlap", "overlap_chunked", "overlap_swap"])
def test_a_request_aborted_in_any_phase_leaves_no_trace(
    engines: Callable[[str], Any], make: Callable[..., Any], setting: str
) -> None:
    served = engines(setting)
    bystanders = [
        make("generate", "stays", seed=1, temperature=0.9, frequency_penalty=0.5, max_tokens=20),
        make("nested", "stays", seed=2, temperature=0.9, depth_temperature=0.9, max_frames=8),
        make("states", "stays"),
    ]
    # Queued, in prefill, in decode, in a lane, between two walks, inside an Each, in the last step.
    aborted = [
        (make("generate", "p" * 40, seed=3, max_tokens=20), 0),
        (make("generate", "decodes", seed=4, max_tokens=20), 1),
        (make("generate", "decodes", seed=5, n=3, temperature=1.0, max_tokens=12), 7),
        (make("nested", "frames", seed=6, max_frames=9), 2),
        (make("states", "between"), 4),
        (make("states", "after"), 5),
        (make("fanout", "one|two", "three", reply_tokens=[6]), 3),
        (make("spans", "only text", steps=6), 2),
        (make("chunks", "x", counts=[[1] * 9]), 3),
        (make("chunks_each", "x", counts=[[1] * 5, [2] * 5]), 2),
        (make("generate", "last", seed=7, max_tokens=4), 4),
    ]

    async def gather() -> list[Any]:
        import asyncio

        works = [served.answer(ask, abort_after=after) for ask, after in aborted]
        works += [served.answer(ask) for ask in bystanders]
        return await asyncio.gather(*works, return_exceptions=True)

    answers = served.run(gather())
    for (ask, _), answer in zip(aborted, answers, strict=False):
        assert not isinstance(answer, RequestError) or answer.status == 499, f"{ask}: {answer!r}"
    assert sum(isinstance(answer, RequestError) for answer in answers) >= len(aborted) // 2
    for ask, answer in zip(bystanders, answers[len(aborted) :], strict=True):
        served.oracle.check(ask, answer)
    served.assert_clean()
    served.check_all([ask for ask, _ in aborted])  # and again, whole: nothing of the first time is left
    served.assert_clean()
