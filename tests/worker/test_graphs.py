"""Graphs against the eager oracle, on a CPU: a fake device records kernels as CUDA does and replays them blindly."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from mstar.ipc.messages import Close
from mstar.layers.attention import AttentionPlan
from mstar.layers.attention.plain import PlainBackend, write_kv
from mstar.layers.attention.plan import Pool
from mstar.layers.sampling import native, plain
from mstar.plugin.graph import KV, Method, Port
from mstar.worker import graphs
from mstar.worker.ahead import look_ahead
from mstar.worker.finish import Finished, finish
from mstar.worker.graphs import GraphRunner, buckets
from mstar.worker.modules import varies

UNIT = "lm.frame, depth.start, 3 × depth.step, depth.sum"
WAITS = (
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::nonzero",
    "aten::equal",
)  # for the device, which a capture refuses


class Recorder(TorchDispatchMode):
    """Notes the kernels that run. Keeps what they make, as a graph's pool does, but not what was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[tuple[Any, list[Any], Any, Any]] = []  # kernel, its operands, their tree, its results
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in WAITS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        result = func(*args, **(kwargs or {}))
        leaves, tree = tree_flatten((args, kwargs or {}))
        self.kernels.append((func, [self._held(leaf) for leaf in leaves], tree, result))
        self._made |= {id(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        return result

    def _held(self, leaf: Any) -> Any:
        is_outside = isinstance(leaf, Tensor) and id(leaf) not in self._made
        return weakref.ref(leaf) if is_outside else lambda: leaf

    def replay(self) -> None:
        """The same kernels on the same memory, and nothing else: no Python of the method runs again."""
        for func, held, tree, made in self.kernels:
            leaves = [get() for get in held]
            lost = [
                get for leaf, get in zip(leaves, held, strict=True) if leaf is None and isinstance(get, weakref.ref)
            ]
            assert not lost, f"{func} reads memory that has been given back"
            args, kwargs = tree_unflatten(leaves, tree)
            for old, new in zip(tree_leaves(made), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class FakeGraphs:
    """A device without a device."""

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        function()
        with Recorder() as recorder:
            result = function()
        return recorder.replay, result


class TensorAttention(PlainBackend):
    """Decodes from the plan's tensors alone, as a kernel does."""

    name = "tensors"

    def __init__(self) -> None:
        self.num_refreshed = 0

    def can_capture(self, *, head_dim: int, dtype: torch.dtype) -> bool:
        return True

    def refresh(self, fixed: AttentionPlan, live: AttentionPlan) -> None:
        self.num_refreshed += 1
        for name in ("context_lens", "slot_mapping", "visible_end"):
            getattr(fixed, name).copy_(getattr(live, name))
        fixed.page_table[:, : live.page_table.shape[1]].copy_(live.page_table)

    def paged(
        self, q: Tensor, k: Tensor, v: Tensor, pool: Pool, plan: AttentionPlan, *, scale: float, window: int
    ) -> Tensor:
        if plan.held is None:
            return super().paged(q, k, v, pool, plan, scale=scale, window=window)
        write_kv(plan, k=k, v=v, pool=pool)
        keys, values = (cache[plan.page_table.long()].transpose(2, 3).flatten(1, 2) for cache in pool)  # (B, S, Hkv, D)
        seen = torch.arange(keys.shape[1], device=q.device) < plan.visible_end[:, None]
        values = values.masked_fill(~seen[:, :, None, None], 0)
        group = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (keys, values))
        return functional.scaled_dot_product_attention(q[:, :, None], keys, values, seen[:, None, None], scale=scale)[
            :, :, 0
        ].contiguous()


class Captured:
    """A worker that replays on a fake device, beside one that does not."""

    def __init__(
        self, parts: Callable[..., Any], *, walks: Sequence[str] = ("generate", "frames"), **settings: Any
    ) -> None:
        self.worker = parts(**settings)
        self.worker.runner.backend = TensorAttention()
        self.graphs = self.worker.runner.graphs = GraphRunner(self.worker.runner, FakeGraphs())
        programs = self.worker.router.programs
        self.graphs.capture_all({name: programs[name] for name in walks})


@pytest.fixture(autouse=True)
def draws_as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(plain, "_require_finite", lambda *_: None)
    monkeypatch.setattr(plain, "_ascending", lambda scores: scores.sort(-1).values)  # numpy's sort is no kernel
    monkeypatch.setattr(graphs, "buckets", lambda most: buckets(min(most, 16)))  # more take long to capture here


def everything(worker: Any) -> dict[str, list[bytes]]:
    """Every request's messages, in order."""
    found: dict[str, list[bytes]] = {}
    for message in worker.router.output.messages:
        found.setdefault(message.request_id, []).append(
            msgspec.json.encode(message, enc_hook=lambda tensor: tensor.tolist())
        )
    return found


def run(worker: Any) -> dict[str, list[bytes]]:
    while worker.step() is not None:
        pass
    return everything(worker)


def run_ahead(worker: Any) -> dict[str, list[bytes]]:
    """As `Worker.overlapped_step` does: a step is finished after the next one has been launched."""
    pending = None
    while True:
        batch = worker.scheduler.next_batch()
        launched = None if batch is None else worker.runner.launch(batch)
        if pending is not None:
            route(worker, finish(pending, worker.modules))
        if launched is not None:
            look_ahead(launched, worker.scheduler)
        if batch is None and pending is None:
            return everything(worker)
        pending = launched


def route(worker: Any, finished: Finished) -> None:
    assert not finished.failed, finished.failed
    for work in finished.unfinished:
        worker.scheduler.add(work)
    for work, values in finished.done:
        if not work.request.is_dead:
            worker.router.complete(work, values)


def ask(worker: Any, num: int, **params: Any) -> None:
    """`num` requests of different lengths, for single methods and for units; most of them sample."""
    for seed in range(num):
        text, heat = "a prompt of some length"[: 3 + seed], float(seed % 4 > 0)
        worker.open("generate", text, seed=seed, max_tokens=2 + seed % 5, temperature=heat, **params)
        worker.open("nested", text, seed=seed, max_frames=1 + seed % 4, temperature=heat, depth_temperature=1.0)


def test_buckets_grow_by_eight_to_the_most_rows() -> None:
    assert buckets(32) == [1, 2, 4, 8, 16, 24, 32]
    assert buckets(20) == [1, 2, 4, 8, 16, 20]
    assert [buckets(n) for n in (1, 3, 8)] == [[1], [1, 2, 3], [1, 2, 4, 8]]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("runs", [run, run_ahead])
def test_replays_give_what_eager_calls_give_in_any_batch(
    parts: Callable[..., Any], runs: Callable[[Any], dict[str, list[bytes]]]
) -> None:
    settings: dict[str, Any] = {"overlap": runs is run_ahead, "max_num_seqs": 48}
    captured, eager = Captured(parts, **settings), parts(**settings)
    counts, before = captured.graphs.counts, captured.graphs.counts.captures
    for num in range(1, 17):
        replays = counts.replays
        for worker in (captured.worker, eager):
            ask(worker, num, top_p=0.9, ignore_eos=True)
        assert runs(captured.worker) == runs(eager), num
        assert counts.replays - replays >= 3
        for worker in (captured.worker, eager):
            close(worker)
    assert (counts.captures, counts.eager, counts.dropped) == (before, 0, 0)  # nothing is captured while serving
    assert captured.worker.runner.backend.num_refreshed == counts.replays
    assert called(captured.worker) == called(eager)


def close(worker: Any) -> None:
    """End all requests; nothing of them may be left."""
    for name in list(worker.router.requests):
        worker.router.handle(Close(request_id=name))
    worker.router.output.messages.clear()
    worker.modules.check_integrity([])


def called(worker: Any) -> dict[str, dict[str, list[float]]]:
    """module -> method -> [calls, rows]."""
    modules = worker.modules.by_name.values()
    return {module.name: {name: entry[:2] for name, entry in module.method_s.items()} for module in modules}


def decode_batch(worker: Any, num: int, **params: Any) -> Any:
    """A batch of decodes that has not run yet."""
    for seed in range(num):
        worker.open("generate", "late"[: 2 + seed % 3], seed=seed, max_tokens=9, ignore_eos=True, **params)
    batch = worker.scheduler.next_batch()
    while batch.key[1] != "decode":
        route(worker, worker.runner.run(batch))
        batch = worker.scheduler.next_batch()
    assert len(batch.works) == num
    return batch


def test_padding_rows_touch_scratch_memory_alone(parts: Callable[..., Any]) -> None:
    captured, eager = Captured(parts, max_num_seqs=16), parts(max_num_seqs=16)
    for worker in (captured.worker, eager):
        route(worker, worker.runner.run(decode_batch(worker, 8, temperature=1.0)))  # leaves 8 rows in the operands
        close(worker)
        batch = decode_batch(worker, 5, temperature=1.0)
        module = worker.modules["lm"]
        busy = torch.tensor([work.row for work in batch.works])
        idle = torch.tensor([row for row in range(1, module.slots.rows) if row not in busy])
        sampler = module.slots.samplers["main"]
        sampler.step[idle] = 7
        module.pool.storage.tensor[:, :, 1:] = 3.0
        route(worker, worker.runner.run(batch))
        assert (sampler.step[idle] == 7).all()
        assert sampler.step[busy].tolist() == [1] * 5
    assert captured.graphs.counts.replays == 2
    kept = [worker.modules["lm"].pool.storage.tensor[:, :, 1:] for worker in (captured.worker, eager)]
    torch.testing.assert_close(*kept)


def test_outputs_outlive_the_next_replay(parts: Callable[..., Any]) -> None:
    captured = Captured(parts, overlap=True, max_num_seqs=8)
    worker = captured.worker
    first = worker.runner.launch(decode_batch(worker, 3, temperature=1.0))
    tokens = first.outputs["token"].clone()
    assert tokens.shape == (3,)
    look_ahead(first, worker.scheduler)
    second = worker.runner.launch(worker.scheduler.next_batch())
    assert captured.graphs.counts.replays == 2
    assert second.outputs["token"].tolist() != tokens.tolist()
    assert first.outputs["token"].tolist() == tokens.tolist()
    assert first.outputs["token"] is first.outputs["text"]  # one copy of what is one tensor


def test_a_late_step_is_undone_from_its_own_draws(parts: Callable[..., Any]) -> None:
    """Even if others have drawn by the same graph since."""
    captured = Captured(parts, overlap=True, max_num_seqs=8)
    worker, state = captured.worker, captured.worker.modules["lm"].slots.samplers["main"]
    first = worker.runner.launch(decode_batch(worker, 3, temperature=1.0, presence_penalty=0.1))
    rows, drawn = torch.tensor([work.row for work in first.batch.works]), first.outputs["token"]
    look_ahead(first, worker.scheduler)
    second = worker.runner.launch(worker.scheduler.next_batch())
    again = second.outputs["token"]
    assert captured.graphs.counts.replays == 2
    assert drawn[0] != again[0]
    first.batch.works[0].undo()
    assert state.step[rows].tolist() == [1, 2, 2]
    assert state.counts[rows[0], [drawn[0], again[0]]].tolist() == [0, 1]
    assert state.counts[rows].sum(-1).tolist() == [1, 2, 2]


def test_fed_and_unfed_optional_ports_have_graphs_of_their_own(parts: Callable[..., Any]) -> None:
    captured, eager = Captured(parts, max_num_seqs=8), parts(max_num_seqs=8)
    counts, before = captured.graphs.counts, captured.graphs.counts.captures
    for asks in ([{}], [{"eos_at": 2}], [{}, {"eos_at": 1}]):
        for worker in (captured.worker, eager):
            for seed, params in enumerate(asks):
                worker.open("generate", "ports", seed=seed, max_tokens=4, **params)
        assert run(captured.worker) == run(eager)
    assert (counts.captures, counts.eager) == (before, 0)


def test_features_of_samplers_that_are_not_captured_at_load_are_when_first_used(
    parts: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    captured, eager = Captured(parts, max_num_seqs=8), parts(max_num_seqs=8)
    counts, before = captured.graphs.counts, captured.graphs.counts.captures
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "logit_bias": {"65": 5.0}}
    caplog.set_level("INFO", logger="mstar.worker")
    for params, captures in ((penalties, 1), (penalties, 0), ({"top_k": 3}, 0), ({"temperature": 0.0}, 0)):
        for worker in (captured.worker, eager):
            given = {"temperature": 1.0} | params
            worker.open("generate", "aaaabbbb", seed=5, max_tokens=8, ignore_eos=True, **given)
        assert run(captured.worker) == run(eager)
        assert counts.captures - before == captures
        before = counts.captures
        for worker in (captured.worker, eager):
            close(worker)
    assert counts.eager == 0
    assert sum("while serving" in message for message in caplog.messages) == 1


def test_a_pool_that_grows_drops_its_graphs_once(parts: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    captured, eager = Captured(parts, max_num_seqs=4), parts(max_num_seqs=4)
    counts, before = captured.graphs.counts, captured.graphs.counts.captures
    for num in (3, 1, 3):
        for worker in (captured.worker, eager):
            ask(worker, num, ignore_eos=True)  # more rows than there are
        assert run(captured.worker) == run(eager)
    assert counts.dropped >= before
    assert counts.captures > before
    assert 1 <= sum("captured again when next used" in message for message in caplog.messages) <= 3  # doublings
    for _ in range(2):
        latest = counts.captures
        for worker in (captured.worker, eager):
            close(worker)
            ask(worker, 3, ignore_eos=True)
        assert run(captured.worker) == run(eager)
    assert counts.captures == latest


def test_batches_that_are_too_large_run_eagerly_and_are_counted(
    parts: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "buckets", lambda most: [1, 2])
    captured = Captured(parts, max_num_seqs=4, walks=["generate"])
    worker, eager = captured.worker, parts(max_num_seqs=4)
    for one in (worker, eager):
        ask(one, 6, ignore_eos=True)
    assert run(worker) == run(eager)
    assert captured.graphs.counts.eager > 0


def test_what_cannot_be_captured_stays_with_its_reason(
    parts: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="mstar.worker")
    captured = Captured(parts, max_num_seqs=1, walks=["generate", "fanout", "branches", "spans", "speak"])
    why = captured.graphs.why_not
    assert why["lm.prefill"] == "its batches are ragged"
    assert caplog.messages.count("lm.prefill runs without CUDA graphs: its batches are ragged") == 1
    assert "lm.decode" not in why


def test_a_method_that_waits_for_the_device_runs_eagerly(parts: Callable[..., Any]) -> None:
    worker = parts(max_num_seqs=1)
    node = worker.modules["lm"].node
    decode = node.decode

    def waits(ctx: Any, ids: Tensor, eos_at: Tensor | None) -> Any:
        assert int(ids.sum()) > -1
        return decode(ctx, ids, eos_at)

    worker.modules["lm"].methods["decode"] = waits
    worker.runner.backend = TensorAttention()
    runner = worker.runner.graphs = GraphRunner(worker.runner, FakeGraphs())
    runner.capture_all(worker.router.programs)
    assert "not permitted when stream is capturing" in runner.why_not["lm.decode"]
    eager = parts(max_num_seqs=1)
    for one in (worker, eager):
        one.open("generate", "still answered", max_tokens=3)
    assert run(worker) == run(eager)


@pytest.mark.parametrize(
    ("method", "has_prepare", "reason"),
    [
        (Method(name="m", inputs=(Port("x", "tokens"),)), False, "ragged"),
        (Method(name="m", inputs=(Port("x", "item"),)), False, "'x' is a list"),
        (Method(name="m", inputs=(Port("x", shape=None),)), False, "'x' has no fixed shape"),
        (Method(name="m", kv=KV(tokens=2)), False, "2 tokens a row"),
        (Method(name="m", inputs=(Port("x"),)), True, "prepare hook"),
    ],
)
def test_shapes_that_vary_are_told_apart(method: Method, has_prepare: bool, reason: str) -> None:
    assert reason in str(varies(method, has_prepare=has_prepare))


def test_attention_that_cannot_be_captured_is_named(parts: Callable[..., Any]) -> None:
    worker = parts(max_num_seqs=1)
    runner = worker.runner.graphs = GraphRunner(worker.runner, FakeGraphs())
    runner.capture_all({"generate": worker.router.programs["generate"]})
    assert "attention backend 'cpu' cannot be captured" in runner.why_not["lm.decode"]
