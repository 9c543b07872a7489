"""The channel between the engine and a worker in a process of its own: sockets, and an arena for what is large.

A packet of the control socket is one message, or announces a piece of something large: the elements of a tensor, or a
long message itself, go through the arena of their direction, piece by piece, before it. The lifeline, a second socket,
says how far each side has read, which makes room in the other's arena, and once a second that the worker lives. Either
ends when the other process does. Nothing polls, nothing is pickled.

All of it is inherited as open files and has no name, so that nothing is left behind, whoever is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import cast

import torch
from msgspec import Struct
from torch import Tensor

from mstar.ipc.arena import ARENA_BYTES, ArenaReader, ArenaWriter, create_arena
from mstar.ipc.messages import FromWorker, ToWorker
from mstar.ipc.tensors import sparing_decoder, sparing_encoder

HEARTBEAT_S = 1.0

_MESSAGE, _LONG, _PIECE = b"M", b"L", b"P"
_PIECE_PACKET = struct.Struct("<cQQQ")  # kind, position, bytes, bytes of the whole if it is its first piece, else 0
_POSITION = struct.Struct("<Q")
_PACKET_BYTES = 1 << 16


class Road(Struct, frozen=True, kw_only=True):
    """The open files that a worker's process inherits to take up its end."""

    control: int
    lifeline: int
    to_worker: int
    from_worker: int

    @property
    def files(self) -> tuple[int, ...]:
        return self.control, self.lifeline, self.to_worker, self.from_worker


# ---- one direction ----------------------------------------------------------------------------------------------


class _Outlet:
    """Messages on their way out, in order; those that there is no room for wait."""

    def __init__(self, file: int, control: socket.socket) -> None:
        self.arena = ArenaWriter(file)
        self._control = control
        self._spared: list[Tensor] = []
        self._encode = sparing_encoder(self._spared.append)
        self._waiting: deque[bytes | tuple[Tensor, int]] = deque()  # a packet, or a piece and the bytes of its whole

    def put(self, message: ToWorker | FromWorker) -> None:
        """Add a message. Raises TypeError for values that may not cross."""
        self._spared.clear()
        body = self._encode(message)
        is_long = len(body) >= _PACKET_BYTES
        for large in (*self._spared, *([torch.frombuffer(bytearray(body), dtype=torch.uint8)] if is_long else ())):
            first, *rest = large.split(self.arena.most)
            self._waiting.append((first, large.numel()))
            self._waiting.extend((piece, 0) for piece in rest)
        self._waiting.append(_LONG if is_long else _MESSAGE + body)
        self._spared.clear()

    def flush(self) -> bool:
        """Send what the arena has room for; whether that was everything. Raises what the socket raises."""
        while self._waiting:
            part = self._waiting[0]
            if isinstance(part, tuple):
                piece, whole = part
                if (position := self.arena.write(piece)) is None:
                    return False
                part = self._waiting[0] = _PIECE_PACKET.pack(_PIECE, position, piece.numel(), whole)
            self._control.send(part)
            self._waiting.popleft()
        return True


