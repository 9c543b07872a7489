"""Linear layers: plain, fused (one weight for several projections), output head; and batch invariance of a model.

On CPUs a kernel of our own serves few rows: torch's bfloat16 product on CPUs without such instructions costs the same
per row in any batch. Another one serves tens of float32 rows. Knows tensors, not requests.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn import functional

from mstar.errors import ConfigError
from mstar.layers.kernels import function

SOURCE = Path(__file__).with_suffix(".cpp")
PRODUCT = SOURCE.with_name("product.cpp")
ROWS = 16  # batches are padded to a multiple of it when they must be invariant
_SERIAL = 1 << 18  # multiplications that are not worth waking a thread for
_ARGUMENTS = (*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 3, ctypes.c_int)

Embedding = nn.Embedding


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., K) @ weight (N, K)^T + bias (N,) -> (..., N), by the faster of our kernel and torch's."""
    return _product(x, weight, bias, invariant=False)


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` whose rows do not depend, to the bit, on how many others there are.

    By our kernel, which sums each output in one order, or by giving every call of torch's exactly ROWS rows.
    """
    return _product(x, weight, bias, invariant=True)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, *, invariant: bool) -> Tensor:
    if x.device.type != "cpu":
        return _by_torch(x, weight, bias, invariant=invariant)
    on_cpu = _op if torch.compiler.is_compiling() else _on_cpu
    return on_cpu(x, weight, bias, invariant)


class Linear(nn.Linear):
    """A linear layer."""

    def forward(self, x: Tensor) -> Tensor:  # (..., K) -> (..., N)
        return linear(x, self.weight, self.bias)


class MergedLinear(Linear):
    """Several projections of one input as one product; checkpoints load into slices of its weight.

    Args:
        out_features: widths of the projections, in order.
    """

    def __init__(self, in_features: int, out_features: Sequence[int], *, bias: bool = False) -> None:
        super().__init__(in_features, sum(out_features), bias=bias)
        self.widths = tuple(out_features)

    def split(self, merged: Tensor) -> tuple[Tensor, ...]:
        """Views of the projections in what `forward` returned."""
        return merged.split(self.widths, dim=-1)

    def heads(self, head_dim: int) -> tuple[int, ...]:
        """How many heads each projection has."""
        return tuple([width // head_dim for width in self.widths])


class Head(Linear):
    """Logits over a vocabulary, without bias; `tie` shares an embedding's weight."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__(hidden_size, vocab_size, bias=False)

    def tie(self, embedding: nn.Embedding) -> None:
        """Use the embedding's (vocab, hidden) weight."""
        self.weight = embedding.weight


# ---- our kernel -----------------------------------------------------------------------------------------


@functools.cache
def kernel(dtype: torch.dtype) -> tuple[Callable[..., None] | None, int]:
    """Our kernel for a dtype, and the rows up to which to use it, as measured (benchmarks/LOG.md).

    torch's bfloat16 product, on CPUs without such instructions, never catches up. Up to there a row does not depend on
    its batch.
    """
    entry = function(SOURCE, dtype, _ARGUMENTS)
    if entry is None:
        return None, 0
    if dtype == torch.float32:
        return entry, 32
    return entry, 8 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else 1 << 40


@functools.cache
def product_kernel(dtype: torch.dtype) -> tuple[Callable[..., None] | None, int]:
    """Our kernel for more rows than `kernel` is for, and the rows up to which to use it.

    torch packs a float32 weight anew in every call, which more than about a hundred rows make up for.
    """
    return (function(PRODUCT, dtype, _ARGUMENTS), 160) if dtype == torch.float32 else (None, 0)


def _on_cpu(x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool) -> Tensor:
    entry, most_rows = kernel(x.dtype)
    width, depth = weight.shape
    rows = x.numel() // depth
    if rows > most_rows and not invariant:
        entry, most_rows = product_kernel(x.dtype)
    if entry is None or (rows > most_rows and not invariant):
        return _by_torch(x, weight, bias, invariant=invariant)
    operands = [x.contiguous(), weight.contiguous()] + ([] if bias is None else [bias.contiguous()])
    assert all(operand.dtype == x.dtype for operand in operands), f"input is {x.dtype}, weight {weight.dtype}"
    assert depth == x.shape[-1], f"input has {x.shape[-1]} columns, weight {depth}"
    out = x.new_empty((*x.shape[:-1], width))
    threads = torch.get_num_threads() if rows * width * depth > _SERIAL else 1
    pointers = [operand.data_ptr() for operand in operands] + ([None] if bias is None else [])
    entry(*pointers, out.data_ptr(), rows, width, depth, threads)
    return out


# What it does depends on the machine: opaque to torch.compile.
_op = torch.library.custom_op("mstar::linear", _on_cpu, mutates_args=(), device_types="cpu")


@_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _by_torch(x: Tensor, weight: Tensor, bias: Tensor | None, *, invariant: bool) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    if not invariant or not len(flat):
        return functional.linear(x, weight, bias)
    padded = functional.pad(flat, (0, 0, 0, -len(flat) % ROWS))
    result = torch.cat([functional.linear(part, weight, bias) for part in padded.split(ROWS)])
    return result[: len(flat)].reshape(*x.shape[:-1], -1)


# ---- batch invariance, applied from outside -------------------------------------------------------------

_CONVOLUTIONS = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


def set_batch_invariant(module: nn.Module) -> None:
    """Make a built model's linears and convolutions give each row, or item, the same bits in any batch.

    Elementwise operations keep the promise only for batches padded to a multiple of ROWS rows, which is the caller's
    part; `self_check` says whether this machine keeps its own.
    """
    for child in module.modules():
        if isinstance(child, nn.Linear):
            child.forward = MethodType(_invariant_forward, child)  # type: ignore[method-assign]
        elif isinstance(child, _CONVOLUTIONS):
            child.forward = functools.partial(per_item, child.forward)  # type: ignore[method-assign]


def _invariant_forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return invariant_linear(x, layer.weight, layer.bias)


def per_item(convolution: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run a convolution, or any function of a batch (B, ...), on one item at a time."""
    return torch.cat([convolution(item) for item in x.split(1)])


def self_check(dtype: torch.dtype, device: torch.device | str) -> None:
    """Raise ConfigError if, on this machine, the bits of a row depend on the number of rows beside it."""
    generator = torch.Generator().manual_seed(0)
    for depth, width in ((40, 16), (16, 40), (64, 200), (1024, 512)):
        weight = (torch.randn(width, depth, generator=generator) / depth**0.5).to(device, dtype)
        x = torch.randn(16 * ROWS, depth, generator=generator).to(device, dtype)
        expected = _probe(x[:ROWS], weight)
        for rows in (2 * ROWS, 3 * ROWS, 7 * ROWS, 16 * ROWS):
            for name, result in _probe(x[:rows], weight).items():
                if not torch.equal(result[:ROWS], expected[name]):
                    raise ConfigError(
                        f"--batch-invariant cannot be kept here: {name} of {ROWS} rows of {depth} in {dtype} changes "
                        f"when {rows} rows are computed together (device {device}, {torch.get_num_threads()} threads); "
                        "set --threads to a power of two, or serve without --batch-invariant"
                    )


def _probe(x: Tensor, weight: Tensor) -> dict[str, Tensor]:
    product = invariant_linear(x, weight)
    return {
        "linear": product,
        "silu": functional.silu(product),
        "gelu": functional.gelu(product),
        "exp": torch.exp(product),
        "sin": torch.sin(product),
        "softmax": product.softmax(-1),
        "layer_norm": functional.layer_norm(product, product.shape[-1:]),
        "mean": product.float().square().mean(-1, keepdim=True),
    }
