"""The C++ sampler against `plain`: equal ids, equal records."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mstar.errors import PluginError
from mstar.layers.sampling import SamplingState, draw_key, native, sample, sample_plain
from mstar.types import SamplingParams

needs_kernel = pytest.mark.skipif(not native.available(), reason="no compiler")

EVERY = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.6, top_p=0.8, repetition_penalty=1.3),
    SamplingParams(temperature=0.6, top_p=0.95),
    SamplingParams(top_k=50),
    SamplingParams(top_k=1),
    SamplingParams(temperature=0.9, top_k=50, top_p=0.8),
    SamplingParams(top_k=3_000, top_p=0.7),
    SamplingParams(temperature=1.7, min_p=0.05),
    SamplingParams(top_p=0.9, min_p=0.2),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=0.7, top_k=300, top_p=0.999, min_p=1e-4),
    SamplingParams(top_p=1e-6),
    SamplingParams(top_p=0.0),
    SamplingParams(temperature=3.0, top_p=0.5, logit_bias={"3": 4.5, "4": -100.0}),
    SamplingParams(top_k=100_000_000, top_p=0.3),
    SamplingParams(temperature=0, repetition_penalty=1.5, presence_penalty=1.0),
    SamplingParams(temperature=0.8, top_p=0.9, frequency_penalty=0.5, presence_penalty=-0.5),
    SamplingParams(temperature=0.8, repetition_penalty=0.8, logit_bias={"2": 3.0}),
]


def twins(*params: SamplingParams, vocab: int) -> tuple[SamplingState, SamplingState, Tensor]:
    """Two equal states, and their rows in use."""
    states = [SamplingState.allocate(len(params) + 1, vocab, "cpu") for _ in range(2)]
    for state in states:
        for row, one in enumerate(params, 1):
            state.set_row(row, one, draw_key(row, (), "main"), [3, 4])
    return states[0], states[1], torch.arange(1, len(params) + 1)


def draw_plainly(logits: Tensor, state: SamplingState, rows: Tensor) -> Tensor:
    ids = sample_plain(logits, state, rows)
    state.step[rows] += 1
    if state.counts is not None:
        state.counts[rows, ids] += 1
    return ids


def logits_of(kind: str, rows: int, vocab: int, *, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(rows, vocab, generator=generator)
    if kind == "masked":
        noise = (noise * 3).masked_fill(torch.rand(rows, vocab, generator=generator) < 0.9, -torch.inf)
        noise[:, seed % vocab] = 1.0
        return noise
    spread, step = {"peaked": (10, 0), "usual": (3, 0), "flat": (0.01, 0), "ties": (2, 0.5), "equal": (0, 0)}[kind]
    return (noise * spread / step).round() * step if step else noise * spread - 7


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [5, 100, 4_096, 28_982, 156_940])
@pytest.mark.parametrize("kind", ["peaked", "usual", "flat", "ties", "equal", "masked"])
def test_ids_and_records_are_those_of_the_plain_path(kind: str, vocab: int, dtype: torch.dtype) -> None:
    ours, twin, rows = twins(*EVERY, vocab=vocab)
    for turn in range(1 if vocab > 100_000 else 6):
        logits = logits_of(kind, len(rows), vocab, seed=turn).to(dtype)
        assert native.draw(logits, ours, rows).tolist() == draw_plainly(logits, twin, rows).tolist()
    assert torch.equal(ours.step, twin.step)
    assert ours.counts is not None and torch.equal(ours.counts, twin.counts)


@needs_kernel
@pytest.mark.parametrize("params", [EVERY[1], EVERY[3], EVERY[6], EVERY[9]], ids=str)
@pytest.mark.parametrize(("kind", "vocab"), [("ties", 5_000), ("flat", 20_011), ("peaked", 20_011)])
def test_many_draws_from_one_distribution_are_those_of_the_plain_path(
    kind: str, vocab: int, params: SamplingParams
) -> None:
    ours, twin, rows = twins(*[params] * 200, vocab=vocab)
    logits = logits_of(kind, 1, vocab, seed=7).expand(200, -1)
    assert native.draw(logits, ours, rows).tolist() == draw_plainly(logits, twin, rows).tolist()


@needs_kernel
def test_an_id_depends_on_neither_batch_row_nor_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of("usual", len(EVERY), 20_011, seed=1)
    drawn = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        state, _, rows = twins(*EVERY, vocab=20_011)
        drawn.append(sample(logits, state, rows).tolist())
        assert state.step.tolist() == [0] + [1] * len(rows)
    assert drawn[0] == drawn[1] == drawn[2]
    backwards, _, rows = twins(*EVERY, vocab=20_011)
    assert sample(logits.flip(0), backwards, rows.flip(0)).tolist() == drawn[0][::-1]
    for index, one in enumerate(EVERY):
        alone = SamplingState.allocate(8, 20_011, "cpu")
        alone.set_row(6, one, draw_key(index + 1, (), "main"), [3, 4])
        assert sample(logits[index : index + 1], alone, torch.tensor([6])).item() == drawn[0][index]


@needs_kernel
def test_padding_shares_the_scratch_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    state, twin, _ = twins(EVERY[2], EVERY[0], vocab=20_000)
    logits = logits_of("usual", 16, 20_000, seed=3)
    logits[2:] = torch.nan  # greedy rows do not mind
    rows = torch.tensor([1, 2, *[0] * 14])
    ids = sample(logits, state, rows)
    assert ids[:2].tolist() == draw_plainly(logits[:2], twin, rows[:2]).tolist()
    assert state.step.tolist() == [14, 1, 1]
    assert state.counts is not None
    assert torch.equal(state.counts[1:], twin.counts[1:])
    assert int(state.counts[0].sum()) == 14


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", ["kernel", "plain"])
@pytest.mark.parametrize("params", [EVERY[1], EVERY[4], EVERY[6], EVERY[2]], ids=str)
def test_logits_that_are_not_finite_are_refused_where_chance_decides(
    params: SamplingParams, kind: str, value: float
) -> None:
    if kind == "kernel" and not native.available():
        pytest.skip("no compiler")
    state, _, rows = twins(EVERY[0], params, EVERY[1], vocab=5_000)
    logits = logits_of("usual", 3, 5_000, seed=0)
    logits[1, slice(None) if value < 0 else 4_321] = value
    draw = native.draw if kind == "kernel" else sample_plain
    with pytest.raises(PluginError, match=r"logits that are not finite \(NaN or infinity\)"):
        draw(logits, state, rows)
    assert state.step.tolist() == [0] * 4
    assert state.counts is None or not state.counts.any()
    greedy, _, one = twins(EVERY[0], vocab=5_000)
    assert draw(logits[1:2], greedy, one).item() == (0 if value < 0 else 4_321)


@needs_kernel
@pytest.mark.parametrize("threads", [1, 3])
def test_with_flags_rows_that_cannot_be_drawn_are_marked_and_the_others_go_on(threads: int) -> None:
    state, twin, rows = twins(EVERY[0], EVERY[6], EVERY[2], EVERY[1], vocab=5_000)
    logits = logits_of("usual", 4, 5_000, seed=0)
    expected = draw_plainly(logits, twin, rows).tolist()
    logits[:2, 9] = torch.nan
    ids, flags, kernel = torch.full((4,), -1), torch.zeros(4, dtype=torch.uint8), native.kernel()
    assert kernel is not None
    operands = logits.data_ptr(), 0, 5_000, 4, rows.data_ptr(), ids.data_ptr(), flags.data_ptr()
    assert kernel(native.address_of(state), *operands, threads) == 0
    assert ids.tolist() == [9, 0, *expected[2:]]
    assert flags.tolist() == [0, 1, 0, 0]
    assert state.step.tolist() == [0, 1, 1, 1, 1]


@needs_kernel
def test_logits_may_have_any_stride_and_float_dtype() -> None:
    logits = logits_of("usual", len(EVERY), 5_003, seed=5).bfloat16()
    state, _, rows = twins(*EVERY, vocab=5_003)
    expected = sample(logits, state, rows).tolist()
    wide = torch.zeros(len(EVERY), 2, 5_100, dtype=torch.bfloat16)
    wide[:, 1, 50:5_053] = logits
    for same in (wide[:, 1, 50:5_053], logits.t().contiguous().t(), logits.float(), logits.double()):
        state, _, rows = twins(*EVERY, vocab=5_003)
        assert sample(same, state, torch.stack((rows, rows), dim=1)[:, 0]).tolist() == expected
    assert sample(logits[:0], state, rows[:0]).tolist() == []


@needs_kernel
def test_addresses_follow_their_state_and_stay_where_they_are() -> None:
    ours, twin, rows = twins(EVERY[0], EVERY[3], vocab=300)
    addresses = native.struct_of(ours)
    place, before = native.address_of(ours), addresses.key
    assert addresses.counts is None
    for turn, change in enumerate(
        [
            lambda state: None,
            lambda state: state.set_row(1, EVERY[17], 5),
            lambda state: state.set_row(2, EVERY[2], 6, [1, 2]),
            lambda state: state.grow(9),
        ]
    ):
        for state in (ours, twin):
            change(state)
        logits = logits_of("usual", 2, 300, seed=turn)
        assert native.draw(logits, ours, rows).tolist() == draw_plainly(logits, twin, rows).tolist()
        assert native.struct_of(ours) is addresses
    assert native.address_of(ours) == ctypes.addressof(addresses) == place
    assert addresses.rows == 9
    assert ours.counts is not None and ours.prompt_mask is not None
    assert [addresses.counts, addresses.prompt_mask] == [ours.counts.data_ptr(), ours.prompt_mask.data_ptr()]
    assert addresses.key == ours.key.data_ptr() != before


@needs_kernel
def test_what_does_not_fit_the_state_is_refused() -> None:
    state, _, rows = twins(EVERY[0], vocab=10)
    with pytest.raises(PluginError, match=r"logits of shape \(1, 11\).* \(1, 10\)"):
        native.draw(torch.zeros(1, 11), state, rows)
    for row in (-1, 2):
        with pytest.raises(AssertionError, match="outside the sampling state"):
            native.draw(torch.zeros(1, 10), state, torch.tensor([row]))


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(native, "library", lambda source: None)
    native.kernel.cache_clear()
    yield
    native.kernel.cache_clear()


def test_where_the_kernel_cannot_be_built_the_plain_path_draws(without_compiler: None) -> None:
    assert not native.available()
    state, twin, rows = twins(*EVERY, vocab=5_000)
    for turn in range(3):
        logits = logits_of("usual", len(rows), 5_000, seed=turn)
        assert sample(logits, state, rows).tolist() == draw_plainly(logits, twin, rows).tolist()
    assert torch.equal(state.step, twin.step)
    assert state.counts is not None and torch.equal(state.counts, twin.counts)
