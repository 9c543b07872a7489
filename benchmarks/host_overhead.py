"""What does a step cost besides the methods it runs? Median over steps in steady state.

    python benchmarks/host_overhead.py [--batch 16] [--steps 400] [--compile] [--overlap] [--model echo|orpheus]

Requests decode greedily: of the echo plugin's `generate`, or of the tiny Orpheus, whose step computes for milliseconds.
The overhead is the wall time of a step minus the time inside node methods; with `--overlap` (which needs `--compile`)
minus the time that the queue of compiled calls was busy, so what the host could not hide behind a step that computes.
Then a step's computing and the host's work for it end at different times, so that single steps scatter, also below 0:
believe `windows_median_us`, the median of means of 20 steps; what else the machine did is in it.
That needs one: compiled, the echo model's step is shorter than the host's work for the next, which is then all that
one sees. Targets at batch 16: under 300 us, overlapped with orpheus under 150 us.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from harness import DirectWorker, machine, report
from mstar_plugin_echo.oracle import make_request

from mstar.config import EngineConfig
from mstar.types import Request, TokensPart
from mstar.worker.worker import Worker
from mstar_plugin_orpheus.plugin import SpeechParams

WARM_STEPS = 20
WINDOW = 20


def request_of(model: str, *, index: int, tokens: int) -> Request:
    """The request number `index`, which decodes `tokens` tokens."""
    if model == "echo":
        request = make_request(
            "generate", f"request {index}", seed=index, max_tokens=tokens, ignore_eos=True, temperature=0.0
        )
        request.id = str(index)
        return request
    params = SpeechParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, repetition_penalty=1.0)
    return Request(
        id=str(index), model="m", task="speech", parts=(TokensPart([index, *range(8)]),), outputs=("tensor:codes",),
        params=params,
    )  # fmt: skip


def measure(*, model: str, batch: int, steps: int, **settings: Any) -> tuple[list[float], list[float]]:
    """Microseconds of each step outside of and inside node methods."""
    driver = DirectWorker(EngineConfig(plugin=model, model="tiny", max_num_seqs=batch, block_size=64, **settings))
    for index in range(batch):
        driver.submit(request_of(model, index=index, tokens=steps + WARM_STEPS + 30), arrival=float(index))
    busy = busy_seconds(driver.worker)
    while not driver.is_decoding:
        driver.step()
    for _ in range(WARM_STEPS):
        driver.step()
    ends, computed = [time.perf_counter()], [busy()]
    for _ in range(steps):
        driver.step()
        driver.end.outbox.clear()
        ends.append(time.perf_counter())
        computed.append(busy())
    inside = [(after - before) * 1e6 for before, after in pairwise(computed)]
    outside = [(after - before) * 1e6 - took for (before, after), took in zip(pairwise(ends), inside, strict=True)]
    return outside, inside


def busy_seconds(worker: Worker) -> Callable[[], float]:
    """Computing so far: of the queue where there is one, else in nodes' methods and hooks."""
    queue = worker.modules.queue
    return (lambda: node_seconds(worker)) if queue is None else (lambda: queue.busy_s)


def node_seconds(worker: Worker) -> float:
    """Time in nodes' methods and hooks so far."""
    return sum(entry[2] for module in worker.modules.by_name.values() for entry in module.method_s.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--model", default="echo", choices=["echo", "orpheus"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--overlap", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    outside, inside = measure(**vars(arguments))
    windows = [statistics.fmean(outside[at : at + WINDOW]) for at in range(0, len(outside), WINDOW)]
    outside.sort()
    report(
        benchmark="host_overhead",
        **vars(arguments),
        median_us=round(statistics.median(outside), 1),
        p10_us=round(outside[len(outside) // 10], 1),
        p90_us=round(outside[len(outside) * 9 // 10], 1),
        windows_median_us=round(statistics.median(windows), 1),
        computing_us=round(statistics.median(inside), 1),
        **machine(),
    )


if __name__ == "__main__":
    main()