class _Inlet:
    """Packets on their way in. `release` is told how far the arena has been read, each quarter of it."""

    def __init__(self, file: int, control: socket.socket, *, release: Callable[[int], None]) -> None:
        self.arena = ArenaReader(file)
        self._control = control
        self._packet = memoryview(bytearray(_PACKET_BYTES))
        self._release = release
        self._released = 0
        self._spared: deque[Tensor] = deque()
        self._missing = 0  # bytes of the last of them
        self._decode = sparing_decoder(self._spared.popleft)

    def receive(self) -> list[ToWorker | FromWorker]:
        """All messages there are. Raises EOFError at the end, and ArenaError or what decoding raises."""
        messages: list[ToWorker | FromWorker] = []
        while True:
            try:
                num_bytes = self._control.recv_into(self._packet, flags=socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            except ConnectionError:
                num_bytes = 0
            if not num_bytes:
                if messages:
                    return messages
                raise EOFError("the other process has ended")
            kind, body = bytes(self._packet[:1]), self._packet[1:num_bytes]
            if kind == _MESSAGE:
                messages.append(self._decode(body))
            elif kind == _LONG:
                messages.append(self._decode(self._spared.pop().numpy().data))
            else:
                self._read(*_PIECE_PACKET.unpack(self._packet[:num_bytes])[1:])

    def _read(self, position: int, num_bytes: int, whole: int) -> None:
        if whole:
            self._spared.append(torch.empty(whole, dtype=torch.uint8))
            self._missing = whole
        large = self._spared[-1]
        start = large.numel() - self._missing
        self.arena.read(position, into=large[start : start + num_bytes])
        self._missing -= num_bytes
        if self.arena.position - self._released >= self.arena.num_bytes // 4:
            self._released = self.arena.position
            self._release(self._released)


# ---- the worker's end -------------------------------------------------------------------------------------------


class ProcessWorkerEnd:
    """A worker's end in its own process. `send` waits for room where the engine has not read yet what was sent before.

    Args:
        road: from the engine's end; its files are this end's from now on.
        on_lost: called, on a thread of the channel, when the engine's process is gone.
    """

    def __init__(self, road: Road, *, on_lost: Callable[[], None]) -> None:
        self._control = socket.socket(fileno=road.control)
        self._lifeline = socket.socket(fileno=road.lifeline)
        self._lifeline.settimeout(HEARTBEAT_S)
        self._on_lost = on_lost
        self._is_over = False  # closed, or the engine is gone
        self._inlet = _Inlet(road.to_worker, self._control, release=self._say_position)
        self._outlet = _Outlet(road.from_worker, self._control)
        os.close(road.to_worker)
        os.close(road.from_worker)
        self._arrivals = select.poll()
        self._arrivals.register(self._control, select.POLLIN)
        self._room = threading.Condition()  # guards the outlet: any thread may send
        self._watching = threading.Thread(target=self._watch, name="mstar-lifeline", daemon=True)
        self._watching.start()

    def send(self, message: FromWorker) -> None:
        """Raises TypeError for values that may not cross; nothing of the message is sent then."""
        with self._room:
            if not self._is_over:
                self._outlet.put(message)
            try:
                while not self._is_over and not self._outlet.flush():
                    self._room.wait()
            except ConnectionError:  # the lifeline tells whoever wants to know
                self._is_over = True

    def receive(self, timeout_s: float | None = None) -> list[ToWorker]:
        """Once the engine is gone, nothing comes any more, and nobody waits."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            if not self._arrivals.poll(None if left_s == math.inf else math.ceil(1000 * left_s)):
                return []
            try:
                messages = cast(list[ToWorker], self._inlet.receive())
            except EOFError:
                return []
            if messages or time.monotonic() >= deadline:
                return messages

    def close(self) -> None:
        """Say no more; what was sent is still delivered. Not for use while another thread sends or receives."""
        with self._room:
            self._is_over = True
        with contextlib.suppress(OSError):
            self._lifeline.shutdown(socket.SHUT_RDWR)
        self._watching.join()
        self._lifeline.close()
        self._control.close()
        self._inlet.arena.close()
        self._outlet.arena.close()

    def _say_position(self, position: int) -> None:
        _say(self._lifeline, position)

    def _watch(self) -> None:
        while True:
            try:
                record = self._lifeline.recv(_POSITION.size)
            except TimeoutError:
                self._say_position(self._inlet.arena.position)
                continue
            except OSError:
                record = b""
            with self._room:
                if record:
                    self._outlet.arena.released = max(self._outlet.arena.released, *_POSITION.unpack(record))
                was_over, self._is_over = self._is_over, self._is_over or not record
                self._room.notify_all()
            if not record:
                if not was_over:
                    self._on_lost()
                return


# ---- the engine's end -------------------------------------------------------------------------------------------


class ProcessEngineEnd:
    """The engine's end, made on its event loop. What there is no room for waits here, so `send` never blocks.

    Attributes:
        road: for the worker's process, which inherits `road.files`; `hand_over` once it has them.
        heard_at: when the worker's process last showed that it lives, in seconds of `time.monotonic`.
    """

    def __init__(self, *, arena_bytes: int = ARENA_BYTES) -> None:
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lifeline, lifeline = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._is_closed = self._is_full = False
        for ours in (self._control, self._lifeline):
            ours.setblocking(False)
        down, up = create_arena(arena_bytes), create_arena(arena_bytes)
        self.road = Road(control=control.detach(), lifeline=lifeline.detach(), to_worker=down, from_worker=up)
        self._outlet = _Outlet(down, self._control)
        self._inlet = _Inlet(up, self._control, release=self._say_position)
        self._inbox: list[FromWorker] = []
        self._waiter: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self.heard_at = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._control, self._on_packets)
        self._loop.add_reader(self._lifeline, self._on_lifeline)

    def hand_over(self) -> None:
        """The worker's process has inherited the road: close this process's copies, so that its end can be seen."""
        for file in self.road.files:
            os.close(file)

    def send(self, message: ToWorker) -> None:
        """Never blocks. Raises TypeError for values that may not cross; nothing of the message is sent then."""
        if not self._is_closed:
            self._outlet.put(message)
            self._flush()

    async def receive(self) -> list[FromWorker]:
        """All messages there are, waiting for the first.

        Raises EOFError once the worker's process has ended and all that it sent has been received; ArenaError, or
        what decoding raised, if the channel is broken.
        """
        while not self._inbox:
            if self._failure is not None:
                raise self._failure
            self._waiter = self._loop.create_future()
            await self._waiter
        messages, self._inbox = self._inbox, []
        return messages

    def close(self) -> None:
        """Stop listening; what there was room for is still delivered. `dispose` once the process has ended."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_writer(self._control)
            for ours in (self._control, self._lifeline):
                self._loop.remove_reader(ours)

    def dispose(self) -> None:
        """Free everything; a worker that still lives sees that its engine is gone. Once."""
        self.close()
        self._control.close()
        self._lifeline.close()
        self._inlet.arena.close()
        self._outlet.arena.close()

    def _flush(self) -> None:
        was_full, self._is_full = self._is_full, False
        try:
            self._outlet.flush()  # what the arena has no room for goes when the worker has read
        except BlockingIOError:
            self._is_full = True
        except ConnectionError:  # whoever receives learns of it
            pass
        if self._is_full and not was_full:
            self._loop.add_writer(self._control, self._flush)
        elif was_full and not self._is_full:
            self._loop.remove_writer(self._control)

    def _on_packets(self) -> None:
        self.heard_at = time.monotonic()
        try:
            self._inbox += cast(list[FromWorker], self._inlet.receive())
        except Exception as error:  # noqa: BLE001  # whoever receives next raises it
            self._failure = error
            self._loop.remove_reader(self._control)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _on_lifeline(self) -> None:
        try:
            record = self._lifeline.recv(_POSITION.size)
        except BlockingIOError:
            return
        except OSError:
            record = b""
        if not record:
            self._loop.remove_reader(self._lifeline)
            return
        self.heard_at = time.monotonic()
        self._outlet.arena.released = max(self._outlet.arena.released, *_POSITION.unpack(record))
        self._flush()

    def _say_position(self, position: int) -> None:
        _say(self._lifeline, position)


def _say(lifeline: socket.socket, position: int) -> None:
    with contextlib.suppress(OSError):  # gone, or full of older ones: heartbeats repeat it
        lifeline.send(_POSITION.pack(position), socket.MSG_DONTWAIT)
