"""Loops that run as one method give all that their methods give one by one: `--enforce-eager` is the oracle."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from mstar.errors import RequestError
from mstar.plugin.graph import Call, DynamicLoop, Each, Graph, Loop, Section, Sequential, Walk, When
from mstar.plugin.program import Run
from mstar.plugin.spec import ModelSpec
from mstar.plugin.states import RequestView

SAMPLED = {"temperature": 0.9, "depth_temperature": 1.1, "depth_top_k": 12}
SMALL = {"block_size": 4, "max_model_len": 64, "kv_cache_memory_bytes": 64 * 256}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap": True},
    "batch_invariant": {"batch_invariant": True},
    "overlap_invariant": {"batch_invariant": True, "overlap": True},
    "few_rows": {"max_num_seqs": 3},
    "swap": SMALL,
    "overlap_swap": {**SMALL, "overlap": True},
}


def units(served: Any, walk: str = "frames") -> list[str]:
    """What runs as one in a walk."""
    ops = served.worker.router.programs[walk].ops
    return [op.target for op in ops if isinstance(op, Run) and op.unit is not None]


def ask_of(make: Callable[..., Any], seed: int, *, more: int = 0) -> Any:
    end = {"end_at": seed} if seed in (0, 3) else {}
    return make("nested", "frames of some length"[: 6 + seed], seed=seed, max_frames=4 + seed + more, **SAMPLED, **end)


@pytest.mark.parametrize("setting", list(SETTINGS))
def test_fused_frames_are_those_of_methods_that_run_alone(
    fresh: Callable[..., Any], make: Callable[..., Any], setting: str
) -> None:
    fused, eager = fresh(**SETTINGS[setting]), fresh(**SETTINGS[setting], enforce_eager=True)
    assert units(fused) == ["lm.frame, depth.start, 3 × depth.step, depth.sum"] and not units(eager)
    more = 20 if "swap" in setting else 0
    asks = [ask_of(make, seed, more=more) for seed in range(5)]
    alone = [eager.ask(ask).everything() for ask in asks]
    assert [answer.everything() for answer in eager.ask_all(asks)] == alone
    assert [fused.ask(ask).everything() for ask in asks] == alone
    assert [answer.everything() for answer in fused.ask_all(asks)] == alone
    assert alone[4]["counters"]["depth.step"] == 3 * alone[4]["counters"]["lm.frame"] == 3 * (8 + more)
    assert (fused.worker.scheduler.num_swaps > 0) == ("swap" in setting)
    fused.check_all(asks)
    for served in (fused, eager):
        served.assert_clean()


@pytest.mark.parametrize("setting", ["plain", "overlap"])
def test_a_fused_request_aborted_in_any_frame_leaves_no_trace(
    fresh: Callable[..., Any], make: Callable[..., Any], setting: str
) -> None:
    served = fresh(**SETTINGS[setting])
    asks = [ask_of(make, seed) for seed in (1, 2, 4, 5, 6, 7)]

    async def gather() -> list[Any]:
        works = [served.answer(ask, abort_after=after) for after, ask in enumerate(asks[:4])]
        return await asyncio.gather(*works, *map(served.answer, asks[4:]), return_exceptions=True)

    for _ in range(3):
        answers = served.run(gather())
        assert all(not isinstance(a, RequestError) or a.status == 499 for a in answers[:4])
        for ask, answer in zip(asks[4:], answers[4:], strict=True):
            served.oracle.check(ask, answer)
        served.assert_clean()
    served.check_all(asks)
    served.assert_clean()


# ---- other bodies of the same loop --------------------------------------------------------------------------


def odd(request: RequestView, iteration: int) -> bool:
    return iteration % 2 == 1


STEP = Loop(3, Call("depth.step"), carry=("code",))
SUM = Call("depth.sum", emits={"frame": "frames"}, sends={"frame": "frames"})
BODIES: dict[str, tuple[Section, list[str]]] = {
    "nested": (
        Sequential(Call("lm.frame"), Loop(1, Sequential(Call("depth.start"), STEP), carry=("code",)), SUM),
        ["lm.frame, depth.start, 3 × depth.step, depth.sum"],
    ),
    "cut by a When": (
        Sequential(Call("lm.frame"), Call("depth.start"), STEP, When(odd, Call("pace.lap")), SUM),
        ["lm.frame, depth.start, 3 × depth.step"],
    ),
    "without KV": (
        Sequential(Call("lm.frame"), Loop("max_frames", Call("pace.lap")), Call("depth.start"), STEP, SUM),
        ["depth.start, 3 × depth.step, depth.sum"],
    ),
    "inner loop alone": (
        Sequential(Call("lm.frame"), Call("depth.start"), When(lambda request, iteration: True, STEP), SUM),
        ["3 × depth.step"],
    ),
}  # fmt: skip


def with_laps(spec: ModelSpec) -> ModelSpec:
    """The voice's loop, which begins with a stream's chunk of any length, has an inner loop after it."""

    def changed(config: Any) -> Graph:
        graph = spec.graph(config)
        render = Call("voice.render", receives={"frames": "frames"}, emits={"wave": "wave"})
        body = Sequential(render, Loop(2, Call("pace.lap")))
        walk = Walk(name="speak", section=DynamicLoop(None, body))
        return dataclasses.replace(graph, walks=tuple(walk if w.name == "speak" else w for w in graph.walks))

    return dataclasses.replace(spec, graph=changed)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_unit_may_begin_with_a_chunk_of_a_stream(
    fresh: Callable[..., Any], make: Callable[..., Any], overlap: bool
) -> None:
    fused, eager = (fresh(change=with_laps, overlap=overlap, enforce_eager=off) for off in (False, True))
    assert units(fused, "speak") == ["voice.render, 2 × pace.lap"] and not units(eager, "speak")
    asks = [ask_of(make, seed) for seed in range(4)]
    asks.append(make("nested", "loud", voice="loud", max_frames=9))
    alone = [eager.ask(ask).everything() for ask in asks]
    assert all(answer["samples"] for answer in alone[1:])
    assert alone[4]["counters"]["pace.lap"] == 2 * alone[4]["counters"]["voice.render"] > 2
    assert [fused.ask(ask).everything() for ask in asks] == alone
    assert [answer.everything() for answer in fused.ask_all(asks)] == alone
    fused.assert_clean()
    eager.assert_clean()


def decode_with_laps(spec: ModelSpec) -> ModelSpec:
    """Decoding, whose ids the KV pool must learn, with an inner loop after it."""

    def changed(config: Any) -> Graph:
        graph = spec.graph(config)
        decode = Call("lm.decode", inputs={"ids": "last"}, outputs={"token": "last"}, emits={"text": "text"})
        loop = DynamicLoop("max_tokens", Sequential(decode, Loop(2, Call("pace.lap"))), carry=("last",))
        section = Sequential(Call("lm.prefill"), Each(loop, over="last", fork="main"))
        walk = Walk(name="generate", inputs=("ids", "last", "eos_at"), section=section)
        return dataclasses.replace(graph, walks=(walk, *graph.walks[1:]))

    return dataclasses.replace(spec, graph=changed)


@pytest.mark.parametrize("setting", ["plain", "overlap", "overlap_invariant", "recompute", "overlap_recompute"])
def test_ids_written_in_a_unit_are_learned_and_recomputed(
    fresh: Callable[..., Any], make: Callable[..., Any], setting: str
) -> None:
    small = {**SMALL, "swap_space_bytes": 0, "overlap": "overlap" in setting}
    settings = {**(small if "recompute" in setting else SETTINGS[setting]), "block_size": 4}
    fused, eager = (fresh(change=decode_with_laps, **settings, enforce_eager=off) for off in (False, True))
    assert units(fused, "generate") == ["lm.decode, 2 × pace.lap"] and not units(eager, "generate")
    drawn = {"temperature": 1.2, "repetition_penalty": 1.4, "presence_penalty": 0.5, "max_tokens": 20}
    asks = [make("generate", "a long enough prompt"[seed:], seed=seed, **drawn) for seed in range(4)]
    asks.append(make("generate", "ends", eos_at=3, seed=5, n=2, **drawn))
    alone = [eager.ask(ask).everything() for ask in asks]
    assert [fused.ask(ask).everything() for ask in asks] == alone
    cached = [s.on_worker(lambda s=s: set(s.worker.modules["lm"].pool._cache._page_of)) for s in (fused, eager)]
    assert "recompute" in setting or cached[0] == cached[1] != set()  # in a small pool pages are evicted
    assert [answer.everything() for answer in fused.ask_all(asks)] == alone
    assert (fused.worker.scheduler.num_rebuilds > 0) == ("recompute" in setting)
    fused.assert_clean()
    eager.assert_clean()


def in_items(spec: ModelSpec) -> ModelSpec:
    """Two items side by side, each with the frames that follow the prompt read once more, or twice."""

    def changed(config: Any) -> Graph:
        graph = spec.graph(config)
        frames = next(walk for walk in graph.walks if walk.name == "frames")
        read = Loop(2, Call("lm.prefill", outputs={"hidden": "sum"}), collect={"sum": "begin"})
        out = {"frame": "frames"}
        last = Call("depth.sum", outputs={"sum": "begin"}, emits=out, sends=out)
        body = Sequential(Call("lm.frame", inputs={"sum": "begin"}), Call("depth.start"), STEP, last)
        items = Each(DynamicLoop("max_frames", body, carry=("begin",)), over="begin", fork="main")
        walk = Walk(name="frames", inputs=frames.inputs, section=Sequential(read, items))
        return dataclasses.replace(graph, walks=tuple(walk if w is frames else w for w in graph.walks))

    return dataclasses.replace(spec, graph=changed)


@pytest.mark.parametrize("overlap", [False, True])
def test_items_of_an_each_draw_apart_in_units_too(
    fresh: Callable[..., Any], make: Callable[..., Any], overlap: bool
) -> None:
    fused, eager = (fresh(change=in_items, overlap=overlap, enforce_eager=off) for off in (False, True))
    assert units(fused) == ["lm.frame, depth.start, 3 × depth.step, depth.sum"]
    asks = [make("nested", "items", seed=seed, max_frames=4, temperature=1.0, depth_temperature=1.2) for seed in (1, 2)]
    alone = [eager.ask(ask).everything() for ask in asks]
    frames = [answer["tensors"]["frames"] for answer in alone]
    assert all(len(rows) == 8 and rows[:4] != rows[4:] for rows in frames)
    assert [fused.ask(ask).everything() for ask in asks] == alone
    assert [answer.everything() for answer in fused.ask_all(asks)] == alone
    fused.assert_clean()
    eager.assert_clean()


def with_body(body: Section) -> Callable[[ModelSpec], ModelSpec]:
    def change(spec: ModelSpec) -> ModelSpec:
        def changed(config: Any) -> Graph:
            graph = spec.graph(config)
            frames = next(walk for walk in graph.walks if walk.name == "frames")
            loop = DynamicLoop("max_frames", body, carry=("sum",), name="frames")
            section = Sequential(Call("lm.prefill", outputs={"hidden": "sum"}), loop)
            walk = Walk(name="frames", inputs=frames.inputs, section=section)
            return dataclasses.replace(graph, walks=tuple(walk if w is frames else w for w in graph.walks))

        return dataclasses.replace(spec, graph=changed)

    return change


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", list(BODIES))
def test_bodies_fused_whole_or_in_part_give_the_same(
    fresh: Callable[..., Any], make: Callable[..., Any], name: str, overlap: bool
) -> None:
    body, parts = BODIES[name]
    fused, eager = (fresh(change=with_body(body), overlap=overlap, enforce_eager=off) for off in (False, True))
    assert units(fused) == parts
    asks = [ask_of(make, seed) for seed in range(4)]
    alone = [eager.ask(ask).everything() for ask in asks]
    assert all(answer["tensors"] for answer in alone[1:])
    assert [fused.ask(ask).everything() for ask in asks] == alone
    assert [answer.everything() for answer in fused.ask_all(asks)] == alone
    fused.assert_clean()
    eager.assert_clean()
