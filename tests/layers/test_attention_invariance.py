"""Batch invariance: the bits of a token's attention are the same alone, in any batch, chunk, row and page."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar.layers.attention import KVBatch, build_plan, varlen_attention
from mstar.layers.attention.cpu import CpuBackend
from mstar.layers.attention.plain import PlainBackend

BACKENDS: dict[str, Any] = {"cpu": CpuBackend(), "plain": PlainBackend()}
LENGTH = 150  # of each sequence: more than one tile of keys


@dataclass(kw_only=True)
class Sequences:
    """Random sequences, run step by step through one pool with pages handed out in a random order."""

    count: int
    heads: int = 6
    kv_heads: int = 2
    dim: int = 8
    page_size: int = 4
    dtype: torch.dtype = torch.float32
    window: int | None = None
    seed: int = 0
    backend: str = "cpu"
    spans: list[tuple[int, int]] = field(default_factory=list)  # in every sequence

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        shape = (self.count, LENGTH)
        self.q = torch.randn(*shape, self.heads, self.dim, generator=generator).to(self.dtype)
        self.k = torch.randn(*shape, self.kv_heads, self.dim, generator=generator).to(self.dtype)
        self.v = torch.randn(*shape, self.kv_heads, self.dim, generator=generator).to(self.dtype)

    def run(self, steps: list[list[tuple[int, int]]]) -> Tensor:
        """Each step is [(sequence, new tokens)]; returns (count, LENGTH, H, D)."""
        rng = np.random.default_rng(self.seed)
        width = -(-LENGTH // self.page_size)
        table = (rng.permutation(self.count * width).astype(np.int32) + 1).reshape(self.count, width)
        pool = (self.count * width + 1, self.kv_heads, self.page_size, self.dim)
        keys, values = (torch.full(pool, torch.nan, dtype=self.dtype) for _ in range(2))
        done = np.zeros(self.count, dtype=np.int32)
        out = torch.empty_like(self.q)
        for step in steps:
            rows = np.array([row for row, _ in step])
            plan = build_plan(
                query_lens=np.array([num for _, num in step], dtype=np.int32),
                context_lens=done[rows],
                page_table=table[rows],
                page_size=self.page_size,
                device="cpu",
                spans=[self._spans(done[row], num) for row, num in step],
                batch_invariant=self.backend == "plain",  # the kernel is so always
            )
            taken = [(row, slice(done[row], done[row] + num)) for row, num in step]
            q, k, v = (torch.cat([x[row, part] for row, part in taken]) for x in (self.q, self.k, self.v))
            result = KVBatch(plan, [keys], [values], BACKENDS[self.backend]).attend(0, q, k, v, window=self.window)
            for (row, part), piece in zip(taken, result.split([num for _, num in step]), strict=True):
                out[row, part] = piece
            done[rows] += plan.host.query_lens
        assert (done == LENGTH).all()
        return out

    def _spans(self, start: int, num: int) -> Any:
        inside = [(a - start, b - start) for a, b in self.spans if start <= a and b <= start + num]
        return np.array(inside) if inside else None


def whole(count: int) -> list[list[tuple[int, int]]]:
    """Every sequence alone, in one piece."""
    return [[(row, LENGTH)] for row in range(count)]


def random_steps(count: int, *, seed: int, borders: list[tuple[int, int]] | None = None) -> list[list[tuple[int, int]]]:
    """Random batches of random chunks (many of one token), never cut inside a span."""
    rng = np.random.default_rng(seed)
    done, steps = [0] * count, []
    while any(d < LENGTH for d in done):
        step = []
        for row in rng.permutation(count):
            if done[row] == LENGTH or rng.random() < 0.3:
                continue
            end = min(done[row] + int(rng.choice([1, 1, 7, 16, 33])), LENGTH)
            for a, b in borders or []:
                end = b if a < end < b else end
            step.append((int(row), end - done[row]))
            done[row] = end
        if step:
            steps.append(step)
    return steps


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual, expected), f"{(actual != expected).float().mean():.1%} of the values differ"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("group", "kv_heads", "dim", "page_size"), [(3, 2, 8, 4), (1, 1, 72, 16), (8, 2, 64, 16)])
def test_any_batching_and_chunking_gives_the_same_bits(
    group: int, kv_heads: int, dim: int, page_size: int, dtype: torch.dtype, window: int | None, backend: str
) -> None:
    options: dict[str, Any] = {
        "backend": backend,
        "heads": group * kv_heads,
        "kv_heads": kv_heads,
        "dim": dim,
        "dtype": dtype,
    }
    sequences = Sequences(count=3, window=window, page_size=page_size, **options)
    expected = sequences.run(whole(3))
    for seed in (1, 2):
        sequences.seed = seed
        assert_same_bits(sequences.run(random_steps(3, seed=seed)), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_token_by_token_equals_one_prefill(backend: str) -> None:
    sequences = Sequences(count=1, backend=backend)
    assert_same_bits(sequences.run([[(0, 1)]] * LENGTH), sequences.run(whole(1)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [4, 7, 64])
def test_page_size_does_not_change_the_bits(size: int, backend: str) -> None:
    whole_row = Sequences(count=1, page_size=16, backend=backend).run(whole(1))
    assert_same_bits(Sequences(count=1, page_size=size, backend=backend).run([[(0, 100)], [(0, 50)]]), whole_row)


@pytest.mark.parametrize("backend", BACKENDS)
def test_spans_keep_their_bits(backend: str) -> None:
    spans = [(3, 40), (40, 49), (90, 130)]
    sequences = Sequences(count=3, spans=spans, backend=backend)
    expected = sequences.run(whole(3))
    for seed in range(3):
        sequences.seed = seed
        assert_same_bits(sequences.run(random_steps(3, seed=seed, borders=spans)), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("full", [False, True])
def test_uncached_tokens_have_the_bits_of_cached_ones(full: bool, backend: str) -> None:
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    contexts, num, size = [21, 130], 9, 4
    q, k, v = draw(18, 4, 8), draw(18, 2, 8), draw(18, 2, 8)
    table = np.arange(1, 81, dtype=np.int32).reshape(2, 40)
    pool = [draw(81, 2, size, 8) for _ in range(2)]

    def run(rows: list[int], *, write: bool) -> Tensor:
        plan = build_plan(
            query_lens=np.full(len(rows), num, dtype=np.int32),
            context_lens=np.array([contexts[row] for row in rows], dtype=np.int32),
            page_table=table[rows],
            page_size=size,
            device="cpu",
            write=write,
            full=np.full(len(rows), full),
            batch_invariant=True,
        )
        tokens = torch.cat([torch.arange(row * num, (row + 1) * num) for row in rows])
        batch = KVBatch(plan, [pool[0].clone()], [pool[1].clone()], BACKENDS[backend])
        return batch.attend(0, q[tokens], k[tokens], v[tokens])

    together = run([0, 1], write=False)
    assert_same_bits(together, run([0, 1], write=True))
    assert_same_bits(torch.cat([run([0], write=False), run([1], write=False)]), together)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_encoders_give_each_sequence_the_bits_it_has_alone(causal: bool, dtype: torch.dtype) -> None:
    lens = [5, 140, 1, 70]
    q, k, v = (torch.randn(sum(lens), 3, 72).to(dtype) for _ in range(3))

    def run(some: slice, lens: list[int]) -> Tensor:
        starts = torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32)
        return varlen_attention(
            q[some], k[some], v[some], starts, max_len=max(lens), causal=causal, batch_invariant=True
        )

    together = run(slice(None), lens)
    for begin, length in zip(np.cumsum([0, *lens]), lens, strict=False):
        some = slice(int(begin), int(begin) + length)
        assert_same_bits(run(some, [length]), together[some])
