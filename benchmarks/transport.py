"""What does a tensor's way to another process cost, against pickled pyzmq and torch.multiprocessing's queues?

    python benchmarks/transport.py [--rounds 5] [--seconds 0.4]

A float32 tensor of 4 KB, 1 MB and 64 MB goes to a spawned process, which reads one word of each page and answers with a
small message. Printed are the medians of round trips in microseconds, from rounds that take turns, and how many times
the bandwidth of pickling that is. Ours is the channel as engine and worker hold it: the engine's end on an event loop,
messages validated, the tensor copied in and out again, so that both sides own what they have; between workers there is
no event loop. The floor is what that stands on: zmq's sockets, on an event loop (`zmq, loop`) and without (`zmq`), and
no message but the bytes themselves, or, of large tensors, as many as announce them, with one copy into memory that both
processes have and one out of it, always into the same. A queue is measured with one and the same tensor (`reused`),
whose memory is shared once, and with a new one each time, as results are.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import torch
import zmq
from harness import machine, report
from torch import multiprocessing

from mstar.ipc.messages import Begin, Emit, Shutdown
from mstar.ipc.process_channel import Exchange, ProcessWorkerEnd, Road
from mstar.ipc.tensors import INLINE_BYTES

SIZES = {"4 KB": 4 << 10, "1 MB": 1 << 20, "64 MB": 64 << 20}
PAGE = 1024  # float32 elements
ANNOUNCEMENT = 160  # bytes
ANSWER = b"x" * 40

RoundTrip = Callable[[torch.Tensor], Awaitable[None]]


def shared_room(file: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, SIZES["64 MB"]), dtype=torch.float32)


def touch(tensor: torch.Tensor) -> float:
    return float(tensor[::PAGE].sum())


# ---- the other process ------------------------------------------------------------------------------------------


def answer_channel(road: str, server: str) -> None:
    found = msgspec.json.decode(road, type=Road)
    end = ProcessWorkerEnd(found, server=int(server), on_lost=lambda: os._exit(1))
    while True:
        for message in end.receive():
            if isinstance(message, Shutdown):
                return end.close()
            assert isinstance(message, Begin)
            value = touch(message.inputs["x"])
            if message.request_id == "of a worker":
                end.send_to(1, Begin(request_id="r", walks={}, inputs={"x": value}))
            else:
                end.send(Emit(request_id="r", name="x", path=(), value=value))


def answer_bytes(address: str, room: str) -> None:
    pair = zmq.Context.instance().socket(zmq.PAIR)
    pair.connect(address)
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    shared, own = shared_room(int(room)), torch.ones(SIZES["64 MB"] // 4)
    while sent := pair.recv():
        if len(sent) == ANNOUNCEMENT:
            num_elements = int(sent)
            touch(own[:num_elements].copy_(shared[:num_elements]))
        else:
            touch(torch.frombuffer(bytearray(sent), dtype=torch.float32))
        pair.send(ANSWER)


def answer_pickled(address: str) -> None:
    pair = zmq.Context.instance().socket(zmq.PAIR)
    pair.connect(address)
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()  # ends with who asks
    while (tensor := pickle.loads(pair.recv())) is not None:
        pair.send(pickle.dumps(touch(tensor)))


def answer_queue(there: multiprocessing.Queue, back: multiprocessing.Queue) -> None:
    while (tensor := there.get()) is not None:
        back.put(touch(tensor))


# ---- this process -----------------------------------------------------------------------------------------------


async def measure(roundtrip: RoundTrip, size: int, *, seconds: float, is_new: bool) -> list[float]:
    tensor = torch.ones(size // 4)
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 4:
        tensor = torch.ones(size // 4) if is_new else tensor
        started = time.perf_counter()
        await roundtrip(tensor)
        times.append(1e6 * (time.perf_counter() - started))
    return times[1:]


def worker_here(exchange: Exchange) -> ProcessWorkerEnd:
    """Another worker's end, in this process."""
    engine = exchange.end(1)
    engine.send(Shutdown())
    road = engine.road
    own = {name: os.dup(getattr(road, name)) for name in ("inbox", "arena", "lifeline")}
    end = ProcessWorkerEnd(msgspec.structs.replace(road, **own), server=os.getpid(), on_lost=lambda: None)
    end.receive()  # it has heard of the others then
    return end


