from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from mstar_plugin_echo.oracle import expected, make_request

from mstar.ipc.messages import Emit


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
