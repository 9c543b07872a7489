"""The channel between processes: the server's engine, and workers in their own, which talk to each other too.

Every process has one inbox, an address of zmq's without a name in any file system, and a socket to each inbox that it
sends to, made at first use. Messages of one sender arrive in its order. Large tensors lie in the sender's arena
(`ipc.arena`), or follow their message where that has no room; so no one waits to send. Nothing polls or is pickled.

The server makes inboxes and arenas, and a process inherits its own: an inbox can be written to before anybody reads it,
and what a process has sent can be read after its end. Nothing is left behind, whoever is killed. An inbox and an arena
belong to one process: whoever starts again in another's place is somebody else, `Peers` says who.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import cast

import torch
import zmq
from msgspec import Struct
from torch import Tensor

from mstar.ipc.arena import ARENA_BYTES, Arena, create_arena
from mstar.ipc.messages import FromWorker, Message, Peers, ToWorker
from mstar.ipc.tensors import Place, sparing_decoder, sparing_encoder

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0

_LINGER_MS = 2000
_NOBLOCK, _MORE, _EVENTS, _POLLIN = (  # as numbers, since enumerations are slow
    int(name) for name in (zmq.NOBLOCK, zmq.SNDMORE, zmq.EVENTS, zmq.POLLIN)
)
_MOST_AT_ONCE = 256
_HEAD = struct.Struct("=cIII")  # kind, sender, its arena's file in the server, number of frames that follow
_MESSAGE, _BEAT, _END = b"M", b"B", b"E"
_SERVER = 1  # processes are numbered, over a server's life


class Road(Struct, frozen=True, kw_only=True):
    """What a worker's process needs to take up its end, with the open files that it inherits."""

    number: int
    address: str
    inbox: int
    arena: int
    lifeline: int
    server_address: str
    server_arena: int  # an open file of the server's

    @property
    def files(self) -> tuple[int, ...]:
        return self.inbox, self.arena, self.lifeline


class _Gone(Exception):
    """The sender of a message is known to have ended, or its arena is gone with it; all that comes of it is dropped."""


def _listener(address: str) -> int:
    """An open file that queues connections to an inbox until zmq takes it over."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address.removeprefix("ipc://").replace("@", "\0", 1))
        listening.listen(128)
        return listening.detach()


class _Post:
    """One process's inbox, arena and sockets. Of one thread, but for `send`, which may have another.

    Args:
        arena: an open file, under the same number in the server's process.
        server: that process.

    Attributes:
        arenas: those of senders, mapped at first use.
        sender: of the message that was received last: its number, and its arena's.
    """

    def __init__(self, number: int, *, address: str, inbox: int, arena: int, server: int) -> None:
        self._context = zmq.Context()
        self.inbox = self._context.socket(zmq.PULL)
        for option, value in ((zmq.RCVHWM, 0), (zmq.IPC_FILTER_UID, os.getuid()), (zmq.USE_FD, inbox)):
            self.inbox.setsockopt(option, value)
        self.inbox.bind(address)
        self.arena = Arena(arena)
        self.arenas: dict[int, Arena] = {}
        self.sender = (0, 0)
        self._gone: set[int] = set()
        self._server = server
        self._outlets: dict[str, zmq.Socket[bytes]] = {}
        self._self = number, arena
        self._reader = ""
        self._places: list[int] = []
        self._inline: list[Tensor] = []
        self._encode = sparing_encoder(self._put)
        self._frames: list[zmq.Frame] = []
        self._decode = sparing_decoder(self._take)

    def send(self, address: str, message: Message | None, *, kind: bytes = _MESSAGE) -> None:
        """Never blocks. Raises TypeError for values that may not cross; nothing of the message is sent then."""
        self._reader = address
        self._places.clear()
        self._inline.clear()
        try:
            body = b"" if message is None else self._encode(message)
        except BaseException:
            for start in self._places:
                self.arena.give_back(start)
            raise
        left = len(self._inline)
        outlet = self._outlets.get(address) or self._connect(address)
        outlet.send(_HEAD.pack(kind, *self._self, left) + body, _NOBLOCK | _MORE if left else _NOBLOCK)
        for elements in self._inline:
            left -= 1
            outlet.send(elements.numpy().data, _NOBLOCK | _MORE if left else _NOBLOCK)
        self._inline.clear()

    def wait(self, timeout_s: float) -> bool:
        """Whether a message is there, or comes in time."""
        if cast(int, self.inbox.getsockopt(_EVENTS)) & _POLLIN:
            return True
        if timeout_s <= 0:
            return False
        return bool(self.inbox.poll(None if timeout_s == math.inf else math.ceil(1000 * timeout_s)))

    def receive(self) -> tuple[bytes, Message | None]:
        """The next message, which is there, and its kind. Raises _Gone, or what decoding raises."""
        frame = self.inbox.recv()
        kind, number, file, num_inline = _HEAD.unpack_from(frame)
        self.sender = number, file
        self._frames = [self.inbox.recv(copy=False) for _ in range(num_inline)]
        if number in self._gone:
            raise _Gone(f"process {number} has ended")
        body = memoryview(frame)[_HEAD.size :]
        return kind, self._decode(body) if len(body) else None

    def forget(self, address: str) -> None:
        """Whoever had an inbox there has ended."""
        number = int(address.rpartition("-")[2])
        self._gone.add(number)
        self.arenas.pop(number, None)
        self.arena.forget(address)
        if (outlet := self._outlets.pop(address, None)) is not None:
            outlet.close(linger=0)

    def close(self, *, linger_ms: int = 0) -> None:
        self._context.destroy(linger=linger_ms)
        self._outlets.clear()
        self.arenas.clear()
        del self.arena

    def map(self, sender: int, file: int) -> Arena:
        """A sender's arena, while the server has it. Raises _Gone; another OSError for what this process lacks."""
        try:
            opened = os.open(f"/proc/{self._server}/fd/{file}", os.O_RDWR)
            try:
                arena = Arena(opened)
            finally:
                os.close(opened)
            if arena.owner != sender:
                raise ValueError(f"it is that of {arena.owner}")
        except (FileNotFoundError, ProcessLookupError, ValueError) as error:  # no such file or process, or another file
            self._gone.add(sender)
            raise _Gone(f"the memory of process {sender} is not there: {error}") from error
        self.arenas[sender] = arena
        return arena

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        outlet = self._context.socket(zmq.PUSH)
        # Who is not there has ended, so a second try is of no use; who is may take its time to start.
        for option, value in ((zmq.SNDHWM, 0), (zmq.RECONNECT_IVL, 60_000), (zmq.HANDSHAKE_IVL, 0)):
            outlet.setsockopt(option, value)
        outlet.connect(address)
        self._outlets[address] = outlet
        return outlet

    def _put(self, elements: Tensor) -> Place:
        place = self.arena.write(elements, reader=self._reader)
        if place is None:
            self._inline.append(elements)
        else:
            self._places.append(place[0])
        return place

    def _take(self, place: Place, num_bytes: int) -> Tensor:
        if place is None:
            return torch.frombuffer(bytearray(self._frames.pop(0).buffer), dtype=torch.uint8)
        arena = self.arenas.get(self.sender[0]) or self.map(*self.sender)
        return arena.read(*place, num_bytes=num_bytes)


