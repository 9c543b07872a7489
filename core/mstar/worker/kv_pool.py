"""The paged KV cache of one module: which page belongs to which sequences, and the tensors behind the pages.

Owned by the worker's thread. Knows nothing of requests, nodes or scheduling; has no clock and does no I/O.

    page        references  in prefix cache   who ends it
    unused      0           no                `reserve`, `match_prefix`, `attach`
    owned       >= 1        once full, if     `free`, `rollback`, `detach`, or a private copy in `reserve`
                            contents known
    idle        0           yes               a hit, or eviction (least recently used first) when `unused` is empty
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mstar.plugin.nodes import KVLayout
from mstar.worker.page_table import PageTable
from mstar.worker.pages import ALL, PageStorage
from mstar.worker.prefix_cache import PrefixCache, Span, page_hash, root_hash

if TYPE_CHECKING:
    from mstar.worker.swap import SwappedPages


class Jump(NamedTuple):
    """A commit of tokens [start, end) that moved the position from `before` to `after`, not by one per token."""

    start: int
    end: int
    before: float
    after: float


@dataclass(slots=True, eq=False)
class Sequence:
    """One KV history. Made, changed and freed by its `KVPool` only.

    Args:
        row: of the pool's page table; -1 when freed.
        start: position of the first token.
        position: of the next token.
        length: tokens written.
        pages: in token order; those past `length` are reserved.
        ids: token ids behind the first tokens. Shorter than `length`: what follows was not written from ids;
            longer: the rest is still to be rewritten after `KVPool.forget`.
        spans: content that ids do not tell.
        jumps: where positions were not consecutive.
        page_hashes: of the full pages whose contents are known, chained.
        writable: pages hold tokens [length, writable) and are this sequence's alone; 0: not known.
        image: where its pages are while it is swapped out.
    """

    row: int
    start: float = 0.0
    position: float = 0.0
    length: int = 0
    pages: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    jumps: list[Jump] = field(default_factory=list)
    page_hashes: list[bytes] = field(default_factory=list)
    writable: int = 0
    image: SwappedPages | None = None

    @property
    def swapped(self) -> bool:
        return self.image is not None

    @property
    def resident(self) -> bool:
        """Whether its pages are in the pool: neither freed nor swapped out."""
        return self.row >= 0 and self.image is None

    @property
    def history(self) -> list[int] | None:
        """Token ids from which every token can be rewritten; None if there is more to it than ids."""
        return self.ids if len(self.ids) >= self.length and not self.spans and not self.jumps else None

    @property
    def num_pending(self) -> int:
        """Tokens of the history that are still to be rewritten after `KVPool.forget`."""
        return max(0, len(self.ids) - self.length)

    def position_at(self, length: int) -> float | None:
        """Position of the token at index `length`; None if a commit left it open.

        Where one commit moved the position otherwise than by its number of tokens, tokens outside its spans are
        taken to count one each, so only places between two spans of one commit, or in a span, are open.
        """
        for start, end, before, after in reversed(self.jumps):
            if length >= end:
                return after + (length - end)
            if length > start:
                inside = [span for span in self.spans if span[0] < end and span[1] > start]
                if inside and length <= min(span[0] for span in inside):
                    return before + (length - start)
                if inside and length >= max(span[1] for span in inside):
                    return after - (end - length)
                return None
        return self.start + length

    def first_unkeyed(self) -> int:
        """Index of the first token whose position neither ids nor spans tell: nothing past it can be cached."""
        for jump in self.jumps:
            if not any(span[0] < jump.end and span[1] > jump.start for span in self.spans):
                return jump.start
        return sys.maxsize

    def cut_to(self, length: int, *, position: float) -> None:
        """Forget everything known about tokens from `length` on; pages and ids are the pool's to cut."""
        self.spans = [(start, min(end, length), key) for start, end, key in self.spans if start < length]
        jumps = [jump for jump in self.jumps if jump.end <= length]
        jumps += [
            Jump(jump.start, length, jump.before, position) for jump in self.jumps if jump.start < length < jump.end
        ]
        self.jumps = jumps
        self.length = length
        self.position = position
        self.writable = 0


