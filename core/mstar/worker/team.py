"""The further processes of a tensor-parallel worker, as the first one has them: started, told what to do, watched.

The worker's thread runs methods of split modules and moves their pages; each time, the others are told before, and do
the same on their shares. Which requests it is for, and which page is whose, is known here alone.
"""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from mstar.config import EngineConfig
from mstar.errors import ConfigError
from mstar.ipc.lifetime import command
from mstar.ipc.ranks import (
    Attention,
    CallMethod,
    CopyPage,
    FromRank,
    Load,
    Pools,
    RankOrder,
    ReadPages,
    Settle,
    Stop,
    ToRank,
    Unable,
    Wire,
    WritePages,
    spared,
)
from mstar.layers.attention import AttentionPlan
from mstar.plugin.nodes import Context, KVLayout
from mstar.worker.pages import ALL, PageStorage
from mstar.worker.ranks import TIMEOUT_S, ProcessRanks, open_store

logger = logging.getLogger(__name__)

COLUMNS = ("query_starts", "last_tokens", "positions", "rows", "iteration", "draw_keys")
SETTLE_S = 5.0
_STOP_S = 5.0

Method = Callable[..., dict[str, Any]]


class Team:
    """The ranks of a worker behind the first.

    Example:
        with Team(2, config=config, device=device, on_lost=end) as team:
            Worker(..., team=team).run()

    Args:
        size: ranks, the first one included.
        device: of the first one.
        devices: of all, by rank; empty: as `config` says, CUDA devices in turn.
        on_lost: called, maybe on another thread, when ranks cannot go on together, and why. Nothing can be computed
            from then on.
        timeout_s: of a collective, and of a message.
    """

    def __init__(
        self, size: int, *, config: EngineConfig, device: torch.device, on_lost: Callable[[str], None],
        devices: Sequence[str] = (), timeout_s: float = TIMEOUT_S,
    ) -> None:  # fmt: skip
        self._on_lost, self._timeout_s = on_lost, timeout_s
        self._lock = threading.Lock()
        self._losing = threading.RLock()
        self._is_over = False
        self._wires: list[Wire] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        store = open_store(size)
        try:
            for rank in range(1, size):
                own = replace(config, device=_device(rank, config, device, devices))
                self._start(rank, size, store.port, own)
            self._await()
            self.ranks = ProcessRanks(
                0, size, store=store, device=device, timeout_s=timeout_s, invariant=config.batch_invariant
            )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Of the further ranks."""
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """End all."""
        with self._lock:
            was_over, self._is_over = self._is_over, True
        for wire in self._wires:
            try:
                if not was_over:
                    wire.send(Stop())
            except OSError:
                pass
            wire.close()
        for process in self._processes:
            if was_over:
                process.kill()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    # ---- what the others are told -----------------------------------------------------------------------

    def load(self, modules: list[str]) -> None:
        """Have them load; they do it meanwhile."""
        self._tell(Load(modules=modules))

    def begin(self, num_pages: dict[str, int]) -> None:
        """Wait until all have loaded, and have them make room for pages. Raises what one could not load for."""
        self._await()
        self._tell(Pools(num_pages=num_pages))

    def split(self, module: str, name: str, method: Method) -> Method:
        """A method that all ranks run. What it draws is drawn here."""

        def call(context: Context, **inputs: Any) -> dict[str, Any]:
            brought: list[Tensor] = []
            self._tell(_call(module, name, context, inputs, brought.append))
            try:
                for tensor in brought:
                    self.ranks.share(tensor)
                draw = context.sample
                return method(replace(context, sample=lambda *of: self.ranks.share(draw(*of))), **inputs)
            except BaseException:
                self._settle()
                raise

        return call

    def pages(self, module: str, layout: KVLayout, *, total_heads: int, **sizes: Any) -> PageStorage:
        """The storage of a split module, of whose heads this rank has `layout`'s. `sizes`: as of `PageStorage`."""
        return _SplitPages(self, module, layout, total_heads=total_heads, **sizes)

    def copy_page(self, module: str, source: int, target: int) -> None:
        self._tell(CopyPage(module=module, source=source, target=target))

    def read_pages(self, module: str, pages: Sequence[int]) -> list[Tensor]:
        """What each of the others has in these pages."""
        self._tell(ReadPages(module=module, pages=list(pages)))
        return [self._answer(rank).content for rank in range(1, self.ranks.size)]

    def write_pages(
        self, module: str, pages: Sequence[int], contents: Sequence[Tensor], *, first_layer: int = 0
    ) -> None:
        """Fill pages, for each of the others with its own content."""
        for rank, content in enumerate(contents, 1):
            self._tell(WritePages(module=module, pages=list(pages), content=content, first_layer=first_layer), rank)

    # ---- telling ----------------------------------------------------------------------------------------

    def _tell(self, message: ToRank, *ranks: int) -> None:
        for rank in ranks or range(1, len(self._wires) + 1):
            try:
                self._wires[rank - 1].send(message)
            except OSError as error:
                self._lose(f"rank {rank} cannot be told what to do: {error or type(error).__name__}")
                raise

    def _answer(self, rank: int) -> Any:
        try:
            return self._wires[rank - 1].receive()
        except (OSError, EOFError) as error:
            self._lose(f"rank {rank} does not answer: {error or type(error).__name__}")
            raise

    def _settle(self) -> None:
        """A call has failed. Go on only if the others failed at the same place, or came through."""
        if self.ranks.is_broken:
            self._lose("a collective of its ranks failed")
            return
        self._tell(Settle())
        for rank, wire in enumerate(self._wires, 1):
            wire.set_timeout(SETTLE_S)
            done = self._answer(rank).num_collectives
            wire.set_timeout(self._timeout_s)
            if done != self.ranks.num_collectives:
                self._lose(f"rank {rank} is out of step after a call that failed")

    def _lose(self, reason: str) -> None:
        with self._losing:  # who comes second must not tell requests of it before all has ended
            with self._lock:
                was_over, self._is_over = self._is_over, True
            if not was_over:
                self._on_lost(reason)

    # ---- processes --------------------------------------------------------------------------------------

    def _start(self, rank: int, size: int, port: int, config: EngineConfig) -> None:
        ours, theirs = socket.socketpair()
        self._wires.append(Wire(ours, FromRank, timeout_s=self._timeout_s))
        order = RankOrder(
            rank=rank, size=size, port=port, socket=theirs.fileno(),
            config=msgspec.to_builtins(config, enc_hook=str), timeout_s=self._timeout_s,
            log_level=logging.getLevelName(logging.getLogger("mstar").getEffectiveLevel()).lower(),
        )  # fmt: skip
        with theirs:
            process = subprocess.Popen(
                command("mstar.worker.follower"), stdin=subprocess.PIPE, pass_fds=(order.socket,)
            )
        self._processes.append(process)
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(msgspec.json.encode(order))
        threading.Thread(target=self._watch, args=(rank, process), name="mstar-rank", daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        self._lose(f"rank {rank} has ended: " + (signal.Signals(-code).name if code < 0 else f"exit code {code}"))

    def _await(self) -> None:
        """Until each has done what it is at, however long that takes."""
        for rank, wire in enumerate(self._wires, 1):
            try:
                message = wire.receive(forever=True)
            except EOFError as error:
                raise RuntimeError(f"rank {rank} of the worker ended before it was ready") from error
            if isinstance(message, Unable):
                raise (ConfigError if message.is_config else RuntimeError)(f"rank {rank}: {message.reason}")


class _SplitPages(PageStorage):
    """Pages whose heads are split among ranks. Several ranks have the same heads where there are too few."""

    is_whole = False

    def __init__(self, team: Team, module: str, layout: KVLayout, *, total_heads: int, **sizes: Any) -> None:
        super().__init__(layout, **sizes)
        self._team, self._module, self._size = team, module, team.ranks.size
        self._own, self._total = layout.num_kv_heads, total_heads
        self.host_page_bytes = self.page_bytes // self._own * total_heads

    def copy(self, source: int, target: int) -> None:
        self._team.copy_page(self._module, source, target)
        super().copy(source, target)

    def read(self, pages: Sequence[int], *, layers: slice = ALL) -> Tensor:
        if not pages:
            return super().read(pages, layers=layers).repeat(1, 1, 1, self._total // self._own, 1, 1)
        others = self._team.read_pages(self._module, pages)
        parts = [super().read(pages, layers=layers), *(other[:, layers] for other in others)]
        return torch.cat(parts[:: self._size * self._own // self._total], dim=3)

    def write(self, pages: Sequence[int], content: Tensor, *, first_layer: int = 0) -> None:
        if not pages:
            return
        starts = [rank * self._total // self._size for rank in range(self._size)]
        parts = [content[:, :, :, start : start + self._own] for start in starts]
        self._team.write_pages(self._module, pages, parts[1:], first_layer=first_layer)
        super().write(pages, parts[0], first_layer=first_layer)


def _device(rank: int, config: EngineConfig, first: torch.device, devices: Sequence[str]) -> str:
    if devices:
        return devices[rank]
    if first.type == "cpu":
        return config.device
    return f"{first.type}:{((first.index or 0) + rank) % torch.cuda.device_count()}"


def _call(
    module: str, method: str, context: Context, inputs: dict[str, Any], bring: Callable[[Tensor], None]
) -> CallMethod:
    columns = {name: getattr(context, name) for name in COLUMNS}
    parts = [spared(part, bring) for part in (columns, context.present, context.plan, inputs)]
    return CallMethod(
        module=module, method=method, num_rows=context.num_rows, row_multiple=context.row_multiple, columns=parts[0],
        present=parts[1], plan=parts[2], attention=None if context.kv is None else _attention(context.kv.plan),
        inputs=parts[3],
    )  # fmt: skip


def _attention(plan: AttentionPlan) -> Attention:
    host = plan.host
    arrays = {name: getattr(host, name) for name in ("query_starts", "context_lens", "page_table", "visible_end")}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return Attention(**tensors, write=plan.write, batch_invariant=plan.batch_invariant)
