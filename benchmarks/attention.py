"""How fast is the CPU's attention kernel, against plain torch over the same pages?

    python benchmarks/attention.py [--heads 16] [--kv-heads 8] [--dim 64] [--seconds 1]

One JSON line for each dtype and batch, (rows) x (new tokens) + (context): medians of interleaved calls, one layer each,
planned beforehand.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from harness import machine, report

from mstar.layers.attention import KVBatch, build_plan
from mstar.layers.attention.cpu import CpuBackend
from mstar.layers.attention.plain import PlainBackend

PAGE = 16
BATCHES = ((1, 1, 48), (1, 1, 1024), (1, 1, 4096), (16, 1, 48), (16, 1, 1024), (1, 64, 0), (1, 512, 0), (4, 128, 512))


def batch_of(rows: int, new: int, context: int, *, layers: list[list[torch.Tensor]], backend: object) -> KVBatch:
    pages = -(-(context + new) // PAGE)
    plan = build_plan(
        query_lens=np.full(rows, new, dtype=np.int32), context_lens=np.full(rows, context, dtype=np.int32),
        page_table=np.random.default_rng(0).permutation(rows * pages).astype(np.int32).reshape(rows, pages) + 1,
        page_size=PAGE, device="cpu",
    )  # fmt: skip
    return KVBatch(plan, *layers, backend)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            for batch in BATCHES:
                compare(*batch, dtype=dtype, arguments=arguments)


def compare(rows: int, new: int, context: int, *, dtype: torch.dtype, arguments: argparse.Namespace) -> None:
    pages = rows * -(-(context + new) // PAGE) + 1
    layers = [[torch.randn(pages, arguments.kv_heads, PAGE, arguments.dim).to(dtype)] for _ in range(2)]
    q, k, v = (
        torch.randn(rows * new, heads, arguments.dim).to(dtype)
        for heads in (arguments.heads, arguments.kv_heads, arguments.kv_heads)
    )
    backends = {"kernel": CpuBackend(), "plain": PlainBackend()}
    batches = {name: batch_of(rows, new, context, layers=layers, backend=one) for name, one in backends.items()}
    times: dict[str, list[float]] = {name: [] for name in batches}
    until = time.perf_counter() + arguments.seconds
    while time.perf_counter() < until or len(times["plain"]) < 3:
        for name, batch in batches.items():
            started = time.perf_counter()
            batch.attend(0, q, k, v)
            times[name].append(time.perf_counter() - started)
    us = {name: round(statistics.median(some) * 1e6, 1) for name, some in times.items()}
    report(
        benchmark="attention",
        batch=f"{rows} x {new} + {context}",
        dtype=str(dtype),
        us=us,
        speedup=round(us["plain"] / us["kernel"], 2),
        **machine(),
    )


if __name__ == "__main__":
    main()
