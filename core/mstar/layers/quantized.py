"""Linear layers with weights of four bits, on CPUs: made from those of a loaded model, run by a kernel of our own.

Each group of a row's weights is minimum + scale * number, with the numbers 0 to 15 rounded to nearest; nothing is
calibrated, inputs and sums keep their precision. Only the packed weights stay in memory. Knows tensors, not requests.
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn import functional

from mstar.errors import ConfigError
from mstar.layers.kernels import function
from mstar.layers.linear import Linear, MergedLinear

SOURCE = Path(__file__).with_suffix(".cpp")
GROUP_SIZES = (32, 64, 128)
GROUP_SIZE = 64  # 4.5 bits a weight
_WORDS, _PLACES = 16, 8  # a block: 16 words of 8 numbers; number 16 i + j lies in word j at bit 4 i
_BLOCK = _WORDS * _PLACES
_SERIAL = 1 << 18  # multiplications that are not worth waking a thread for
_PACKED_ROWS = 1024  # packed at once, as packing takes several times the memory
_ARGUMENTS = (*[ctypes.c_void_p] * 5, *[ctypes.c_int64] * 4, ctypes.c_int)


@functools.cache
def kernel(dtype: torch.dtype) -> Callable[..., None] | None:
    """Our kernel for inputs of a dtype."""
    return function(SOURCE, dtype, _ARGUMENTS)


def linear_int4(x: Tensor, words: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., K) @ weight (N, K)^T + bias (N,) -> (..., N) in x's dtype; words and scales as of `pack`.

    The bits of a row do not depend on how many others there are. Infinite inputs may give NaN.
    """
    return (_op if torch.compiler.is_compiling() else _on_cpu)(x, words, scales, bias)


def _on_cpu(x: Tensor, words: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    entry, depth, width = kernel(x.dtype), x.shape[-1], len(words)
    assert entry is not None, f"no kernel for {x.dtype}"
    assert -(-depth // _BLOCK) * _WORDS == words.shape[1], f"input has {depth} columns, weight {words.shape[1]} words"
    assert bias is None or bias.dtype == x.dtype, "input and bias differ in dtype"
    operands = [x.contiguous(), words, scales] + ([] if bias is None else [bias])
    assert all(operand.is_contiguous() for operand in operands), "packed weights are not contiguous"
    rows, group_size = x.numel() // depth, words.shape[1] * _PLACES // scales.shape[1]
    out = x.new_empty((*x.shape[:-1], width))
    threads = torch.get_num_threads() if rows * width * depth > _SERIAL else 1
    pointers = [operand.data_ptr() for operand in operands] + ([None] if bias is None else [])
    entry(*pointers, out.data_ptr(), rows, width, depth, group_size, threads)
    return out


_op = torch.library.custom_op("mstar::linear_int4", _on_cpu, mutates_args=(), device_types="cpu")


@_op.register_fake
def _(x: Tensor, words: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], words.shape[0]))


# ---- weights --------------------------------------------------------------------------------------------


