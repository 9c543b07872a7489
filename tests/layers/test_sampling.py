from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mstar.errors import PluginError, RequestError
from mstar.layers.sampling import (
    SamplingState,
    draw_key,
    logprobs,
    normal,
    process_logits,
    sample,
    uniform,
    unsample,
)
from mstar.layers.sampling.plain import argmax
from mstar.types import SamplingParams


def random_logits(rows: int, vocab: int, *, spread: float = 3.0, seed: int = 0, step: float = 0.0) -> Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread
    return (logits / step).round() * step if step else logits


def state_of(*params: SamplingParams, vocab: int, prompt: list[int] | None = None) -> tuple[SamplingState, Tensor]:
    state = SamplingState.allocate(len(params) + 1, vocab, "cpu")
    for row, one in enumerate(params, 1):
        state.set_row(row, one, draw_key(row, (), "main"), prompt or [])
    return state, torch.arange(1, len(params) + 1)


def warped(logits: Tensor, params: SamplingParams, ids: list[int]) -> Tensor:
    """What `transformers` makes of one row, (1, V)."""
    steps = LogitsProcessorList()
    if params.logit_bias:
        steps.append(SequenceBiasLogitsProcessor({(int(k),): v for k, v in params.logit_bias.items()}))
    if params.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature not in (0, 1):
        steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        steps.append(MinPLogitsWarper(params.min_p))
    return steps(torch.tensor([ids], dtype=torch.int64), logits[None])


WARPS = [
    SamplingParams(temperature=0.6, top_p=0.8, repetition_penalty=1.3),
    SamplingParams(temperature=0.6, top_p=0.95),
    SamplingParams(top_k=50),
    SamplingParams(top_k=1),
    SamplingParams(temperature=0.9, top_k=50, top_p=0.8),
    SamplingParams(temperature=1.7, min_p=0.05),
    SamplingParams(top_p=0.9, min_p=0.2),
    SamplingParams(temperature=0.7, top_k=300, top_p=0.999, min_p=1e-4),
    SamplingParams(top_p=1e-6),
    SamplingParams(temperature=3.0, top_p=0.5, logit_bias={"3": 4.5, "70": -100.0}),
    SamplingParams(top_k=100_000_000, top_p=0.3),
    SamplingParams(),
]


@pytest.mark.parametrize("params", WARPS, ids=str)
@pytest.mark.parametrize(("vocab", "spread"), [(100, 3.0), (5_000, 1.0), (20_011, 3.0), (20_011, 0.01)])
def test_kept_set_and_values_equal_those_of_transformers(params: SamplingParams, vocab: int, spread: float) -> None:
    ids = [1, 5, 5, 99]
    state, rows = state_of(params, params, params, vocab=vocab, prompt=ids)
    logits = random_logits(3, vocab, spread=spread, seed=vocab)
    processed = process_logits(logits, state, rows)
    for row in range(3):
        assert torch.equal(processed[row], warped(logits[row], params, ids)[0])


