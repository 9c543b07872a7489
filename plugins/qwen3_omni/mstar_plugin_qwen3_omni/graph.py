"""The graph of Qwen3-Omni: three lanes that run side by side. Imports no torch.

    thinker  what was seen and heard is encoded, beside each other; the prompt, whole; then a token at a time
             (speaking: what it made of media => taps, what it writes => words)
    talker   its prompt <- taps; then a frame a time: talker.step, code_predictor.prefill, .step, .sum; frames => codes
    voice    code2wav.decode(window) <- codes, in growing chunks; audio to the client

A prompt's last token enters by the first step, not by prefill, so that every token is drawn inside a loop. The same
holds for the talker: its prompt ends where the first word belongs, so it is read while the thinker still writes that.
"""

from __future__ import annotations

from typing import Any

from mstar.plugin.graph import (
    KV,
    Call,
    DynamicLoop,
    Each,
    Fixed,
    Graph,
    LeftContext,
    Loop,
    Method,
    Node,
    Parallel,
    Port,
    Section,
    Sequential,
    Stream,
    Walk,
    Whole,
)
from mstar.plugin.states import RequestView, Start, States
from mstar_plugin_qwen3_omni.config import published
from mstar_plugin_qwen3_omni.config.speech import SpeechConfig
from mstar_plugin_qwen3_omni.config.thinker import ThinkerConfig

MOST_LOGPROBS = 20
"""Likeliest tokens that can be told beside each."""

CHUNKS = (4, 8, 16, 25)
"""Frames of the codec's chunks, the last again and again: small at first, so that speech begins early."""


def chunk_field(index: int) -> str:
    """The request field with the size of chunk `index`, at most what the request allows."""
    return f"chunk_{index}"


def build(config: Any) -> Graph:
    """The graph of a checkpoint; without one that of the published model."""
    config = published() if config is None else config
    nodes: tuple[Node, ...] = (*_encoders(config.thinker), _thinker(config.thinker))
    walks: tuple[Walk, ...] = (_write(config.thinker, scored=False), _write(config.thinker, scored=True))
    streams: tuple[Stream, ...] = ()
    if config.speech is not None:
        nodes += _speakers(config.speech)
        walks += (_answer(config.thinker, scored=False), _answer(config.thinker, scored=True), *_speech(config.speech))
        streams = (
            Stream(name="taps", policy=Whole()),
            Stream(name="words", policy=Fixed(1), after_end="absent"),
            Stream(name="codes", policy=LeftContext(tuple(map(chunk_field, range(len(CHUNKS)))), "codec_left_context")),
        )
    return Graph(nodes=nodes, walks=walks, streams=streams, states=_states(has_speech=config.speech is not None))


# ---- nodes ----------------------------------------------------------------------------------------------


def _item(name: str, dtype: str = "float", *, optional: bool = False) -> Port:
    return Port(name, "item", dtype, None, optional=optional)


def _encoders(config: ThinkerConfig) -> tuple[Node, ...]:
    hear = Method(name="encode", inputs=(_item("spectrogram", "float32"),), outputs=(_item("heard"),))
    see = Method(name="encode", inputs=(_item("patches", "uint8"), _item("grid", "int64")), outputs=(_item("seen"),))
    nodes = (Node("audio_encoder", (hear,)), config.audio), (Node("vision_encoder", (see,)), config.vision)
    return tuple(node for node, part in nodes if part is not None)


def _thinker(config: ThinkerConfig) -> Node:
    """`tapped` is prefill that also gives taps, for the talker; its tokens are never taken from the prefix cache."""
    last, text, words = (Port(name, dtype="int64") for name in ("last", "text", "words"))
    prompt = (
        Port("ids", "tokens", "int64"),
        Port("places", "tokens", "float32", (4,), optional=True),
        Port("sources", "tokens", "int64", optional=True),
        _item("seen", optional=True),
        _item("heard", optional=True),
    )
    taps = Port("taps", "tokens", shape=(config.decoder.hidden_size,))
    scored = Port("scored", dtype="float64", shape=(2 + 2 * MOST_LOGPROBS,))
    return Node(
        "thinker",
        (
            Method(name="prefill", inputs=prompt, kv=KV(ids="ids")),
            Method(name="tapped", inputs=prompt, outputs=(taps,), kv=KV()),
            Method(name="decode", inputs=(last,), outputs=(last, text, words), kv=KV(ids="last")),
            Method(name="score", inputs=(last,), outputs=(last, text, words, scored), kv=KV(ids="last")),
        ),
    )


