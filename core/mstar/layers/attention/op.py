"""The attention op, `mstar::attention`, and what models call: `ctx.kv.attend` and `varlen_attention`.

The op is one for all modes and opaque to `torch.compile`; without compilation the backend, chosen once at start-up, is
called directly. Runs in workers; knows nothing of requests or of who owns the pages.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mstar.errors import ConfigError
from mstar.layers.attention.cpu import CpuBackend
from mstar.layers.attention.flashinfer import FlashInferBackend
from mstar.layers.attention.plain import PlainBackend
from mstar.layers.attention.plan import AttentionPlan, Pool, Varlen, plan_from_tensors
from mstar.layers.attention.reference import ReferenceBackend

logger = logging.getLogger(__name__)


class AttentionBackend(Protocol):
    """Computes attention on one kind of device. Shapes: q (T, H, D), k and v (T, Hkv, D); results (T, H, D)."""

    name: str

    def require(self, *, head_dim: int, dtype: torch.dtype) -> None:
        """Check at start-up what a node will ask for; ConfigError when asked for by name and unable."""

    def paged(
        self, q: Tensor, k: Tensor, v: Tensor, pool: Pool, plan: AttentionPlan, *, scale: float, window: int
    ) -> Tensor:
        """Contiguous; writes k and v into the pool first when `plan.write`. `window` 0 is none."""
        ...

    def varlen(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *, how: Varlen) -> Tensor:
        """Contiguous; no cache. `starts` is not changed in place between calls with the same tensor."""
        ...


_BACKENDS: dict[str, AttentionBackend] = {}
_DEFAULTS: dict[str, str] = {}  # device type -> name of the backend chosen for it
# By address of `query_starts`. An entry lives as long as its plan, hence as long as the address is taken.
_PLANS: WeakValueDictionary[int, AttentionPlan] = WeakValueDictionary()


def choose_backend(device: torch.device | str, name: str | None = None) -> AttentionBackend:
    """The backend for a device: "auto" (or None), "cpu", "flashinfer" or "reference".

    It becomes the default of `varlen_attention` on that kind of device. Raises ConfigError when the named backend
    cannot work there; "auto" says in the log when it had to take the slower one.
    """
    kind = torch.device(device).type
    backend: AttentionBackend
    if name == "reference":
        backend = ReferenceBackend()
    elif name == "cpu":
        if kind != "cpu":
            raise ConfigError(f"attention backend 'cpu' cannot run on {kind!r}; use 'auto' or 'flashinfer'")
        backend = CpuBackend()
    elif name == "flashinfer":
        if kind != "cuda":
            raise ConfigError(f"attention backend 'flashinfer' needs a CUDA device, not {kind!r}; use 'auto' or 'cpu'")
        backend = FlashInferBackend(device=torch.device(device), strict=True)
    elif name not in (None, "auto"):
        raise ConfigError(f"unknown attention backend {name!r}; use 'auto', 'cpu', 'flashinfer' or 'reference'")
    elif kind == "cuda" and importlib.util.find_spec("flashinfer") is not None:
        backend = FlashInferBackend(device=torch.device(device), strict=False)
    elif kind == "cpu":
        backend = CpuBackend()
    else:
        logger.warning(
            "attention runs in plain torch: no faster backend for %r; on CUDA install mstar-core[cuda]", kind
        )
        backend = PlainBackend()
    _BACKENDS[backend.name] = backend
    _DEFAULTS[kind] = backend.name
    return backend


class KVBatch:
    """A batch's view of the KV pool: what `ctx.kv` is.

    Args:
        plan: this step's rows.
        keys, values: per layer, the pool (num_pages, Hkv, page_size, D), contiguous.
        backend: from `choose_backend`.

    Attributes:
        after_layer: called with a layer's number once its new keys and values are written, or are about to be on the
            device. Not where graphs are replayed or code is compiled.
    """

    after_layer: Callable[[int], None] | None = None

    def __init__(
        self, plan: AttentionPlan, keys: list[Tensor], values: list[Tensor], backend: AttentionBackend
    ) -> None:
        self.plan = plan
        self.keys = keys
        self.values = values
        self.backend = backend
        _BACKENDS[backend.name] = backend
        _PLANS[plan.query_starts.data_ptr()] = plan

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, window: int | None = None
    ) -> Tensor:
        """Attention of the batch's new tokens over their rows' context and each other, as the plan says.

        Args:
            q: (T, H, D); k, v: (T, Hkv, D), with H a multiple of Hkv.
            scale: of the scores; D ** -0.5 by default.
            window: a query sees only keys later than its position - window.
        """
        plan = self.plan
        pool = self.keys[layer], self.values[layer]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if not torch.compiler.is_compiling():
            assert pool[0].shape[2] == plan.page_size, f"pool has pages of {pool[0].shape[2]}, not {plan.page_size}"
            found = self.backend.paged(q, k, v, pool, plan, scale=scale, window=window or 0)
            if self.after_layer is not None:
                self.after_layer(layer)
            return found
        rows = plan.query_starts, plan.context_lens, plan.page_table, plan.slot_mapping, plan.visible_end
        flags = plan.write, plan.decode, plan.batch_invariant
        name = self.backend.name
        return torch.ops.mstar.attention(q, k, v, *pool, *rows, scale, window or 0, 0, False, *flags, name)  # type: ignore[no-any-return]


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    *,
    max_len: int,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    batch_invariant: bool = False,
    backend: AttentionBackend | None = None,
) -> Tensor:
    """Attention within each of B ragged sequences, without a cache: encoders.

    Args:
        q: (T, H, D); k, v: (T, Hkv, D).
        starts: (B + 1,) int32; sequence b is tokens [starts[b], starts[b + 1]). Not to be changed in place.
        max_len: length of the longest sequence.
        window: a query sees only keys later than its position - window.
        backend: the device's default when None.
    """
    name = _DEFAULTS.get(q.device.type, "auto") if backend is None else backend.name
    rows = starts, None, None, None, None
    flags = causal, False, False, batch_invariant
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return torch.ops.mstar.attention(q, k, v, None, None, *rows, scale, window or 0, max_len, *flags, name)  # type: ignore[no-any-return]


_LIBRARY = torch.library.Library("mstar", "FRAGMENT")
_LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor(a!)? keys, Tensor(b!)? values, Tensor query_starts,"
    " Tensor? context_lens, Tensor? page_table, Tensor? slot_mapping, Tensor? visible_end, float scale, SymInt window,"
    " SymInt max_len, bool causal, bool write, bool decode, bool batch_invariant, str backend) -> Tensor"
)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor | None,
    values: Tensor | None,
    query_starts: Tensor,
    context_lens: Tensor | None,
    page_table: Tensor | None,
    slot_mapping: Tensor | None,
    visible_end: Tensor | None,
    scale: float,
    window: int,
    max_len: int,
    causal: bool,
    write: bool,
    decode: bool,
    batch_invariant: bool,
    backend: str,
) -> Tensor:
    chosen = _BACKENDS.get(backend) or choose_backend(q.device, backend)
    if keys is None or values is None:
        how = Varlen(max_len=max_len, causal=causal, window=window, scale=scale, batch_invariant=batch_invariant)
        return chosen.varlen(q, k, v, query_starts, how=how)
    plan = _PLANS.get(query_starts.data_ptr())
    if plan is None:
        assert context_lens is not None and page_table is not None
        assert slot_mapping is not None and visible_end is not None
        rows = query_starts, context_lens, page_table, slot_mapping, visible_end
        page_size = keys.shape[2]
        plan = plan_from_tensors(rows, write=write, decode=decode, page_size=page_size, batch_invariant=batch_invariant)
    assert keys.shape[2] == plan.page_size, f"pool has pages of {keys.shape[2]}, the plan of {plan.page_size}"
    return chosen.paged(q, k, v, (keys, values), plan, scale=scale, window=window)


def _attention_fake(q: Tensor, *_args: object) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


_LIBRARY.impl("attention", _attention, "CompositeExplicitAutograd")
torch.library.register_fake("mstar::attention", _attention_fake, lib=_LIBRARY)
