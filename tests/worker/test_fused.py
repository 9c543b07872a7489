"""Hooks, stops and failures inside a fused unit: the same messages as from methods that run alone."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from mstar.errors import RequestError
from mstar.ipc.messages import Failed, WalkDone
from mstar.plugin.graph import Call, DynamicLoop, Graph, Loop, Method, Node, Port, Sequential
from mstar.plugin.nodes import Plan
from mstar.worker.router import Router
from mstar.worker.runner import Runner

UNIT = "lm.frame, depth.start, 3 × depth.step, depth.sum"


def changed(graph: Graph) -> Graph:
    """The frames' loop with a method more: `depth.look` reads two values, one absent, in the inner loop's turns."""
    look = Method(
        name="look",
        inputs=(Port("code", dtype="float32"), Port("gone", dtype="int64", optional=True)),
        outputs=(Port("seen", dtype="float32"), Port("nothing", dtype="int64")),
    )
    last = Method(name="last", inputs=(Port("nothing", dtype="int64", optional=True), Port("seen", dtype="float32")))
    depth = next(node for node in graph.nodes if node.name == "depth")
    nodes = [Node("depth", (*depth.methods, look, last)) if node is depth else node for node in graph.nodes]
    inner = Loop(3, Sequential(Call("depth.step"), Call("depth.look", inputs={"gone": "end_at"})), carry=("code",))
    out = {"frame": "frames"}
    body = Sequential(
        Call("lm.frame"), Call("depth.start"), inner, Call("depth.last"), Call("depth.sum", emits=out, sends=out)
    )
    frames = next(walk for walk in graph.walks if walk.name == "frames")
    loop = DynamicLoop("max_frames", body, carry=("sum",), name="frames")
    walk = dataclasses.replace(frames, section=Sequential(Call("lm.prefill", outputs={"hidden": "sum"}), loop))
    walks = tuple(walk if one is frames else one for one in graph.walks)
    return dataclasses.replace(graph, nodes=tuple(nodes), walks=walks)


class Told:
    """A worker whose nodes have further hooks, and what these were told."""

    def __init__(self, parts: Callable[..., Any], *, fused: bool, batch_invariant: bool = False) -> None:
        self.worker = parts(enforce_eager=not fused, batch_invariant=batch_invariant)
        self.calls: list[Any] = []

    def hook(self, target: str, act: Callable[..., Any]) -> None:
        """Give a node a hook: "depth.finish_start"."""
        name, _, hook = target.partition(".")
        kind, _, method = hook.partition("_")
        module = self.worker.modules[name]
        setattr(module.node, hook, act)
        getattr(module, kind)[method] = act

    def start(self, graph: Graph | None = None) -> None:
        worker = self.worker
        worker.router = Router(
            worker.router.spec, graph or worker.graph, modules=worker.modules, scheduler=worker.scheduler
        )
        worker.runner = Runner(worker.modules, config=worker.modules.config)

    def results(self, *, num: int = 3, max_frames: int = 4) -> dict[str, list[Any]]:
        """Every request's messages, in order."""
        drawn = {"temperature": 1.0, "depth_temperature": 1.0, "max_frames": max_frames}
        texts = ["frames"[: index + 2] for index in range(num)]
        names = [self.worker.open("nested", text, seed=index, **drawn) for index, text in enumerate(texts)]
        while self.worker.step() is not None:
            pass
        found: dict[str, list[Any]] = {name: [] for name in names}
        for message in self.worker.router.output.messages:
            shown = msgspec.json.encode(message, enc_hook=lambda tensor: tensor.tolist())
            found[message.request_id].append(shown)
        return found


def both(
    parts: Callable[..., Any], prepare: Callable[[Told], None], *, graph: Callable[[Graph], Graph] | None = None
) -> list[tuple[Told, dict[str, list[Any]]]]:
    """(worker, results) fused and eager; `prepare` gives hooks."""
    found = []
    for fused in (True, False):
        told = Told(parts, fused=fused)
        prepare(told)
        told.start(graph(told.worker.graph) if graph else None)
        found.append((told, told.results()))
    return found


