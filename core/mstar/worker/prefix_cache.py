"""Finds pages of a KV pool by what their tokens are made of. Owned by one `KVPool`, used by the worker's thread.

Owns the map between pages and content hashes, and which cached pages nobody references, least recently used first.
Does not know tensors, sequences or reference counts.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from hashlib import blake2b

Span = tuple[int, int, bytes]
"""(start, end, key): tokens [start, end) of a sequence hold content that ids do not tell; `key` tells it."""


def root_hash(position: float) -> bytes:
    """What the first page's hash follows: the position of a sequence's first token."""
    return struct.pack("<d", position)


def page_hash(previous: bytes, *, ids: list[int], start: int, spans: Iterable[Span]) -> bytes:
    """Hash of the page with tokens [start, start + len(ids)) that follows the page hashed `previous`.

    Every span that overlaps the page counts whole: its borders, and its key.
    """
    state = blake2b(previous, digest_size=32)
    state.update(array("q", ids).tobytes())
    end = start + len(ids)
    for span_start, span_end, key in spans:
        if span_start < end and span_end > start:
            state.update(struct.pack("<qqq", span_start, span_end, len(key)))
            state.update(key)
    return state.digest()


class PrefixCache:
    """Full pages by content. A cached page is either in use or idle; idle ones may be evicted.

    The pool calls `retire` when a page's last reference goes and `revive` when an idle page is referenced again.
    """

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._end_positions: dict[int, float | None] = {}
        self._idle: dict[int, None] = {}  # in order of last use

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def __contains__(self, page: int) -> bool:
        return page in self._hash_of

    def find(self, content: bytes) -> int | None:
        """The page with this content."""
        return self._page_of.get(content)

    def end_position(self, page: int) -> float | None:
        """Position that follows a cached page's last token; None: not known, so no hit may end there."""
        return self._end_positions[page]

    def insert(self, page: int, *, content: bytes, end_position: float | None) -> None:
        """Make a full page findable, unless another page has this content already."""
        if content not in self._page_of and page not in self._hash_of:
            self._page_of[content] = page
            self._hash_of[page] = content
            self._end_positions[page] = end_position

    def remove(self, page: int) -> None:
        """Forget what a page holds, if it was cached; it must not be idle."""
        content = self._hash_of.pop(page, None)
        if content is not None:
            del self._page_of[content], self._end_positions[page]

    def retire(self, page: int) -> bool:
        """A page's last reference has gone: keep it as idle if it is cached. Returns whether it was."""
        if page not in self._hash_of:
            return False
        self._idle[page] = None
        return True

    def revive(self, page: int) -> None:
        """An idle page is referenced again."""
        del self._idle[page]

    def evict(self) -> int:
        """Forget the idle page that was used longest ago, and return it."""
        page = next(iter(self._idle))
        del self._idle[page]
        self.remove(page)
        return page

    def check_integrity(self, references: list[int]) -> set[int]:
        """Assert that both maps agree and that exactly the unreferenced cached pages are idle. Returns those."""
        assert {content: page for page, content in self._hash_of.items()} == self._page_of, "hash maps disagree"
        assert self._end_positions.keys() == self._hash_of.keys(), "end positions disagree with hashes"
        idle = {page for page in self._hash_of if references[page] == 0}
        assert idle == set(self._idle), "idle pages are not those without references"
        return idle
