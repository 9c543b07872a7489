"""What the ranks of a tensor-parallel worker tell each other, and the socket pair between the first and each other.

The first rank alone knows requests; the others do on their shares what it says, in order. Values are as in
`ipc.messages`; tensors that are large, or on a device, stand for what a collective brings.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from mstar.ipc import tensors

LARGE_BYTES = 16 * 1024
"""Tensors from here on come by a collective."""

_LENGTH = struct.Struct("=Q")
_BROUGHT = 3  # an extension type, beside those of `ipc.tensors`


class RankOrder(Struct, frozen=True, kw_only=True):
    """What a further rank's process is told at its start, as JSON on its standard input.

    Args:
        port: of the store at which ranks meet.
        socket: an open file, its end of the socket pair.
        config: the fields of its EngineConfig as built-in types.
    """

    rank: int
    size: int
    port: int
    socket: int
    config: dict[str, Any]
    log_level: str
    timeout_s: float


# ---- from the first rank ------------------------------------------------------------------------------------


class Load(Struct, tag=True, frozen=True, kw_only=True):
    """Load this rank's share of these modules."""

    modules: list[str]


class Pools(Struct, tag=True, frozen=True, kw_only=True):
    """All have loaded: make room for so many pages, by module."""

    num_pages: dict[str, int]


class Attention(Struct, tag=True, frozen=True, kw_only=True):
    """An attention plan: its host arrays as tensors, and its flags."""

    query_starts: Tensor
    context_lens: Tensor
    page_table: Tensor
    visible_end: Tensor
    write: bool
    batch_invariant: bool


class CallMethod(Struct, tag=True, frozen=True, kw_only=True):
    """Call a method of a module.

    Args:
        columns: tensors of the context, by name.
        present, plan: of the context.
        attention: of methods that use KV.
        inputs: by port.
    """

    module: str
    method: str
    num_rows: int
    row_multiple: int
    columns: dict[str, Any]
    present: dict[str, Any]
    plan: dict[str, Any]
    attention: Attention | None
    inputs: dict[str, Any]


class CopyPage(Struct, tag=True, frozen=True, kw_only=True):
    """Make page `target` what `source` is."""

    module: str
    source: int
    target: int


class ReadPages(Struct, tag=True, frozen=True, kw_only=True):
    """Answer with what is in these pages."""

    module: str
    pages: list[int]


class WritePages(Struct, tag=True, frozen=True, kw_only=True):
    """Fill these pages; `content` has this rank's heads."""

    module: str
    pages: list[int]
    content: Tensor
    first_layer: int = 0


class Settle(Struct, tag=True, frozen=True):
    """The last call failed here: answer how far it came there."""


class Stop(Struct, tag=True, frozen=True):
    """End."""


ToRank = Load | Pools | CallMethod | CopyPage | ReadPages | WritePages | Settle | Stop


# ---- from the others ----------------------------------------------------------------------------------------


class Started(Struct, tag=True, frozen=True):
    """About to meet the other ranks."""


class Loaded(Struct, tag=True, frozen=True):
    """Its share of the weights is there."""


class Unable(Struct, tag=True, frozen=True, kw_only=True):
    """It cannot start; `is_config`: the operator can change that."""

    reason: str
    is_config: bool


class PagesRead(Struct, tag=True, frozen=True, kw_only=True):
    """What is in pages, of this rank's heads."""

    content: Tensor


class Settled(Struct, tag=True, frozen=True, kw_only=True):
    """How many collectives there have been."""

    num_collectives: int


FromRank = Started | Loaded | Unable | PagesRead | Settled


# ---- the socket pair ----------------------------------------------------------------------------------------


class Brought(Struct, frozen=True):
    """In the place of a tensor that a collective brings."""

    dtype: str
    shape: list[int]

    def empty(self, device: torch.device) -> Tensor:
        """Room for it."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device=device)


class Wire:
    """One end of a socket pair between two ranks. Owned by one thread.

    Args:
        kind: what arrives here.
        timeout_s: for which sending may block, and receiving unless it says otherwise; TimeoutError then.
    """

    def __init__(self, end: socket.socket, kind: Any, *, timeout_s: float) -> None:
        self._socket, self._timeout_s = end, timeout_s
        end.settimeout(timeout_s)
        self._encode = msgspec.msgpack.Encoder(enc_hook=tensors.encode_value).encode
        self._decode = msgspec.msgpack.Decoder(kind, ext_hook=_extension).decode

    def send(self, message: Any) -> None:
        """Raises OSError if nobody is there, TypeError for values that may not cross."""
        body = self._encode(message)
        self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self, *, forever: bool = False) -> Any:
        """The next message. Raises EOFError if nobody is there any more."""
        self._socket.settimeout(None if forever else self._timeout_s)
        try:
            (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
            return self._decode(self._exactly(length))
        finally:
            self._socket.settimeout(self._timeout_s)

    def set_timeout(self, timeout_s: float) -> None:
        """For which sending and receiving may block from now on."""
        self._timeout_s = timeout_s
        self._socket.settimeout(timeout_s)

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, count: int) -> bytearray:
        data, at = bytearray(count), 0
        view = memoryview(data)
        while at < count:
            got = self._socket.recv_into(view[at:])
            if not got:
                raise EOFError("the other rank has ended")
            at += got
        return data


def spared(value: Any, bring: Callable[[Tensor], None]) -> Any:
    """A value as it is sent: tensors that a collective brings are told to `bring`, in order."""
    if isinstance(value, Tensor) and (value.device.type != "cpu" or value.nbytes >= LARGE_BYTES):
        bring(value)
        note = Brought(str(value.dtype).removeprefix("torch."), list(value.shape))
        return msgspec.msgpack.Ext(_BROUGHT, msgspec.msgpack.encode(note))
    return _mapped(value, lambda inner: spared(inner, bring))


def restored(value: Any, take: Callable[[Brought], Tensor]) -> Any:
    """A value as it was, its tensors that a collective brings from `take`, in the same order."""
    return take(value) if isinstance(value, Brought) else _mapped(value, lambda inner: restored(inner, take))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, list | tuple):
        return [change(inner) for inner in value]
    return {key: change(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def _extension(code: int, data: memoryview) -> Any:
    return msgspec.msgpack.decode(data, type=Brought) if code == _BROUGHT else tensors.decode_extension(code, data)
