"""How fast is the CPU's linear kernel, against torch's product and against only reading the weights?

    python benchmarks/linear.py [--rows 1 4 16 32 64] [--layers 24] [--threads 1] [--seconds 5]

One JSON line for each dtype and number of rows: a pass multiplies by the weights of every layer of a 313M Llama and its
head, which caches do not hold; passes of kernel, torch and reading alternate. Medians and the best, in ms a pass: of
processor time with one thread, which other work on the machine disturbs less, else of the clock.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from harness import machine, report
from torch import Tensor
from torch.nn import functional

from mstar.layers.linear import invariant_linear, kernel

LAYER = ((1024, 2048), (1024, 1024), (1024, 5632), (2816, 1024))  # K, N of qkv, output, gate and up, down
HEAD = (1024, 29000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 32, 64])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with torch.inference_mode():
        for name in arguments.dtypes:
            dtype = getattr(torch, name)
            assert kernel(dtype)[0] is not None, "the kernel cannot be built here"
            shapes = [*LAYER * arguments.layers, HEAD]
            weights = [(torch.randn(width, depth) / depth**0.5).to(dtype) for depth, width in shapes]
            for rows in arguments.rows:
                compare(rows, weights, seconds=arguments.seconds)


def compare(rows: int, weights: list[Tensor], *, seconds: float) -> None:
    dtype = weights[0].dtype
    inputs = {depth: torch.randn(rows, depth).to(dtype) for depth in {weight.shape[1] for weight in weights}}
    sides: dict[str, Callable[[Tensor], Tensor]] = {
        "read": lambda weight: weight.view(torch.float32).sum(),
        "kernel": lambda weight: invariant_linear(inputs[weight.shape[1]], weight),
        "torch": lambda weight: functional.linear(inputs[weight.shape[1]], weight),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times["torch"]) < 3:
        for name, side in sides.items():
            started = clock()
            for weight in weights:
                side(weight)
            times[name].append(clock() - started)
    elements, median = sum(weight.numel() for weight in weights), {k: statistics.median(v) for k, v in times.items()}
    report(
        benchmark="linear",
        rows=rows,
        dtype=str(dtype),
        ms={name: round(value * 1e3, 2) for name, value in median.items()},
        best_ms={name: round(min(some) * 1e3, 2) for name, some in times.items()},
        read_gb_s=round(elements * dtype.itemsize / min(times["read"]) / 1e9, 1),
        gflop_s=round(2 * rows * elements / min(times["kernel"]) / 1e9, 1),
        of_floor=round(median["kernel"] / median["read"], 2),
        speedup=round(median["torch"] / median["kernel"], 2),
        **machine(),
    )


if __name__ == "__main__":
    main()
