"""A model split between workers, in any way: every request gets the oracle's answer, and leaves nothing anywhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from meshed import look_at

from mstar.errors import RequestError
from mstar.ipc import messages
from mstar.ipc.messages import Abort, Open, ScopeStep, Want
from mstar.plugin.graph import Alias, Call, DynamicLoop, Each, Graph, Sequential, Walk
from mstar.plugin.spec import ModelSpec
from mstar.worker import standstill


def test_all_tasks_one_by_one(meshed: Any, cases: Callable[..., Any]) -> None:
    for ask in cases():
        meshed.oracle.check(ask, meshed.ask(ask))


def test_all_tasks_at_once(meshed: Any, cases: Callable[..., Any]) -> None:
    meshed.check_all(cases())


def test_nothing_is_said_of_a_request_that_is_over_nor_kept_of_one_that_never_began(
    meshes: Callable[..., Any], make: Callable[..., Any]
) -> None:
    served = meshes("three", "default")

    def step(name: str) -> ScopeStep:
        return ScopeStep(request_id=name, step="free", lane="main", path=(), ordinal=0)

    def abort(worker: Any) -> list[Any]:
        (name,) = worker.router.requests
        for other in range(3):
            worker.router.output.post(other, step(name))
        worker.router.handle(Abort(request_id=name))
        worker.router.handle(step(name))
        return [*worker.router.output.posts, *worker.router.strays.early]

    def fail_to_open(worker: Any) -> list[str]:
        wrong: dict[str, Any] = {name: {} for name in ("params", "fields", "samplers", "sampler_prompts")}
        worker.router.handle(step("wrong"))
        worker.router.handle(
            Open(request_id="wrong", task="nothing", seed=0, arrival=0.0, content_keys={}, route=(0, 1, 2), **wrong)
        )
        worker.router.handle(step("wrong"))
        return list(worker.router.strays.early)

    async def begin() -> Any:
        return await served.submit(make("trouble", "slow", kind="sleep", sleep_s=0.05, steps=100))

    handle = served.run(begin())
    while not all(served.on_each(lambda worker: bool(worker.router.requests))):
        pass
    assert served.on_each(abort) == [[], [], []]

    async def end() -> None:
        handle.abort()

    served.run(end())
    assert served.on_each(fail_to_open) == [[], [], []]
    served.assert_clean()


def test_what_cannot_cross_to_another_worker_fails_its_request_alone(
    meshes: Callable[..., Any], make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = meshes("components", "default")
    end = served.workers[1].end
    send_to = end.send_to

    def refuse_some(worker: int, message: Any) -> None:
        if isinstance(message, messages.Call) and message.walk == "trouble":
            raise TypeError("numpy.float32 cannot cross to another process")
        send_to(worker, message)

    monkeypatch.setattr(end, "send_to", refuse_some)
    failed, good = served.ask_all([make("trouble", "t"), make("generate", "beside")])
    assert isinstance(failed, RequestError) and "numpy.float32 cannot cross" in failed.message
    served.oracle.check(make("generate", "beside"), good)
    served.assert_clean()


def test_who_only_waits_for_another_worker_is_not_taken_for_out_of_memory(
    meshes: Callable[..., Any], make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = meshes("prefill apart", "at the end")
    moves = served.workers[1].router.remote.moves
    handle = moves.handle

    def slowly(scope: Any, message: Any) -> bool:
        time.sleep(0.5 if isinstance(message, Want) else 0)
        return bool(handle(scope, message))

    monkeypatch.setattr(moves, "handle", slowly)
    monkeypatch.setattr(standstill, "PATIENCE_S", 0.2)
    ask = make("generate", "hello", max_tokens=3)
    served.oracle.check(ask, served.ask(ask))
    served.assert_clean()


@pytest.mark.parametrize("is_back", [False, True])
def test_what_has_become_old_is_not_recomputed(
    meshes: Callable[..., Any], make: Callable[..., Any], is_back: bool
) -> None:
    served = meshes("prefill apart", "default")

    def grow_old(worker: Any) -> bool:
        (tenant,) = [t for t in worker.router.holdings.tenants() if t.scopes[0].sequences]
        (scope,) = tenant.scopes
        worker.modules.forget(tenant)
        if is_back:
            assert not worker.scheduler._bring_back(tenant, [])
            assert tenant.num_rebuilding == len(scope.sequences)
        for module, label in list(scope.sequences):
            worker.router.remote.moves.release(scope, module, label)
        worker.scheduler.take_resumable()
        return not (tenant.forgotten or tenant.num_rebuilding or worker.scheduler.has_work)

    async def begin() -> Any:
        handle = await served.submit(make("trouble", "slow", kind="sleep", sleep_s=0.2, steps=100))
        await anext(handle)
        return handle

    handle = served.run(begin())
    assert look_at(served.workers[1:], grow_old) == [True]

    async def end() -> None:
        handle.abort()

    served.run(end())
    served.assert_clean()


def by_two_names(spec: ModelSpec) -> ModelSpec:
    """Decoding writes to a sequence by one label and the other in turn."""

    def changed(config: Any) -> Graph:
        graph = spec.graph(config)
        turns = (
            Call(f"{node}.decode", inputs={"ids": "last"}, outputs={"token": "last"}, emits={"text": "text"})
            for node in ("lm_view", "lm", "lm", "lm_view")
        )
        item = Sequential(Alias("view", "main"), DynamicLoop("max_tokens", Sequential(*turns), carry=("last",)))
        section = Sequential(Call("lm.prefill"), Each(item, over="last", fork="main"))
        walk = Walk(name="generate", inputs=("ids", "last", "eos_at"), section=section)
        return replace(graph, walks=(walk, *graph.walks[1:]))

    return replace(spec, graph=changed)


@pytest.mark.parametrize("groups", [[["*"], ["lm_view"]], [["lm_view"], ["lm"], ["*"]]], ids=["home", "two guests"])
def test_a_sequence_that_moves_keeps_its_other_label(
    fresh: Callable[..., Any], make_mesh: Callable[..., Any], make: Callable[..., Any], groups: list[list[str]]
) -> None:
    one = fresh(change=by_two_names)
    ask = make("generate", "hello", max_tokens=3, n=2)
    with contextlib.closing(make_mesh(groups, {}, change=by_two_names)) as served:
        assert served.ask(ask).everything() == one.ask(ask).everything()
        served.assert_clean()


@pytest.mark.parametrize("way", ["idle", "resumed", "on the host"])
def test_what_a_session_keeps_hears_steps_that_its_request_overtook(
    meshes: Callable[..., Any], make: Callable[..., Any], way: str
) -> None:
    """The order of what the engine says and what another worker says is not given."""
    served = meshes("prefill apart", "default")
    served.ask(make("session", "hello", session="s", max_tokens=2))
    served.settle()

    def keep_more(worker: Any) -> str:
        (scope,) = worker.router.holdings.sessions["s"].values()
        worker.modules.sequence(scope, "lm", "spare")
        if way == "on the host":
            assert worker.modules.swap_out(scope.tenant)
        return next(reversed(worker.router.strays._ended))

    (name,) = look_at(served.workers[1:], keep_more)

    def say(worker: Any) -> None:
        step = {"request_id": name, "lane": "main", "ordinal": 0, "new": "spare"}
        worker.router.handle(ScopeStep(step="free", **step, path=(0,)))
        worker.router.handle(ScopeStep(step="drop", **step, path=()))

    def kept(worker: Any) -> list[Any]:
        scopes = [scope for scope in worker.router.holdings.scopes() if scope.path == ()]
        return [label for scope in scopes for _, label in scope.sequences]

    async def resume() -> None:
        handle = await served.submit(make("session", "on", session="s", max_tokens=3))
        if way == "resumed":
            await anext(handle)
            look_at(served.workers[1:], say)
        async for _ in handle:
            pass

    if way != "resumed":
        look_at(served.workers[1:], say)
    served.run(resume())
    served.settle()
    assert "spare" not in look_at(served.workers[1:], kept)[0]
    served.drop_session("s")
    served.assert_clean()
    look_at(served.workers[1:], say)
    assert not any(served.on_each(lambda worker: worker.router.strays.behind))
