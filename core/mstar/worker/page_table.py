"""Which pages each sequence of a KV pool has, as rows of one array. Owned by one `KVPool`, used by the worker's thread.

Knows rows and page numbers; not what a page holds, nor who else has it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class PageTable:
    """A row per sequence: its pages in token order, 0 (the scratch page) past them."""

    def __init__(self) -> None:
        self._pages = np.zeros((16, 16), dtype=np.int32)
        self._free_rows = list(range(15, -1, -1))
        self._given: dict[tuple[int, ...], np.ndarray] = {}  # by `gather`, since a page last changed

    def take_row(self) -> int:
        """An empty row."""
        if not self._free_rows:
            rows = len(self._pages)
            self._pages = np.concatenate([self._pages, np.zeros_like(self._pages)])
            self._free_rows = list(range(2 * rows - 1, rows - 1, -1))
        return self._free_rows.pop()

    def free_row(self, row: int) -> None:
        """Give back a row, which is empty."""
        self._free_rows.append(row)

    def write(self, row: int, first: int, pages: list[int]) -> None:
        """Put pages at a row's places from `first` on; zeros end them."""
        self._given.clear()
        end = first + len(pages)
        while end > self._pages.shape[1]:
            self._pages = np.concatenate([self._pages, np.zeros_like(self._pages)], axis=1)
        self._pages[row, first:end] = pages

    def gather(self, rows: list[int], *, widest: int, num_rows: int, width: int) -> np.ndarray:
        """(B or `num_rows`, `widest` or `width`) int32: the first `widest` pages of these rows, padded with 0.

        The same array is given again until some page changes, so it is not to be written to.
        """
        found = self._given.get((num_rows, width, *rows))
        if found is None:
            found = np.zeros((max(num_rows, len(rows)), max(widest, width)), dtype=np.int32)
            found[: len(rows), :widest] = self._pages[rows, :widest]
            self._given[(num_rows, width, *rows)] = found
        return found

    def check_integrity(self, pages_of: Iterable[tuple[int, list[int]]]) -> None:
        """Assert that (row, pages) of all live sequences are just what the table holds."""
        held = dict(pages_of)
        assert sorted([*held, *self._free_rows]) == list(range(len(self._pages))), "table rows leaked"
        assert not self._pages[self._free_rows].any(), "a free table row has pages"
        for row, pages in held.items():
            assert self._pages[row].tolist() == pages + [0] * (self._pages.shape[1] - len(pages)), "page table is wrong"
