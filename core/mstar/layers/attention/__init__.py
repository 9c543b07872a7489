"""Attention for every node: one op, chosen backends, plans made on the host.

Modes: causal, bidirectional spans, no-write, varlen without cache, sliding window; grouped heads; any head dimension.
"""

from mstar.layers.attention.op import AttentionBackend, KVBatch, choose_backend, varlen_attention
from mstar.layers.attention.plan import AttentionPlan, HostPlan, build_plan, decode_plan

__all__ = [
    "AttentionBackend",
    "AttentionPlan",
    "HostPlan",
    "KVBatch",
    "build_plan",
    "choose_backend",
    "decode_plan",
    "varlen_attention",
]