async def main(arguments: argparse.Namespace) -> None:
    exchange = Exchange()
    channel = exchange.end(0)
    command = [sys.executable, __file__, "--channel", msgspec.json.encode(channel.road).decode(), str(os.getpid())]
    children = [subprocess.Popen(command, pass_fds=channel.road.files)]
    channel.hand_over()
    with tempfile.TemporaryDirectory() as folder:
        pair, bare = (zmq.Context.instance().socket(zmq.PAIR) for _ in range(2))
        file = os.memfd_create("room")
        os.ftruncate(file, SIZES["64 MB"])
        room = shared_room(file)
        for socket, way, more in ((pair, "pickled", []), (bare, "bytes", [str(file)])):
            socket.bind(f"ipc://{folder}/{way}")
            command = [sys.executable, __file__, f"--{way}", f"ipc://{folder}/{way}", *more]
            children.append(subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[file]))
        peer = worker_here(exchange)
        arrived = asyncio.Event()
        spawn = multiprocessing.get_context("spawn")
        there, back = spawn.Queue(), spawn.Queue()
        queued = spawn.Process(target=answer_queue, args=(there, back))
        queued.start()

        async def ours(tensor: torch.Tensor) -> None:
            channel.send(Begin(request_id="r", walks={}, inputs={"x": tensor}))
            await channel.receive()

        async def between_workers(tensor: torch.Tensor) -> None:
            peer.send_to(0, Begin(request_id="of a worker", walks={}, inputs={"x": tensor}))
            peer.receive()

        async def pickled(tensor: torch.Tensor) -> None:
            pair.send(pickle.dumps(tensor))
            pickle.loads(pair.recv())

        def announced(tensor: torch.Tensor) -> bytes:
            """What crosses a socket: a small tensor itself, or where a large one is; that is copied in and out."""
            if tensor.nbytes < INLINE_BYTES:
                return tensor.numpy().tobytes()
            room[: tensor.numel()].copy_(tensor)
            return str(tensor.numel()).zfill(ANNOUNCEMENT).encode()

        async def raw(tensor: torch.Tensor) -> None:
            bare.send(announced(tensor))
            bare.recv()

        async def raw_on_loop(tensor: torch.Tensor) -> None:
            asyncio.get_running_loop().add_reader(bare, arrived.set)
            bare.send(announced(tensor), zmq.NOBLOCK)
            while not bare.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                arrived.clear()
                await arrived.wait()
            bare.recv()
            asyncio.get_running_loop().remove_reader(bare)

        async def queue(tensor: torch.Tensor) -> None:
            there.put(tensor)
            back.get()

        ways = {
            "ours": (ours, True), "ours, between workers": (between_workers, True), "pickled pyzmq": (pickled, True),
            "queue": (queue, True), "queue, reused": (queue, False), "zmq": (raw, True),
            "zmq, loop": (raw_on_loop, True),
        }  # fmt: skip
        found: dict[tuple[str, str], list[float]] = {(way, size): [] for way in ways for size in SIZES}
        for number in range(-1, arguments.rounds):  # the first round warms up
            for size, num_bytes in SIZES.items():
                for way, (roundtrip, is_new) in ways.items():
                    seconds = arguments.seconds if number >= 0 else 0.0
                    times = await measure(roundtrip, num_bytes, seconds=seconds, is_new=is_new)
                    found[way, size] += times if number >= 0 else []
        for size in SIZES:
            medians = {way: statistics.median(found[way, size]) for way in ways}
            times_pickled = round(medians["pickled pyzmq"] / medians["ours"], 1)
            report(size=size, median_us={way: round(us) for way, us in medians.items()}, times_pickled=times_pickled)
        report(**machine(), threads_alive=threading.active_count())
        channel.send(Shutdown())
        peer.close()
        pair.send(pickle.dumps(None))
        bare.send(b"")
        there.put(None)
        for child in children:
            child.wait(60)
        queued.join(60)
        channel.dispose()
        exchange.close()
        pair.close()
        bare.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=Path(__file__).name)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.4, help="of one way and size in one round")
    parser.add_argument("--channel", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--pickled", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.channel:
        answer_channel(*given.channel)
    elif given.bytes:
        answer_bytes(*given.bytes)
    elif given.pickled:
        answer_pickled(given.pickled)
    else:
        asyncio.run(main(given))
