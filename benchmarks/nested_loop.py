"""What does fusing a loop inside a loop save? Frames of the echo plugin, fused against `--enforce-eager`, interleaved.

    python benchmarks/nested_loop.py [--inner 15] [--hidden 32] [--frames 60] [--batch 1] [--repeats 5]

Each frame is one step of a tiny language model, then `inner` steps of a tinier one, sampling included. Both workers
draw the same codes; the medians are of milliseconds a frame, from interleaved rounds.
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
from mstar_plugin_echo.config import EchoConfig
from mstar_plugin_echo.oracle import make_request

from mstar.config import EngineConfig


def frames(driver: DirectWorker, *, batch: int, count: int, number: int) -> tuple[float, list[list[int]]]:
    """Seconds that `batch` requests of `count` frames take side by side, without their prompts; and their codes."""
    for index in range(batch):
        request = make_request(
            "nested", f"request {index}", seed=index, max_frames=count, temperature=0.8, depth_temperature=0.9
        )
        request.id, request.outputs = f"{number}-{index}", ("tensors",)
        driver.submit(request, arrival=float(number * batch + index))
    codes: dict[str, list[int]] = {f"{number}-{index}": [] for index in range(batch)}
    worker, started = driver.worker, None
    while True:
        worker.step()
        for emit in driver.drain():
            started = started or time.perf_counter()
            if emit.name == "frames" and emit.value is not None:
                codes[emit.request_id] += emit.value.flatten().tolist()
        if not worker.scheduler.has_work and not driver.end.inbox:
            assert started is not None
            return time.perf_counter() - started, list(codes.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"inner": 15, "hidden": 32, "frames": 60, "batch": 1, "repeats": 5}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
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
    taken: dict[str, list[float]] = {name: [] for name in drivers}
    for number in range(arguments.repeats + 1):
        answers = []
        for name, driver in drivers.items():
            seconds, codes = frames(driver, batch=arguments.batch, count=arguments.frames, number=number)
            answers.append(codes)
            if number:  # the first round warms up
                taken[name].append(1000 * seconds / (arguments.frames - 1))
        assert answers[0] == answers[1] and len(answers[0][0]) == arguments.frames * (1 + arguments.inner)
    medians = {name: statistics.median(values) for name, values in taken.items()}
    report(
        benchmark="nested_loop",
        **{name: getattr(arguments, name) for name in sizes},
        **{f"{name}_ms": round(value, 3) for name, value in medians.items()},
        ratio=round(medians["eager"] / medians["fused"], 2),
        **machine(),
    )


if __name__ == "__main__":
    main()
