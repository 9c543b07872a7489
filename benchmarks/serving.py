"""How fast does a server answer over HTTP? End-to-end tokens per second, and the time between a client's tokens.

    python benchmarks/serving.py [--concurrency 1,4,16] [--prompt 128] [--tokens 64] [--requests 3] [--eager]

`mstar serve --plugin orpheus --compile --overlap` in a process of its own, with the random Llama of about 300M
parameters of decode.py in bfloat16, and one client that keeps `concurrency` requests of `/v1/generate` open, `requests`
times each, as streams. A random model does not speak in whole frames of codes, so the server is started with the
assembly of frames replaced: every token is an event of its own, which is more for the server to do, not less.
`threads` are the server's; the client takes time of the same machine.

`vllm` repeats what a vLLM CPU server gave elsewhere: another machine, busy, 284M parameters. It is not a comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from harness import SAMPLING, machine, report

from mstar.cli import main as command
from mstar.client import AsyncClient
from mstar_plugin_orpheus import tiny
from mstar_plugin_orpheus.modeling import frames

HERE = Path(__file__).resolve()
VLLM = {
    1: {"tokens_per_s": 21.0, "inter_token_p50_ms": 41.9},
    4: {"tokens_per_s": 63.3, "inter_token_p50_ms": 41.2},
    16: {"tokens_per_s": 89.3, "inter_token_p50_ms": 84.2},
}


def emit_every_token() -> None:
    """Let each token of the language model come out at once, as if it were a frame of codes."""
    frames.FrameAssembler.push = lambda self, tokens: (list(tokens), 0)  # type: ignore[method-assign]


async def ask(client: AsyncClient, ids: list[int], *, tokens: int) -> list[float]:
    """When each token of an answer came, the time of asking first."""
    times = [time.perf_counter()]
    stream = client.stream(
        inputs=[{"type": "token_ids", "ids": ids}], task="speech", outputs=["tensor:codes"],
        params={"max_tokens": tokens, "ignore_eos": True, **SAMPLING},
    )  # fmt: skip
    async with stream:
        async for event in stream:
            if getattr(event, "name", None) == "codes":
                times.append(time.perf_counter())
    assert len(times) == tokens + 1, f"{len(times) - 1} of {tokens} tokens came"
    return times


async def load(url: str, *, concurrency: int, number: int, arguments: argparse.Namespace) -> list[list[float]]:
    """Times of `number` requests of each of `concurrency` clients."""
    generator = torch.Generator().manual_seed(concurrency)
    prompts = torch.randint(0, 256, (concurrency, number, arguments.prompt), generator=generator).tolist()
    async with AsyncClient(url) as client:

        async def one(own: list[list[int]]) -> list[list[float]]:
            return [await ask(client, ids, tokens=arguments.tokens) for ids in own]

        return sum(await asyncio.gather(*map(one, prompts)), [])


def measure(url: str, *, concurrency: int, arguments: argparse.Namespace) -> None:
    asyncio.run(load(url, concurrency=concurrency, number=1, arguments=arguments))
    answers = asyncio.run(load(url, concurrency=concurrency, number=arguments.requests, arguments=arguments))
    wall = max(times[-1] for times in answers) - min(times[0] for times in answers)
    gaps = sorted(1e3 * (after - before) for times in answers for before, after in pairwise(times[1:]))
    report(
        benchmark="serving",
        concurrency=concurrency,
        mode=arguments.mode,
        tokens_per_s=round(len(answers) * arguments.tokens / wall, 2),
        inter_token_p50_ms=round(statistics.median(gaps), 2),
        inter_token_p99_ms=round(gaps[int(len(gaps) * 0.99)], 2),
        first_token_p50_ms=round(statistics.median(1e3 * (times[1] - times[0]) for times in answers), 1),
        vllm={**VLLM.get(concurrency, {}), "where": "other box, busy"},
        **machine() | {"threads": arguments.threads},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--eager", dest="mode", action="store_const", const="eager", default="compiled, overlapped")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the program")
    arguments = parser.parse_args()
    sys.path.insert(0, str(HERE.parents[1] / "tests" / "harness"))
    from decode import write_checkpoint
    from serve_process import ServeProcess

    scratch = Path(tempfile.mkdtemp(prefix="mstar-serving-"))
    try:
        folder = tiny.make(scratch) if arguments.tiny else write_checkpoint(scratch)
        flags = ["--plugin", "orpheus", "--model", str(folder), "--dtype", "bfloat16", "--max-model-len", "1024"]
        flags += ["--no-enable-prefix-caching", "--threads", str(arguments.threads)]
        flags += [] if arguments.mode == "eager" else ["--compile", "--overlap"]
        paths = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        with ServeProcess(*flags, module=HERE.stem, environment={"PYTHONPATH": paths}, start_s=900) as server:
            for concurrency in (int(text) for text in arguments.concurrency.split(",")):
                measure(server.url, concurrency=concurrency, arguments=arguments)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        emit_every_token()
        command()
    else:
        main()
