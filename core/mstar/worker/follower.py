"""A further rank of a tensor-parallel worker, started by `ipc.lifetime` with a `RankOrder` on standard input.

It holds its share of the split modules and of their pages, and does on it what the first rank says, in order. Knows no
requests. It ends with the first rank's process; when it cannot go on it ends by itself, and the first rank sees it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys

import msgspec
import torch
from torch import Tensor

from mstar import observe
from mstar.config import EngineConfig
from mstar.errors import ConfigError
from mstar.ipc.ranks import (
    Attention,
    CallMethod,
    CopyPage,
    Load,
    Loaded,
    PagesRead,
    Pools,
    RankOrder,
    ReadPages,
    Settle,
    Settled,
    Started,
    ToRank,
    Unable,
    Wire,
    WritePages,
    restored,
)
from mstar.layers.attention import KVBatch, choose_backend
from mstar.layers.attention.plan import host_plan, plan_from_host
from mstar.model import find_model
from mstar.plugin.nodes import Context, Node
from mstar.plugin.spec import load_object
from mstar.worker.finish import described
from mstar.worker.modules import load_node, model_device, model_dtype
from mstar.worker.pages import PageStorage
from mstar.worker.ranks import ProcessRanks, join_store, split_node

logger = logging.getLogger(__name__)


class Follower:
    """One further rank, from the time when the ranks have met.

    Args:
        wire: to the first rank.
    """

    def __init__(self, order: RankOrder, wire: Wire) -> None:
        self.config = msgspec.convert(order.config, EngineConfig, dec_hook=lambda kind, value: kind(value))
        assert self.config.threads is not None
        torch.set_num_threads(self.config.threads)
        self.wire = wire
        self.model = find_model(self.config)
        self.device, self.dtype = model_device(self.config), model_dtype(self.config, self.model.checkpoint)
        self.backend = choose_backend(self.device, self.config.attention_backend)
        wire.send(Started())
        self.ranks = ProcessRanks(
            order.rank, order.size, store=join_store(order.port, order.size), device=self.device,
            timeout_s=order.timeout_s, invariant=self.config.batch_invariant,
        )  # fmt: skip
        self.nodes: dict[str, Node] = {}
        self.pages: dict[str, PageStorage] = {}

    def load(self) -> None:
        """Load what the first rank names, and make room for the pages that it has."""
        order: Load = self.wire.receive(forever=True)
        spec = self.model.plugin.spec
        for name in order.modules:
            node = load_object(spec.nodes[name], plugin=spec.name)(self.model.checkpoint.config)
            split_node(node, self.ranks, name=name)
            load_node(node, self.model.checkpoint, name=name, config=self.config, dtype=self.dtype, device=self.device)
            self.nodes[name] = node
        self.wire.send(Loaded())
        pools: Pools = self.wire.receive(forever=True)
        for name, num_pages in pools.num_pages.items():
            layout = self.nodes[name].kv_layout
            assert layout is not None
            self.backend.require(head_dim=layout.head_dim, dtype=self.dtype)
            self.pages[name] = PageStorage(
                layout, num_pages=num_pages, page_size=self.config.block_size, dtype=self.dtype, device=self.device
            )

    @torch.inference_mode()
    def run(self) -> None:
        """Until told to stop. Raises what a call raised that the first rank came through."""
        failure: Exception | None = None
        while True:
            message: ToRank = self.wire.receive(forever=True)
            if isinstance(message, Settle):
                failure = None
                self.wire.send(Settled(num_collectives=self.ranks.num_collectives))
            elif failure is not None:
                raise failure
            elif isinstance(message, CallMethod):
                try:
                    self._call(message)
                except Exception as error:  # whether it is the first rank's too, that will say
                    logger.debug("%s.%s failed", message.module, message.method, exc_info=True)
                    failure = error
            elif isinstance(message, CopyPage):
                self.pages[message.module].copy(message.source, message.target)
            elif isinstance(message, ReadPages):
                self.wire.send(PagesRead(content=self.pages[message.module].read(message.pages)))
            elif isinstance(message, WritePages):
                self.pages[message.module].write(message.pages, message.content, first_layer=message.first_layer)
            else:
                return

    def _call(self, message: CallMethod) -> None:
        parts = (message.columns, message.present, message.plan, message.inputs)
        columns, present, plan, inputs = (
            restored(part, lambda brought: self.ranks.share(brought.empty(self.device))) for part in parts
        )
        context = Context(
            num_rows=message.num_rows, row_multiple=message.row_multiple, present=present, plan=plan,
            sample=self._drawn, **columns,
        )  # fmt: skip
        if message.attention is not None:
            context.kv = self._kv(message.attention, self.pages[message.module])
        getattr(self.nodes[message.module], message.method)(context, **inputs)

    def _kv(self, attention: Attention, pages: PageStorage) -> KVBatch:
        rows = (attention.query_starts, attention.context_lens, attention.page_table, attention.visible_end)
        plan = plan_from_host(
            host_plan(*(tensor.numpy() for tensor in rows)), page_size=self.config.block_size, device=self.device,
            write=attention.write, batch_invariant=attention.batch_invariant,
        )  # fmt: skip
        return KVBatch(plan, pages.keys, pages.values, self.backend)

    def _drawn(self, name: str, logits: Tensor) -> Tensor:
        """What the first rank draws."""
        return self.ranks.share(torch.empty(logits.shape[0], dtype=torch.int64, device=self.device))


def main() -> None:
    """Follow until told to stop, and exit."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=RankOrder)
    observe.setup_logging(order.log_level)
    wire = Wire(socket.socket(fileno=order.socket), ToRank, timeout_s=order.timeout_s)
    try:
        follower = Follower(order, wire)
        follower.load()
    except BaseException as error:  # noqa: BLE001  # the first rank must hear of it
        with contextlib.suppress(OSError):  # it may have ended, of the same
            wire.send(Unable(reason=described(error), is_config=isinstance(error, ConfigError)))
        _end(1)
    try:
        follower.run()
    except EOFError:
        _end(0)
    except BaseException as error:  # noqa: BLE001  # why it ends is seen here alone
        sys.excepthook(type(error), error, error.__traceback__)
        _end(1)
    _end(0)


def _end(code: int) -> None:
    sys.stderr.flush()
    os._exit(code)  # no thread of the model's, or of a library's, may keep it
