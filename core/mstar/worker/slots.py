"""Per-request device state of one module: rows of its slot tensors and samplers. Owned by the worker's thread.

One row number serves all slots and samplers of the module. Row 0 is scratch: padding reads and writes it. Does not
know requests, or what the rows mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mstar.errors import MstarError
from mstar.layers.sampling import RowSnapshot, SamplingState
from mstar.plugin.nodes import Sampler, Slot
from mstar.types import SamplingParams


@dataclass(frozen=True, slots=True)
class SavedRow:
    """A row in host memory, for swapping: slot name -> tensor, sampler name -> snapshot."""

    slots: dict[str, Tensor]
    samplers: dict[str, RowSnapshot]


class SlotPool:
    """Rows for the slots and samplers of one module.

    Running out of rows doubles them, which replaces every tensor: captured graphs hold the old ones, so size the
    pool for the most rows before capturing.

    Args:
        rows: row 0 included.
        fence: waits for what changes rows meanwhile.

    Attributes:
        tensors: slot name -> (R, *shape).
        samplers: sampler name -> its R rows.
    """

    def __init__(
        self, slots: Sequence[Slot], samplers: Sequence[Sampler], *, rows: int, device: torch.device | str,
        fence: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        assert rows > 1, rows
        self.rows = rows
        self._fence = fence
        self.tensors: dict[str, Tensor] = {
            slot.name: torch.zeros((rows, *slot.shape), dtype=slot.dtype, device=device) for slot in slots
        }
        self.samplers: dict[str, SamplingState] = {
            sampler.name: SamplingState.allocate(rows, sampler.vocab_size, device) for sampler in samplers
        }
        self._free = list(range(rows - 1, 0, -1))

    @property
    def num_used(self) -> int:
        return self.rows - 1 - len(self._free)

    def allocate(self, *, sampling: Mapping[str, tuple[SamplingParams, int, Sequence[int]]]) -> int:
        """A row with zeroed slots.

        Args:
            sampling: sampler name -> (parameters, draw key, prompt ids); samplers left out are greedy. What a
                sampler refuses (RequestError, PluginError) takes no row.
        """
        row = self._take()
        try:
            for name, (params, key, prompt_ids) in sampling.items():
                self.samplers[name].set_row(row, params, key, prompt_ids)
        except MstarError:
            self.free(row)
            raise
        for tensor in self.tensors.values():
            tensor[row].zero_()
        return row

    def copy_slots(self, source: int, target: int) -> None:
        """Let a forked item begin with its parent's slots; its samplers are its own."""
        self._fence()
        for tensor in self.tensors.values():
            tensor[target].copy_(tensor[source])

    def free(self, row: int) -> None:
        """Give a row back."""
        assert row in range(1, self.rows), f"row {row} is not in use"
        assert row not in self._free, f"row {row} is not in use"
        self._fence()
        for state in self.samplers.values():
            state.clear_row(row)
        self._free.append(row)

    def save(self, rows: Tensor) -> dict[str, Tensor]:
        """The slots of a batch, rows (B,) int64, as they are now. Samplers are undone by `sampling.unsample`."""
        return {name: tensor[rows] for name, tensor in self.tensors.items()}

    def restore(self, rows: Tensor, saved: Mapping[str, Tensor]) -> None:
        """Put back what `save` returned for the same rows."""
        self._fence()
        for name, values in saved.items():
            self.tensors[name][rows] = values

    def swap_out(self, row: int) -> SavedRow:
        """Move a row to host memory and give it back."""
        self._fence()
        saved = SavedRow(
            {name: tensor[row].to("cpu", copy=True) for name, tensor in self.tensors.items()},
            {name: state.snapshot_row(row) for name, state in self.samplers.items()},
        )
        self.free(row)
        return saved

    def swap_in(self, saved: SavedRow) -> int:
        """A row with what was saved; not always the one it was."""
        row = self._take()
        for name, value in saved.slots.items():
            self.tensors[name][row].copy_(value)
        for name, snapshot in saved.samplers.items():
            self.samplers[name].restore_row(row, snapshot)
        return row

    def check_integrity(self, rows: Sequence[int]) -> None:
        """Assert that exactly `rows` are in use and every tensor has a place for each."""
        assert sorted([0, *rows, *self._free]) == list(range(self.rows)), "rows leaked, or are in use twice"
        assert all(tensor.shape[0] == self.rows for tensor in self.tensors.values()), "a slot has too few rows"
        assert all(state.rows == self.rows for state in self.samplers.values()), "a sampler has too few rows"

    def _take(self) -> int:
        self._fence()
        if not self._free:
            self._grow()
        return self._free.pop()

    def _grow(self) -> None:
        for name, tensor in self.tensors.items():
            self.tensors[name] = torch.cat([tensor, torch.zeros_like(tensor)])
        for state in self.samplers.values():
            state.grow(2 * self.rows)
        self._free = list(range(2 * self.rows - 1, self.rows - 1, -1))
        self.rows *= 2
