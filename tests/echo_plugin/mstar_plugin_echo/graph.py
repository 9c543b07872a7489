"""The echo model's graph: nodes, walks, streams, states. Imports no torch.

Every task has its own walks; they share nodes, so that requests of different tasks meet in one batch.
"""

from __future__ import annotations

from mstar.plugin.graph import (
    KV,
    Alias,
    Call,
    Drop,
    DynamicLoop,
    Each,
    Fixed,
    Fork,
    Graph,
    LeftContext,
    Loop,
    Method,
    Node,
    Parallel,
    Port,
    Section,
    Sequential,
    SlidingWindow,
    Stream,
    Walk,
    When,
    Whole,
)
from mstar.plugin.states import RequestView, Start, States, Then
from mstar_plugin_echo.config import IMAGE_FEATURES, MOST_LOGPROBS, EchoConfig

# ---- nodes ----------------------------------------------------------------------------------------------


def language_nodes(config: EchoConfig) -> tuple[Node, ...]:
    """One module under four names: three of them only read or extend another sequence."""
    hidden = (config.hidden_size,)
    ids = Port("ids", dtype="int64")
    prompt = Port("ids", "tokens", "int64")

    def decode(label: str = "main") -> Method:
        return Method(
            name="decode",
            inputs=(ids, Port("eos_at", dtype="int64", optional=True)),
            # The same id twice: `token` goes round the loop on the device, `text` is what finish_decode lets out.
            outputs=(Port("token", dtype="int64"), Port("text", dtype="int64")),
            kv=KV(label=label, ids="ids"),
        )

    def flow(label: str = "main") -> Method:
        return Method(
            name="flow",
            inputs=(Port("latents", "tokens", shape=(IMAGE_FEATURES,)),),
            outputs=(Port("velocity", "tokens", shape=(IMAGE_FEATURES,)),),
            kv=KV(label=label, write=False, attention="full"),
        )

    prefill = Method(
        name="prefill", inputs=(prompt,), outputs=(Port("hidden", shape=hidden),), kv=KV(ids="ids", rebuild=True)
    )
    say = Method(
        name="say",
        inputs=(ids, Port("eos_at", dtype="int64", optional=True)),
        # The id again with its log-probability, and the likeliest ids with theirs.
        outputs=(Port("token", dtype="int64"), Port("said", dtype="float32", shape=(2 + 2 * MOST_LOGPROBS,))),
        kv=KV(ids="ids"),
    )
    push = Method(name="push", inputs=(ids,), kv=KV(ids="ids"))
    read = Method(
        name="read",
        inputs=(
            prompt,
            Port("pixels", "tokens", shape=(IMAGE_FEATURES,)),
            Port("is_pixel", "tokens", "bool"),
            Port("spans", "item", "int64", None),
        ),
        kv=KV(ids="ids", spans="spans"),
    )
    frame = Method(
        name="frame",
        inputs=(Port("sum", shape=hidden), Port("end_at", dtype="int64")),
        outputs=(Port("hidden", shape=hidden), Port("code", dtype="int64")),
        kv=KV(),
    )
    return (
        Node("lm", (prefill, decode(), say, push, read, flow(), frame)),
        Node("lm_text", (flow("text"),), "lm"),
        Node("lm_draft", (decode("draft"),), "lm"),
        Node("lm_view", (decode("view"),), "lm"),
    )


def frame_nodes(config: EchoConfig) -> tuple[Node, ...]:
    hidden = (config.hidden_size,)
    code = Port("code", dtype="int64")
    frame = Port("frame", dtype="int64", shape=(config.frame_size,))
    depth = Node(
        "depth",
        (
            Method(name="start", inputs=(Port("hidden", shape=hidden), code)),
            Method(name="step", inputs=(code,), outputs=(code,)),
            Method(name="sum", outputs=(Port("sum", shape=hidden), frame, Port("number", dtype="int64"))),
        ),
    )
    window = Port("frames", dtype="int64", shape=None)
    voice = Node(
        "voice", (Method(name="render", inputs=(window,), outputs=(Port("wave", dtype="float32", shape=None),)),)
    )
    return depth, voice