def _speakers(config: SpeechConfig) -> tuple[Node, ...]:
    hidden = (config.talker.decoder.hidden_size,)
    total, code = Port("sum", shape=hidden), Port("code", dtype="int64")
    state, first, text = Port("hidden", shape=hidden), Port("first", shape=hidden), Port("text", dtype="int64")
    prompt = (
        Port("ids", "tokens", "int64"),
        Port("sources", "tokens", "int64"),
        Port("codes", "tokens", "int64"),
        Port("places", "tokens", "float32", (3,)),
        _item("taps"),
    )
    frame = Port("frame", dtype="int64", shape=(config.talker.num_groups,))
    talker = Node(
        "talker",
        (
            Method(name="prefill", inputs=prompt, outputs=(total,), kv=KV()),
            Method(name="follow", inputs=(_item("words", "int64", optional=True),), outputs=(text,)),
            Method(name="step", inputs=(total, text), outputs=(state, first, code), kv=KV()),
        ),
    )
    predictor = Node(
        "code_predictor",
        (
            Method(name="prefill", inputs=(state, first, code), outputs=(code,)),
            Method(name="step", inputs=(code,), outputs=(code,)),
            Method(name="sum", inputs=(code,), outputs=(total, frame)),
        ),
    )
    decode = Method(
        name="decode",
        inputs=(_item("window", "int64"), _item("context", "int64", optional=True)),
        outputs=(_item("audio", "float32"),),
        max_batch=8,
    )
    return talker, predictor, Node("code2wav", (decode,))


# ---- what a request needs -------------------------------------------------------------------------------


def speaks(request: RequestView) -> bool:
    return request.task == "chat" and bool({"audio", "tensors", "tensor:audio", "tensor:codes"} & {*request.outputs})


def sounds(request: RequestView) -> bool:
    return request.task == "chat" and bool({"audio", "tensors", "tensor:audio"} & {*request.outputs})


def is_scored(request: RequestView) -> bool:
    return request.params.logprobs is not None


# ---- walks ----------------------------------------------------------------------------------------------

PROMPT = ("pictures", "sounds", "ids", "places", "sources")
TALKER_PROMPT = ("talker_ids", "talker_sources", "talker_codes", "talker_places")


def _read(config: ThinkerConfig, prefill: Call) -> Section:
    """What is seen and heard side by side, then the prompt."""
    encoders: list[Section] = []
    if config.vision is not None:
        encoders.append(Each(Call("vision_encoder.encode", cache="key"), over="pictures", collect={"seen": "seen"}))
    if config.audio is not None:
        encoders.append(Each(Call("audio_encoder.encode", cache="key"), over="sounds", collect={"heard": "heard"}))
    return Sequential(Parallel(*encoders), prefill) if encoders else prefill


def _step(*, scored: bool, sends: dict[str, str]) -> Call:
    name, emits = ("score", {"scored": "scored"}) if scored else ("decode", {"text": "text"})
    return Call(f"thinker.{name}", sends=sends, emits=emits)


def _write(config: ThinkerConfig, *, scored: bool) -> Walk:
    """Text alone: samples go on from forks of the prompt."""
    loop = DynamicLoop("max_tokens", _step(scored=scored, sends={}), carry=("last",))
    section = Sequential(_read(config, Call("thinker.prefill")), Each(loop, over="samples", fork="main"))
    return Walk(name="score" if scored else "write", inputs=(*PROMPT, "samples"), section=section)


def _answer(config: ThinkerConfig, *, scored: bool) -> Walk:
    """Text that is spoken."""
    loop = DynamicLoop("max_tokens", _step(scored=scored, sends={"words": "words"}), carry=("last",))
    section = Sequential(_read(config, Call("thinker.tapped", sends={"taps": "taps"})), loop)
    return Walk(name="answer_scored" if scored else "answer", inputs=(*PROMPT, "last", *TALKER_PROMPT), section=section)


def _speech(config: SpeechConfig) -> tuple[Walk, ...]:
    prompt = dict(zip(("ids", "sources", "codes", "places"), TALKER_PROMPT, strict=True))
    further = config.talker.num_groups - 2
    step = Loop(further, Call("code_predictor.step"), carry=("code",), name="codes") if further else None
    frame = (
        Call("talker.step"),
        Call("code_predictor.prefill"),
        *((step,) if step is not None else ()),
        Call("code_predictor.sum", sends={"frame": "codes"}, emits={"frame": "codes"}),
    )
    follow = Call("talker.follow", receives={"words": "words"})
    talk = Sequential(
        Call("talker.prefill", inputs=prompt, receives={"taps": "taps"}),
        DynamicLoop("frames", Sequential(follow, *frame), carry=("sum",), name="frames"),
    )
    voice = DynamicLoop(None, Call("code2wav.decode", receives={"window": "codes"}, emits={"audio": "audio"}))
    windows = Each(Call("code2wav.decode", emits={"audio": "audio"}), over="windows")
    return (
        Walk(name="talk", inputs=TALKER_PROMPT, section=talk),
        Walk(name="voice", section=voice),
        Walk(name="vocode", inputs=("windows",), section=windows),
    )


def _states(*, has_speech: bool) -> States:
    starts: tuple[Start, ...] = ()
    if has_speech:
        starts = (
            Start(walk="answer_scored", lane="thinker", task="chat", when=_speaks_scored),
            Start(walk="answer", lane="thinker", task="chat", when=speaks),
            Start(walk="talk", lane="talker", task="chat", when=speaks),
            Start(walk="voice", lane="voice", task="chat", when=sounds),
            Start(walk="vocode", lane="voice", task="vocode"),
        )
    write = Start(walk="write", lane="thinker", task="chat")
    return States((*starts, Start(walk="score", lane="thinker", task="chat", when=is_scored), write))


def _speaks_scored(request: RequestView) -> bool:
    return speaks(request) and is_scored(request)