@pytest.mark.parametrize("params", [p for p in WARPS if p.top_k or p.top_p < 1 or p.min_p], ids=str)
def test_ties_keep_as_many_as_transformers_and_the_highest_ids(params: SamplingParams) -> None:
    params = SamplingParams(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
    state, rows = state_of(params, params, vocab=20_011)
    logits = random_logits(2, 20_011, step=0.25)
    processed = process_logits(logits, state, rows)
    for row in range(2):
        expected = warped(logits[row], params, [])[0]
        ours = processed[row].isfinite()
        # Which of equal scores stay is an accident of sorting there; how many is not.
        assert torch.equal(processed[row][ours].sort().values, expected[expected.isfinite()].sort().values)
        lowest = processed[row][ours].min()
        tied = (logits[row] / params.temperature == lowest).nonzero()[:, 0]
        kept_of_tied = ours[tied].long()
        assert torch.equal(kept_of_tied, kept_of_tied.sort().values)


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    params = SamplingParams(temperature=0, presence_penalty=0.5, frequency_penalty=0.25)
    state, rows = state_of(params, vocab=8, prompt=[1])
    logits = torch.tensor([[0.0, 2.0, 1.9, 0, 0, 0, 0, 0]])
    assert sample(logits, state, rows).item() == 1
    assert sample(logits, state, rows).item() == 2
    assert sample(logits, state, rows).item() == 1
    expected = torch.tensor([0.0, 2.0 - 0.5 - 2 * 0.25, 1.9 - 0.5 - 0.25, 0, 0, 0, 0, 0])
    torch.testing.assert_close(process_logits(logits, state, rows)[0], expected)


def test_a_late_draw_leaves_no_trace() -> None:
    params = SamplingParams(repetition_penalty=1.3, top_p=0.9)
    state, rows = state_of(params, params, vocab=300)
    logits = random_logits(2, 300)
    first = sample(logits, state, rows)
    late = sample(logits, state, rows)
    before = state.counts.clone()
    unsample(state, rows, late)
    assert state.step.tolist() == [0, 1, 1]
    assert torch.equal(sample(logits, state, rows), late)
    assert torch.equal(state.counts, before)
    assert state.counts[1, first[0]] >= 1


def test_a_draw_depends_on_neither_batch_nor_row() -> None:
    params = [WARPS[0], SamplingParams(temperature=0), WARPS[5], WARPS[11]]
    logits = random_logits(4, 9_001, spread=1.5)
    state, rows = state_of(*params, vocab=9_001)
    together = sample(logits, state, rows)
    for index, one in enumerate(params):
        alone = SamplingState.allocate(8, 9_001, "cpu")
        alone.set_row(6, one, draw_key(index + 1, (), "main"), [])
        assert sample(logits[index : index + 1], alone, torch.tensor([6])).item() == together[index]


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5]).log_softmax(-1)
    state, rows = state_of(*[SamplingParams()] * 64, vocab=5)
    drawn = torch.cat([sample(logits.expand(64, -1), state, rows) for _ in range(150)])
    frequencies = drawn.bincount(minlength=5) / len(drawn)
    torch.testing.assert_close(frequencies, logits.exp(), atol=0.02, rtol=0)


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((1, 1_000), -torch.inf)
    logits[0, [17, 999]] = torch.tensor([0.0, -20.0])
    for params in (SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=3), SamplingParams(min_p=0.1)):
        state, rows = state_of(params, vocab=1_000)
        assert {sample(logits, state, rows).item() for _ in range(50)} <= {17, 999}


@pytest.mark.parametrize("width", [5, 64, 127, 128, 200, 20_011])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_lowest_of_equals(width: int, dtype: torch.dtype) -> None:
    scores = random_logits(16, width, step=0.5).to(dtype)
    expected = [int((row == row.max()).nonzero()[0]) for row in scores]
    assert argmax(scores).tolist() == expected


def test_nothing_is_allocated_for_penalties_nobody_uses() -> None:
    state, rows = state_of(SamplingParams(top_p=0.5), vocab=100)
    sample(random_logits(1, 100), state, rows)
    assert state.counts is None
    assert state.prompt_mask is None
    state.set_row(1, SamplingParams(presence_penalty=1), 1)
    assert state.counts is not None
    assert state.prompt_mask is None


def test_rows_survive_growing_swapping_and_copying() -> None:
    params = SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.2, logit_bias={"4": 1.0})
    state, _ = state_of(params, vocab=400, prompt=[1, 2])
    twin, rows = state_of(params, vocab=400, prompt=[1, 2])
    logits = random_logits(1, 400)
    expected = [sample(logits, twin, rows).item() for _ in range(9)]
    drawn = [sample(logits, state, torch.tensor([1])).item() for _ in range(3)]
    state.grow(5)
    drawn += [sample(logits, state, torch.tensor([1])).item() for _ in range(2)]
    snapshot = state.snapshot_row(1)
    state.clear_row(1)
    state.set_row(1, SamplingParams(repetition_penalty=2.0), 77, [5])
    sample(logits, state, torch.tensor([1]))
    state.restore_row(3, snapshot)
    drawn += [sample(logits, state, torch.tensor([3])).item() for _ in range(2)]
    state.restore_row(4, state.snapshot_row(3))
    state.clear_row(3)
    drawn += [sample(logits, state, torch.tensor([4])).item() for _ in range(2)]
    assert drawn == expected
    state.clear_row(4)
    state.clear_row(1)
    assert not state.uses("random")
    assert not state.uses("repetition")


