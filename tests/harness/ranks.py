"""Ranks of a tensor-parallel model, as threads or as processes; and the least of a worker, for a bare node."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import multiprocessing
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import served
import torch
from torch import Tensor

from mstar.config import EngineConfig
from mstar.layers.attention import KVBatch, build_plan, choose_backend
from mstar.layers.parallel import Ranks
from mstar.plugin.nodes import Context, Node
from mstar.worker.ranks import ProcessRanks, join_store, open_store
from mstar.worker.team import Team
from mstar.worker.worker import Worker

TIMEOUT_S = 60


# ---- threads --------------------------------------------------------------------------------------------


@dataclass
class ThreadRanks:
    """One of several threads."""

    rank: int
    size: int
    meeting: threading.Barrier
    brought: list[Tensor]

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self._all(x)).sum(0)

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._all(x), dim=-1)

    def share(self, x: Tensor) -> Tensor:
        return self._all(x)[0].clone()

    def _all(self, x: Tensor) -> list[Tensor]:
        self.brought[self.rank] = x
        self.meeting.wait(TIMEOUT_S)
        found = list(self.brought)
        self.meeting.wait(TIMEOUT_S)
        return found


def in_threads(function: Callable[[Ranks], Any], *, size: int) -> list[Any]:
    """What `function` gives as each of `size` ranks."""
    meeting, brought = threading.Barrier(size), [torch.zeros(0)] * size

    def run(rank: int) -> Any:
        try:
            with torch.inference_mode():
                return function(ThreadRanks(rank, size, meeting, brought))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


# ---- processes ------------------------------------------------------------------------------------------


def in_processes(function: Callable[..., Any], *args: Any, size: int = 2, invariant: bool = False) -> list[Any]:
    """What `function(ranks, *args)`, of a module's top level, gives at each of `size` processes; rank 0 is this one."""
    store, context = open_store(size), multiprocessing.get_context("spawn")
    source = inspect.getsourcefile(function)
    pipes, children = [], []
    for rank in range(1, size):
        ours, theirs = context.Pipe(duplex=False)
        given = (rank, size, store.port, invariant, source, function.__name__, args, theirs)
        children.append(context.Process(target=_child, args=given, daemon=True))
        children[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        with torch.inference_mode():
            found = [function(_ranks(0, size, store, invariant), *args)]
        for pipe in pipes:
            assert pipe.poll(TIMEOUT_S), "a rank gave nothing"
            found.append(pickle.loads(pipe.recv_bytes()))
    finally:
        for child in children:
            child.join(5)
            child.kill()
            child.join()
    return found


def _ranks(rank: int, size: int, store: Any, invariant: bool) -> Ranks:
    return ProcessRanks(rank, size, store=store, device=torch.device("cpu"), timeout_s=TIMEOUT_S, invariant=invariant)


def _child(
    rank: int, size: int, port: int, invariant: bool, source: str, name: str, args: Any, pipe: Connection
) -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(source).parent))
    spec = importlib.util.spec_from_file_location("of_ranks", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["of_ranks"] = module
    spec.loader.exec_module(module)
    with torch.inference_mode():
        found = getattr(module, name)(_ranks(rank, size, join_store(port, size), invariant), *args)
    pipe.send_bytes(pickle.dumps(found))


# ---- an engine ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def split_worker(*, size: int = 2, lost: list[str] | None = None, **settings: Any) -> Iterator[Team]:
    """Within, the worker of an engine that `served` starts with these settings is so many processes.

    Args:
        lost: gets the reason if they cannot go on together, which is an error otherwise.
    """
    reasons: list[str] = []
    config = EngineConfig(**settings)
    on_lost = (reasons if lost is None else lost).append
    with Team(size, config=config, device=torch.device("cpu"), on_lost=on_lost, timeout_s=TIMEOUT_S) as team:

        class Split(Worker):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments, team=team)  # type: ignore[misc]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(served, "Worker", Split)
            yield team
    assert not reasons


# ---- a bare node ----------------------------------------------------------------------------------------

PAGE, PAGES = 16, 8


@dataclass
class Bare:
    """Just enough of a worker to call a node's methods on rows of a paged cache. Draws are greedy.

    Args:
        logits: what was drawn from so far.
    """

    node: Node
    rows: int
    logits: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        layout = self.node.kv_layout
        assert layout is not None
        shape = (1 + self.rows * PAGES, layout.num_kv_heads, PAGE, layout.head_dim)
        self.keys, self.values = ([torch.zeros(shape) for _ in range(layout.num_layers)] for _ in range(2))
        self.table = np.arange(1, 1 + self.rows * PAGES, dtype=np.int32).reshape(self.rows, PAGES)
        self.lengths = np.zeros(self.rows, dtype=np.int32)

    def context(self, counts: list[int], *, write: bool = True, plan: dict[str, Tensor] | None = None) -> Context:
        """Of a call with so many tokens of each row."""
        new = np.array(counts, dtype=np.int32)
        attention = build_plan(
            query_lens=new, context_lens=self.lengths, page_table=self.table, page_size=PAGE, device="cpu", write=write
        )
        at = [np.arange(start, start + count) for start, count in zip(self.lengths, new, strict=True)]
        self.lengths = self.lengths + (new if write else 0)
        return Context(
            num_rows=self.rows,
            query_starts=attention.query_starts,
            last_tokens=attention.query_starts[1:].long() - 1,
            positions=torch.from_numpy(np.concatenate(at)).long(),
            rows=torch.arange(1, self.rows + 1),
            iteration=torch.zeros(self.rows, dtype=torch.int64),
            draw_keys=torch.zeros(self.rows, dtype=torch.int64),
            sample=self._sample,
            plan=plan or {},
            kv=KVBatch(attention, self.keys, self.values, choose_backend("cpu")),
        )

    def _sample(self, name: str, logits: Tensor) -> Tensor:
        self.logits.append(logits.clone())
        return logits.argmax(-1)
