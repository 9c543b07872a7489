"""The graph of BAGEL: nodes, walks, states. Imports no torch.

    chat  read the prompt; Each(samples): one token a step
    draw  read the prompt, make the contexts of guidance; Each(drawings): Loop(steps): velocities, a step along them
    think read the prompt, make the contexts; decode on a fork. Its words are read into main, and `redraw` draws

A prompt is read once: embeddings of its images, made side by side before, are spliced in where they stand. The three
nodes of the language model are one module, so the branches of a step, and other requests' steps, are one batch.
"""

from __future__ import annotations

from mstar.plugin.graph import (
    KV,
    Call,
    DynamicLoop,
    Each,
    Fork,
    Graph,
    Loop,
    Method,
    Node,
    Parallel,
    Port,
    Section,
    Sequential,
    Walk,
    When,
)
from mstar.plugin.states import RequestView, Start, States, Then
from mstar_plugin_bagel.config import BagelConfig, published
from mstar_plugin_bagel.modeling.schedule import Guidance, guidance

MOST_LOGPROBS = 20
"""Likeliest tokens told beside the one drawn."""
CONTEXTS = ("main", "cfg_text", "cfg_img")
"""Labels of what a drawing reads: all there is, what precedes the last text, and all texts without images."""


def build(config: BagelConfig | None = None) -> Graph:
    """The graph of a checkpoint; None stands for the published one."""
    config = config or published()
    return Graph(
        nodes=(*_media_nodes(config), *_language_nodes(config), _guidance_node()),
        walks=_walks(),
        states=States(
            starts=(
                Start(walk="score", task="text", when=lambda request: request.params.logprobs is not None),
                Start(walk="chat", task="text"),
                Start(walk="think", task="image", when=lambda request: request.params.think),
                Start(walk="draw", task="image"),
            ),
            thens=(Then(after="think", walk="redraw", step="reencode"),),
        ),
    )


# ---- nodes ----------------------------------------------------------------------------------------------


def _item(name: str, dtype: str = "float32", *, optional: bool = False) -> Port:
    return Port(name, "item", dtype, None, optional)


def _media_nodes(config: BagelConfig) -> tuple[Node, ...]:
    """Images have any size, so they are items. One at a time through the autoencoder: it is large work."""
    see = Method(name="encode", inputs=(_item("patches"), _item("places", "int64")), outputs=(_item("seen", "float"),))
    encode = Method(name="encode", inputs=(_item("pixels"), _item("noise")), outputs=(_item("tokens"),), max_batch=1)
    decode = Method(
        name="decode",
        inputs=(_item("latents"), _item("grid", "int64")),
        outputs=(_item("pixels"), _item("tokens")),
        max_batch=1,
    )
    return (
        Node("vit_encoder", (see,)),
        Node("vae_encoder", (encode,), "vae"),
        Node("vae_decoder", (decode,), "vae"),
    )


def _language_nodes(config: BagelConfig) -> tuple[Node, ...]:
    last, text = Port("last", dtype="int64"), Port("text", dtype="int64")
    scored = Port("scored", dtype="float64", shape=(2 + 2 * MOST_LOGPROBS,))
    latents = Port("latents", "tokens", "float32", (config.latent_dim,))

    def prefill(label: str = "main") -> Method:
        inputs = (
            Port("ids", "tokens", "int64"),
            _item("blocks", "int64", optional=True),
            _item("spans", "int64", optional=True),
            _item("drawn", "float", optional=True),
            _item("seen", "float", optional=True),
        )
        return Method(name="prefill", inputs=inputs, kv=KV(label=label, ids="ids", spans="spans", rebuild=True))

    def flow(label: str = "main") -> Method:
        return Method(
            name="flow",
            inputs=(latents, Port("cells", "tokens", "int64")),
            outputs=(Port("v", "tokens", "float32", latents.shape),),
            kv=KV(label=label, write=False, attention="full"),
        )

    condition = Method(
        name="condition", inputs=(_item("tokens"), _item("cells", "int64")), outputs=(_item("drawn", "float"),)
    )
    decode = Method(name="decode", inputs=(last,), outputs=(last, text), kv=KV(ids="last"))
    score = Method(name="score", inputs=(last,), outputs=(last, scored), kv=KV(ids="last"))
    return (
        Node("llm", (condition, prefill(), decode, score, flow())),
        Node("llm_cfg_text", (flow("cfg_text"),), "llm"),
        Node("llm_cfg_img", (prefill("cfg_img"), flow("cfg_img")), "llm"),
    )


def _guidance_node() -> Node:
    step = Method(
        name="step",
        inputs=(_item("latents"), _item("v"), _item("v_text", optional=True), _item("v_img", optional=True)),
        outputs=(_item("latents"), _item("estimate"), Port("progress", dtype="int64")),
    )
    return Node("combine_cfg", (step,))


# ---- what a request needs -------------------------------------------------------------------------------


def guided(request: RequestView) -> Guidance:
    return guidance(request.params, num_images=request.fields["images"])