def runs_as_one(told: Told, target: str) -> bool:
    ops = told.worker.router.programs["frames"].ops
    return any(getattr(op, "target", "") == target and op.unit is not None for op in ops)


def test_finish_hooks_inside_run_in_order_once_for_each_turn(parts: Callable[..., Any]) -> None:
    def prepare(told: Told) -> None:
        def finish(name: str) -> Callable[..., Any]:
            def act(tasks: Any, outputs: Any) -> None:
                for at, task in enumerate(tasks):
                    told.calls.append((task.request_id, name, task.iteration, task.length, len(outputs)))
                    assert name != "look" or outputs["seen"].shape == (len(tasks),)
                    assert name != "look" or float(task.inputs["code"].tensor) == float(outputs["seen"][at])
                    task.count(name, task.iteration)

            return act

        def look(self: Any, ctx: Any, code: Any, gone: Any) -> Any:
            assert code.dtype == torch.float32
            assert ctx.present["gone"].all() and gone is not None
            return {"seen": code + 0, "nothing": None}

        def last(self: Any, ctx: Any, nothing: Any, seen: Any) -> Any:
            assert nothing is None and not ctx.present["nothing"].any()
            return {}

        depth = told.worker.modules["depth"]
        for method in (look, last):
            bound = types.MethodType(method, depth.node)
            setattr(depth.node, method.__name__, bound)
            depth.methods[method.__name__] = bound
        for name in ("start", "last"):
            told.hook(f"depth.finish_{name}", finish(name))

    (fused, one), (eager, other) = both(parts, prepare, graph=changed)
    whole = "lm.frame, depth.start, 3 × depth.step, 3 × depth.look, depth.last, depth.sum"
    assert runs_as_one(fused, whole) and not runs_as_one(eager, whole)
    assert one == other
    done = [m for m in fused.worker.messages(WalkDone) if m.walk == "frames"]
    assert [m.counters["depth.look"] for m in done] == [12] * 3
    assert all(m.counts["last"] == m.counts["start"] == sum(range(4)) for m in done)
    for request in one:
        order = [call for call in fused.calls if call[0] == request]
        assert order == [call for call in eager.calls if call[0] == request]
        assert [call[1] for call in order] == ["start", "last"] * 4


def test_a_stop_in_the_middle_lets_the_iteration_end(parts: Callable[..., Any]) -> None:
    def prepare(told: Told) -> None:
        def finish(tasks: Any, outputs: Any) -> None:
            for task in tasks:
                if task.iteration == 1 and task.request_id == "nested-2":
                    task.stop("enough")

        told.hook("depth.finish_start", finish)

    (fused, one), (_, other) = both(parts, prepare)
    assert runs_as_one(fused, UNIT)
    assert one == other
    done = {m.request_id: m for m in fused.worker.messages(WalkDone) if m.walk == "frames"}
    assert done["nested-2"].counters["depth.sum"] == 2 and done["nested-2"].counts["frames"] == 2
    assert set(done["nested-2"].reasons.values()) == {"enough"}
    assert done["nested-1"].counters["depth.sum"] == 4


def test_prepare_hooks_run_before_with_what_comes_from_outside(parts: Callable[..., Any]) -> None:
    """Positions, their advance and further tensors are those of the method that planned them."""

    def prepare(told: Told) -> None:
        def plan(tasks: Any) -> Plan:
            for task in tasks:
                told.calls.append((task.request_id, task.length, task.position, tuple(task.inputs["sum"].shape)))
            positions = torch.tensor([int(task.position) + 1 for task in tasks])
            return Plan(positions=positions, advance=[3.0] * len(tasks), tensors={"shift": positions})

        def frame(ctx: Any, sum: Any, end_at: Any) -> Any:
            assert ctx.plan["shift"].tolist() == ctx.positions.tolist()
            return original(ctx, sum=sum, end_at=end_at)

        lm = told.worker.modules["lm"]
        original = lm.methods["frame"]
        lm.methods["frame"] = frame
        told.hook("lm.prepare_frame", plan)

    (fused, one), (eager, other) = both(parts, prepare)
    assert runs_as_one(fused, UNIT)
    assert one == other
    assert sorted(fused.calls) == sorted(eager.calls)
    assert {after[2] - before[2] for before, after in zip(fused.calls[::3], fused.calls[3::3], strict=False)} == {3.0}


