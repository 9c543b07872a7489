from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mstar_plugin_echo.oracle import expected, make_request

from mstar.ipc.messages import Emit
from mstar.layers.attention import build_plan, decode_plan
from mstar.worker import runner


@pytest.mark.parametrize(
    ("module", "method"), [("lm", "decode"), ("lm", "frame"), ("depth", "step"), ("depth", "start")]
)
def test_a_batch_that_raised_after_it_drew_and_wrote_leaves_nothing_of_it(
    parts: Callable[..., Any], module: str, method: str
) -> None:
    """Both requests of the batch run again alone, and draw what they would have drawn."""
    worker = parts()
    methods = worker.modules[module].methods
    original, failures = methods[method], []

    def raises_once_for_two(context: Any, **inputs: Any) -> Any:
        outputs = original(context, **inputs)
        if context.num_rows == 2 and len(failures) < 3:
            failures.append(method)
            raise RuntimeError("after the method did its work")
        return outputs

    methods[method] = raises_once_for_two
    task, params = ("nested", {"temperature": 1.0, "depth_temperature": 1.0, "max_frames": 3})
    if method == "decode":
        task, params = ("generate", {"temperature": 1.0, "frequency_penalty": 0.9, "max_tokens": 6})
    names = [worker.open(task, "the same length", seed=seed, **params) for seed in (1, 2)]
    while worker.step() is not None:
        pass
    assert len(failures) == 3
    for seed, name in zip((1, 2), names, strict=True):
        right = expected(make_request(task, "the same length", seed=seed, **params))
        emitted = [e.value for e in worker.messages(Emit) if e.request_id == name and e.value is not None]
        if task == "generate":
            assert [int(value) for value in emitted] == right.texts[0]
        else:
            frames = [value.tolist() for value in emitted if not value.dtype.is_floating_point]
            assert [frame for step in frames for frame in step] == right.tensors["frames"].tolist()


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_rows_are_planned_as_any_batch_is(
    parts: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, batch_invariant: bool
) -> None:
    """The plan of a decoding step is the one that `build_plan` makes of it, padding and forked pages included."""
    plans = []

    def both(**given: Any) -> Any:
        plan = decode_plan(**given)
        lens = np.array(given["context_lens"], dtype=np.int32)
        size, table = given["page_size"], given["page_table"]
        ones = np.ones(len(lens), dtype=np.int32)
        common = {"page_size": size, "device": "cpu", "batch_invariant": given["batch_invariant"]}
        plans.append((plan, build_plan(query_lens=ones, context_lens=lens, page_table=table, **common)))
        return plan

    monkeypatch.setattr(runner, "decode_plan", both)
    worker = parts(batch_invariant=batch_invariant, block_size=4)
    worker.open("generate", "one", n=2, max_tokens=9, ignore_eos=True)
    worker.open("generate", "a longer one", max_tokens=9, ignore_eos=True)
    while worker.step() is not None:
        pass
    assert len(plans) >= 9
    assert {plan.query_starts.shape[0] for plan, _ in plans} >= ({17} if batch_invariant else {4})
    for plan, general in plans:
        for owner, other in ((plan, general), (plan.host, general.host)):
            for name in owner.__dataclass_fields__:
                one, same = getattr(owner, name), getattr(other, name)
                if isinstance(one, torch.Tensor | np.ndarray):
                    assert one.tolist() == same.tolist(), name
                elif name not in ("host", "derived"):
                    assert one == same, name


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_items_are_as_many_as_rows(parts: Callable[..., Any], batch_invariant: bool) -> None:
    worker = parts(batch_invariant=batch_invariant)
    methods, seen = worker.modules["source"].methods, []
    original = methods["emit"]

    def looked_at(context: Any, counts: list[Any], base: Any) -> Any:
        seen.append((len(counts), len(base), context.num_rows))
        return original(context, counts=counts, base=base)

    methods["emit"] = looked_at
    for seed in (1, 2):
        worker.open("chunks", "x", seed=seed, counts=[[1, 2]])
    while worker.step() is not None:
        pass
    assert set(seen) == {(16, 16, 16) if batch_invariant else (2, 2, 2)}
