"""The networks once more, plainly: one sequence at a time, no batch, no pages. Also sampling and chunking. For tests.

Takes the weights from the nodes and nothing else, so that an error there is not repeated here.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from mstar.plugin import SamplingParams
from mstar_plugin_echo import nodes, weights
from mstar_plugin_echo.config import EchoConfig

Path = tuple[int, ...]


@dataclass(slots=True)
class History:
    """One sequence: per layer keys and values (n, heads, dim), and the position of each token."""

    keys: list[Tensor]
    values: list[Tensor]
    positions: list[int] = field(default_factory=list)
    next: int = 0

    def fork(self, at: int | None = None) -> History:
        at = len(self.positions) if at is None else at
        following = self.positions[at] if at < len(self.positions) else self.next
        return History([k[:at] for k in self.keys], [v[:at] for v in self.values], self.positions[:at], following)


class Model:
    """The weights of a configuration, and the forward pass of one sequence in float32."""

    def __init__(self, config: EchoConfig | None = None) -> None:
        self.config = config or EchoConfig()
        self.p: dict[str, Tensor] = {}
        for module in (nodes.LanguageModel(self.config), nodes.Depth(self.config)):
            weights.fill(module, seed=self.config.seed, dtype=torch.float32, device=torch.device("cpu"))
            self.p |= {name: parameter.detach() for name, parameter in module.named_parameters()}

    def history(self) -> History:
        empty = torch.zeros(0, self.config.num_kv_heads, self.config.head_dim)
        return History([empty] * self.config.num_layers, [empty] * self.config.num_layers)

    def embed(self, ids: list[int]) -> Tensor:
        return self.p["embed.weight"][ids]

    def forward(
        self,
        history: History,
        x: Tensor,
        *,
        positions: list[int] | None = None,
        spans: list[tuple[int, int]] | None = None,
        write: bool = True,
    ) -> Tensor:
        """Hidden states (t, H) of the new tokens; `spans` see themselves whole. `write`: add them to the history."""
        past, new = len(history.positions), x.shape[0]
        positions = positions or list(range(history.next, history.next + new))
        visible = torch.ones(new, past + new, dtype=torch.bool).tril(past)
        for start, end in spans or []:
            visible[start:end, past + start : past + end] = True
        for layer in range(self.config.num_layers):
            w = {name: self.p[f"decoder.layers.{layer}.{name}.weight"] for name in LAYER}
            y = self._norm(x, w["input_norm"])
            q, k, v = ((y @ w[name].T).unflatten(-1, (-1, self.config.head_dim)) for name in ("q", "k", "v"))
            q, k = self._rotate(q, positions), self._rotate(k, positions)
            keys, values = torch.cat((history.keys[layer], k)), torch.cat((history.values[layer], v))
            if write:
                history.keys[layer], history.values[layer] = keys, values
            group = self.config.num_heads // self.config.num_kv_heads
            outs = []
            for head in range(self.config.num_heads):
                scores = q[:, head] @ keys[:, head // group].T / math.sqrt(self.config.head_dim)
                outs.append(scores.masked_fill(~visible, -math.inf).softmax(-1) @ values[:, head // group])
            x = x + torch.cat(outs, dim=-1) @ w["out"].T
            y = self._norm(x, w["mlp_norm"])
            x = x + (functional.silu(y @ w["gate"].T) * (y @ w["up"].T)) @ w["down"].T
        if write:
            history.positions += positions
            history.next = positions[-1] + 1
        return self._norm(x, self.p["decoder.norm.weight"])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight

    def _rotate(self, x: Tensor, positions: list[int]) -> Tensor:
        """Pairs (i, i + half) as complex numbers, turned by position * theta ** (-i / half)."""
        half = self.config.head_dim // 2
        angles = torch.tensor(
            [[p * self.config.rope_theta ** (-i / half) for i in range(half)] for p in positions], dtype=torch.float64
        )
        turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.exp(1j * angles)[:, None]
        return torch.cat((turned.real, turned.imag), dim=-1).float()


LAYER = ("input_norm", "mlp_norm", "q", "k", "v", "out", "gate", "up", "down")


# ---- sampling -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Draws:
    """One sampler of one item. `margin`: see `oracle.Expected`."""

    params: SamplingParams
    seed: int
    path: Path
    name: str
    prompt: frozenset[int] = frozenset()
    drawn: Counter[int] = field(default_factory=Counter)
    margin: float = math.inf

    def pick(self, logits: Tensor) -> int:
        """The next id for logits (V,), in the order of operations of `transformers`."""
        scores, params = logits.clone(), self.params
        for text, bias in (params.logit_bias or {}).items():
            scores[int(text)] += bias
        for token in self.prompt | set(self.drawn):
            factor = params.repetition_penalty
            scores[token] = scores[token] * factor if scores[token] < 0 else scores[token] / factor
        for token, count in self.drawn.items():
            scores[token] -= count * params.frequency_penalty + params.presence_penalty
        if params.temperature == 0:
            best = scores.topk(2).values
            self.margin = min(self.margin, float(best[0] - best[1]))
            token = int(scores.argmax())
        else:
            token = self._draw(self._filter(scores / params.temperature))
        self.drawn[token] += 1
        return token

    def _filter(self, scores: Tensor) -> Tensor:
        params = self.params
        if params.top_k > 0:
            scores = scores.masked_fill(scores < scores.sort().values[-min(params.top_k, len(scores))], -math.inf)
        if params.top_p < 1:
            order = scores.sort(stable=True).indices
            removed = scores[order].softmax(-1).cumsum(-1) <= 1 - params.top_p
            removed[-1] = False
            scores = scores.index_fill(0, order[removed], -math.inf)
        probabilities = scores.softmax(-1)
        return scores.masked_fill(probabilities < params.min_p * probabilities.max(), -math.inf)

    def _draw(self, scores: Tensor) -> int:
        cumulative = torch.exp((scores - scores.max()).double()).cumsum(0)
        target = uniform(self.seed, self.path, self.name, self.drawn.total()) * cumulative[-1]
        return int(torch.searchsorted(cumulative, target, right=True))


def uniform(seed: int, path: Path, name: str, step: int) -> float:
    """The number in [0, 1) that decides a draw: splitmix64 of a hash of who draws. Trailing items 0 do not count."""
    while path and path[-1] == 0:
        path = path[:-1]
    text = f"{seed}/{','.join(map(str, path))}/{name}"
    key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
    mask = (1 << 64) - 1
    z = (key + (step + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return ((z ^ (z >> 31)) >> 11) * 2.0**-53


# ---- streams --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk: items [start, end), `new` of them unseen."""

    start: int
    end: int
    new: int
    first: bool
    final: bool


def pieces(count: int, *, sizes: tuple[int, ...], context: int = 0) -> list[Piece]:
    """`Fixed` (one size) and `LeftContext`: full chunks, then a final one with the rest."""
    found: list[Piece] = []
    seen = 0
    while seen + (size := sizes[min(len(found), len(sizes) - 1)]) <= count:
        found.append(Piece(max(0, seen - context), seen + size, size, not found, False))
        seen += size
    return [*found, Piece(max(0, seen - context), count, count - seen, not found, True)]


def windows(count: int, *, window: int, stride: int) -> list[Piece]:
    """`SlidingWindow`: full windows, then the last min(window, count) items once more."""
    found: list[Piece] = []
    seen = 0
    for start in range(0, count - window + 1, stride):
        found.append(Piece(start, start + window, start + window - seen, not found, False))
        seen = start + window
    return [*found, Piece(max(0, count - window), count, count - seen, not found, True)]
