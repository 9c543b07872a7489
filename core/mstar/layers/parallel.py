"""Tensor parallelism, applied from outside: rewrites a plain module to hold one rank's share of its weights.

Before weights are loaded, so that each rank reads its share alone. Forwards stay as they are: what is a partial sum is
added up, and what is a part gathered, by hooks. Knows tensors, not requests, nor how ranks run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MethodType
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from mstar.errors import ConfigError, PluginError
from mstar.layers.grouped import Experts, grouped_share
from mstar.layers.linear import MergedLinear
from mstar.layers.weights import Piece

Kind = Literal["column", "row", "partial", "heads", "vocab", "experts", "sum"]
"""What is split of a module, and what follows.

    column   outputs of a linear layer, of each projection of a fused one; they stay apart
    row      inputs of a linear layer, which are apart already; outputs are added up
    partial  the same, but outputs are left as partial sums
    heads    a fused linear layer of queries, keys and values: attention heads; where there are fewer heads of keys and
             values than ranks, several ranks have the same one
    vocab    rows of an embedding, whose outputs are added up; or outputs of a head, which are gathered
    experts  `Experts`: each rank has some of them whole, and gives zeros for rows of the others
    sum      nothing; outputs, which are partial sums, are added up
"""


class Ranks(Protocol):
    """The processes that hold a model together, as one of them sees them. All call the same in the same order.

    Attributes:
        rank: which one this is, from 0.
        size: how many there are.
    """

    rank: int
    size: int

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, the same bits everywhere; maybe x itself."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' x, one behind the other along the last dimension."""
        ...

    def share(self, x: Tensor) -> Tensor:
        """What x is at rank 0; maybe x itself."""
        ...


def shard(module: nn.Module, kinds: Mapping[str, str], ranks: Ranks, *, name: str, head_dim: int | None = None) -> None:
    """Rewrite a module, of which nothing is loaded yet, to be one rank's share; what no pattern names stays whole.

    Args:
        kinds: patterns of modules' whole names -> `Kind`; the first that matches counts.
        name: of the module, for errors.
        head_dim: of attention; needed for "heads".

    Raises ConfigError for what cannot be split so many ways, PluginError for patterns that make no sense.
    """
    sharding = _Sharding(name, ranks, head_dim)
    compiled = [(re.compile(pattern), kind) for pattern, kind in kinds.items()]
    if unknown := set(kinds.values()) - set(get_args(Kind)):
        raise PluginError(f"{name}: tensor_parallel has {sorted(unknown)}; kinds are {', '.join(get_args(Kind))}")
    used = set()
    for path, child in list(module.named_modules()):
        found = next(((pattern, kind) for pattern, kind in compiled if pattern.fullmatch(path)), None)
        if found is not None:
            used.add(found[0].pattern)
            sharding.apply(found[1], child, path)
    if unused := [pattern for pattern in kinds if pattern not in used]:
        raise PluginError(f"{name}: tensor_parallel names {unused[0]!r}, which no module is called")


