from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from mstar.config import EngineConfig
from mstar.ipc.ranks import CallMethod, Settle, ToRank, Wire, restored, spared
from mstar.plugin.nodes import KVLayout
from mstar.worker.kv_pool import KVPool
from mstar.worker.pages import PageStorage
from mstar.worker.swap import SwapSpace
from mstar.worker.team import Team, _SplitPages

SIZES: dict[str, Any] = {"num_pages": 6, "page_size": 3, "dtype": torch.float32, "device": "cpu"}


@dataclass
class Fellows:
    """The other ranks' pages, in this process."""

    pages: list[PageStorage]

    @property
    def ranks(self) -> Any:
        return SimpleNamespace(size=len(self.pages) + 1)

    def copy_page(self, module: str, source: int, target: int) -> None:
        for own in self.pages:
            own.copy(source, target)

    def read_pages(self, module: str, pages: Sequence[int]) -> list[Tensor]:
        return [own.read(pages) for own in self.pages]

    def write_pages(
        self, module: str, pages: Sequence[int], contents: Sequence[Tensor], *, first_layer: int = 0
    ) -> None:
        for own, content in zip(self.pages, contents, strict=True):
            own.write(pages, content, first_layer=first_layer)


@pytest.mark.parametrize(("total", "size"), [(4, 2), (2, 2), (2, 4), (1, 3)])
def test_pages_leave_with_all_heads_and_come_back_to_their_ranks(total: int, size: int) -> None:
    layout = KVLayout(num_layers=2, num_kv_heads=max(1, total // size), head_dim=5)
    fellows = Fellows([PageStorage(layout, **SIZES) for _ in range(size - 1)])
    split = _SplitPages(cast(Team, fellows), "lm", layout, total_heads=total, **SIZES)
    whole = PageStorage(KVLayout(num_layers=2, num_kv_heads=total, head_dim=5), **SIZES)
    content = torch.randn(2, 2, 3, total, 3, 5, generator=torch.Generator().manual_seed(0))
    for pages in (split, whole):
        pages.write([4, 1, 2], content)
        pages.copy(1, 5)
    assert torch.equal(split.read([2, 5, 4, 3]), whole.read([2, 5, 4, 3]))
    for pages in (split, whole):  # the second layer alone
        pages.write([4, 1], content[:, 1:, 1:], first_layer=1)
    assert torch.equal(split.read([1, 4], layers=slice(1, 2)), whole.read([1, 4])[:, 1:])
    split.write([4, 1, 2], content)
    assert split.read([]).shape == whole.read([]).shape
    assert split.host_page_bytes == whole.page_bytes == split.read([1]).nbytes
    every = [split, *fellows.pages]
    for rank, own in enumerate(every):
        first = rank * total // size
        assert torch.equal(own.tensor[:, :, 4], content[:, :, 0, first : first + layout.num_kv_heads])


def test_the_swap_space_counts_what_split_pages_take_on_the_host() -> None:
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=5)
    fellows = Fellows([PageStorage(layout, **SIZES)])
    storage = _SplitPages(cast(Team, fellows), "lm", layout, total_heads=2, **SIZES)
    pool, space = KVPool(layout, storage=storage, **SIZES), SwapSpace(1 << 20)
    sequence = pool.create()
    assert pool.reserve(sequence, 4)
    pool.commit(sequence, 4, ids=[1, 2, 3, 4])
    needed = space.bytes_needed(pool, [sequence])
    assert space.swap_out(pool, [sequence]) and space.used_bytes == needed == 2 * storage.host_page_bytes
    assert space.swap_in(pool, [sequence]) and space.used_bytes == 0


# ---- the wire ---------------------------------------------------------------------------------------------


def wires(timeout_s: float = 5.0) -> tuple[Wire, Wire]:
    ours, theirs = socket.socketpair()
    return Wire(ours, ToRank, timeout_s=timeout_s), Wire(theirs, ToRank, timeout_s=timeout_s)


def test_large_tensors_come_by_a_collective_in_order() -> None:
    one, other = wires()
    small, large, larger = torch.arange(3), torch.randn(5000), torch.randn(100, 100).bfloat16()
    inputs = {"items": [None, [small, large], "word"], "rows": larger, "bits": torch.ones(2, dtype=torch.bool)}
    brought = list[Tensor]()
    message = CallMethod(
        module="lm", method="decode", num_rows=2, row_multiple=1, columns={}, present={}, plan={}, attention=None,
        inputs=spared(inputs, brought.append),
    )  # fmt: skip
    assert [id(tensor) for tensor in brought] == [id(large), id(larger)]
    one.send(message)
    coming = iter(brought)

    def take(note: Any) -> Tensor:
        tensor = next(coming)
        room = note.empty(torch.device("cpu"))
        assert (room.shape, room.dtype) == (tensor.shape, tensor.dtype)
        return tensor

    found = restored(other.receive().inputs, take)
    assert found["items"][0] is None and found["items"][2] == "word"
    assert torch.equal(found["items"][1][0], small) and found["items"][1][1] is large and found["rows"] is larger
    assert found["bits"].dtype is torch.bool


def test_a_call_that_fails_as_ranks_are_lost_tells_nobody_before_the_loss_is_told() -> None:
    began, told = threading.Event(), list[str]()

    def end(reason: str) -> None:
        began.set()
        time.sleep(0.2)  # a process ends here
        told.append(reason)

    team = Team(1, config=EngineConfig(plugin="echo"), device=torch.device("cpu"), on_lost=end)
    watching = threading.Thread(target=team._lose, args=("rank 1 has ended: SIGKILL",))
    watching.start()
    began.wait()
    team.ranks.is_broken = True
    team._settle()  # of the call
    assert told == ["rank 1 has ended: SIGKILL"]
    watching.join()
    team.close()


def test_a_wire_knows_when_nobody_is_there_or_answers() -> None:
    one, other = wires(timeout_s=0.05)
    with pytest.raises(TimeoutError):
        one.receive()
    with pytest.raises(TypeError, match="cannot cross"):
        one.send(CallMethod(
            module="", method="", num_rows=1, row_multiple=1, columns={"x": object()}, present={}, plan={},
            attention=None, inputs={},
        ))  # fmt: skip
    one.send(Settle())
    assert other.receive() == Settle()
    one.close()
    with pytest.raises(EOFError):
        other.receive(forever=True)
    with pytest.raises(OSError, match=r"."):
        other.send(Settle())
