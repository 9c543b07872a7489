"""A worker's process, from its start (by `ipc.lifetime`) to its end, with an `Order` on standard input.

It ends with the server that started it: the system kills it (Linux), and the channel sees that nobody is there. Signals
meant for the server's process group are left to the server.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time

import msgspec
import torch

from mstar import observe
from mstar.config import EngineConfig
from mstar.errors import ConfigError
from mstar.ipc.messages import Dead
from mstar.ipc.process_channel import ProcessWorkerEnd
from mstar.model import find_model
from mstar.placement import Placement, WorkerPlace
from mstar.processes import Order
from mstar.worker.finish import described
from mstar.worker.modules import model_device
from mstar.worker.team import Team
from mstar.worker.worker import Worker

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 0.1  # until what was sent has left


def main() -> None:
    """Load, serve until told to stop, and exit; what ends it early has been reported to the engine."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    for file in order.road.files:
        os.set_inheritable(file, False)
    observe.setup_logging(order.log_level)
    end = ProcessWorkerEnd(order.road, server=order.parent, on_lost=lambda: os._exit(1))
    try:
        _serve(order, end)
    except BaseException as error:  # noqa: BLE001  # the engine must hear of it
        if not isinstance(error, ConfigError):
            sys.excepthook(type(error), error, error.__traceback__)
        end.send(Dead(reason=described(error)))
    end.close()
    sys.stderr.flush()
    os._exit(0)  # no thread of the model's, or of a library's, may keep it


def _serve(order: Order, end: ProcessWorkerEnd) -> None:
    config = order.engine_config()
    assert config.threads is not None
    torch.set_num_threads(config.threads)
    model = find_model(config)
    placement = Placement.of(order.groups, model.graph, tasks=model.plugin.spec.tasks)
    place = placement.workers[order.worker]
    with _team(placement.groups[place.group].tensor_parallel, place, config, end) as team:
        Worker(
            model.plugin.spec, model.graph, model.checkpoint, config, end,
            placing=placement, worker=place.index, group=place.group, team=team,
        ).run()  # fmt: skip


def _team(
    size: int, place: WorkerPlace, config: EngineConfig, end: ProcessWorkerEnd
) -> contextlib.AbstractContextManager[Team | None]:
    """The further ranks of a worker that is several processes. What ends one of them ends all."""

    def end_all(reason: str) -> None:
        logger.error("worker %d: %s; its processes end", place.index, reason)
        end.send(Dead(reason=reason))
        time.sleep(_LAST_WORDS_S)
        os._exit(1)

    if size == 1:
        return contextlib.nullcontext()
    return Team(size, config=config, device=model_device(config), devices=place.devices, on_lost=end_all)
