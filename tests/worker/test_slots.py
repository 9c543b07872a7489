"""Slot pools: rows are zeroed, forked, saved, swapped and grown together with the samplers of the same row."""

from __future__ import annotations

import pytest
import torch

from mstar.errors import RequestError
from mstar.layers.sampling import sample, unsample
from mstar.plugin.nodes import Sampler, Slot
from mstar.types import SamplingParams
from mstar.worker.slots import SlotPool

VOCAB = 50
SEEDED = {"main": (SamplingParams(temperature=1.0, repetition_penalty=1.5, frequency_penalty=0.5), 1234, [1, 2])}


def make_pool(rows: int = 4) -> SlotPool:
    slots = [Slot(name="last", shape=(), dtype=torch.int64), Slot(name="hidden", shape=(2, 3))]
    return SlotPool(slots, [Sampler(name="main", vocab_size=VOCAB)], rows=rows, device="cpu")


def draw(pool: SlotPool, row: int, count: int) -> list[int]:
    logits = torch.linspace(0, 2, VOCAB)[None]
    return [int(sample(logits, pool.samplers["main"], torch.tensor([row]))) for _ in range(count)]


def test_a_row_is_zeroed_when_it_is_given() -> None:
    pool = make_pool()
    row = pool.allocate(sampling={})
    pool.tensors["last"][row] = 7
    pool.tensors["hidden"][row] = 7.0
    pool.free(row)
    again = pool.allocate(sampling={})
    assert again == row
    assert pool.tensors["last"][row] == 0
    assert not pool.tensors["hidden"][row].any()


def test_rows_are_distinct_and_never_the_scratch_row() -> None:
    pool = make_pool(8)
    rows = [pool.allocate(sampling={}) for _ in range(7)]
    assert sorted(rows) == list(range(1, 8))
    assert pool.num_used == 7
    pool.check_integrity(rows)
    for row in rows:
        pool.free(row)
    assert pool.num_used == 0
    pool.check_integrity([])


def test_freeing_a_free_row_is_refused() -> None:
    pool = make_pool()
    row = pool.allocate(sampling={})
    pool.free(row)
    for wrong in (row, 0, 4):
        with pytest.raises(AssertionError, match="not in use"):
            pool.free(wrong)


def test_running_out_of_rows_grows_and_keeps_contents() -> None:
    pool = make_pool(2)
    first = pool.allocate(sampling=SEEDED)
    reference = make_pool(2)
    expected = draw(reference, reference.allocate(sampling=SEEDED), 8)
    pool.tensors["hidden"][first] = 3.0
    drawn = draw(pool, first, 4)
    rows = [first, *(pool.allocate(sampling={}) for _ in range(5))]
    assert pool.rows == 8
    assert pool.tensors["hidden"].shape == (8, 2, 3)
    assert (pool.tensors["hidden"][first] == 3.0).all()
    assert not pool.tensors["hidden"][rows[1:]].any()
    assert drawn + draw(pool, first, 4) == expected
    pool.check_integrity(rows)


def test_a_sampler_is_reset_when_its_row_is_given_again() -> None:
    pool = make_pool()
    row = pool.allocate(sampling=SEEDED)
    drawn = draw(pool, row, 6)
    pool.free(row)
    assert pool.allocate(sampling=SEEDED) == row
    assert draw(pool, row, 6) == drawn
    pool.free(row)
    assert pool.allocate(sampling={}) == row
    assert draw(pool, row, 2) == [VOCAB - 1, VOCAB - 1]


def test_a_refused_sampler_takes_no_row() -> None:
    pool = make_pool()
    params = SamplingParams(logit_bias={"99": 1.0})
    with pytest.raises(RequestError, match="99"):
        pool.allocate(sampling={"main": (params, 1, [])})
    assert pool.num_used == 0
    pool.check_integrity([])


def test_a_fork_begins_with_its_source_s_slots_and_goes_on_apart_from_it() -> None:
    pool = make_pool(2)
    row, fork = pool.allocate(sampling=SEEDED), pool.allocate(sampling=SEEDED)
    pool.tensors["last"][row] = 5
    pool.copy_slots(row, fork)
    assert pool.tensors["last"][fork] == 5
    pool.tensors["last"][fork] = 6
    assert pool.tensors["last"][row] == 5
    pool.check_integrity([row, fork])


def test_restoring_undoes_a_step_for_the_given_rows_only() -> None:
    pool = make_pool()
    first, second = pool.allocate(sampling=SEEDED), pool.allocate(sampling=SEEDED)
    pool.tensors["hidden"][first] = 1.0
    rows = torch.tensor([first, 0, 0])
    saved = pool.save(rows)
    pool.tensors["hidden"] += 1.0
    late = draw(pool, first, 1)
    pool.restore(rows, saved)
    unsample(pool.samplers["main"], torch.tensor([first]), torch.tensor(late))
    assert (pool.tensors["hidden"][first] == 1.0).all()
    assert (pool.tensors["hidden"][second] == 1.0).all()
    assert draw(pool, first, 4) == draw(pool, second, 4)


def test_a_swapped_row_comes_back_elsewhere_with_everything() -> None:
    pool = make_pool()
    row, twin = pool.allocate(sampling=SEEDED), pool.allocate(sampling=SEEDED)
    assert draw(pool, row, 3) == draw(pool, twin, 3)
    pool.tensors["hidden"][row] = torch.arange(6.0).reshape(2, 3)
    saved = pool.swap_out(row)
    assert pool.num_used == 1
    other = pool.allocate(sampling={})
    assert other == row
    pool.tensors["hidden"][other] = 9.0
    back = pool.swap_in(saved)
    assert back != row
    assert torch.equal(pool.tensors["hidden"][back], torch.arange(6.0).reshape(2, 3))
    assert draw(pool, back, 5) == draw(pool, twin, 5)
    pool.check_integrity([twin, other, back])


def test_a_module_without_slots_or_samplers_has_rows_too() -> None:
    pool = SlotPool([], [], rows=2, device="cpu")
    rows = [pool.allocate(sampling={}) for _ in range(3)]
    assert pool.save(torch.tensor(rows)) == {}
    pool.check_integrity(rows)
