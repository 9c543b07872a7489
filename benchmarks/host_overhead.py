"""What does a step cost besides the methods it runs? Wall time of a step minus time inside node methods.

    python benchmarks/host_overhead.py [--batch 16] [--steps 500]

The echo plugin's `generate` task decodes `batch` requests greedily; target: median under 300 us at batch 16.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from harness import DirectWorker, machine, report
from mstar_plugin_echo.oracle import make_request

from mstar.config import EngineConfig
from mstar.worker.worker import Worker


def measure(*, batch: int, steps: int) -> list[float]:
    """Microseconds outside node methods, per step."""
    config = EngineConfig(plugin="echo", model="tiny", max_num_seqs=batch, block_size=64)
    driver = DirectWorker(config)
    for number in range(batch):
        text = f"request {number}"
        request = make_request("generate", text, seed=number, max_tokens=steps + 50, ignore_eos=True, temperature=0.0)
        request.id = str(number)
        driver.submit(request, arrival=float(number))
    worker, samples = driver.worker, []
    for _ in range(20):
        worker.step()
    for _ in range(steps):
        inside = node_seconds(worker)
        started = time.perf_counter()
        worker.step()
        wall = time.perf_counter() - started
        inside = node_seconds(worker) - inside
        samples.append((wall - inside) * 1e6)
        driver.end.outbox.clear()
    return samples


def node_seconds(worker: Worker) -> float:
    """Time in nodes' methods and hooks so far."""
    return sum(entry[2] for module in worker.modules.by_name.values() for entry in module.method_s.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    samples = sorted(measure(batch=arguments.batch, steps=arguments.steps))
    report(
        benchmark="host_overhead",
        batch=arguments.batch,
        median_us=round(statistics.median(samples), 1),
        p10_us=round(samples[len(samples) // 10], 1),
        p90_us=round(samples[len(samples) * 9 // 10], 1),
        **machine(),
    )


if __name__ == "__main__":
    main()