def arithmetic_nodes() -> tuple[Node, ...]:
    """Small exact methods. The three branches share one module, so their rows meet in one batch."""
    x, count = Port("x", dtype="int64"), Port("count", dtype="int64")
    latents = Port("latents", "tokens", shape=(IMAGE_FEATURES,))
    scale = Method(name="scale", inputs=(x, Port("factor", dtype="int64")), outputs=(Port("y", dtype="int64"),))
    combine = Method(
        name="combine",
        inputs=(
            Port("left", dtype="int64"),
            Port("right", dtype="int64", optional=True),
            Port("third", dtype="int64", optional=True),
        ),
        outputs=(x,),
    )
    guide = Method(
        name="guide",
        inputs=(
            latents,
            Port("main", "tokens", shape=(IMAGE_FEATURES,)),
            Port("text", "tokens", shape=(IMAGE_FEATURES,), optional=True),
            Port("scale"),
        ),
        outputs=(latents, Port("progress", dtype="int64")),
    )
    show = Method(name="show", inputs=(latents,), outputs=(Port("image", "tokens", shape=(IMAGE_FEATURES,)),))
    add = Method(
        name="add",
        inputs=(count, Port("amount", dtype="int64"), Port("last", dtype="int64")),
        outputs=(count, Port("said", dtype="int64")),
    )
    nested = Port("parts", "item", "int64", None)
    facts, seen = Port("facts", "item", "int64", None), Port("seen", "item", "int64", None)
    look = Method(name="look", inputs=(facts,), outputs=(seen, Port("total", dtype="int64")))
    return (
        *(Node(name, (scale,), "affine") for name in ("left", "right", "third")),
        Node("mix", (combine, guide, show)),
        Node("join", (Method(name="concat", inputs=(nested,), outputs=(Port("joined", "item", "int64", None),)), look)),
        Node("pace", (Method(name="lap"),)),
        Node("tally", (add,)),
    )


FRAME_SIZES = (1, 2, 4)
LEFT_SIZES = (1, 2, 3)
CONSUMERS = ("fixed", "sliding", "left", "whole", "follow")


def stream_nodes() -> tuple[Node, ...]:
    counts, base = Port("counts", "item", "int64", None), Port("base", dtype="int64")
    chunk = Port("chunk", "item", "int64", None, optional=True)
    items = tuple(Port(name, dtype="int64") for name in CONSUMERS)
    report = Port("report", dtype="int64", shape=None)
    return (
        Node("source", (Method(name="emit", inputs=(counts, base), outputs=items),)),
        Node("sink", (Method(name="take", inputs=(chunk,), outputs=(report,)),)),
    )


def trouble_nodes() -> tuple[Node, ...]:
    x, beat = Port("x", dtype="int64"), Port("beat", dtype="int64")
    chunk = Port("chunk", dtype="int64", shape=None)
    act = Method(name="act", inputs=(x,), outputs=(x, beat))
    watch = Method(name="watch", inputs=(chunk,), outputs=(Port("seen", dtype="int64"),))
    return (Node("trouble", (act, Method(name="idle"), watch)),)


# ---- walks ----------------------------------------------------------------------------------------------


def decode(node: str = "lm") -> Call:
    """One token of an autoregressive loop that carries `last`."""
    return Call(f"{node}.decode", inputs={"ids": "last"}, outputs={"token": "last"}, emits={"text": "text"})


def generate_walk() -> Walk:
    # Each of the n samples continues a fork of the prompt, which is prefilled once but for its last token. The items
    # are bare ids: inside the Each, `last` is one of them.
    samples = Each(DynamicLoop("max_tokens", decode(), carry=("last",)), over="last", fork="main")
    return Walk(name="generate", inputs=("ids", "last", "eos_at"), section=Sequential(Call("lm.prefill"), samples))


def chat_walk() -> Walk:
    say = Call("lm.say", inputs={"ids": "last"}, outputs={"token": "last"}, emits={"said": "said"})
    samples = Each(DynamicLoop("max_tokens", say, carry=("last",)), over="last", fork="main")
    return Walk(name="chat", inputs=("ids", "last", "eos_at"), section=Sequential(Call("lm.prefill"), samples))


def draw_walk() -> Walk:
    stroke = Call("left.scale", inputs={"factor": "two"}, outputs={"y": "x"}, emits={"y": "strokes"})
    return Walk(name="draw", inputs=("x", "two"), section=Each(Loop("steps", stroke, carry=("x",)), over="x"))


def nested_walks(config: EchoConfig) -> tuple[Walk, ...]:
    frame = Sequential(
        Call("lm.frame"),
        Call("depth.start"),
        Loop(config.depth_steps, Call("depth.step"), carry=("code",), name="depth"),
        Call("depth.sum", emits={"frame": "frames"}, sends={"frame": "frames"}),
    )
    frames = Walk(
        name="frames",
        inputs=("ids", "end_at"),
        section=Sequential(
            Call("lm.prefill", outputs={"hidden": "sum"}),
            DynamicLoop("max_frames", frame, carry=("sum",), name="frames"),
        ),
    )
    render = Call("voice.render", receives={"frames": "frames"}, emits={"wave": "wave"})
    return frames, Walk(name="speak", section=DynamicLoop(None, render))