class KVPool:
    """Paged keys and values of one module, shared copy-on-write by forks and through the prefix cache.

    Args:
        num_pages: page 0, the scratch page of padding, included.
        prefix_cache: keep full pages with known contents findable after their last sequence has gone.
        storage: of that many pages; made here by default.

    Attributes:
        keys, values: per layer (num_pages, num_kv_heads, page_size, head_dim).
        hit_tokens, queried_tokens: tokens `match_prefix` found and was asked for so far.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        prefix_cache: bool = True,
        fence: Callable[[], None] = lambda: None,
        storage: PageStorage | None = None,
    ) -> None:
        assert min(num_pages - 1, page_size) > 0, (num_pages, page_size)
        self.num_pages = num_pages
        self.page_size = page_size
        self.storage = storage or PageStorage(
            layout, num_pages=num_pages, page_size=page_size, dtype=dtype, device=device
        )
        self.page_bytes, self.host_page_bytes = self.storage.page_bytes, self.storage.host_page_bytes
        self.keys, self.values = self.storage.keys, self.storage.values
        self.hit_tokens = self.queried_tokens = 0
        self._prefix_cache = prefix_cache
        self._fence = fence
        self._cache = PrefixCache()
        self._references = [0] * num_pages
        self._freed: list[int] = []
        self._next_new = 1  # pages from here on were never used
        self._table = PageTable()

    @property
    def num_usable(self) -> int:
        """Pages that sequences can have."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that can be had now, those only the prefix cache holds included."""
        return len(self._freed) + self.num_pages - self._next_new + self._cache.num_idle

    @property
    def num_used(self) -> int:
        """Pages that sequences reference."""
        return self.num_usable - self.num_free

    # ---- a sequence's life ----------------------------------------------------------------------------------

    def create(self, *, position: float = 0.0) -> Sequence:
        """An empty sequence whose first token has this position."""
        return Sequence(self._table.take_row(), start=position, position=position)

    def fork(self, source: Sequence, *, at: int | None = None, position: float | None = None) -> Sequence:
        """A sequence that begins with the first `at` tokens of `source` (None: all), sharing their pages.

        Args:
            position: of the next token. None: what it was in `source` at that length, which must be known then
                (`Sequence.position_at`).
        """
        assert source.resident
        length = source.length if at is None else at
        assert 0 <= length <= source.length, (length, source.length)
        known = source.position if length == source.length else source.position_at(length)
        if position is None:
            position = known
        assert position is not None, f"the position after {length} tokens is not known; pass it"
        fork = self.create(position=source.start if length else position)
        fork.ids = source.ids[: length if at is not None else None]
        fork.page_hashes = source.page_hashes[: length // self.page_size]
        fork.spans, fork.jumps = source.spans, source.jumps
        fork.cut_to(length, position=position)
        if length and known is not None and position != known:
            fork.jumps.append(Jump(length, length, known, position))
        self._append_pages(fork, source.pages[: self._num_pages(length)])
        for page in fork.pages:
            self._references[page] += 1
        source.writable = 0
        return fork

    def free(self, sequence: Sequence) -> None:
        """End a sequence. Pages that are cached stay findable. A swapped one ends with `SwapSpace.drop`."""
        assert sequence.row >= 0, "sequence was freed before"
        assert not sequence.swapped, "sequence is swapped out; drop it from the swap space"
        self._drop_pages(sequence, keep=0)
        self._table.free_row(sequence.row)
        sequence.cut_to(0, position=sequence.start)
        sequence.row = -1

    def forget(self, sequence: Sequence) -> None:
        """Free a sequence's pages but keep its history, so that it can be rewritten with `commit(ids=...)`.

        `num_pending` counts down to 0 then; `match_prefix(sequence, sequence.history)` may shorten the work.
        """
        assert sequence.history is not None, "a sequence that was not written from ids alone cannot be rewritten"
        assert sequence.resident
        self._drop_pages(sequence, keep=0)
        sequence.page_hashes = []
        sequence.cut_to(0, position=sequence.start)

    # ---- writing --------------------------------------------------------------------------------------------

    def num_free_without(self, sequences: Iterable[Sequence]) -> int:
        """Pages that could be had now, were these sequences not there."""
        held = Counter(page for sequence in sequences for page in sequence.pages)
        return self.num_free + sum(self._references[page] == count for page, count in held.items())

    def pages_needed(self, sequence: Sequence, num_tokens: int, *, without: Iterable[Sequence] = ()) -> int:
        """Pages that `reserve` would take, the copy of a shared, partly filled last page included.

        Args:
            without: sequences to take as not there.
        """
        pages = sequence.pages
        first = sequence.length // self.page_size
        is_shared = False
        if num_tokens > 0 and first < len(pages):
            others = sum(first < len(other.pages) and other.pages[first] == pages[first] for other in without)
            is_shared = self._references[pages[first]] - others > 1
        return max(0, self._num_pages(sequence.length + num_tokens) - len(pages)) + is_shared

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for `num_tokens` more, in pages that are this sequence's alone and not findable.

        Returns False, with nothing changed, if there are not enough pages.
        """
        if sequence.length + num_tokens <= sequence.writable:
            return True
        assert sequence.resident
        if self.pages_needed(sequence, num_tokens) > self.num_free:
            return False
        first = sequence.length // self.page_size
        if num_tokens and first < len(sequence.pages):
            self._make_private(sequence, first)
        missing = self._num_pages(sequence.length + num_tokens) - len(sequence.pages)
        if missing > 0:
            self._append_pages(sequence, [self._take() for _ in range(missing)])
        if num_tokens:
            sequence.writable = len(sequence.pages) * self.page_size
        return True

    def commit(
        self,
        sequence: Sequence,
        num_tokens: int,
        *,
        ids: list[int] | None = None,
        spans: Iterable[Span] = (),
        advance: float | None = None,
    ) -> None:
        """Count `num_tokens` as written; their room was reserved.

        Args:
            ids: the tokens' ids; of no use after tokens without. None: they were not written from ids, or are told
                later by `learn`.
            spans: content keys, by token index in the sequence; those outside the new tokens are ignored. A span
                that was written in parts is given each time.
            advance: how far the position moves. None: by `num_tokens`. Otherwise positions must follow from the
                keys of the spans in these tokens; without a span, nothing is cached from here on.
        """
        before = sequence.length
        length = before + num_tokens
        assert length <= sequence.writable or num_tokens == 0, "tokens were committed without reserving them"
        sequence.length = length
        if advance is None or advance == num_tokens:
            sequence.position += num_tokens
        else:
            position = sequence.position
            sequence.position = position + advance
            sequence.jumps.append(Jump(before, length, position, position + advance))
        for span in spans:
            if span[0] < length and span[1] > before:
                sequence.spans = [known for known in sequence.spans if known[0] != span[0]]
                sequence.spans.append(span)
        known_ids = sequence.ids
        if ids is None:
            del known_ids[before:]
            return
        if len(known_ids) == before:
            assert len(ids) == num_tokens, (len(ids), num_tokens)
            known_ids += ids
        elif len(known_ids) > before:
            assert known_ids[before:length] == ids, "a rewritten history differs from the one it had"
        if length // self.page_size > len(sequence.page_hashes):
            self._cache_full_pages(sequence)

    def commit_rows(self, sequences: Iterable[Sequence]) -> None:
        """`commit` one token of each, without ids."""
        for sequence in sequences:
            before = sequence.length
            assert before < sequence.writable, "a token was committed without reserving it"
            sequence.length = before + 1
            sequence.position += 1
            if len(sequence.ids) > before:
                del sequence.ids[before:]

    def learn(self, rows: Iterable[tuple[Sequence, int, int]]) -> None:
        """Tell (sequence, index, id) of tokens that were committed without, because their step was still running.

        Where ids of earlier tokens are not known, or the sequence ended meanwhile, this one is of no use.
        """
        for sequence, index, token in rows:
            known = sequence.ids
            if len(known) == index < sequence.length:
                known.append(token)
                if (index + 1) % self.page_size == 0:
                    self._cache_full_pages(sequence)

    def rollback(self, sequence: Sequence, num_tokens: int, *, advance: float | None = None) -> None:
        """Undo the last commits, once the steps that wrote them have run: a late finish leaves no trace.

        Pages past the new length are given back; no hit will find what was undone, unless a fork has it too.

        Args:
            advance: how far the position had moved (None: as known from the commits).
        """
        assert sequence.resident
        assert 0 <= num_tokens <= sequence.length, (num_tokens, sequence.length)
        if num_tokens == 0:
            return
        length = sequence.length - num_tokens
        position = sequence.position_at(length) if advance is None else sequence.position - advance
        assert position is not None, f"the position after {length} tokens is not known; pass advance"
        if not sequence.num_pending:
            del sequence.ids[length:]
        first = length // self.page_size
        for page in sequence.pages[first:]:
            if self._references[page] == 1:
                self._cache.remove(page)
        del sequence.page_hashes[first:]
        self._drop_pages(sequence, keep=self._num_pages(length))
        sequence.cut_to(length, position=position)

    # ---- prefix cache ---------------------------------------------------------------------------------------

    def match_prefix(self, sequence: Sequence, ids: list[int], spans: Iterable[Span] = ()) -> int:
        """Give an empty sequence the cached pages that hold its first tokens; returns how many tokens that is.

        Less than `len(ids)`, so that the last token is computed, and never inside a span.
        """
        assert sequence.resident
        assert sequence.length == 0, "only an empty sequence can take a prefix"
        spans = list(spans)
        self.queried_tokens += len(ids)
        size = self.page_size
        content = root_hash(sequence.start)
        found: list[tuple[int, bytes]] = []
        num_hits = 0
        position: float | None = None
        for start in range(0, len(ids) - size, size):
            end = start + size
            content = page_hash(content, ids=ids[start:end], start=start, spans=spans)
            page = self._cache.find(content)
            if page is None:
                break
            found.append((page, content))
            end_position = self._cache.end_position(page)
            if end_position is not None and not any(span[0] < end < span[1] for span in spans):
                num_hits, position = len(found), end_position
        if position is None:
            return 0
        self._drop_pages(sequence, keep=0)  # what was reserved before
        self._append_pages(sequence, [page for page, _ in found[:num_hits]])
        for page in sequence.pages:
            self._reference(page)
        length = num_hits * size
        if not sequence.num_pending:
            sequence.ids = list(ids[:length])
        sequence.page_hashes = [content for _, content in found[:num_hits]]
        sequence.spans = spans
        if position != sequence.start + length:
            sequence.jumps = [Jump(0, length, sequence.start, position)]
        sequence.cut_to(length, position=position)
        self.hit_tokens += length
        return length

    def _cache_full_pages(self, sequence: Sequence) -> None:
        """Hash the pages that have become full, and make them findable."""
        if not self._prefix_cache:
            return
        size = self.page_size
        hashes = sequence.page_hashes
        num_known = min(len(sequence.ids), sequence.length)
        if num_known // size <= len(hashes):
            return
        for index in range(len(hashes), min(num_known, sequence.first_unkeyed()) // size):
            start, end = index * size, (index + 1) * size
            previous = hashes[-1] if hashes else root_hash(sequence.start)
            content = page_hash(previous, ids=sequence.ids[start:end], start=start, spans=sequence.spans)
            hashes.append(content)
            self._cache.insert(sequence.pages[index], content=content, end_position=sequence.position_at(end))

    # ---- tables and pages -----------------------------------------------------------------------------------

    def page_table(self, sequences: Iterable[Sequence], *, num_rows: int = 0, width: int = 1) -> np.ndarray:
        """(B or more, most pages of any or more) int32, reserved pages included; 0 past a sequence's pages.

        Not to be written to: the same array may be given again.
        """
        widest = max([len(sequence.pages) for sequence in sequences], default=0)
        rows = [sequence.row for sequence in sequences]
        return self._table.gather(rows, widest=widest, num_rows=num_rows, width=width)

    def next_slots(self, sequences: Iterable[Sequence]) -> list[int]:
        """Where each sequence's next token goes, for which there is room: page * page_size + offset."""
        size = self.page_size
        return [s.pages[s.length // size] * size + s.length % size for s in sequences]

    def read_pages(self, pages: list[int], *, layers: slice = ALL) -> Tensor:
        """A copy in host memory: (2, num_layers, n, num_kv_heads, page_size, head_dim), keys first."""
        self._fence()
        return self.storage.read(pages, layers=layers)

    def write_pages(self, sequence: Sequence, content: Tensor, *, start: int, first_layer: int = 0) -> None:
        """Fill pages that have been reserved, from token `start` on, with what `read_pages` gave. See `settle`."""
        pages = sequence.pages[start // self.page_size :][: content.shape[2]]
        assert len(pages) == content.shape[2] and start >= sequence.length // self.page_size * self.page_size, start
        self._fence()
        self.storage.write(pages, content, first_layer=first_layer)

    def settle(self, sequence: Sequence, source: Sequence) -> None:
        """Make a sequence, all of whose pages have been filled, what `source`, a description, says."""
        sequence.length, sequence.position, sequence.ids = source.length, source.position, source.ids
        sequence.spans, sequence.jumps = source.spans, source.jumps
        self._cache_full_pages(sequence)

    def detach(self, sequence: Sequence, *, image: SwappedPages) -> None:
        """Give a sequence's pages back; `image` has their contents."""
        self._drop_pages(sequence, keep=0)
        sequence.writable = 0
        sequence.image = image

    def attach(self, sequences: list[Sequence], *, indices: list[list[int]], content: Tensor) -> bool:
        """Give detached sequences new pages: number j of `content` becomes one page, shared where indices repeat.

        Returns False, with nothing changed, if there are not enough pages.
        """
        num_pages = content.shape[2]
        if num_pages > self.num_free:
            return False
        pages = [self._take() for _ in range(num_pages)]
        if pages:
            self._fence()
            self.storage.write(pages, content)
        for page in pages:
            self._references[page] = 0  # counted again below, once per sequence
        for sequence, own in zip(sequences, indices, strict=True):
            self._append_pages(sequence, [pages[i] for i in own])
            sequence.image = None
            for page in sequence.pages:
                self._references[page] += 1
            for i, page_content in enumerate(sequence.page_hashes):
                end = (i + 1) * self.page_size
                self._cache.insert(sequence.pages[i], content=page_content, end_position=sequence.position_at(end))
        return True

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _take(self) -> int:
        """A page with one reference; freed pages before new ones, those before cached ones."""
        if self._freed:
            page = self._freed.pop()
        elif self._next_new < self.num_pages:
            page = self._next_new
            self._next_new += 1
        else:
            page = self._cache.evict()
        self._references[page] = 1
        return page

    def _reference(self, page: int) -> None:
        if self._references[page] == 0:
            self._cache.revive(page)
        self._references[page] += 1

    def _make_private(self, sequence: Sequence, index: int) -> None:
        page = sequence.pages[index]
        if self._references[page] == 1:
            self._cache.remove(page)
            return
        copy = self._take()
        self._fence()
        self.storage.copy(page, copy)
        self._references[page] -= 1
        sequence.pages[index] = copy
        self._table.write(sequence.row, index, [copy])

    def _append_pages(self, sequence: Sequence, pages: list[int]) -> None:
        self._table.write(sequence.row, len(sequence.pages), pages)
        sequence.pages += pages

    def _drop_pages(self, sequence: Sequence, *, keep: int) -> None:
        dropped = sequence.pages[keep:]
        self._table.write(sequence.row, keep, [0] * len(dropped))
        del sequence.pages[keep:]
        for page in reversed(dropped):  # a prefix outlives what follows it
            self._references[page] -= 1
            if self._references[page] == 0 and not self._cache.retire(page):
                self._freed.append(page)

    # ---- invariants -----------------------------------------------------------------------------------------

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Assert that the pool is consistent, given all live sequences (swapped ones too). Slow; for idle times."""
        counted = Counter(page for sequence in sequences for page in sequence.pages)
        assert self._references == [counted[page] for page in range(self.num_pages)], "reference counts are wrong"
        assert 0 not in counted, "the scratch page is in use"
        idle = self._cache.check_integrity(self._references)
        free = set(self._freed)
        assert len(free) == len(self._freed), "a page was freed twice"
        new = set(range(self._next_new, self.num_pages))
        places = [set(counted), free, new, idle]
        assert sum(map(len, places)) == self.num_usable, "pages leaked, or are in two places"
        assert set().union(*places) == set(range(1, self.num_pages)), "pages leaked, or are in two places"
        self._table.check_integrity((sequence.row, sequence.pages) for sequence in sequences)
        for sequence in sequences:
            self._check_sequence(sequence)

    def _check_sequence(self, sequence: Sequence) -> None:
        size, num_pages = self.page_size, len(sequence.pages)
        if sequence.image is not None:
            assert (num_pages, sequence.writable) == (0, 0), "a swapped sequence has pages"
            return
        assert sequence.length <= num_pages * size, "tokens without a page"
        if sequence.writable > sequence.length:
            assert sequence.writable <= num_pages * size, "more is writable than reserved"
            for page in sequence.pages[sequence.length // size :]:
                assert self._references[page] == 1, "a writable page is shared"
                assert page not in self._cache, "a writable page can be found"
        previous = root_hash(sequence.start)
        for index, content in enumerate(sequence.page_hashes):
            start, end = index * size, (index + 1) * size
            assert end <= min(sequence.length, len(sequence.ids)), "a page that is not full or known is hashed"
            # A span that was cut meanwhile was hashed whole, so pages with spans are not hashed again.
            if not any(span[0] < end and span[1] > start for span in sequence.spans):
                again = page_hash(previous, ids=sequence.ids[start:end], start=start, spans=())
                assert content == again, "a page hash does not fit its ids"
            previous = content