def pack(weight: Tensor, *, group_size: int = GROUP_SIZE) -> tuple[Tensor, Tensor]:
    """(N, K) -> int32 words (N, 16 B) and bfloat16 scales (N, 128 B / group_size, 2) of (scale, minimum).

    B = ceil(K / 128); what a row lacks to whole blocks meets inputs of zero.
    """
    depth = weight.shape[1]
    groups = functional.pad(weight.float(), (0, -depth % _BLOCK)).unflatten(1, (-1, group_size))
    if depth % group_size:  # the range of the last weights is their own
        groups[:, depth // group_size, depth % group_size :] = groups[:, depth // group_size, :1]
    low, high = groups.aminmax(dim=-1, keepdim=True)
    minimum, scale = low.bfloat16(), ((high - low) / 15).bfloat16()
    step = scale.float().where(scale > 0, 1.0)
    numbers = ((groups - minimum.float()) / step).round_().clamp_(0, 15).int().view(len(weight), -1, _PLACES, _WORDS)
    return (numbers << _shifts()).sum(dim=2, dtype=torch.int32).flatten(1), torch.cat((scale, minimum), dim=-1)


def unpack(words: Tensor, scales: Tensor, *, depth: int) -> Tensor:
    """The (N, depth) weight that the kernel multiplies with, in float32."""
    numbers = (words.unflatten(1, (-1, 1, _WORDS)) >> _shifts() & 15).view(*scales.shape[:2], -1)
    scale, minimum = scales.float().split(1, dim=-1)
    return (numbers * scale + minimum).flatten(1)[:, :depth]


def _shifts() -> Tensor:
    return torch.arange(0, 4 * _PLACES, 4, dtype=torch.int32)[:, None]


# ---- quantisation, applied from outside -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """What quantising a module came to.

    Args:
        bytes_before, bytes_after: of the weights of layers that now have four bits.
        errors: by how much each such layer's outputs differ for random inputs: root mean square, relative.
    """

    bytes_before: int
    bytes_after: int
    errors: dict[str, float]

    @property
    def num_layers(self) -> int:
        return len(self.errors)

    def __str__(self) -> str:
        if not self.errors:
            return "no linear layer is quantised: there is none, or in four bits it would take no less memory"
        worst, mib = max(self.errors, key=self.errors.__getitem__), 1024**2
        mean = sum(self.errors.values()) / self.num_layers
        return (
            f"{self.num_layers} linear layers are quantised to four bits: {self.bytes_after / mib:.1f} MiB instead of "
            f"{self.bytes_before / mib:.1f}; outputs for random inputs differ by {mean:.1%} on average, at most by "
            f"{self.errors[worst]:.1%} ({worst})"
        )


def check(dtype: torch.dtype, device: torch.device, *, invariant: bool) -> None:
    """Raise ConfigError where `quantize_int4` cannot work; `invariant`: also if bits of a row depend on the others."""
    if device.type != "cpu":
        raise ConfigError(f"--quantization int4 is for CPUs, not {device}; add --device cpu or leave it out")
    if dtype not in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(f"--quantization int4 cannot be had with dtype {name}; add --dtype bfloat16 or float32")
    if kernel(dtype) is None:
        raise ConfigError("--quantization int4 needs a C++ compiler; install g++, set CXX, or leave it out")
    if invariant:
        generator = torch.Generator().manual_seed(0)
        weight = pack(torch.randn(50, 300, generator=generator))
        x = torch.randn(40, 300, generator=generator).to(dtype)
        whole = linear_int4(x, *weight)
        if not all(torch.equal(linear_int4(x[:rows], *weight), whole[:rows]) for rows in (1, 2, 3, 16, 33)):
            raise ConfigError("--batch-invariant cannot be kept here with --quantization int4; leave one of them out")


def quantize_int4(module: nn.Module, *, group_size: int = GROUP_SIZE) -> Quantization:
    """Replace the weights of a built module's linear layers by packed ones, which are buffers.

    Not of heads, whose errors go straight into what is drawn, nor weights that several layers share, as an embedding
    needs them whole. Raises ConfigError for weights with NaN or infinity, or a group size that there is not.
    """
    if group_size not in GROUP_SIZES:
        raise ConfigError(f"group size is {group_size}; it must be one of {', '.join(map(str, GROUP_SIZES))}")
    owners = Counter(id(weight) for child in module.modules() for weight in child.parameters(recurse=False))
    before, after, errors = 0, 0, dict[str, float]()
    for name, layer in module.named_modules():
        if type(layer) not in (nn.Linear, Linear, MergedLinear) or owners[id(layer.weight)] > 1:
            continue
        blocks, weight = -(-layer.in_features // _BLOCK), layer.weight.detach()
        num_bytes = len(weight) * blocks * (_BLOCK // 2 + 4 * _BLOCK // group_size)
        if num_bytes >= weight.nbytes:
            continue
        if not weight.isfinite().all():
            raise ConfigError(f"{name}.weight has NaN or infinity, which four bits cannot hold; mend the checkpoint")
        before, after = before + weight.nbytes, after + num_bytes
        errors[name] = _quantize(layer, weight, group_size=group_size)
    return Quantization(bytes_before=before, bytes_after=after, errors=errors)


def _quantize(layer: nn.Linear, weight: Tensor, *, group_size: int) -> float:
    """Returns the error of its outputs."""
    parts, squares = list[tuple[Tensor, Tensor]](), torch.zeros(2)
    for rows in weight.split(_PACKED_ROWS):
        parts.append(pack(rows, group_size=group_size))
        difference = unpack(*parts[-1], depth=layer.in_features) - rows
        squares += torch.stack((difference.square().sum(), rows.float().square().sum()))
    del layer.weight
    for name, tensors in zip(("words", "scales"), zip(*parts, strict=True), strict=True):
        layer.register_buffer(name, torch.cat(tensors))
    layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]
    return float((squares[0] / squares[1].clamp(min=1e-30)).sqrt())


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear_int4(x, layer.words, layer.scales, layer.bias)  # type: ignore[arg-type]
