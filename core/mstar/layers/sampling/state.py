"""Sampling parameters and penalty counts of live requests, as rows of tensors. Knows rows, not requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from mstar.errors import PluginError, RequestError
from mstar.types import SamplingParams

_COLUMNS: dict[str, tuple[torch.dtype, float]] = {  # what a row consists of, and an empty one holds: greedy
    "temperature": (torch.float32, 0),
    "top_k": (torch.int64, 0),
    "tail": (torch.float32, -1),
    "min_p": (torch.float32, 0),
    "repetition": (torch.float32, 1),
    "presence": (torch.float32, 0),
    "frequency": (torch.float32, 0),
    "key": (torch.int64, 0),
    "step": (torch.int64, 0),
    "bias_index": (torch.int64, -1),
    "bias_value": (torch.float32, 0),
    "counts": (torch.int32, 0),
    "prompt_mask": (torch.bool, False),
}
_OF_PENALTIES = {"counts": ("repetition", "additive"), "prompt_mask": ("repetition",)}  # and which need them

LEAST_TEMPERATURE = 1e-5  # below, scores would overflow; the draw is greedy


_FEATURES: dict[str, Callable[[SamplingParams], bool]] = {
    "random": lambda params: params.temperature > 0,
    "filter": lambda params: params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0),
    "bias": lambda params: bool(params.logit_bias),
    "repetition": lambda params: params.repetition_penalty != 1,
    "additive": lambda params: params.presence_penalty != 0 or params.frequency_penalty != 0,
}


@dataclass(frozen=True, slots=True)
class RowSnapshot:
    """A row on the host, for swapping."""

    params: SamplingParams | None
    columns: dict[str, Tensor]


@dataclass(slots=True, eq=False)
class SamplingState:
    """One sampler's rows, R of them; row 0 is scratch, for padding.

    Args:
        temperature: (R,) float32; 0 is greedy, and switches top-k, top-p and min-p off.
        top_k: (R,) int64; 0 is off.
        tail: (R,) float32, 1 - top_p rounded once: the mass that may go; -1 is off.
        min_p, repetition, presence, frequency: (R,) float32.
        key, step: (R,) int64: what the next draw is a function of.
        bias_index, bias_value: (R, max_bias) int64 (-1: unused) and float32.
        counts: (R, V) int32, how often each token was generated; None until a row has a penalty, and kept right
            for rows that have one only.
        prompt_mask: (R, V) bool, tokens of the prompt; None until a row has a repetition penalty.
    """

    vocab_size: int
    device: torch.device
    temperature: Tensor
    top_k: Tensor
    tail: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    key: Tensor
    step: Tensor
    bias_index: Tensor
    bias_value: Tensor
    counts: Tensor | None = None
    prompt_mask: Tensor | None = None
    addresses: Any = field(default=None, init=False, repr=False)  # set by `native`, which says what it is
    _params: dict[int, SamplingParams] = field(default_factory=dict)
    _users: dict[str, set[int]] = field(default_factory=lambda: {name: set() for name in _FEATURES})

    @classmethod
    def allocate(cls, rows: int, vocab_size: int, device: torch.device | str, max_bias: int = 300) -> SamplingState:
        """A state of `rows` empty rows."""
        target = torch.device(device)
        tensors: dict[str, Any] = {}
        for name, (dtype, fill) in _COLUMNS.items():
            if name not in _OF_PENALTIES:
                shape = (rows, max_bias) if name.startswith("bias") else (rows,)
                tensors[name] = torch.full(shape, fill, dtype=dtype, device=target)
        return cls(vocab_size=vocab_size, device=target, **tensors)

    @property
    def rows(self) -> int:
        return self.key.shape[0]

    def uses(self, feature: str) -> bool:
        """Whether any row uses a feature: "random", "filter", "bias", "repetition" or "additive"."""
        return bool(self._users[feature])

    def set_row(self, row: int, params: SamplingParams, key: int, prompt_ids: Sequence[int] = ()) -> None:
        """Begin a request at `row`. Raises RequestError for a logit bias outside the vocabulary."""
        bias = self._check_bias(params)
        if params.temperature < LEAST_TEMPERATURE:
            params = msgspec.structs.replace(params, temperature=0.0)
        self.clear_row(row)
        self._register(row, params)
        values: dict[str, Any] = {
            "temperature": params.temperature,
            "repetition": params.repetition_penalty,
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
            "key": key,
        }
        if params.temperature > 0:
            tail = 1 - params.top_p if params.top_p < 1 else -1
            values |= {"top_k": max(params.top_k, 0), "tail": tail, "min_p": params.min_p}
        for name, value in values.items():
            getattr(self, name)[row] = value
        self.bias_index[row, : len(bias)] = torch.tensor(list(bias), dtype=torch.int64)
        self.bias_value[row, : len(bias)] = torch.tensor(list(bias.values()))
        if params.repetition_penalty != 1 and self.prompt_mask is not None:
            ids = torch.as_tensor(prompt_ids, dtype=torch.int64)
            outside = ids[(ids < 0) | (ids >= self.vocab_size)].tolist()
            if outside:
                raise PluginError(
                    f"a sampler's prompt holds token id {outside[0]}, outside its vocabulary of {self.vocab_size}"
                )
            self.prompt_mask[row, ids.to(self.device)] = True

    def clear_row(self, row: int) -> None:
        """End the request at `row`: greedy, no penalties, step 0."""
        self._params.pop(row, None)
        for users in self._users.values():
            users.discard(row)
        for name, column in self._columns():
            column[row] = _COLUMNS[name][1]

    def snapshot_row(self, row: int) -> RowSnapshot:
        """The row's content on the host."""
        taken = self._take(row)
        return RowSnapshot(taken.params, {name: value.cpu() for name, value in taken.columns.items()})

    def restore_row(self, row: int, snapshot: RowSnapshot) -> None:
        """Put a snapshot back, at any row."""
        self.clear_row(row)
        if snapshot.params is not None:
            self._register(row, snapshot.params)
        for name, value in snapshot.columns.items():
            getattr(self, name)[row] = value.to(self.device)

    def grow(self, rows: int) -> None:
        """Make room for `rows` rows; the present ones keep their content."""
        for name, column in self._columns():
            more = column.new_full((max(rows - len(column), 0), *column.shape[1:]), _COLUMNS[name][1])
            setattr(self, name, torch.cat((column, more)))

    def _columns(self) -> list[tuple[str, Tensor]]:
        """The tensors there are, by name."""
        return [(name, column) for name in _COLUMNS if (column := getattr(self, name)) is not None]

    def _check_bias(self, params: SamplingParams) -> dict[int, float]:
        bias = params.logit_bias or {}
        most = self.bias_index.shape[1]
        if len(bias) > most:
            raise RequestError(f"logit_bias has {len(bias)} entries; the limit is {most}", param="logit_bias")
        for text in bias:
            if not text.isdecimal() or int(text) >= self.vocab_size:
                message = f"logit_bias names token {text!r}; ids of this model are 0 to {self.vocab_size - 1}"
                raise RequestError(message, param="logit_bias")
        return {int(text): value for text, value in bias.items()}

    def _register(self, row: int, params: SamplingParams) -> None:
        self._params[row] = params
        for name, is_used in _FEATURES.items():
            if is_used(params):
                self._users[name].add(row)
        for name, features in _OF_PENALTIES.items():
            if getattr(self, name) is None and any(row in self._users[feature] for feature in features):
                shape = (self.rows, self.vocab_size)
                setattr(self, name, torch.zeros(shape, dtype=_COLUMNS[name][0], device=self.device))

    def _take(self, row: int) -> RowSnapshot:
        is_penalised = row in self._users["repetition"] or row in self._users["additive"]
        columns = {n: column[row].clone() for n, column in self._columns() if is_penalised or n not in _OF_PENALTIES}
        return RowSnapshot(self._params.get(row), columns)