def branches_walk() -> Walk:
    step = Sequential(
        Parallel(
            Call("left.scale", inputs={"factor": "two"}, outputs={"y": "left"}),
            When(right_runs, Call("right.scale", inputs={"factor": "three"}, outputs={"y": "right"}), "interval"),
            When(third_runs, Call("third.scale", inputs={"factor": "five"}, outputs={"y": "third"}), "asked for"),
        ),
        Call("mix.combine", emits={"x": "steps"}),
    )
    rounds = Loop("rounds", Loop("steps", step, carry=("x",), collect={"x": "trace"}), carry=("x",))
    join = Call("join.concat", inputs={"parts": "trace"}, emits={"joined": "last_round"})
    return Walk(
        name="branches",
        inputs=("x", "two", "three", "five"),
        section=Sequential(rounds, join),
        outputs=("x", "trace"),
    )


def fanout_walk() -> Walk:
    answer = DynamicLoop("reply_tokens", decode(), carry=("last",), collect={"last": "reply"}, budget="max_tokens")
    text = Sequential(Call("lm.prefill"), Loop("laps", Call("pace.lap")), answer)
    texts = Each(text, over="texts", fork="main", ordered=one_by_one, collect={"reply": "replies"})
    group = Sequential(Call("lm.prefill", inputs={"ids": "header"}), texts)
    return Walk(
        name="fanout",
        inputs=("prefix", "groups"),
        section=Sequential(
            Call("lm.prefill", inputs={"ids": "prefix"}),
            Each(group, over="groups", fork="main", ordered=one_by_one, collect={"replies": "replies"}),
            Call("join.concat", inputs={"parts": "replies"}, emits={"joined": "joined"}),
        ),
    )


def spans_walk() -> Walk:
    flow = Sequential(
        Parallel(
            Call("lm.flow", outputs={"velocity": "main"}),
            When(guided, Call("lm_text.flow", outputs={"velocity": "text"}), "guided"),
        ),
        Call("mix.guide", emits={"progress": "progress"}),
    )
    return Walk(
        name="spans",
        inputs=("ids", "pixels", "is_pixel", "spans", "text_end", "latents", "scale", "last"),
        section=Sequential(
            Call("lm.read"),
            Fork("text", "main", at="text_end"),
            Loop("steps", flow, carry=("latents",)),
            Drop("text"),
            Call("mix.show", emits={"image": "image"}),
            Alias("view", "main"),
            DynamicLoop("max_tokens", decode("lm_view"), carry=("last",)),
        ),
    )


def chunk_walks() -> tuple[Walk, ...]:
    def produce(prefix: str) -> Section:
        return Loop("steps", Call("source.emit", sends={name: prefix + name for name in CONSUMERS}))

    def take(name: str, stream: str) -> Walk:
        call = Call("sink.take", receives={"chunk": stream}, emits={"report": name})
        return Walk(name=f"take_{stream}", section=DynamicLoop("follow_steps" if name == "follow" else None, call))

    # A child of an Each has its own cursor in each lane it feeds, so these lanes have walks and streams of their own.
    return (
        Walk(name="produce", inputs=("counts", "base"), section=produce("")),
        Walk(name="produce_each", inputs=("producers", "base"), section=Each(produce("each_"), over="producers")),
        *(take(name, prefix + name) for prefix in ("", "each_") for name in CONSUMERS),
    )


def chunk_streams(prefix: str) -> tuple[Stream, ...]:
    return (
        Stream(name=f"{prefix}fixed", policy=Fixed("size")),
        Stream(name=f"{prefix}sliding", policy=SlidingWindow("window", "stride")),
        Stream(name=f"{prefix}left", policy=LeftContext(LEFT_SIZES, "context")),
        Stream(name=f"{prefix}whole", policy=Whole()),
        Stream(name=f"{prefix}follow", policy=Fixed(1), after_end="absent"),
    )


def trouble_walks() -> tuple[Walk, ...]:
    act = Call("trouble.act", emits={"x": "x"}, sends={"beat": "beats"})
    step = Sequential(When(sound_predicate, Call("trouble.idle")), act)
    main = Sequential(Call("lm.prefill"), Loop("steps", step, carry=("x",)))
    watch = Call("trouble.watch", receives={"chunk": "beats"}, emits={"seen": "seen"})
    return (
        Walk(name="trouble", inputs=("ids", "x"), section=main),
        Walk(name="watch", section=DynamicLoop(None, watch)),
    )


def session_walks() -> tuple[Walk, ...]:
    talk = Sequential(
        Call("lm.prefill"),
        DynamicLoop("max_tokens", decode(), carry=("last",)),
        Call("tally.add", emits={"count": "total"}),
    )
    # The last token of a turn was sampled, never written: the next turn begins by writing it.
    resume = Sequential(Call("lm.push", inputs={"ids": "said"}), talk)
    inputs, kept = ("ids", "last", "eos_at", "amount", "count"), ("count", "said")
    return (
        Walk(name="open", inputs=inputs, section=talk, outputs=kept),
        Walk(name="resume", inputs=(*inputs, "said"), section=resume, outputs=kept),
    )