def num_kv_heads(total: int, *, size: int) -> int:
    """Heads of keys and values of each rank, where they can be split."""
    return max(1, total // size)


class _Sharding:
    """One module's sharding. Parameters that are shared stay shared."""

    def __init__(self, name: str, ranks: Ranks, head_dim: int | None) -> None:
        self.name, self.ranks, self.head_dim = name, ranks, head_dim
        self._cut: dict[int, nn.Parameter] = {}

    def apply(self, kind: str, module: nn.Module, path: str) -> None:
        if kind == "sum":
            module.register_forward_hook(self._sum)
        elif kind == "vocab" and isinstance(module, nn.Embedding):
            self._embedding(module, path)
        elif kind == "experts" and isinstance(module, Experts):
            self._experts(module, path)
        elif kind == "heads" and isinstance(module, MergedLinear) and len(module.widths) == 3 and self.head_dim:
            self._heads(module, path)
        elif isinstance(module, nn.Linear) and not isinstance(module, Experts) and kind not in ("experts", "heads"):
            self._linear(kind, module, path)
        else:
            raise PluginError(f"{self.name}: {path} is a {type(module).__name__}; it cannot be split as {kind!r}")

    # ---- kinds ------------------------------------------------------------------------------------------

    def _linear(self, kind: str, layer: nn.Linear, path: str) -> None:
        if kind == "column":
            widths = layer.widths if isinstance(layer, MergedLinear) else (layer.out_features,)
            self._outputs(layer, tuple(self._even(0, width, f"{path}.weight", "outputs") for width in widths))
        elif kind == "vocab":
            whole = layer.out_features
            self._outputs(layer, (self._padded(whole),), size=-(-whole // self.ranks.size))
            layer.register_forward_hook(lambda layer, args, out: self.ranks.gather(out)[..., :whole])
        else:
            self._shrink(layer, "weight", (self._even(1, layer.in_features, f"{path}.weight", "inputs"),))
            if layer.bias is not None:  # added by one of them
                whole = layer.out_features
                self._shrink(layer, "bias", (Piece(0, 0, 0 if self.ranks.rank else whole, whole),), size=whole)
            layer.in_features = layer.weight.shape[1]
            if kind == "row":
                layer.register_forward_hook(self._sum)

    def _heads(self, layer: MergedLinear, path: str) -> None:
        """Each rank's query heads need the heads of keys and values that they belong to."""
        dim, size = self.head_dim or 1, self.ranks.size
        queries, keys, _ = layer.widths
        pieces = [self._even(0, queries, f"{path}.weight", "query heads", unit=dim)]
        if size <= keys // dim or size % (keys // dim):
            piece = self._even(0, keys, f"{path}.weight", "heads of keys and values", unit=dim)
        else:
            piece = Piece(0, self.ranks.rank * (keys // dim) // size * dim, dim, keys)
        self._outputs(layer, (*pieces, piece, piece))

    def _outputs(self, layer: nn.Linear, pieces: tuple[Piece, ...], *, size: int | None = None) -> None:
        for name in ("weight", "bias"):
            if getattr(layer, name) is not None:
                self._shrink(layer, name, pieces, size=size)
        layer.out_features = layer.weight.shape[0]
        if isinstance(layer, MergedLinear):
            layer.widths = tuple(piece.length for piece in pieces if piece.length)

    def _embedding(self, layer: nn.Embedding, path: str) -> None:
        piece = self._padded(layer.num_embeddings)
        self._shrink(layer, "weight", (piece,), size=-(-layer.num_embeddings // self.ranks.size))

        def forward(layer: nn.Embedding, ids: Tensor) -> Tensor:
            own = ids - piece.start
            is_own = (own >= 0) & (own < piece.length)
            found = functional.embedding(own.where(is_own, 0), layer.weight)
            return self.ranks.sum(found.where(is_own[..., None], 0.0))

        layer.forward = MethodType(forward, layer)  # type: ignore[method-assign]

    def _experts(self, layer: Experts, path: str) -> None:
        """Parts of the weight are experts' projections; those of other ranks have no room here."""
        widths, total = layer.widths, layer.num_experts
        own, each = self._even(0, total, f"{path}.weight", "experts"), len(widths) // total
        mine = range(own.start * each, (own.start + own.length) * each)
        self._outputs(layer, tuple(Piece(0, 0, width * (i in mine), width) for i, width in enumerate(widths)))
        layer.num_experts = own.length

        def product(layer: Experts, x: Tensor, chosen: Tensor, *, invariant: bool) -> Tensor:
            weight = layer.weight.unflatten(0, (own.length, -1))
            return grouped_share(x, weight, chosen, first=own.start, invariant=invariant)

        layer.product = MethodType(product, layer)  # type: ignore[method-assign]

    # ---- parts ------------------------------------------------------------------------------------------

    def _sum(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return self.ranks.sum(out)

    def _even(self, dim: int, whole: int, parameter: str, of: str, *, unit: int = 1) -> Piece:
        """This rank's of equal parts. Raises ConfigError where there are none."""
        count, size = whole // unit, self.ranks.size
        if count % size:
            raise ConfigError(
                f"{self.name}: {parameter} has {count} {of}, which {size} ranks cannot share evenly; "
                f"choose a tensor-parallel size that divides {count}"
            )
        return Piece(dim, self.ranks.rank * (whole // size), whole // size, whole)

    def _padded(self, whole: int) -> Piece:
        """Of parts of equal room, the last of which may not be full."""
        room = -(-whole // self.ranks.size)
        start = min(self.ranks.rank * room, whole)
        return Piece(0, start, min(room, whole - start), whole)

    def _shrink(self, layer: nn.Module, name: str, pieces: tuple[Piece, ...], *, size: int | None = None) -> None:
        old: nn.Parameter = getattr(layer, name)
        if id(old) not in self._cut:
            shape = list(old.shape)
            shape[pieces[0].dim] = sum(piece.length for piece in pieces) if size is None else size
            new = torch.empty(shape, dtype=old.dtype, device=old.device)
            self._cut[id(old)] = nn.Parameter(new, requires_grad=False)
        setattr(layer, name, self._cut[id(old)])
        layer.pieces = {**getattr(layer, "pieces", {}), name: pieces}  # type: ignore[assignment]