def draws(request: RequestView, iteration: int) -> bool:
    return request.task == "image"


def needs_text(request: RequestView, iteration: int) -> bool:
    return guided(request).branches(iteration)[0]


def needs_img(request: RequestView, iteration: int) -> bool:
    return guided(request).branches(iteration)[1] and not is_img_main(request)


def is_img_main(request: RequestView) -> bool:
    """Without images, and nothing thought, what is left without images is all there is."""
    return not request.fields["images"] and not request.params.think


def ever_text(request: RequestView, iteration: int) -> bool:
    return guided(request).branches()[0]


def reads_img(request: RequestView, iteration: int) -> bool:
    fields = request.fields
    return draws(request, 0) and bool(fields["images"] and fields["words"]) and guided(request).branches()[1]


def forks_img(request: RequestView, iteration: int) -> bool:
    return not request.fields["images"] and not is_img_main(request) and guided(request).branches()[1]


def previews(request: RequestView, iteration: int) -> bool:
    """By the number of steps, or so many pictures, evenly spread; the last step's would be the drawing itself."""
    params, steps, step = request.params, request.fields["steps"], iteration + 1
    places = [round(steps * (place + 1) / (params.partial_images + 1)) for place in range(params.partial_images)]
    is_turn = params.preview_every is not None and step % params.preview_every == 0
    return step < steps and (is_turn or step in places)


# ---- walks ----------------------------------------------------------------------------------------------

PROMPT = ("images", "prompt", "prompt_blocks", "prompt_spans", "texts")
DRAWING = ("drawings", "cells", "grid")


def _walks() -> tuple[Walk, ...]:
    score = Call("llm.score", emits={"scored": "scored"})
    contexts = Sequential(
        When(ever_text, Fork("cfg_text", "main", at="text_start"), "guided by text"),
        When(forks_img, Fork("cfg_img", "main"), "without images anyway"),
    )
    reading = Sequential(_read(), contexts)
    thinking = Each(
        DynamicLoop("think_max_tokens", _decode("thought"), carry=("last",), collect={"last": "words"}),
        over="thoughts",
        fork="main",
        collect={"words": "thought"},
    )
    return (
        Walk(name="chat", inputs=(*PROMPT, "samples"), section=Sequential(_read(), _answer(_decode("text")))),
        Walk(name="score", inputs=(*PROMPT, "samples"), section=Sequential(_read(), _answer(score))),
        Walk(name="draw", inputs=(*PROMPT, "text_start", *DRAWING), section=Sequential(reading, _draw())),
        Walk(
            name="think",
            inputs=(*PROMPT, "text_start", "thoughts"),
            section=Sequential(reading, thinking),
            outputs=("thought",),
        ),
        Walk(
            name="redraw",
            inputs=("thought_ids", *DRAWING),
            section=Sequential(Call("llm.prefill", inputs={"ids": "thought_ids"}), _draw()),
        ),
    )


def _read() -> Section:
    """The images side by side, then the prompt. Where it matters, the texts alone are read beside it."""
    image = Parallel(
        Call("vit_encoder.encode"),
        When(draws, Sequential(Call("vae_encoder.encode"), Call("llm.condition")), "draws"),
    )
    prompt = {"ids": "prompt", "blocks": "prompt_blocks", "spans": "prompt_spans"}
    prompt |= {"drawn": "all_drawn", "seen": "all_seen"}
    main = Sequential(
        Each(image, over="images", collect={"drawn": "all_drawn", "seen": "all_seen"}),
        Call("llm.prefill", inputs=prompt),
    )
    return Parallel(main, When(reads_img, Call("llm_cfg_img.prefill", inputs={"ids": "texts"}), "guided by images"))


def _decode(name: str) -> Call:
    return Call("llm.decode", emits={"text": name})


def _answer(step: Call) -> Each:
    """It begins with the token that begins a text; samples go on from forks of the prompt."""
    return Each(DynamicLoop("max_tokens", step, carry=("last",)), over="samples", fork="main")


def _draw() -> Each:
    velocities = Parallel(
        Call("llm.flow"),
        When(needs_text, Call("llm_cfg_text.flow", outputs={"v": "v_text"}), "guided by text"),
        When(needs_img, Call("llm_cfg_img.flow", outputs={"v": "v_img"}), "guided by images"),
    )
    preview = Call(
        "vae_decoder.decode",
        inputs={"latents": "estimate"},
        outputs={"pixels": "preview", "tokens": "estimated"},
        emits={"pixels": "preview"},
    )
    step = Sequential(
        velocities, Call("combine_cfg.step", emits={"progress": "progress"}), When(previews, preview, "previews")
    )
    drawing = Sequential(
        Loop("steps", step, carry=("latents",), name="steps"),
        Call("vae_decoder.decode", emits={"pixels": "pixels", "tokens": "latents"}),
    )
    return Each(drawing, over="drawings", fork=CONTEXTS)
