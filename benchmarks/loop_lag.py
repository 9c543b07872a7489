"""How late does the server's event loop wake while compiled steps of 100 ms and more run in the same process?

    python benchmarks/loop_lag.py [--batch 16] [--tokens 40] [--tick-ms 5] [--no-overlap] [--eager]

An engine and its worker as `mstar serve` starts them, the worker in a thread beside the event loop. `batch` requests
of the random Llama of about 300M parameters of decode.py decode in bfloat16, drawing, every token an event; a task of
the loop sleeps `tick-ms` at a time and notes how much later it woke. Counted from the second decode step on, so
without prefill, which Python runs. `step_ms` is what a decode step took. The target is a lag under 30 ms at p99 while
steps take 100 ms or more: ask for more requests where 16 take less. One thread computes; a second core is the loop's.
`idle_p99_ms` is the lag of the same loop before any request: what the machine itself is good for.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from decode import write_checkpoint
from harness import SAMPLING, machine, report
from serving import emit_every_token

from mstar import launch
from mstar.config import EngineConfig
from mstar.server.engine import Engine
from mstar.server.native import GenerateRequest, TokensInput
from mstar_plugin_orpheus import tiny

IDLE_S = 3.0


async def watch(lags: list[float], *, tick_s: float) -> None:
    """Note, until cancelled, how many milliseconds after its time the loop wakes."""
    while True:
        due = time.perf_counter() + tick_s
        await asyncio.sleep(tick_s)
        lags.append(1e3 * (time.perf_counter() - due))


async def ask(engine: Engine, *, index: int, tokens: int) -> int:
    """One request, read to its end; how many chunks came."""
    wire = GenerateRequest(
        task="speech", inputs=[TokensInput(ids=[index, *range(31)])], outputs=["tensor:codes"],
        params={"max_tokens": tokens, "ignore_eos": True, **SAMPLING},
    )  # fmt: skip
    return len([chunk async for chunk in await engine.submit(wire)])


def decoded(engine: Engine) -> tuple[int, float]:
    """Decode steps so far, and their seconds."""
    stats = engine.state.stats
    calls, _, seconds = stats.method_s.get("lm.decode", (0, 0, 0.0)) if stats else (0, 0, 0.0)
    return calls, seconds


def p99(values: list[float]) -> float:
    return round(sorted(values)[int(len(values) * 0.99)], 2)


async def measure(config: EngineConfig, arguments: argparse.Namespace) -> None:
    async with launch.started_engine(config) as engine:
        tick_s, idle, lags = arguments.tick_ms / 1e3, list[float](), list[float]()
        await asyncio.gather(*(ask(engine, index=index, tokens=4) for index in range(arguments.batch)))  # warms up
        watching = asyncio.create_task(watch(idle, tick_s=tick_s))
        await asyncio.sleep(IDLE_S)
        watching.cancel()
        before = decoded(engine)
        tokens = arguments.tokens
        asking = [asyncio.create_task(ask(engine, index=index, tokens=tokens)) for index in range(arguments.batch)]
        while decoded(engine)[0] < before[0] + 2:
            await asyncio.sleep(tick_s)
        first = decoded(engine)
        watching = asyncio.create_task(watch(lags, tick_s=tick_s))
        assert await asyncio.gather(*asking) == [tokens] * arguments.batch
        watching.cancel()
        await asyncio.sleep(0.2)  # until the last statistics have come
        last = decoded(engine)
    report(
        benchmark="loop_lag",
        **vars(arguments),
        step_ms=round(1e3 * (last[1] - first[1]) / (last[0] - first[0]), 1),
        steps=last[0] - first[0],
        lag_p50_ms=round(statistics.median(lags), 2),
        lag_p99_ms=p99(lags),
        lag_max_ms=round(max(lags), 2),
        idle_p99_ms=p99(idle),
        samples=len(lags),
        **machine(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--tick-ms", type=float, default=5.0)
    parser.add_argument("--no-overlap", dest="overlap", action="store_false")
    parser.add_argument("--eager", dest="compile", action="store_false")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the program")
    arguments = parser.parse_args()
    emit_every_token()
    scratch = Path(tempfile.mkdtemp(prefix="mstar-loop-lag-"))
    try:
        folder = tiny.make(scratch) if arguments.tiny else write_checkpoint(scratch)
        config = EngineConfig(
            plugin="orpheus", model=str(folder), dtype="bfloat16", device="cpu", max_model_len=1024, threads=1,
            max_num_seqs=max(32, arguments.batch), compile=arguments.compile,
            overlap=arguments.overlap and arguments.compile, enable_prefix_caching=False,
        )  # fmt: skip
        asyncio.run(measure(config, arguments))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