# ---- a worker's end ---------------------------------------------------------------------------------------------


class ProcessWorkerEnd:
    """A worker's end in its own process.

    Args:
        road: from the engine's end; its files are this end's from now on.
        server: the server's process.
        on_lost: called, on a thread of the channel, when that has ended.
    """

    def __init__(self, road: Road, *, server: int, on_lost: Callable[[], None]) -> None:
        self._road = road
        self._post = _Post(road.number, address=road.address, inbox=road.inbox, arena=road.arena, server=server)
        self._on_lost = on_lost
        self._peers: dict[int, str] = {}
        self._lock = threading.Lock()  # guards sending
        self._is_closed = False
        self._post.map(_SERVER, road.server_arena)
        threading.Thread(target=self._watch, name="mstar-lifeline", daemon=True).start()

    def send(self, message: FromWorker) -> None:
        """To the engine; from any thread. Never blocks, but to copy.

        Raises TypeError for values that may not cross; nothing of the message is sent then.
        """
        self._send(self._road.server_address, message)

    def send_to(self, worker: int, message: ToWorker) -> None:
        """To another worker, as `send`; dropped if that has ended, and nobody is in its place yet."""
        if (address := self._peers.get(worker)) is not None:
            self._send(address, message)

    def receive(self, timeout_s: float | None = None) -> list[ToWorker]:
        """The messages there are, of all senders, each in its order; waits up to `timeout_s` for the first.

        Some may be left for the next time, so that a flood of them keeps nobody from work.
        """
        messages: list[ToWorker] = []
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while len(messages) < _MOST_AT_ONCE and self._post.wait(0.0 if messages else deadline - time.monotonic()):
            try:
                _, message = self._post.receive()
            except _Gone:
                logger.debug("a message of a process that has ended is dropped", exc_info=True)
                continue
            if isinstance(message, Peers):
                self._meet(message.addresses)
            else:
                messages.append(cast(ToWorker, message))
        return messages

    def close(self) -> None:
        """Say so, and no more; what was sent is still delivered. Not for use while another thread receives."""
        with self._lock:
            if not self._is_closed:
                self._post.send(self._road.server_address, None, kind=_END)
                self._is_closed = True
                self._post.close(linger_ms=_LINGER_MS)
                os.close(self._road.arena)

    def _send(self, address: str, message: FromWorker | ToWorker | None, kind: bytes = _MESSAGE) -> None:
        with self._lock:
            if not self._is_closed:
                self._post.send(address, message, kind=kind)

    def _meet(self, addresses: dict[int, str]) -> None:
        with self._lock:
            for address in set(self._peers.values()) - set(addresses.values()):
                self._post.forget(address)
            self._peers = addresses

    def _watch(self) -> None:
        """Have the server hear of this process, and learn of the server's end."""
        while not self._is_closed:
            if select.select([self._road.lifeline], [], [], HEARTBEAT_S)[0]:
                if not self._is_closed:
                    self._on_lost()
                break
            self._send(self._road.server_address, None, _BEAT)
        os.close(self._road.lifeline)