def test_a_hook_that_must_run_in_between_cuts_the_unit(parts: Callable[..., Any]) -> None:
    def prepare(told: Told) -> None:
        told.hook("depth.prepare_start", lambda tasks: told.calls.extend(int(t.inputs["code"]) for t in tasks))

    (fused, one), (eager, other) = both(parts, prepare)
    assert runs_as_one(fused, "depth.start, 3 × depth.step, depth.sum")
    assert one == other
    assert sorted(fused.calls) == sorted(eager.calls) != []


@pytest.mark.parametrize("how", ["method", "finish", "fail", "shape"])
def test_what_fails_inside_fails_its_request_and_names_its_method(parts: Callable[..., Any], how: str) -> None:
    """The second request goes wrong in its second frame, in the middle of the inner loop."""
    seen: list[Any] = []

    def prepare(told: Told) -> None:
        depth = told.worker.modules["depth"]
        step = depth.methods["step"]

        def wrong(ctx: Any) -> bool:
            numbers = ctx.slots["number"][ctx.rows].tolist()
            rows = [scope.rows["depth"] for scope in bad(told) if "depth" in scope.rows]
            return any(row in ctx.rows.tolist() and numbers[ctx.rows.tolist().index(row)] == 2 for row in rows)

        def stepped(ctx: Any, code: Any) -> Any:
            outputs = step(ctx, code=code)
            if how in ("method", "shape") and int(ctx.iteration[0]) == 1 and wrong(ctx):
                if how == "shape":
                    return {"code": outputs["code"][:, None]}
                raise ValueError("after the draw")
            return outputs

        def finish(tasks: Any, outputs: Any) -> None:
            for task in tasks:
                if task.request_id == "nested-2" and task.iteration == 1:
                    if how == "fail":
                        task.fail(RequestError("told to", status=422))
                    if how == "finish":
                        raise ValueError("in the hook")

        depth.methods["step"] = stepped
        told.hook("depth.finish_start", finish)

    def bad(told: Told) -> list[Any]:
        return [s for s in told.worker.router.holdings.scopes() if s.request.info.request_id == "nested-2"]

    for told, results in both(parts, prepare):
        assert runs_as_one(told, UNIT) == (not told.worker.modules.config.enforce_eager)
        (failed,) = told.worker.messages(Failed)
        assert failed.request_id == "nested-2"
        where = {"method": "depth.step: ValueError", "shape": "depth.step returned", "finish": "depth.finish_start: "}
        assert where.get(how, "told to") in failed.message
        seen.append(
            {name: messages for name, messages in results.items() if name != "nested-2"} | {"e": failed.message}
        )
    assert seen[0] == seen[1]


def test_rows_of_padding_are_inert(parts: Callable[..., Any]) -> None:
    results, drawn = [], []
    for fused in (True, False):
        told = Told(parts, fused=fused, batch_invariant=True)
        depth = told.worker.modules["depth"]

        def step(ctx: Any, code: Any, original: Any = depth.methods["step"]) -> Any:
            num = int((ctx.rows > 0).sum())
            assert ctx.num_rows == 16 and (code[num:] == code[num - 1]).all()  # each the last task's, in every turn
            return original(ctx, code=code)

        depth.methods["step"] = step
        told.start()
        results.append(told.results())
        drawn.append(depth.slots.samplers["depth"].step[1:].tolist())
    assert results[0] == results[1]
    assert drawn[0] == drawn[1] and sum(drawn[0]) == 3 * 4 * 3
