"""Several workers' ends of channels as one end, for an engine that knows of one worker. The shell of `routing`.

Runs on the server's event loop. Whoever starts workers attaches their ends and says when they have ended; knows no
processes.
"""

from __future__ import annotations

import asyncio
import logging

from mstar.ipc import messages
from mstar.ipc.channel import EngineEnd
from mstar.ipc.messages import FromWorker, ToWorker
from mstar.server.routing import Routing

logger = logging.getLogger(__name__)


class Fleet:
    """Workers that serve one model together.

    Attributes:
        closed: set when the engine has no more use for them.
    """

    def __init__(self, routing: Routing) -> None:
        self.routing = routing
        self.closed = asyncio.Event()
        self._ends: dict[int, EngineEnd] = {}
        self._inbox: list[FromWorker] = []
        self._arrived = asyncio.Event()

    def attach(self, worker: int, end: EngineEnd, *, pid: int) -> asyncio.Task[None]:
        """Talk to a worker's new process; the task ends when its channel does."""
        self._ends[worker] = end
        self.routing.started(worker, pid=pid)
        return asyncio.get_running_loop().create_task(self._listen(worker, end))

    def ended(self, worker: int, reason: str, *, age_s: float) -> float | None:
        """A worker's process has ended: in how many seconds another is to be started; None: never."""
        self._ends.pop(worker, None)
        told, delay_s = self.routing.ended(worker, reason, age_s=age_s)
        self._put(told)
        return delay_s

    # -- the engine's end ------------------------------------------------------------------------------------

    def send(self, message: ToWorker) -> None:
        """Never blocks. A request that no worker can take fails."""
        sent_to = self.routing.to_workers(message)
        if not sent_to and isinstance(message, messages.Open):
            problem = "no worker is left that could take it; try again later"
            self._fail(message.request_id, problem, status=503, code="worker_lost")
        try:
            for worker, part in sent_to:
                self._ends[worker].send(part)
        except TypeError as error:  # something of the model's that cannot cross
            assert isinstance(message, messages.Open | messages.Begin), message
            logger.error("request %s: %s", message.request_id, error)
            self._fail(message.request_id, f"the model's inputs cannot be sent: {error}", status=500)

    async def receive(self) -> list[FromWorker]:
        """What the workers have said, waiting for the first message."""
        while not self._inbox:
            self._arrived.clear()
            await self._arrived.wait()
        told, self._inbox = self._inbox, []
        return told

    def close(self) -> None:
        """Stop listening to all."""
        self.closed.set()
        for end in self._ends.values():
            end.close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _put(self, told: list[FromWorker]) -> None:
        self._inbox += told
        self._arrived.set()
        for worker, message in self.routing.take_sends():
            self._ends[worker].send(message)

    def _fail(self, request_id: str, message: str, *, status: int, code: str | None = None) -> None:
        self.routing.abort(request_id)
        self._put([messages.Failed(request_id=request_id, message=message, status=status, code=code)])

    async def _listen(self, worker: int, end: EngineEnd) -> None:
        try:
            while True:
                for message in await end.receive():
                    self._put(self.routing.from_worker(worker, message))
        except EOFError:
            return
        except Exception:
            logger.exception("the channel to worker %d is broken", worker)
