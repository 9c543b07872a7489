"""What does compiled code gain over eager in a decode step, and what does it cost at start-up?

    python benchmarks/compiled.py [--model tiny|300m] [--dtype float32] [--batches 1,4,16] [--steps 60] [--starts]

Two workers in one process, one eager, one compiled, decode the same greedy requests of the Orpheus plugin; their steps
alternate. `step_ms` is a whole step (scheduler, pages, draws, routing), `method_ms` the part inside the node's method
and hooks. `--starts` measures loading with an empty cache (`cold`) and again (`warm`), in processes of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from decode import write_checkpoint
from harness import DirectWorker, machine, report

from mstar.config import EngineConfig
from mstar.types import Request, TokensPart
from mstar_plugin_orpheus import tiny
from mstar_plugin_orpheus.plugin import SpeechParams


class Decoding:
    """A worker whose requests all decode."""

    def __init__(self, folder: Path, *, dtype: str, compile: bool) -> None:
        config = EngineConfig(
            plugin="orpheus", model=str(folder), dtype=dtype, device="cpu", max_model_len=1024, max_num_seqs=32,
            enable_prefix_caching=False, compile=compile,
        )  # fmt: skip
        self.driver = DirectWorker(config)
        self.served = 0

    def begin(self, prompts: list[list[int]], *, tokens: int) -> None:
        params = SpeechParams(temperature=0.0, repetition_penalty=1.0, max_tokens=tokens, ignore_eos=True)
        for prompt in prompts:
            self.served += 1
            request = Request(
                id=str(self.served), model="m", task="speech", parts=(TokensPart(prompt),), outputs=("tensor:codes",),
                params=params,
            )  # fmt: skip
            self.driver.submit(request, arrival=float(self.served))
        worker = self.driver.worker
        while self.driver.end.inbox or {work.key[1] for work in worker.scheduler.works()} != {"decode"}:
            worker.step()

    def step(self) -> tuple[float, float]:
        """Milliseconds of a step, and of it in the method."""
        entry = self.driver.worker.modules["lm"].method_s.setdefault("decode", [0, 0, 0.0])
        inside, started = entry[2], time.perf_counter()
        self.driver.worker.step()
        wall = time.perf_counter() - started
        return wall * 1e3, (entry[2] - inside) * 1e3

    def end(self) -> None:
        while self.driver.worker.router.requests:
            list(self.driver.drain())
            self.driver.worker.step()


def compare(eager: Decoding, compiled: Decoding, *, batch: int, arguments: argparse.Namespace) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, 256, (batch, arguments.prompt), generator=generator).tolist()
    samples: dict[str, list[tuple[float, float]]] = {"eager": [], "compiled": []}
    for side in (eager, compiled):
        side.begin(prompts, tokens=arguments.steps + 20)
        for _ in range(3):
            side.step()
    for _ in range(arguments.steps):
        samples["eager"].append(eager.step())
        samples["compiled"].append(compiled.step())
    for side in (eager, compiled):
        side.end()
    whole = {name: [wall for wall, _ in values] for name, values in samples.items()}
    inside = {name: [method for _, method in values] for name, values in samples.items()}
    report(
        benchmark="compiled",
        model=arguments.model,
        dtype=arguments.dtype,
        requests=batch,
        step_ms={name: round(statistics.median(values), 3) for name, values in whole.items()},
        method_ms={name: round(statistics.median(values), 3) for name, values in inside.items()},
        step_ratio=round(statistics.median(whole["eager"]) / statistics.median(whole["compiled"]), 2),
        method_ratio=round(statistics.median(inside["eager"]) / statistics.median(inside["compiled"]), 2),
        **machine(),
    )


def measure_start(folder: Path, *, dtype: str) -> dict[str, float]:
    """Seconds to load a worker, and of them for compiling or loading code."""
    started = time.perf_counter()
    compilation = Decoding(folder, dtype=dtype, compile=True).driver.worker.compilation
    return {
        "load_s": round(time.perf_counter() - started, 2),
        "code_s": round(compilation.seconds, 2),
        "built": compilation.num_built,
        "compiled": len(compilation.compiled),
    }


def report_starts(folder: Path, *, arguments: argparse.Namespace) -> None:
    """In two processes, with a cache of their own."""
    command = [sys.executable, __file__, "--start", str(folder), "--dtype", arguments.dtype]
    command += ["--threads", str(arguments.threads)]
    with tempfile.TemporaryDirectory(prefix="mstar-compiled-") as cache:
        environment = {**os.environ, "MSTAR_CACHE": cache}
        answers = [
            subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
            for _ in ("cold", "warm")
        ]
    cold, warm = (json.loads(answer.splitlines()[-1]) for answer in answers)
    report(benchmark="compiled_start", model=arguments.model, dtype=arguments.dtype, cold=cold, warm=warm, **machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", choices=["tiny", "300m"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--starts", action="store_true")
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.start is not None:
        print(json.dumps(measure_start(arguments.start, dtype=arguments.dtype)))
        return
    scratch = Path(tempfile.mkdtemp(prefix="mstar-compiled-"))
    try:
        folder = tiny.make(scratch) if arguments.model == "tiny" else write_checkpoint(scratch)
        if arguments.starts:
            report_starts(folder, arguments=arguments)
        else:
            sides = [Decoding(folder, dtype=arguments.dtype, compile=compile) for compile in (False, True)]
            for batch in (int(text) for text in arguments.batches.split(",")):
                compare(*sides, batch=batch, arguments=arguments)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
