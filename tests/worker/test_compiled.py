"""Compiled methods, kept in a store, give what the oracle says; what cannot be compiled stays, with its reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import served
import torch
from mstar_plugin_echo.oracle import expected, make_request

from mstar.config import EngineConfig
from mstar.errors import ConfigError
from mstar.ipc.messages import Emit, WalkDone
from mstar.layers import shims
from mstar.plugin.graph import KV, Graph, Method, Port
from mstar.worker import compiled
from mstar.worker.compiled import Compilation, Compiler
from mstar.worker.taped import Taper
from mstar_compile_cache import Store

METHODS = ("step", "decode")
"""An inner loop with slots and draws, and a loop with KV, draws and an optional port."""


def only(graph: Graph, *methods: str) -> Graph:
    nodes = ((node, tuple(m for m in node.methods if m.name in methods)) for node in graph.nodes)
    return dataclasses.replace(graph, nodes=tuple(dataclasses.replace(n, methods=own) for n, own in nodes if own))


def compiler(worker: Any, *, store: Store, attention: str = "cpu") -> Compiler:
    return Compiler(worker.modules, plugin="echo", attention=attention, store=store)


def compile_parts(worker: Any, *methods: str, store: Store, attention: str = "cpu") -> Compilation:
    """Compile some of the methods of a worker's parts."""
    worker.modules.graph = only(worker.graph, *methods)
    compilation = compiler(worker, store=store, attention=attention).run()
    worker.runner.taper = Taper(worker.runner, queue=None)
    return compilation


def frames_of(worker: Any, requests: list[dict[str, Any]]) -> list[list[Any]]:
    names = [worker.open("nested", "the same length", **request) for request in requests]
    while worker.step() is not None:
        pass
    emitted = [[e.value for e in worker.messages(Emit) if e.request_id == n and e.value is not None] for n in names]
    return [[f for v in own if not v.dtype.is_floating_point for f in v.tolist()] for own in emitted]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_loops_compiled_once_draw_what_the_oracle_draws_in_any_batch(
    parts: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shims.load():
        pytest.skip("no C++ compiler")
    with Store(tmp_path / "store") as store:
        first = compile_parts(parts(), *METHODS, store=store)
        assert (first.num_built, first.eager) == (3, {})  # with the optional port and without
    monkeypatch.setattr(compiled.cache, "aot_compile", None)  # from here on nothing is compiled
    with Store(tmp_path / "store") as store:
        worker = parts()
        second = compile_parts(worker, *METHODS, store=store)
        assert (second.num_built, second.eager, set(second.compiled)) == (0, {}, {"depth.step", "lm.decode"})
        files = [path.suffix for path in (tmp_path / "store" / "entries").rglob("method.*")]
        assert sorted(files) == [".constants"] * 3 + [".so"] * 3  # no list of calls by torch's dispatcher
        for batch in (1, 2, 5, 9):
            requests: list[dict[str, Any]] = [
                {"seed": seed, "temperature": 1.0, "depth_temperature": 1.0, "max_frames": 1 + seed % 4}
                for seed in range(batch)
            ]
            right = [expected(make_request("nested", "the same length", **r)).tensors["frames"] for r in requests]
            assert frames_of(worker, requests) == [tensor.tolist() for tensor in right]
        said: dict[str, Any] = {"seed": 3, "temperature": 1.0, "max_tokens": 9}
        for more in ({"ignore_eos": True}, {"eos_at": 4}):
            name = worker.open("generate", "said", **said, **more)
            while worker.step() is not None:
                pass
            ids = [int(e.value) for e in worker.messages(Emit) if e.request_id == name and e.value is not None]
            assert ids == expected(make_request("generate", "said", **said, **more)).texts[0]
        worker.open("states", "said", seed=3)  # nothing feeds the optional port
        while worker.step() is not None:
            pass
        (draft,) = (done.outputs["draft"] for done in worker.messages(WalkDone) if "draft" in done.outputs)
        right_draft = expected(make_request("states", "said", seed=3)).tensors["draft"]
        assert [int(token) for token in draft] == right_draft.tolist()
        assert all(code.num_runs and not code.num_eager for code in second.compiled.values())


def test_what_cannot_be_compiled_stays_with_its_reason(
    parts: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = parts()
    before = dict(worker.modules["lm"].methods)
    caplog.set_level("INFO", logger="mstar.worker")
    with Store(tmp_path / "store") as store:
        result = compile_parts(worker, "prefill", "decode", "render", "concat", "frame", store=store, attention="plain")
    assert result.eager == {
        "lm.prefill": "its batches are ragged",
        "lm.decode": "only attention backend 'cpu' can be compiled, not 'plain'",
        "lm.frame": "only attention backend 'cpu' can be compiled, not 'plain'",
        "voice.render": "its input 'frames' has no fixed shape",
        "join.concat": "its input 'parts' is a list",
    }
    assert dict(worker.modules["lm"].methods) == before
    for name, reason in result.eager.items():
        assert caplog.messages.count(f"{name} is not compiled: {reason}") == 1


def test_a_method_that_branches_on_data_stays_with_the_compiler_s_words(
    parts: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shims.load():
        pytest.skip("no C++ compiler")
    worker = parts()
    module = worker.modules["depth"]

    def branches(_: Any, code: torch.Tensor) -> dict[str, Any]:
        return {"code": code if code.sum() > 3 else -code}

    monkeypatch.setattr(module.node, "step", branches)
    with Store(tmp_path / "store") as store:
        result = compile_parts(worker, "step", store=store)
    assert result.compiled == {}
    assert "data-dependent" in result.eager["depth.step"]


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (Method(name="step", inputs=(Port("code", "tokens", "int64"),)), "its batches are ragged"),
        (Method(name="step", kv=KV(tokens=2)), "it has 2 tokens a row"),
        (Method(name="step", inputs=(Port("code", "item", "int64"),)), "its input 'code' is a list"),
    ],
)
def test_declarations_that_name_no_one_shape_are_not_traced(
    parts: Callable[..., Any], tmp_path: Path, method: Method, reason: str
) -> None:
    worker = parts()
    with pytest.raises(compiled.NotCompilable, match=reason), Store(tmp_path / "store") as store:
        compiler(worker, store=store)._check(worker.modules["depth"], method)


def test_batch_invariance_is_not_promised_with_compiled_code() -> None:
    with pytest.raises(ConfigError, match="--batch-invariant"):
        EngineConfig(plugin="echo", compile=True, batch_invariant=True)


def test_a_dtype_without_kernels_is_not_compiled_in_vain() -> None:
    with pytest.raises(ConfigError, match="--compile cannot be had with dtype float16"):
        served.Served(plugin="echo", dtype="float16", compile=True)


def test_overlap_without_compiled_code_is_said_to_gain_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="mstar.worker")
    engine = served.Served(plugin="echo", overlap=True)
    engine.close()
    assert sum(message.startswith("--overlap gains nothing here") for message in caplog.messages) == 1
