"""Messages to bytes and back: msgpack, with tensors as an extension type: dtype, shape and raw bytes.

Used by channels between processes, and by the in-memory channel under test. A channel may carry the bytes of large
tensors beside the message (`sparing_encoder`, `sparing_decoder`). Knows no sockets and no devices but the CPU: whoever
sends a tensor has moved it there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from mstar.ipc.messages import Message

INLINE_BYTES = 16 * 1024
"""Tensors from here on are large."""

Place = tuple[int, int] | None
"""Where a channel has put the elements of a large tensor; what it means is the channel's."""

_TENSOR = 1
_SPARED = 2  # the same with a place in the stead of its elements
_DTYPES = {str(d).removeprefix("torch."): d for d in (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_encode_tensor = msgspec.msgpack.Encoder().encode
_decode_tensor = msgspec.msgpack.Decoder(tuple[str, list[int], memoryview]).decode  # dtype, shape, elements
_decode_spared = msgspec.msgpack.Decoder(tuple[str, list[int], Place]).decode


def encode(message: Message) -> bytes:
    """A message as bytes. Raises TypeError for values that may not cross (see `ipc.messages`)."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """The message that `encode` made bytes of; tuples inside untyped values come back as lists."""
    return _decoder.decode(data)


def sparing_encoder(spare: Callable[[Tensor], Place]) -> Callable[[Message], bytes]:
    """Like `encode`, but the elements of each large tensor go to `spare`, in order: uint8 (B,), a view if it can be."""

    def encode_value(value: Any) -> msgspec.msgpack.Ext:
        if not isinstance(value, Tensor) or value.nbytes < INLINE_BYTES:
            return _encode_value(value)
        name = _dtype_name(value)
        place = spare(value.detach().contiguous().reshape(-1).view(torch.uint8))
        return msgspec.msgpack.Ext(_SPARED, _encode_tensor((name, list(value.shape), place)))

    return msgspec.msgpack.Encoder(enc_hook=encode_value).encode


def sparing_decoder(take: Callable[[Place, int], Tensor]) -> Callable[[bytes | memoryview], Message]:
    """Like `decode`; `take` gets places, in order, and bytes: uint8 (B,), memory that the tensor then owns."""

    def decode_extension(code: int, data: memoryview) -> Tensor:
        if code != _SPARED:
            return _decode_extension(code, data)
        name, shape, place = _decode_spared(data)
        dtype = _DTYPES[name]
        return take(place, math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)

    return msgspec.msgpack.Decoder(Message, ext_hook=decode_extension).decode


def tensor_bytes(tensor: Tensor) -> bytes:
    """The elements of a CPU tensor of any dtype and strides, in C order."""
    if tensor.dtype is torch.bfloat16:  # which numpy lacks
        tensor = tensor.view(torch.int16)
    return tensor.detach().numpy().tobytes()


def tensor_from_bytes(data: bytes | bytearray | memoryview, *, dtype: torch.dtype, shape: list[int]) -> Tensor:
    """A tensor that owns a copy of `data`, elements in C order. The size must fit."""
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _encode_value(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{type(value).__module__}.{type(value).__qualname__} cannot cross to another process; "
            "send tensors, numbers, strings, None, and lists and dicts of those"
        )
    name = _dtype_name(value)
    return msgspec.msgpack.Ext(_TENSOR, _encode_tensor((name, list(value.shape), tensor_bytes(value))))


def _dtype_name(tensor: Tensor) -> str:
    if not tensor.is_cpu:
        raise TypeError(f"a tensor on {tensor.device} cannot cross to another process; move it to the CPU first")
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise TypeError(f"tensors of {tensor.dtype} cannot cross to another process; use one of {', '.join(_DTYPES)}")
    return name


def _decode_extension(code: int, data: memoryview) -> Tensor:
    assert code == _TENSOR, f"unknown extension type {code}"
    name, shape, elements = _decode_tensor(data)
    return tensor_from_bytes(elements, dtype=_DTYPES[name], shape=shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_value)
_decoder = msgspec.msgpack.Decoder(Message, ext_hook=_decode_extension)

encode_value, decode_extension = _encode_value, _decode_extension  # for messages of other kinds
