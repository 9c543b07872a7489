"""What does fusing a loop inside a loop save? Frames of the echo plugin, fused against `--enforce-eager`, interleaved.

    python benchmarks/nested_loop.py [--inner 15] [--hidden 32] [--frames 60] [--batch 1] [--repeats 5] [--greedy]
        [--compile]

Each frame is one step of a tiny language model, then `inner` steps of a tinier one, sampling included. All workers
draw the same codes; medians of milliseconds a frame, all in all and outside of methods, from interleaved rounds. With
`--compile` two more run the fused loop compiled, one of them overlapped, whose `host_ms` is what it could not hide.
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
from host_overhead import busy_seconds
from mstar_plugin_echo.config import EchoConfig
from mstar_plugin_echo.oracle import make_request

from mstar.config import EngineConfig

KINDS: dict[str, dict[str, bool]] = {
    "fused": {},
    "eager": {"enforce_eager": True},
    "compiled": {"compile": True},
    "overlapped": {"compile": True, "overlap": True},
}


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
    busy, started, inside = busy_seconds(driver.worker), None, 0.0
    while not driver.is_idle:
        driver.step()
        for emit in driver.drain():
            if started is None:
                started, inside = time.perf_counter(), busy()
            if emit.name == "frames" and emit.value is not None:
                codes[emit.request_id] += emit.value.flatten().tolist()
    assert started is not None
    seconds = time.perf_counter() - started
    return seconds, seconds - (busy() - inside), list(codes.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"inner": 15, "hidden": 32, "frames": 60, "batch": 1, "repeats": 5}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--greedy", action="store_true", help="take the likeliest codes, which costs less than drawing")
    parser.add_argument("--compile", action="store_true", help="compiled and overlapped loops too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = EchoConfig(hidden_size=arguments.hidden, depth_steps=arguments.inner)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": "echo", **asdict(config)}))
        drivers = {
            name: DirectWorker(EngineConfig(plugin="echo", model=folder, max_num_seqs=arguments.batch, **settings))
            for name, settings in KINDS.items()
            if arguments.compile or "compile" not in settings
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
        assert len(answers[0][0]) == arguments.frames * (1 + arguments.inner)
        assert all(codes == answers[0] for codes in answers), "not the same codes from all"
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in taken.items()}
    report(
        benchmark="nested_loop",
        **vars(arguments),
        **{f"{name}_ms": round(whole, 3) for name, (whole, _) in medians.items()},
        **{f"{name}_host_ms": round(host, 3) for name, (_, host) in medians.items()},
        ratios={name: round(medians["eager"][0] / whole, 2) for name, (whole, _) in medians.items()},
        host_ratios={name: round(medians["eager"][1] / host, 2) for name, (_, host) in medians.items()},
        **machine(),
    )


if __name__ == "__main__":
    main()
