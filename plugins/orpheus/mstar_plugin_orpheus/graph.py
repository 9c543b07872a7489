"""The graph of Orpheus: a language model that streams codes, a codec that speaks them. Imports no torch.

    lm     Each(segments): prefill, then one token a step; whole frames of codes => codes
           (task vocode: feed, the client's codes => codes)
    voice  snac.vocode(window) <- codes, four frames at a time, one frame apart; audio to the client

A prompt's last token enters by the first decode step, not by prefill: so every token is drawn inside the loop, and
the limit, the budget and the stop token hold from the very first one.
"""

from __future__ import annotations

from typing import Any

from mstar.plugin.graph import (
    KV,
    Call,
    DynamicLoop,
    Each,
    Graph,
    Method,
    Node,
    Port,
    Sequential,
    SlidingWindow,
    Stream,
    Walk,
)
from mstar.plugin.states import RequestView, Start, States
from mstar_plugin_orpheus.modeling.frames import FRAME_CODES, WINDOW_FRAMES


def is_budgeted(request: RequestView, iteration: int) -> bool:
    """Segments share one budget of tokens, so they must be spoken one after the other."""
    return "max_tokens" in request.fields


def wants_audio(request: RequestView) -> bool:
    return bool({"audio", "tensors", "tensor:audio"} & set(request.outputs))


LANGUAGE_MODEL = Node(
    "lm",
    (
        Method(
            name="prefill",
            inputs=(Port("ids", layout="tokens", dtype="int64"),),
            kv=KV(ids="ids", rebuild=True),
        ),
        Method(
            name="decode",
            inputs=(Port("last", dtype="int64"),),
            outputs=(Port("last", dtype="int64"), Port("codes", dtype="int64")),
            kv=KV(ids="last"),
        ),
    ),
)

CODEC = Node(
    "snac",
    (
        Method(
            name="feed",
            inputs=(Port("codes", layout="item", dtype="int64", shape=None),),
            outputs=(Port("items", dtype="int64"),),
        ),
        Method(
            name="vocode",
            inputs=(Port("window", dtype="int64", shape=None),),
            outputs=(Port("audio", dtype="float32", shape=None),),
            # Larger batches are no faster on a CPU, and its kernels for them round otherwise: by up to 5 of int16.
            max_batch=8,
        ),
    ),
)

SPEAK = Walk(
    name="speak",
    inputs=("segments",),
    section=Each(
        Sequential(
            Call("lm.prefill"),
            DynamicLoop(
                "limit",
                Call("lm.decode", sends={"codes": "codes"}, emits={"codes": "codes"}),
                budget="max_tokens",
                carry=("last",),
            ),
        ),
        over="segments",
        ordered=is_budgeted,
    ),
)

FEED = Walk(
    name="feed", inputs=("segments",), section=Each(Call("snac.feed", sends={"items": "codes"}), over="segments")
)

VOICE = Walk(
    name="voice",
    section=DynamicLoop(None, Call("snac.vocode", receives={"window": "codes"}, emits={"audio": "audio"})),
)


def build(config: Any) -> Graph:
    """The graph; the same for every checkpoint."""
    return Graph(
        nodes=(LANGUAGE_MODEL, CODEC),
        walks=(SPEAK, FEED, VOICE),
        streams=(Stream(name="codes", policy=SlidingWindow(WINDOW_FRAMES * FRAME_CODES, FRAME_CODES)),),
        states=States(
            starts=(
                Start(walk="speak", lane="lm", task="speech"),
                Start(walk="feed", lane="lm", task="vocode"),
                Start(walk="voice", lane="voice", task="speech", when=wants_audio),
                Start(walk="voice", lane="voice", task="vocode"),
            )
        ),
    )
