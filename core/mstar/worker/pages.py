"""Keys and values behind the pages of a pool: where they are on the device, and their way to the host and back.

Which page belongs to whom is the pool's business. What leaves has all heads, however many ranks they are split among.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mstar.plugin.nodes import KVLayout

ALL = slice(None)


class PageStorage:
    """One module's.

    Attributes:
        tensor: (2, num_layers, num_pages, num_kv_heads, page_size, head_dim), keys first.
        keys, values: its layers.
        page_bytes: of one page here, over all layers.
        host_page_bytes: of one page that `read` gives.
        is_whole: whether all heads are here, so that `read` needs nobody else.
    """

    is_whole = True

    def __init__(
        self, layout: KVLayout, *, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        shape = (2, layout.num_layers, num_pages, layout.num_kv_heads, page_size, layout.head_dim)
        self.num_layers = layout.num_layers
        # One tensor, so that copying a page is one operation; zeros, because no mask hides a NaN from p @ v.
        self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.keys: list[Tensor] = list(self.tensor[0].unbind(0))
        self.values: list[Tensor] = list(self.tensor[1].unbind(0))
        self.page_bytes = self.host_page_bytes = page_bytes(layout, page_size=page_size, dtype=dtype)

    def copy(self, source: int, target: int) -> None:
        """Make a page what another is."""
        self.tensor[:, :, target].copy_(self.tensor[:, :, source])

    def read(self, pages: Sequence[int], *, layers: slice = ALL) -> Tensor:
        """A copy in host memory: (2, number of layers, n, num_kv_heads, page_size, head_dim)."""
        return self.select(pages, layers=layers).cpu()

    def select(self, pages: Sequence[int], *, layers: slice = ALL) -> Tensor:
        """The same on the device."""
        return self.tensor[:, layers].index_select(2, self._index(pages))

    def write(self, pages: Sequence[int], content: Tensor, *, first_layer: int = 0) -> None:
        """Put back what `read` gave, of whatever pages, to as many layers from `first_layer` on."""
        layers = self.tensor[:, first_layer : first_layer + content.shape[1]]
        layers.index_copy_(2, self._index(pages), content.to(self.tensor.device))

    def _index(self, pages: Sequence[int]) -> Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self.tensor.device)


def page_bytes(layout: KVLayout, *, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers, keys and values."""
    return 2 * layout.num_layers * layout.num_kv_heads * page_size * layout.head_dim * dtype.itemsize
