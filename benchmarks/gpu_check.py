"""Does everything that needs a GPU work on this one, and how fast? Under ten minutes.

    python benchmarks/gpu_check.py [--requests 1,4,16,64] [--tokens 64]

JSON lines: versions; a tiny model's ids on CUDA against the CPU's; the sampler's; FlashInfer against the reference and
plain torch; a captured decode against an eager one on a random model of about 300M parameters, through the worker. Each
part is tried whatever became of those before it. Exit status: 0 all passed, 1 some failed, 2 no CUDA device.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode import write_checkpoint
from harness import DirectWorker, report
from torch import Tensor

from mstar.config import EngineConfig
from mstar.layers.attention import AttentionBackend, KVBatch, build_plan, choose_backend, decode_plan
from mstar.layers.attention.plain import PlainBackend
from mstar.layers.sampling import SamplingState, sample_plain
from mstar.types import Request, SamplingParams, TokensPart
from mstar.worker.graphs import CudaGraphs
from mstar_plugin_orpheus.plugin import SpeechParams

DEVICE = "cuda"
PAGE = 64
HEADS, KV_HEADS, DIM = 16, 8, 64


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def milliseconds(call: Callable[[], Any], *, repeats: int = 20) -> float:
    """Median time of a call, to the end on the device."""
    times = []
    for _ in range(repeats + 3):
        wait()
        started = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - started)
    return round(1e3 * statistics.median(times[3:]), 4)


# ---- parts: each reports lines and raises if it fails -----------------------------------------------------


def versions(_: argparse.Namespace) -> None:
    packages = {}
    for name in ("torch", "flashinfer-python", "triton", "transformers"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = "absent"
    properties = torch.cuda.get_device_properties(0)
    report(
        part="versions", python=sys.version.split()[0], cuda=torch.version.cuda, device=properties.name,
        capability=f"{properties.major}.{properties.minor}", memory_gib=round(properties.total_memory / 2**30, 1),
        **packages,
    )  # fmt: skip


def parity(_: argparse.Namespace) -> None:
    """float32: the same ids but where two tokens are within rounding of each other."""
    prompts = [list(range(3, 3 + n)) for n in (4, 9, 17)]
    for params in ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}):
        ids = {}
        for device in ("cpu", DEVICE):
            ids[device] = Decoding("tiny", device=device, dtype="float32", tokens=24, enforce_eager=True).ids(
                prompts, **params
            )
        agree = agreement(ids["cpu"], ids[DEVICE])
        report(part="parity", params=params, agreement=agree)
        assert agree >= 0.98, "ids on CUDA are not the CPU's"


def agreement(one: list[list[int]], other: list[list[int]]) -> float:
    """Share of the tokens before which two lists of sequences have not yet differed."""
    same = total = 0
    for a, b in zip(one, other, strict=True):
        total += max(len(a), len(b))
        same += next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))
    return round(same / max(total, 1), 4)


@torch.inference_mode()
def sampler(_: argparse.Namespace) -> None:
    torch.manual_seed(0)
    rows, vocab = 64, 32000
    logits = torch.randn(rows, vocab) * 4
    kinds = [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}, {"temperature": 0.0}, {"repetition_penalty": 1.3}]
    found = {}
    for device in ("cpu", DEVICE):
        state = SamplingState.allocate(rows + 1, vocab, device)
        for row in range(1, rows + 1):
            state.set_row(row, SamplingParams(**kinds[row % len(kinds)]), key=row, prompt_ids=[row])
        own, of = logits.to(device), torch.arange(1, rows + 1, device=device)
        found[device] = sample_plain(own, state, of).tolist()
        took = milliseconds(lambda own=own, state=state, of=of: sample_plain(own, state, of), repeats=5)
        report(part="sampler", device=device, rows=rows, vocab=vocab, ms=took)
    agree = sum(a == b for a, b in zip(found["cpu"], found[DEVICE], strict=True)) / rows
    report(part="sampler", agreement=agree)
    assert agree >= 0.95, "drawn ids on CUDA are not the CPU's"


def batch_of(
    backend: AttentionBackend, pools: list[list[Tensor]], *, rows: int, new: int, context: int, write: bool = True
) -> KVBatch:
    pages = -(-(context + new) // PAGE)
    table = np.random.default_rng(0).permutation(rows * pages).astype(np.int32).reshape(rows, pages) + 1
    plan = build_plan(
        query_lens=np.full(rows, new, dtype=np.int32), context_lens=np.full(rows, context, dtype=np.int32),
        page_table=table, page_size=PAGE, device=DEVICE, write=write,
    )  # fmt: skip
    return KVBatch(plan, *pools, backend)


@torch.inference_mode()
def attention(_: argparse.Namespace) -> None:
    """FlashInfer against the reference where that is quick, and against plain torch."""
    fast, plain, reference = choose_backend(DEVICE), PlainBackend(), choose_backend(DEVICE, "reference")
    choose_backend(DEVICE)
    worst = 0.0
    for rows, new, context, write in (
        (3, 1, 70, True), (2, 40, 0, True), (2, 9, 130, False), (1, 1, 1024, True), (16, 1, 1024, True),
        (64, 1, 1024, True), (4, 512, 512, True),
    ):  # fmt: skip
        torch.manual_seed(0)
        pages = rows * -(-(context + new) // PAGE) + 1
        pools = [[torch.randn(pages, KV_HEADS, PAGE, DIM, device=DEVICE).bfloat16()] for _ in range(2)]
        q = torch.randn(rows * new, HEADS, DIM, device=DEVICE).bfloat16()
        k, v = (torch.randn(rows * new, KV_HEADS, DIM, device=DEVICE).bfloat16() for _ in range(2))
        batches = {
            one.name: batch_of(one, pools, rows=rows, new=new, context=context, write=write)
            for one in ([fast, plain, reference] if rows * (context + new) < 400 else [fast, plain])
        }
        results = {name: batch.attend(0, q, k, v).float() for name, batch in batches.items()}
        right = results.get("reference", results["plain"])
        error = float((results[fast.name] - right).abs().max())
        worst = max(worst, error)
        ms = {n: milliseconds(lambda b=b: b.attend(0, q, k, v)) for n, b in batches.items() if n != "reference"}  # noqa: B023
        report(
            part="attention", backend=fast.name, rows=rows, new=new, context=context, write=write, error=error, ms=ms
        )
    assert fast.name == "flashinfer", "FlashInfer is not installed: pip install mstar-core[cuda]"
    assert worst < 0.03, f"attention is off by {worst}"


@torch.inference_mode()
def captured_attention(_: argparse.Namespace) -> None:
    """One decode in a graph, replayed with other lengths and pages."""
    backend, rows, context = choose_backend(DEVICE), 4, 200
    pools = [[torch.randn(64, KV_HEADS, PAGE, DIM, device=DEVICE).bfloat16()] for _ in range(2)]
    q = torch.randn(rows, HEADS, DIM, device=DEVICE).bfloat16()
    k, v = (torch.randn(rows, KV_HEADS, DIM, device=DEVICE).bfloat16() for _ in range(2))
    fixed = decode_plan(
        context_lens=[0] * rows, slot_mapping=torch.zeros(rows, dtype=torch.int64, device=DEVICE),
        page_table=np.zeros((rows, 8), dtype=np.int32), page_size=PAGE,
    )  # fmt: skip
    fixed.held = {}

    def region() -> Tensor:
        fixed.derived.clear()
        return KVBatch(fixed, *pools, backend).attend(0, q, k, v)

    again, out = CudaGraphs(torch.device(DEVICE)).capture(region)
    worst = 0.0
    for length in (context, 3, 400):
        live = batch_of(backend, pools, rows=rows, new=1, context=length)
        backend.refresh(fixed, live.plan)  # type: ignore[attr-defined]
        again()
        right = batch_of(PlainBackend(), pools, rows=rows, new=1, context=length).attend(0, q, k, v)
        worst = max(worst, float((out.float() - right.float()).abs().max()))
    report(part="captured_attention", error=worst)
    assert worst < 0.03, f"captured attention is off by {worst}"


class Decoding:
    """A worker that decodes token prompts to a fixed length."""

    def __init__(self, model: str, *, device: str, dtype: str, tokens: int, **settings: Any) -> None:
        started = time.perf_counter()
        config = EngineConfig(
            plugin="orpheus", model=model, dtype=dtype, device=device, max_model_len=1024,
            kv_cache_memory_bytes=4 << 30 if device == "cuda" else 1 << 28, enable_prefix_caching=False, **settings,
        )  # fmt: skip
        self.driver, self.tokens, self.served = DirectWorker(config), tokens, 0
        self.worker = self.driver.worker
        self.load_s = round(time.perf_counter() - started, 1)

    def submit(self, prompts: list[list[int]], **params: Any) -> list[str]:
        given: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.0, "ignore_eos": True} | params
        names = []
        for prompt in prompts:
            self.served += 1
            request = Request(
                id=str(self.served), model="m", task="speech", parts=(TokensPart(prompt),), outputs=("tensor:codes",),
                params=SpeechParams(max_tokens=self.tokens, **given), seed=self.served,
            )  # fmt: skip
            self.driver.submit(request, arrival=float(self.served))
            names.append(request.id)
        return names

    def ids(self, prompts: list[list[int]], **params: Any) -> list[list[int]]:
        """What each prompt goes on with: codes, in order."""
        names = self.submit(prompts, **params)
        found: dict[str, list[int]] = {name: [] for name in names}
        while self.driver.end.inbox or self.worker.router.requests:
            self.worker.step()
            for emit in self.driver.drain():
                if emit.value is not None:
                    found[emit.request_id] += torch.as_tensor(emit.value).flatten().tolist()
        return [found[name] for name in names]

    def step_ms(self, prompts: list[list[int]], **params: Any) -> float:
        """Median time of a decode step of all prompts."""
        self.submit(prompts, **params)
        times = []
        while self.driver.end.inbox or self.worker.router.requests:
            queued = {work.key[1] for work in self.worker.scheduler.works()}
            wait()
            started = time.perf_counter()
            self.worker.step()
            wait()
            if queued == {"decode"} and not self.driver.end.inbox:
                times.append(time.perf_counter() - started)
            list(self.driver.drain())
        return round(1e3 * statistics.median(times), 3)


def capture(arguments: argparse.Namespace) -> None:
    counts = [int(text) for text in arguments.requests.split(",")]
    folder = Path(tempfile.mkdtemp(prefix="mstar-gpu-"))
    try:
        checkpoint = str(write_checkpoint(folder))
        how: dict[str, Any] = {
            "device": DEVICE,
            "dtype": "bfloat16",
            "tokens": arguments.tokens,
            "max_num_seqs": max(counts),
        }
        workers = {
            "eager": Decoding(checkpoint, enforce_eager=True, **how),
            "captured": Decoding(checkpoint, **how),
        }
        graphs = workers["captured"].worker.runner.graphs
        assert graphs is not None, "nothing was captured"
        report(
            part="capture", load_s={name: one.load_s for name, one in workers.items()}, captures=graphs.counts.captures,
            not_captured=graphs.why_not,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(1)
        for number in counts:
            prompts = torch.randint(0, 256, (number, 64), generator=generator).tolist()
            for params in ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}):
                ids = {name: one.ids(prompts, **params) for name, one in workers.items()}
                ms = {name: one.step_ms(prompts, **params) for name, one in workers.items()}
                agree = agreement(ids["eager"], ids["captured"])
                report(
                    part="capture", requests=number, params=params, step_ms=ms, agreement=agree,
                    speedup=round(ms["eager"] / ms["captured"], 2),
                )  # fmt: skip
        report(part="capture", replays=graphs.counts.replays, eager=graphs.counts.eager, dropped=graphs.counts.dropped)
        assert graphs.counts.replays > 0 and graphs.counts.eager == 0, "decode steps ran without a graph"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


PARTS = (versions, parity, sampler, attention, captured_attention, capture)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="1,4,16,64")
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device")
        return 2
    return run(PARTS, arguments)


def run(parts: tuple[Callable[[argparse.Namespace], None], ...], arguments: argparse.Namespace) -> int:
    failed = []
    for part in parts:
        started, error = time.perf_counter(), None
        try:
            part(arguments)
        except Exception as raised:  # noqa: BLE001  # one failure must not hide the rest
            traceback.print_exc()
            failed.append(part.__name__)
            error = f"{type(raised).__name__}: {raised}"[:500]
        report(part=part.__name__, passed=error is None, error=error, seconds=round(time.perf_counter() - started, 1))
    report(failed=failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