# ---- the server's ends ------------------------------------------------------------------------------------------


class ProcessEngineEnd:
    """The engine's end with one worker's process.

    Attributes:
        road: what the process needs.
        heard_at: when its process was last heard, by the monotonic clock.
    """

    def __init__(self, server: Exchange, worker: int, number: int) -> None:
        self._server = server
        self.worker = worker
        address = f"{server.prefix}-{worker}-{number}"
        self.road = Road(
            number=number, address=address, inbox=_listener(address), arena=create_arena(number, server.arena_bytes),
            lifeline=server.lifeline, server_address=server.address, server_arena=server.arena,
        )  # fmt: skip
        self.heard_at = time.monotonic()
        self._inbox: list[FromWorker] = []
        self._waiter: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._is_closed = False

    def hand_over(self) -> None:
        """The worker's process has inherited the road: its inbox ends with it from now on."""
        os.close(self.road.inbox)

    def send(self, message: ToWorker) -> None:
        """Never blocks. Raises TypeError for values that may not cross; nothing of the message is sent then."""
        if not self._is_closed:
            self._server.post.send(self.road.address, message)

    async def receive(self) -> list[FromWorker]:
        """All messages there are, waiting for the first.

        Raises EOFError once the worker has closed its end and all that it sent has been received; ArenaError, or what
        decoding raised, if the channel is broken.
        """
        while not self._inbox:
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        messages, self._inbox = self._inbox, []
        return messages

    def close(self) -> None:
        """Stop listening, and send no more; what was sent is delivered. `dispose` once the process has ended."""
        self._is_closed = True

    def dispose(self) -> None:
        """Free everything. Once, when the process has ended."""
        self.close()
        self._server.forget(self)
        os.close(self.road.arena)

    def put(self, message: FromWorker | None, failure: Exception | None) -> None:
        """From the exchange: a message has come, or the end of all."""
        self.heard_at = time.monotonic()
        if self._is_closed or self._failure is not None:
            return
        self._failure = failure
        if message is not None:
            self._inbox.append(message)
        elif failure is None:
            return
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Exchange:
    """The server's inbox, and its ends with all workers' processes. Made, used and closed on its event loop."""

    def __init__(self, *, arena_bytes: int = ARENA_BYTES) -> None:
        self.arena_bytes = arena_bytes
        self.prefix = f"ipc://@mstar-{secrets.token_hex(8)}"
        self.address = f"{self.prefix}-server-{_SERVER}"
        self.arena = create_arena(_SERVER, arena_bytes)
        self.lifeline, self._held = os.pipe()
        inbox = _listener(self.address)
        self.post = _Post(_SERVER, address=self.address, inbox=inbox, arena=self.arena, server=os.getpid())
        self._last_number = _SERVER
        self._ends: dict[int, ProcessEngineEnd] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.post.inbox, self._on_arrivals)

    def end(self, worker: int) -> ProcessEngineEnd:
        """An end with a process that is about to start as `worker`; the others are told."""
        self._last_number += 1
        end = ProcessEngineEnd(self, worker, self._last_number)
        self._ends[self._last_number] = end
        self.post.arenas[self._last_number] = Arena(end.road.arena)
        self._announce()
        return end

    def forget(self, end: ProcessEngineEnd) -> None:
        """A process has ended; the others are told."""
        del self._ends[end.road.number]
        self.post.forget(end.road.address)
        self._announce()

    def close(self) -> None:
        """Free everything, when no process is left."""
        self._loop.remove_reader(self.post.inbox)
        self.post.close()
        for file in (self.arena, self.lifeline, self._held):
            os.close(file)

    def _announce(self) -> None:
        peers = Peers(addresses={end.worker: end.road.address for end in self._ends.values()})
        for end in self._ends.values():
            self.post.send(end.road.address, peers)

    def _on_arrivals(self) -> None:
        """Read what there is: zmq tells of new messages only after that."""
        for _ in range(_MOST_AT_ONCE):
            if self.post.inbox.closed or not self.post.wait(0.0):
                return
            message: Message | None = None
            failure: Exception | None = None
            try:
                kind, message = self.post.receive()
                failure = EOFError("the worker has ended") if kind == _END else None
            except Exception as error:  # noqa: BLE001  # whoever receives next raises it
                failure = error
            if (end := self._ends.get(self.post.sender[0])) is not None:
                end.put(cast(FromWorker | None, message), failure)
        self._loop.call_soon(self._on_arrivals)
