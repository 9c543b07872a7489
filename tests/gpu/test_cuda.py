"""On a CUDA device: the CPU's answers, with graphs and without; FlashInfer; the sampler.

float32 ids are the CPU's but where two tokens lie within rounding of each other, so a few may differ; attention in
bfloat16 is within 0.03. A graph replays the kernels that run without one: ids are equal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import served
import torch
from torch import Tensor

from mstar.layers.attention import AttentionPlan, KVBatch, build_plan, choose_backend, decode_plan
from mstar.layers.sampling import SamplingState, sample_plain
from mstar.server.convert import convert
from mstar.server.native import GenerateRequest
from mstar.types import SamplingParams, TensorChunk
from mstar.worker.graphs import CudaGraphs, GraphRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CUDA = torch.device("cuda")
PAGE, HEADS, KV_HEADS, DIM = 16, 8, 2, 64


def same_share(one: dict[str, list[bytes]], other: dict[str, list[bytes]]) -> float:
    """Share of the emitted ids that are equal, in order."""
    pairs: list[tuple[Any, Any]] = []
    for name, messages in one.items():
        ids = [
            [json.loads(message)["value"] for message in own if b'"Emit"' in message and b'"wave"' not in message]
            for own in (messages, other[name])
        ]
        pairs += zip(*ids, strict=False)
    assert pairs
    return sum(a == b for a, b in pairs) / len(pairs)


@pytest.mark.parametrize("runs", ["run", "run_ahead"])
def test_captured_steps_give_what_eager_ones_give(parts: Any, shared: Any, runs: str) -> None:
    how: dict[str, Any] = {"max_num_seqs": 24, "overlap": runs == "run_ahead"}
    workers = {
        "cpu": parts(device="cpu", **how),
        "eager": parts(device="cuda", **how),
        "captured": parts(device="cuda", **how),
    }
    for name in ("eager", "captured"):
        workers[name].runner.backend = shared.TensorAttention()
    captured = workers["captured"]
    graphs = captured.runner.graphs = GraphRunner(captured.runner, CudaGraphs(CUDA))
    graphs.capture_all({name: captured.router.programs[name] for name in ("generate", "frames")})
    before = graphs.counts.captures
    for num in (1, 3, 7):
        found = {}
        for name, worker in workers.items():
            shared.ask(worker, num, top_p=0.9, ignore_eos=True)
            found[name] = getattr(shared, runs)(worker)
            shared.close(worker)
        assert found["captured"] == found["eager"]
        assert same_share(found["eager"], found["cpu"]) >= 0.95
    assert (graphs.counts.captures, graphs.counts.eager) == (before, 0)
    assert graphs.counts.replays > 0


def test_speech_in_float32_is_the_cpu_s() -> None:
    ids = {}
    request = {
        "task": "speech", "inputs": [{"type": "text", "text": "Hello there."}], "outputs": ["tensors"], "seed": 1,
        "params": {"temperature": 0, "repetition_penalty": 1.0, "codec_noise": False, "max_tokens": 35},
    }  # fmt: skip
    for device in ("cpu", "cuda"):
        model = served.Served(plugin="orpheus", model="tiny", device=device, dtype="float32", max_model_len=512)
        try:
            ids[device] = model.run(codes(model, request))
        finally:
            model.close()
    assert len(ids["cpu"]) == 35
    assert ids["cuda"] == ids["cpu"]


async def codes(model: Any, request: dict[str, Any]) -> list[int]:
    handle = await model.engine.submit(convert(request, GenerateRequest))
    found = [chunk.tensor async for chunk in handle if isinstance(chunk, TensorChunk) and chunk.name == "codes"]
    return [int(token) for tensor in found for token in tensor]


# ---- attention ------------------------------------------------------------------------------------------


@pytest.fixture
def flashinfer() -> Iterator[Any]:
    pytest.importorskip("flashinfer")
    yield choose_backend(CUDA, "flashinfer")
    choose_backend(CUDA)


def plan_of(lens: list[int], contexts: list[int], *, write: bool = True) -> AttentionPlan:
    width = max(-(-(c + n) // PAGE) for c, n in zip(contexts, lens, strict=True))
    table = np.random.default_rng(0).permutation(len(lens) * width).astype(np.int32).reshape(len(lens), width) + 1
    return build_plan(
        query_lens=np.array(lens, dtype=np.int32), context_lens=np.array(contexts, dtype=np.int32), page_table=table,
        page_size=PAGE, device=CUDA, write=write,
    )  # fmt: skip


def operands(tokens: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    torch.manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    pools = [[torch.randn(128, KV_HEADS, PAGE, DIM, device=CUDA).bfloat16()] for _ in range(2)]
    return [torch.randn(tokens, n, DIM, device=CUDA).bfloat16() for n in heads], pools


@torch.inference_mode()
@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize(
    ("lens", "contexts"), [([1, 1, 1], [40, 0, 17]), ([9, 1, 30], [5, 20, 0])], ids=["decode", "mixed"]
)
def test_flashinfer_is_the_reference_s(lens: list[int], contexts: list[int], write: bool, flashinfer: Any) -> None:
    tokens, pools = operands(sum(lens))
    results = []
    for backend in (flashinfer, choose_backend(CUDA, "reference")):
        results.append(KVBatch(plan_of(lens, contexts, write=write), *pools, backend).attend(0, *tokens))
    torch.testing.assert_close(*results, atol=0.03, rtol=0.03)


@torch.inference_mode()
def test_captured_flashinfer_follows_each_step_s_plan(flashinfer: Any) -> None:
    rows = 4
    tokens, pools = operands(rows)
    fixed = decode_plan(
        context_lens=[0] * rows, slot_mapping=torch.zeros(rows, dtype=torch.int64, device=CUDA),
        page_table=np.zeros((rows, 16), dtype=np.int32), page_size=PAGE,
    )  # fmt: skip
    fixed.held = {}

    def region() -> Tensor:
        fixed.derived.clear()
        return KVBatch(fixed, *pools, flashinfer).attend(0, *tokens)

    again, out = CudaGraphs(CUDA).capture(region)
    for contexts in ([60, 3, 0, 100], [1, 2, 200, 4], [61, 4, 1, 101]):
        live = plan_of([1] * rows, contexts)
        flashinfer.refresh(fixed, live)
        again()
        expected = KVBatch(live, *pools, choose_backend(CUDA, "reference")).attend(0, *tokens)
        torch.testing.assert_close(out, expected, atol=0.03, rtol=0.03)


# ---- sampling -------------------------------------------------------------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize("is_captured", [False, True])
def test_draws_are_the_cpu_s(is_captured: bool) -> None:
    rows, vocab = 60, 5000
    torch.manual_seed(0)
    logits = torch.randn(rows, vocab) * 4
    kinds: list[dict[str, Any]] = [
        {}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}, {"temperature": 0.0},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {"7": 3.0}},
    ]  # fmt: skip
    found = []
    for device in ("cpu", "cuda"):
        state = SamplingState.allocate(rows + 1, vocab, device)
        for row in range(1, rows + 1):
            state.set_row(row, SamplingParams(**kinds[row % len(kinds)]), key=row, prompt_ids=[row])
        of, own = torch.arange(1, rows + 1, device=device), logits.to(device)

        def draw(state: SamplingState = state, of: Tensor = of, own: Tensor = own) -> Tensor:
            return sample_plain(own, state, of)

        found.append(_by_graph(draw) if is_captured and device == "cuda" else draw().tolist())
    assert sum(a == b for a, b in zip(*found, strict=True)) >= 0.95 * rows


def _by_graph(draw: Callable[[], Tensor]) -> list[int]:
    again, ids = CudaGraphs(CUDA).capture(draw)
    ids.zero_()
    again()
    drawn: list[int] = ids.tolist()
    return drawn
