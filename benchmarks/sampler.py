"""How fast is the CPU's sampler, against plain torch over the same logits?

    python benchmarks/sampler.py [--vocab 156940] [--dtype bfloat16] [--seconds 1]

One JSON line for each case and number of rows: medians of interleaved calls, each a draw with its record.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from harness import machine, report
from torch import Tensor

from mstar.layers.sampling import SamplingState, draw_key, native, sample_plain
from mstar.types import SamplingParams

CASES = {  # parameters, and the deviation of the logits
    "greedy": (SamplingParams(temperature=0), 3.0),
    "all": (SamplingParams(), 3.0),
    "top-k 50": (SamplingParams(top_k=50), 3.0),
    "temperature 0.6, top-p 0.8": (SamplingParams(temperature=0.6, top_p=0.8), 3.0),
    "penalties, top-p 0.8": (SamplingParams(temperature=0.6, top_p=0.8, repetition_penalty=1.3), 3.0),
    "flat, top-p 0.8": (SamplingParams(top_p=0.8), 0.01),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=156_940)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if not native.available():
        raise SystemExit("the kernel cannot be built: install g++ or set CXX")
    with torch.inference_mode():
        for name in CASES:
            for num_rows in (1, 16):
                compare(name, num_rows, arguments)


def compare(name: str, num_rows: int, arguments: argparse.Namespace) -> None:
    params, deviation = CASES[name]
    logits = torch.randn(num_rows, arguments.vocab).mul(deviation).to(getattr(torch, arguments.dtype))
    state, rows = SamplingState.allocate(num_rows + 1, arguments.vocab, "cpu"), torch.arange(1, num_rows + 1)
    for row in rows.tolist():
        state.set_row(row, params, draw_key(row, (), "main"), range(64))
    draws: dict[str, Callable[[Tensor, SamplingState, Tensor], Tensor]] = {"kernel": native.draw, "plain": sample_plain}
    times: dict[str, list[float]] = {draw: [] for draw in draws}
    until = time.perf_counter() + arguments.seconds
    while time.perf_counter() < until or len(times["plain"]) < 3:
        for draw, function in draws.items():
            started = time.perf_counter()
            function(logits, state, rows)
            times[draw].append(time.perf_counter() - started)
    us = {draw: round(statistics.median(some) * 1e6, 1) for draw, some in times.items()}
    report(
        benchmark="sampler", case=name, rows=num_rows, vocab=arguments.vocab, dtype=arguments.dtype, us=us,
        us_a_row=round(us["kernel"] / num_rows, 1), speedup=round(us["plain"] / us["kernel"], 2), **machine(),
    )  # fmt: skip


if __name__ == "__main__":
    main()
