"""Host memory for the pages of preempted requests. Owned by the worker's thread.

A request's sequences in one pool are swapped together, each distinct page once. Does not know requests, pools'
bookkeeping, or when to swap.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mstar.worker.kv_pool import KVPool, Sequence


@dataclass(slots=True, eq=False)
class SwappedPages:
    """The pages of some sequences of one pool.

    Args:
        sequences: all that were swapped together.
        indices: per sequence, which page of `content` each of its pages is.
        content: (2, num_layers, n, num_kv_heads, page_size, head_dim) in host memory.
    """

    sequences: list[Sequence]
    indices: list[list[int]]
    content: Tensor

    @property
    def num_bytes(self) -> int:
        return self.content.nbytes

    def compact(self) -> None:
        """Give up the pages that no sequence has any more."""
        used = sorted({i for own in self.indices for i in own})
        if len(used) < self.content.shape[2]:
            number = {old: new for new, old in enumerate(used)}
            self.indices = [[number[i] for i in own] for own in self.indices]
            self.content = self.content[:, :, used]


class SwapSpace:
    """Holds up to `limit_bytes` of swapped pages, over all pools."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._images: dict[SwappedPages, None] = {}

    @property
    def used_bytes(self) -> int:
        return sum(image.num_bytes for image in self._images)

    def bytes_needed(self, pool: KVPool, sequences: list[Sequence]) -> int:
        """What `swap_out` would take; sum it over a request's pools to know beforehand whether all of it fits."""
        return pool.host_page_bytes * len(self._written_pages(pool, sequences))

    def pages_needed(self, sequences: list[Sequence]) -> int:
        """Free pages that `swap_in` would take, all of one pool."""
        return self._image_of(sequences).content.shape[2] if sequences else 0

    def can_hold(self, num_bytes: int) -> bool:
        """Whether there is room for `num_bytes` more."""
        return self.used_bytes + num_bytes <= self.limit_bytes

    def swap_out(self, pool: KVPool, sequences: list[Sequence]) -> bool:
        """Move what the sequences have written to host memory and give their pages back.

        Others that share a page keep it. Reserved pages without tokens are given back for good. Returns False,
        with nothing changed, if there is no room.
        """
        if not sequences:
            return True
        assert not any(sequence.swapped for sequence in sequences), "a sequence is swapped out already"
        if not self.can_hold(self.bytes_needed(pool, sequences)):
            return False
        written = self._written_pages(pool, sequences)
        number = {page: i for i, page in enumerate(written)}
        indices = [
            [number[page] for page in sequence.pages[: -(-sequence.length // pool.page_size)]] for sequence in sequences
        ]
        image = SwappedPages(list(sequences), indices, pool.read_pages(written))
        self._images[image] = None
        for sequence in sequences:
            pool.detach(sequence, image=image)
        return True

    def swap_in(self, pool: KVPool, sequences: list[Sequence]) -> bool:
        """Bring sequences back that were swapped out together: same contents, same sharing among them.

        Returns False, with nothing changed, if the pool has too few pages.
        """
        if not sequences:
            return True
        image = self._image_of(sequences)
        if not pool.attach(image.sequences, indices=image.indices, content=image.content):
            return False
        del self._images[image]
        return True

    def drop(self, pool: KVPool, sequences: list[Sequence]) -> None:
        """End swapped sequences. What was swapped out together is given up with the last of it."""
        for sequence in sequences:
            image = sequence.image
            assert image is not None, "sequence is not swapped out"
            index = image.sequences.index(sequence)
            del image.sequences[index], image.indices[index]
            if not image.sequences:
                del self._images[image]
            sequence.image = None
            pool.free(sequence)
            image.compact()

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Assert that exactly the swapped among all live sequences, of all pools, have an image here."""
        held = [sequence for image in self._images for sequence in image.sequences]
        assert len(held) == len(set(held)), "a sequence has two images"
        assert set(held) == {sequence for sequence in sequences if sequence.swapped}, "images and sequences disagree"
        for image in self._images:
            used = {i for own in image.indices for i in own}
            assert used == set(range(image.content.shape[2])), "an image holds pages that no sequence has"
            assert all(sequence.image is image for sequence in image.sequences)
        assert self.used_bytes <= self.limit_bytes, "the swap space is over its limit"

    def _image_of(self, sequences: list[Sequence]) -> SwappedPages:
        image = sequences[0].image
        assert image is not None, "sequences are not swapped out"
        assert set(image.sequences) == set(sequences), "sequences were not swapped out together"
        return image

    def _written_pages(self, pool: KVPool, sequences: list[Sequence]) -> list[int]:
        pages = {
            page: None for sequence in sequences for page in sequence.pages[: -(-sequence.length // pool.page_size)]
        }
        return list(pages)
