"""The processes of a tensor-parallel worker, as one of them sees them: collectives over torch.distributed.

gloo between CPUs, over the loopback device only; NCCL between GPUs. Nothing outlives the processes. A rank that is gone
fails the others' next collective, at the latest after a timeout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from mstar.errors import ConfigError, PluginError
from mstar.layers.parallel import Ranks, num_kv_heads, shard
from mstar.plugin.nodes import Node

HOST = "127.0.0.1"
TIMEOUT_S = 60.0  # of a collective: no rank is behind the others by as much


def open_store(size: int) -> distributed.TCPStore:
    """Where ranks find each other, on a port of its own; rank 0 keeps it."""
    return distributed.TCPStore(HOST, 0, size, is_master=True, wait_for_workers=False)


def join_store(port: int, size: int) -> distributed.TCPStore:
    """The store that rank 0 opened."""
    return distributed.TCPStore(HOST, port, size, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))


class ProcessRanks:
    """`layers.parallel.Ranks` of processes of this machine.

    Args:
        store: the same of all ranks.
        device: of this rank's tensors.
        timeout_s: of a collective; RuntimeError then.
        invariant: add in the order of ranks, so that an element's bits do not depend on how many there are beside it.

    Attributes:
        num_collectives: begun so far.
        is_broken: one has failed, and so will all others.
    """

    def __init__(
        self, rank: int, size: int, *, store: distributed.Store, device: torch.device, timeout_s: float = TIMEOUT_S,
        invariant: bool = False,
    ) -> None:  # fmt: skip
        self.rank, self.size = rank, size
        self.num_collectives, self.is_broken = 0, False
        self._invariant = invariant and size > 2  # two numbers have one sum
        timeout = timedelta(seconds=timeout_s)
        self._group: Any  # whose types torch does not give
        if device.type == "cpu":
            options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [distributed.ProcessGroupGloo.create_device(hostname=HOST)]
            options._timeout = timeout
            self._group = distributed.ProcessGroupGloo(store, rank, size, options)
        elif distributed.is_nccl_available():
            nccl = distributed.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            self._group = distributed.ProcessGroupNCCL(store, rank, size, nccl)
        else:
            raise ConfigError(f"tensor parallelism on {device} needs a torch with NCCL; install that")

    def sum(self, x: Tensor) -> Tensor:
        if self._invariant:
            first, *others = self._gathered(x)
            for other in others:
                first += other
            return first
        x = x.contiguous()
        self._do(self._group.allreduce, [x])
        return x

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._gathered(x), dim=-1)

    def share(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._do(self._group.broadcast, [x])
        return x

    def _gathered(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self._do(self._group.allgather, [parts], [x.contiguous()])
        return parts

    def _do(self, collective: Callable[..., Any], *operands: Any) -> None:
        self.num_collectives += 1
        try:
            collective(*operands).wait()
        except BaseException:
            self.is_broken = True
            raise


def split_node(node: Node, ranks: Ranks, *, name: str) -> None:
    """Make a new node, by the name that errors give it, one rank's share of itself. Raises as `shard` does."""
    layout = node.kv_layout
    if node.slots:
        raise PluginError(f"{name} has slots, which a node that is split among processes cannot have")
    shard(node, node.tensor_parallel, ranks, name=name, head_dim=layout.head_dim if layout else None)
    if layout is not None:
        heads = num_kv_heads(layout.num_kv_heads, size=ranks.size)
        node.kv_layout = dataclasses.replace(layout, num_kv_heads=heads)
