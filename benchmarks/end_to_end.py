"""How fast is a decode step with everything on, against eager, `transformers` and the memory's bandwidth?

    python benchmarks/end_to_end.py [--batches 1,4,16] [--tokens 32] [--prompt 32] [--repeats 5] [--no-static]

A random Llama of about 300M parameters in bfloat16, drawing its tokens (temperature 0.8, top_p 0.9, repetition penalty
1.1), through the worker alone: no HTTP. One JSON line per number of requests; rounds of all sides are interleaved:

    overlapped      ours, `compile` and `overlap`
    compiled        ours, `compile`
    eager_unpacked  ours, `enforce_eager`, with torch's product on the checkpoint's weights in place of our linear
                    kernel; attention and sampler are ours, as in every other
    padded_batch    `generate`, eager, one batch
    static          `generate` with a static cache, compiled; for 1 and 16 requests

Rates are decoded tokens per second, without prefill. The floor is the time to read the model's weights once at the
best bandwidth that reading a large buffer reaches in the same run. Everything is warmed up first, compilation included.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from decode import Ours, Theirs, write_checkpoint
from harness import SAMPLING, machine, report
from transformers import CompileConfig

from mstar.layers import linear
from mstar_plugin_orpheus import tiny

STATIC_BATCHES = (1, 16)
BUFFER_BYTES = 1 << 29

Side = Callable[[list[list[int]]], float]


def bandwidth(*, repeats: int = 5) -> float:
    """Bytes per second at which a buffer far larger than caches is read, the best of several ways and tries."""
    buffer = torch.ones(BUFFER_BYTES // 4)
    seconds = []
    for read in (buffer.sum, lambda: buffer.dot(buffer), lambda: buffer.view(torch.int64).max()):
        for _ in range(repeats):
            started = time.perf_counter()
            read()
            seconds.append(time.perf_counter() - started)
    return BUFFER_BYTES / min(seconds)


def eager_unpacked(ours: Ours) -> Side:
    """Runs with every product of a linear layer torch's."""

    def run(prompts: list[list[int]]) -> float:
        with mock.patch.object(linear, "kernel", return_value=(None, 0)):
            return ours.run(prompts)

    return run


def static(theirs: Theirs) -> Side:
    """`generate` as it compiles itself on GPUs."""
    how = CompileConfig(mode="default", dynamic=False)
    how._compile_all_devices = True
    return lambda prompts: theirs.padded(prompts, cache_implementation="static", compile_config=how)


def sides(folder: Path, *, tokens: int, with_static: bool) -> tuple[dict[str, Side], int]:
    """All that is compared, and the bytes of weights that a decode step reads."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "tokens": tokens, "sampling": SAMPLING}
    theirs = Theirs(folder, dtype="bfloat16", tokens=tokens, do_sample=True, **SAMPLING)
    found: dict[str, Side] = {
        "overlapped": Ours(folder, compile=True, overlap=True, **settings).run,
        "compiled": Ours(folder, compile=True, **settings).run,
        "eager_unpacked": eager_unpacked(Ours(folder, enforce_eager=True, **settings)),
        "padded_batch": theirs.padded,
    }
    if with_static:
        found["static"] = static(theirs)
    read = {id(weight): weight.nbytes for weight in theirs.model.parameters()}
    if not theirs.model.config.tie_word_embeddings:  # of the embedding a step reads a few rows
        del read[id(theirs.model.get_input_embeddings().weight)]
    return found, sum(read.values())


def compare(found: dict[str, Side], *, batch: int, weight_bytes: int, arguments: argparse.Namespace) -> None:
    here = {name: side for name, side in found.items() if name != "static" or batch in STATIC_BATCHES}
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(0, 256, (batch, arguments.prompt), generator=generator).tolist()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for _ in range(2):
        for side in here.values():
            side(prompts)
    has_compiled = bool(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert has_compiled == ("static" in here), "generate has not compiled anything"
    rates: dict[str, list[float]] = {name: [] for name in here}
    read: list[float] = []
    for _ in range(arguments.repeats):
        read.append(bandwidth())
        for name, side in here.items():
            rates[name].append(side(prompts))
    middle = {name: statistics.median(values) for name, values in rates.items()}
    step_ms = {name: 1e3 * batch / rate for name, rate in middle.items()}
    floor_ms = 1e3 * weight_bytes / max(read)
    theirs = {name: middle[name] for name in ("padded_batch", "static") if name in middle}
    against = {"eager_unpacked": middle["eager_unpacked"], **theirs, "best_transformers": max(theirs.values())}
    report(
        benchmark="end_to_end",
        requests=batch,
        tokens_per_s={name: round(value, 2) for name, value in middle.items()},
        step_ms={name: round(value, 2) for name, value in step_ms.items()},
        floor_ms=round(floor_ms, 2),
        read_gb_s=[round(value / 1e9, 1) for value in read],
        weights_mb=round(weight_bytes / 1e6),
        **{
            f"{name}_vs": {other: round(middle[name] / rate, 2) for other, rate in against.items()}
            for name in ("overlapped", "compiled")
        },
        over_floor={name: round(value / floor_ms, 2) for name, value in step_ms.items()},
        all_tokens_per_s={name: [round(value, 2) for value in values] for name, values in rates.items()},
        **machine(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-static", action="store_true", help="without compiled generate, which takes minutes")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the program")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    scratch = Path(tempfile.mkdtemp(prefix="mstar-end-to-end-"))
    try:
        folder = tiny.make(scratch) if arguments.tiny else write_checkpoint(scratch)
        found, weight_bytes = sides(folder, tokens=arguments.tokens, with_static=not arguments.no_static)
        for batch in (int(text) for text in arguments.batches.split(",")):
            compare(found, batch=batch, weight_bytes=weight_bytes, arguments=arguments)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