def states_walks() -> tuple[Walk, ...]:
    draft = DynamicLoop("draft_tokens", decode("lm_draft"), carry=("last",), collect={"last": "draft"})
    revise = DynamicLoop("max_tokens", decode(), carry=("last",), collect={"last": "revised"})
    join = Call("join.concat", inputs={"parts": "draft"}, emits={"joined": "draft"})
    return (
        Walk(
            name="draft",
            inputs=("ids", "last"),
            section=Sequential(Call("lm.prefill"), Fork("draft", "main"), draft, Drop("draft")),
            outputs=("draft",),
        ),
        Walk(
            name="revise",
            inputs=("ids", "last"),
            section=Sequential(Call("lm.prefill"), revise),
            outputs=("revised",),
        ),
        Walk(name="tally", inputs=("draft",), section=join),
    )


def media_walk() -> Walk:
    # What is seen of a part depends on its content alone, so that it is seen once.
    look = Each(Call("join.look", cache="key"), over="media", collect={"seen": "all"})
    join = Call("join.concat", inputs={"parts": "all"}, emits={"joined": "facts"})
    return Walk(name="media", inputs=("media",), section=Sequential(look, join))


# ---- predicates -----------------------------------------------------------------------------------------


def right_runs(request: RequestView, iteration: int) -> bool:
    return bool(request.params.first_step <= iteration < request.params.end_step)


def third_runs(request: RequestView, iteration: int) -> bool:
    return bool(request.params.third)


def one_by_one(request: RequestView, iteration: int) -> bool:
    return bool(request.params.ordered)


def guided(request: RequestView, iteration: int) -> bool:
    params = request.params
    return bool(params.scale != 1 and params.first_step <= iteration < params.end_step)


def sound_predicate(request: RequestView, iteration: int) -> bool:
    if request.params.kind == "predicate" and iteration == request.params.at:
        raise RuntimeError("the predicate was told to fail")
    return True


# ---- states ---------------------------------------------------------------------------------------------


def states() -> States:
    def consumer(name: str, task: str, prefix: str) -> Start:
        return Start(walk=f"take_{prefix}{name}", lane=name, task=task, when=lambda r: name in r.params.consumers)

    return States(
        starts=(
            Start(walk="generate", task="generate"),
            Start(walk="frames", task="nested"),
            Start(walk="speak", task="nested", lane="voice", when=lambda r: "audio" in r.outputs),
            Start(walk="branches", task="branches"),
            Start(walk="fanout", task="fanout"),
            Start(walk="spans", task="spans"),
            Start(walk="produce", task="chunks"),
            Start(walk="produce_each", task="chunks_each"),
            *(consumer(name, "chunks", "") for name in CONSUMERS),
            *(consumer(name, "chunks_each", "each_") for name in CONSUMERS),
            Start(walk="trouble", task="trouble"),
            Start(walk="watch", task="trouble", lane="watch", when=lambda r: r.params.watch),
            Start(walk="open", task="session", when=lambda r: not r.resumed),
            Start(walk="resume", task="session"),
            Start(walk="draft", task="states"),
            Start(walk="media", task="media"),
            Start(walk="chat", task="chat"),
            Start(walk="draw", task="draw"),
        ),
        thens=(
            Then(after="draft", walk="revise", step="reencode", when=lambda r: r.params.revise),
            Then(after="draft", walk="tally", when=lambda r: r.params.tally),
            Then(after="revise", walk="tally", when=lambda r: r.params.tally),
        ),
    )


def graph(config: EchoConfig | None = None) -> Graph:
    """The graph of a configuration; None stands for the default sizes."""
    config = config or EchoConfig()
    return Graph(
        nodes=(
            *language_nodes(config),
            *frame_nodes(config),
            *arithmetic_nodes(),
            *stream_nodes(),
            *trouble_nodes(),
        ),
        walks=(
            generate_walk(),
            *nested_walks(config),
            branches_walk(),
            fanout_walk(),
            spans_walk(),
            *chunk_walks(),
            *trouble_walks(),
            *session_walks(),
            *states_walks(),
            media_walk(),
            chat_walk(),
            draw_walk(),
        ),
        streams=(
            Stream(name="frames", policy=LeftContext(FRAME_SIZES, 1)),
            *chunk_streams(""),
            *chunk_streams("each_"),
            Stream(name="beats", policy=Fixed(1)),
        ),
        states=states(),
    )
