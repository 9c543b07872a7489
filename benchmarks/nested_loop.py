"""What does fusing a loop inside a loop save? Frames of the echo plugin, fused against `--enforce-eager`, interleaved.

    python benchmarks/nested_loop.py [--inner 15] [--hidden 32] [--frames 60] [--batch 1] [--repeats 5] [--greedy]

Each frame is one step of a tiny language model, then `inner` steps of a tinier one, sampling included. Both workers
draw the same codes; medians of milliseconds a frame, all in all and outside of methods, from interleaved rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
from harness import DirectWorker, machine, report
from host_overhead import node_seconds
from mstar_plugin_echo.config import EchoConfig
from mstar_plugin_echo.oracle import make_request

from mstar.config import EngineConfig


def frames(
    driver: DirectWorker, *, batch: int, count: int, number: int, heat: float
) -> tuple[float, float, list[list[int]]]:
    """Seconds that `batch` requests of `count` frames take side by side from their first ones on, those outside of
    methods, and their codes."""
    for index in range(batch):
        request = make_request(
            "nested",
            f"request {index}",
            seed=index,
            max_frames=count,
            end_at=count,
            temperature=heat,
            depth_temperature=heat,
        )
        request.id, request.outputs = f"{number}-{index}", ("tensors",)
        driver.submit(request, arrival=float(number * batch + index))
    codes: dict[str, list[int]] = {f"{number}-{index}": [] for index in range(batch)}
    worker, started, inside = driver.worker, None, 0.0
    while True:
        worker.step()
        for emit in driver.drain():
            if started is None:
                started, inside = time.perf_counter(), node_seconds(worker)
            if emit.name == "frames" and emit.value is not None:
                codes[emit.request_id] += emit.value.flatten().tolist()
        if not worker.scheduler.has_work and not driver.end.inbox:
            assert started is not None
            seconds = time.perf_counter() - started
            return seconds, seconds - (node_seconds(worker) - inside), list(codes.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"inner": 15, "hidden": 32, "frames": 60, "batch": 1, "repeats": 5}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--greedy", action="store_true", help="take the likeliest codes, which costs less than drawing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = EchoConfig(hidden_size=arguments.hidden, depth_steps=arguments.inner)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": "echo", **asdict(config)}))
        drivers = {
            name: DirectWorker(
                EngineConfig(plugin="echo", model=folder, max_num_seqs=arguments.batch, enforce_eager=name == "eager")
            )
            for name in ("fused", "eager")
        }
    taken: dict[str, list[list[float]]] = {name: [] for name in drivers}
    asked = {"batch": arguments.batch, "count": arguments.frames, "heat": 0.0 if arguments.greedy else 0.9}
    for number in range(arguments.repeats + 1):
        answers = []
        for name, driver in drivers.items():
            *seconds, codes = frames(driver, **asked, number=number)
            answers.append(codes)
            if number:  # the first round warms up
                taken[name].append([1000 * value / (arguments.frames - 1) for value in seconds])
        assert answers[0] == answers[1] and len(answers[0][0]) == arguments.frames * (1 + arguments.inner)
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in taken.items()}
    report(
        benchmark="nested_loop",
        **vars(arguments),
        **{f"{name}_ms": round(whole, 3) for name, (whole, _) in medians.items()},
        **{f"{name}_host_ms": round(host, 3) for name, (_, host) in medians.items()},
        ratio=round(medians["eager"][0] / medians["fused"][0], 2),
        host_ratio=round(medians["eager"][1] / medians["fused"][1], 2),
        **machine(),
    )


if __name__ == "__main__":
    main()
