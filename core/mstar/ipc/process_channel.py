"""The channel between the engine and a worker in a process of its own: messages over zmq, large tensors beside them.

Each direction has a socket for messages and an arena for the elements of large tensors, which are copied in piece by
piece, each announced by a frame of its own before the message. A third road, the lifeline, is a socket pair. It says
how far each side has read, which makes room in the other's arena; once a second that the worker lives; and by its end
that the other process is gone. Nothing polls, nothing is pickled.

Sockets lie in a folder that the worker removes once both are connected; arenas and lifeline have no name. So nothing
is left behind, whoever is killed; a folder of a start that was cut short goes at the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
import zmq
from msgspec import Struct
from torch import Tensor

from mstar.ipc.arena import ARENA_BYTES, ArenaReader, ArenaWriter, create_arena
from mstar.ipc.messages import FromWorker, ToWorker
from mstar.ipc.tensors import sparing_decoder, sparing_encoder

HEARTBEAT_S = 1.0

_HELLO, _MESSAGE, _PIECE = b"H", b"M", b"P"
_PIECE_FRAME = struct.Struct("<cQQQ")  # kind, position, bytes, bytes of the whole tensor if it is its first, else 0
_POSITION = struct.Struct("<Q")
_PREFIX = "mstar-"
_LINGER_MS = 1000
_STALE_S = 600.0  # no start takes so long to connect


class Road(Struct, frozen=True, kw_only=True):
    """What a worker process needs to take up its end: open files that it has inherited, and where the sockets lie."""

    folder: str
    to_worker: int
    from_worker: int
    lifeline: int

    @property
    def files(self) -> tuple[int, int, int]:
        return self.to_worker, self.from_worker, self.lifeline


# ---- one direction ----------------------------------------------------------------------------------------------


class _Outlet:
    """Messages on their way out, in order; those that there is no room for wait."""

    def __init__(self, file: int, sender: zmq.Socket[bytes]) -> None:
        self.arena = ArenaWriter(file)
        self._socket = sender
        self._spared: list[Tensor] = []
        self._encode = sparing_encoder(self._spared.append)
        self._waiting: deque[bytes | tuple[Tensor, int]] = deque()  # a frame, or a piece and the bytes of its tensor

    def put(self, message: ToWorker | FromWorker) -> None:
        """Add a message. Raises TypeError for values that may not cross."""
        self._spared.clear()
        frame = _MESSAGE + self._encode(message)
        for tensor in self._spared:
            first, *rest = tensor.split(self.arena.most)
            self._waiting.append((first, tensor.numel()))
            self._waiting.extend((piece, 0) for piece in rest)
        self._waiting.append(frame)
        self._spared.clear()

    def flush(self) -> bool:
        """Send what there is room for; whether that was everything."""
        while self._waiting:
            part = self._waiting[0]
            if isinstance(part, tuple):
                piece, whole = part
                if (position := self.arena.write(piece)) is None:
                    return False
                part = _PIECE_FRAME.pack(_PIECE, position, piece.numel(), whole)
            self._socket.send(part, zmq.NOBLOCK)  # no limit is set, so it is always taken
            self._waiting.popleft()
        return True


class _Inlet:
    """Frames on their way in. `release` is told how far the arena has been read, each quarter of it."""

    def __init__(self, file: int, receiver: zmq.Socket[bytes], *, release: Callable[[int], None]) -> None:
        self.arena = ArenaReader(file)
        self._socket = receiver
        self._release = release
        self._released = 0
        self._spared: deque[Tensor] = deque()
        self._missing = 0  # bytes of the last of them
        self._decode = sparing_decoder(self._spared.popleft)

    def receive(self) -> list[ToWorker | FromWorker | None]:
        """All messages there are, None for a hello. Raises ArenaError or what decoding raises."""
        messages: list[ToWorker | FromWorker | None] = []
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            if frame[:1] == _MESSAGE:
                messages.append(self._decode(memoryview(frame)[1:]))
            elif frame[:1] == _HELLO:
                messages.append(None)
            else:
                self._read(*_PIECE_FRAME.unpack(frame)[1:])

    def _read(self, position: int, num_bytes: int, whole: int) -> None:
        if whole:
            self._spared.append(torch.empty(whole, dtype=torch.uint8))
            self._missing = whole
        tensor = self._spared[-1]
        start = tensor.numel() - self._missing
        self.arena.read(position, into=tensor[start : start + num_bytes])
        self._missing -= num_bytes
        if self.arena.position - self._released >= self.arena.num_bytes // 4:
            self._released = self.arena.position
            self._release(self._released)


# ---- the worker's end -------------------------------------------------------------------------------------------


class ProcessWorkerEnd:
    """A worker's end in its own process. `send` waits for room where the engine has not read yet what was sent before.

    Args:
        road: from the engine's end.
        on_lost: called, on a thread of the channel, when the engine's process is gone.
    """

    def __init__(self, road: Road, *, on_lost: Callable[[], None]) -> None:
        self._folder = Path(road.folder)
        self._lifeline = socket.socket(fileno=road.lifeline)
        self._lifeline.settimeout(HEARTBEAT_S)
        self._on_lost = on_lost
        self._is_lost = False
        self._pull = _socket(zmq.PULL)
        self._pull.bind(f"ipc://{self._folder}/down")
        self._push = _socket(zmq.PUSH)
        self._push.connect(f"ipc://{self._folder}/up")
        self._inlet = _Inlet(road.to_worker, self._pull, release=self._say_position)
        self._outlet = _Outlet(road.from_worker, self._push)
        for file in (road.to_worker, road.from_worker):
            os.close(file)
        self._room = threading.Condition()  # guards the outlet: any thread may send
        self._push.send(_HELLO)
        self._watching = threading.Thread(target=self._watch, name="mstar-lifeline", daemon=True)
        self._watching.start()

    def send(self, message: FromWorker) -> None:
        """Raises TypeError for values that may not cross; nothing of the message is sent then."""
        with self._room:
            if not self._is_lost:
                self._outlet.put(message)
            while not self._is_lost and not self._outlet.flush():
                self._room.wait()

    def receive(self, timeout_s: float | None = None) -> list[ToWorker]:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            if not self._pull.poll(-1 if left_s == math.inf else math.ceil(1000 * left_s)):
                return []
            found = self._inlet.receive()
            if None in found:  # both directions are connected
                shutil.rmtree(self._folder, ignore_errors=True)
            messages = [cast(ToWorker, message) for message in found if message is not None]
            if messages or time.monotonic() >= deadline:
                return messages

    def close(self) -> None:
        """Say no more; what was sent is still delivered. Not for use while another thread sends or receives."""
        with self._room:
            self._is_lost = True
            self._push.close(_LINGER_MS)
            self._pull.close(0)
        with contextlib.suppress(OSError):
            self._lifeline.shutdown(socket.SHUT_RDWR)
        self._watching.join()
        self._lifeline.close()
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
                was_closed, self._is_lost = self._is_lost, self._is_lost or not record
                self._room.notify_all()
            if not record:
                if not was_closed:
                    self._on_lost()
                return


# ---- the engine's end -------------------------------------------------------------------------------------------


class ProcessEngineEnd:
    """The engine's end, made on its event loop. What the arena has no room for waits here, so `send` never blocks.

    Attributes:
        road: for the worker's process, which inherits `road.files`; `hand_over` once it has them.
        heard_at: when the worker's process last showed that it lives, in seconds of `time.monotonic`.
    """

    def __init__(self, *, arena_bytes: int = ARENA_BYTES) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{_identity(os.getpid())}-"))
        self._pull = _socket(zmq.PULL)
        self._pull.bind(f"ipc://{self._folder}/up")
        self._push = _socket(zmq.PUSH)
        self._lifeline, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lifeline.setblocking(False)
        down, up = create_arena(arena_bytes), create_arena(arena_bytes)
        self.road = Road(folder=str(self._folder), to_worker=down, from_worker=up, lifeline=theirs.detach())
        self._outlet = _Outlet(down, self._push)
        self._inlet = _Inlet(up, self._pull, release=self._say_position)
        self._inbox: list[FromWorker] = []
        self._waiter: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._is_connected = self._is_closed = False
        self.heard_at = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(_file(self._pull), self._on_frames)
        self._loop.add_reader(self._lifeline, self._on_lifeline)

    def hand_over(self) -> None:
        """The worker's process has inherited the road: close this process's copies, so that the lifeline can end."""
        for file in self.road.files:
            os.close(file)

    def send(self, message: ToWorker) -> None:
        """Never blocks. Raises TypeError for values that may not cross; nothing of the message is sent then."""
        if not self._is_closed:
            self._outlet.put(message)
            self._flush()

    async def receive(self) -> list[FromWorker]:
        """All messages there are, waiting for the first. Raises ArenaError, or what decoding raised."""
        while not self._inbox:
            if self._failure is not None:
                raise self._failure
            self._waiter = self._loop.create_future()
            await self._waiter
        messages, self._inbox = self._inbox, []
        return messages

    def close(self) -> None:
        """Stop listening; what was sent is still delivered, if the worker reads it. `dispose` once it has ended."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(_file(self._pull))
            self._loop.remove_reader(self._lifeline)
            self._push.close(_LINGER_MS)
            self._pull.close(0)

    def dispose(self) -> None:
        """Cut the lifeline and free what is left; once."""
        self.close()
        self._lifeline.close()
        self._inlet.arena.close()
        self._outlet.arena.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _flush(self) -> None:
        if self._is_connected:
            self._outlet.flush()

    def _on_frames(self) -> None:
        try:
            found = self._inlet.receive()
        except Exception as error:  # noqa: BLE001  # whoever receives next raises it
            self._failure = error
            self._loop.remove_reader(_file(self._pull))
            found = []
        if None in found:
            self._push.connect(f"ipc://{self._folder}/down")
            self._push.send(_HELLO)
            self._is_connected = True
            self._flush()
        self._inbox += [cast(FromWorker, message) for message in found if message is not None]
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
        if not record:  # its process is gone; whoever started it sees how it ended
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


def _socket(kind: int) -> zmq.Socket[bytes]:
    made: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    made.setsockopt(zmq.SNDHWM if kind == zmq.PUSH else zmq.RCVHWM, 0)
    made.setsockopt(zmq.LINGER, 0)
    return made


def _file(of: zmq.Socket[bytes]) -> int:
    return int(of.getsockopt(zmq.FD))


# ---- what a killed process leaves ------------------------------------------------------------------------------


def sweep() -> None:
    """Remove the folders of engines that were killed before their workers had started."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*-*"):
        process, started = folder.name.split("-")[1:3]
        with contextlib.suppress(OSError):  # somebody else has removed it
            is_old = time.time() - folder.stat().st_mtime > _STALE_S  # a process may live where its number says nothing
            if is_old and process.isdecimal() and _identity(int(process)) != f"{process}-{started}":
                shutil.rmtree(folder, ignore_errors=True)


def _identity(process: int) -> str:
    """A process's number and when it started, which together are never used again; without the time if it is gone."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return f"{process}-"
    return f"{process}-{fields[19]}"