def test_a_reused_row_forgets_its_last_request() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=5.0)
    state, rows = state_of(params, vocab=4, prompt=[0])
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.1]])
    assert sample(logits, state, rows).item() == 1
    state.set_row(1, params, 3, [])
    assert sample(logits, state, rows).item() == 0


def test_ids_outside_the_vocabulary_are_refused() -> None:
    state = SamplingState.allocate(2, 10, "cpu", max_bias=2)
    with pytest.raises(RequestError, match=r"names token '10'; ids of this model are 0 to 9"):
        state.set_row(1, SamplingParams(logit_bias={"10": 1.0}), 1)
    with pytest.raises(RequestError, match=r"names token 'x'"):
        state.set_row(1, SamplingParams(logit_bias={"x": 1.0}), 1)
    with pytest.raises(RequestError, match=r"3 entries; the limit is 2"):
        state.set_row(1, SamplingParams(logit_bias={"1": 1.0, "2": 1.0, "3": 1.0}), 1)
    with pytest.raises(PluginError, match=r"outside its vocabulary of 10"):
        state.set_row(1, SamplingParams(repetition_penalty=1.1), 1, [10])


def test_uniforms_are_functions_of_key_and_counter() -> None:
    keys = torch.tensor([draw_key(seed, (), "noise") for seed in range(40)])
    counters = torch.arange(500)
    table = uniform(keys[:, None], counters)
    assert table.dtype == torch.float32
    assert 0 <= table.min() < table.max() < 1
    assert abs(table.mean() - 0.5) < 0.01
    assert torch.equal(uniform(keys[7], counters[123:130]), table[7, 123:130])
    assert len(table.unique()) > 0.99 * table.numel()
    correlation = torch.corrcoef(table.double()).fill_diagonal_(0)
    assert correlation.abs().max() < 0.25


def test_normals_have_unit_moments_and_do_not_depend_on_chunks() -> None:
    key = torch.tensor(draw_key(3, (), "codec"))
    whole = normal(key, torch.arange(40_000))
    assert whole.dtype == torch.float32
    assert abs(whole.mean()) < 0.02
    assert abs(whole.std() - 1) < 0.02
    assert abs(whole.pow(4).mean() - 3) < 0.2
    parts = torch.cat([normal(key, torch.arange(start, min(start + 777, 40_000))) for start in range(0, 40_000, 777)])
    assert torch.equal(whole, parts)


def test_keys_tell_seeds_names_and_items_apart_but_not_item_zero() -> None:
    assert draw_key(1, (), "main") == draw_key(1, (0,), "main") == draw_key(1, (0, 0), "main")
    keys = {
        draw_key(seed, path, name) for seed in (0, 1, -1, 2**70) for path in ((), (1,), (0, 1)) for name in ("a", "b")
    }
    assert len(keys) == 24
    assert all(0 <= key < 2**63 for key in keys)


def test_logprobs_of_chosen_and_likeliest() -> None:
    logits = random_logits(2, 50)
    chosen, ids, values = logprobs(logits, torch.tensor([4, 9]), 3)
    table = logits.log_softmax(-1)
    assert torch.equal(chosen, torch.stack((table[0, 4], table[1, 9])))
    assert torch.equal(ids, table.topk(3).indices)
    assert torch.equal(values, table.topk(3).values)
    assert math.isclose(float(values[0, 0]), float(table[0].max()))


def test_sampling_can_be_compiled_into_a_step() -> None:
    state, rows = state_of(SamplingParams(top_p=0.5), SamplingParams(presence_penalty=1), vocab=64)
    twin, _ = state_of(SamplingParams(top_p=0.5), SamplingParams(presence_penalty=1), vocab=64)
    logits = random_logits(2, 64)
    step = torch.compile(lambda x: sample(x * 2, state, rows), fullgraph=True, backend="eager")
    for _ in range(3):
        assert torch.equal(step(logits), sample(logits * 2, twin, rows))
