"""Drawings hold everything a graph declares, and are valid in their format."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from mstar.plugin import draw
from mstar.plugin.graph import (
    KV,
    Alias,
    Call,
    Drop,
    DynamicLoop,
    Each,
    Fork,
    Graph,
    LeftContext,
    Loop,
    Method,
    Node,
    Parallel,
    Port,
    Sequential,
    Stream,
    Walk,
    When,
)
from mstar.plugin.states import RequestView, Start, States, Then
from mstar.plugin.validate import validate


def guided(request: RequestView, iteration: int) -> bool:
    return True


@pytest.fixture(scope="module")
def graph() -> Graph:
    velocity = (Port("velocity", "tokens"),)
    latents = (Port("latents", "tokens"),)
    flow = Method(name="flow", inputs=latents, outputs=velocity, kv=KV(write=False, attention="full"))
    prefill = Method(name="prefill", inputs=(Port("ids", "tokens", "int64"),), kv=KV(ids="ids", rebuild=True))
    decode = Method(
        name="decode", inputs=(Port("last", dtype="int64"),), outputs=(Port("last", dtype="int64"),), kv=KV(tokens=1)
    )
    guide = Method(
        name="guide",
        inputs=(*latents, Port("main", "tokens"), Port("text", "tokens", optional=True)),
        outputs=latents,
        max_batch=4,
    )
    play = Method(name="play", inputs=(Port("chunk", "item", "int64", None),))
    steps = Sequential(
        Parallel(
            Call("lm.flow", outputs={"velocity": "main"}),
            When(guided, Sequential(Call("lm_text.flow", outputs={"velocity": "text"}))),
        ),
        Call("mix.guide", emits={"latents": 'preview "<small> & #1"'}),
    )
    paint = Sequential(
        Call("lm.prefill"),
        Fork("text", "main", at="cut"),
        Loop("steps", steps, carry=("latents",), collect={"latents": "trace"}, name="flow"),
        Drop("text"),
        Alias("view", "main"),
    )
    write = DynamicLoop("max_tokens", Call("lm.decode", sends={"last": "ids"}), carry=("last",), budget="budget")
    return Graph(
        nodes=(
            Node("lm", (prefill, decode, flow)),
            Node("lm_text", (flow,), "lm"),
            Node("mix", (guide,)),
            Node("player", (play,)),
        ),
        walks=(
            Walk(name="paint", section=paint, inputs=("ids", "latents"), outputs=("trace",)),
            Walk(name="write", section=Each(write, over="starts", fork="main", ordered=guided), inputs=("starts",)),
            Walk(name="listen", section=DynamicLoop(None, Call("player.play", receives={"chunk": "ids"}))),
        ),
        streams=(Stream(name="ids", policy=LeftContext((1, 2), "context")),),
        states=States(
            starts=(Start(walk="paint", task="image"), Start(walk="listen", lane="ear", when=lambda request: True)),
            thens=(Then(after="paint", walk="write", step="encode", when=lambda request: True),),
        ),
    )


def test_the_sample_is_sound(graph: Graph) -> None:
    validate(graph)


def test_the_outline_shows_every_declaration(graph: Graph) -> None:
    lines = draw.text(graph).splitlines()
    assert [line for line in lines if not line.startswith(" ")] == ["nodes", "walks", "streams", "states"]
    for line in (
        "  lm_text (module lm)",
        "    prefill(ids: tokens int64)  [KV main, causal, ids=ids, rebuilds]",
        "    flow(latents: tokens float) → velocity: tokens float  [KV main, full, reads only]",
        "    play(chunk: item int64 (any))",
        "  paint(ids, latents) → trace",
        "    fork text from main at cut",
        "    loop steps times (flow); carry latents; collect latents → trace",
        "      side by side",
        "        lm.flow  velocity → main",
        "        when guided",
        "          lm_text.flow  velocity → text",
        "    alias view = main",
        "    each of starts; fork main; in order if guided",
        "      loop at most max_tokens times; budget budget; carry last",
        "        lm.decode  last ⇒ stream ids",
        "    loop until stopped",
        "      player.play  chunk ⇐ stream ids: (1, 2) a chunk after context seen",
        "  ids: lm.decode ⇒ player.play; (1, 2) a chunk after context seen",
        "  start paint on lane main, task image",
        "  start listen on lane ear, if a condition",
        "  write follows paint, if a condition, step encode",
    ):
        assert line in lines


def test_mermaid_is_balanced_and_escaped(graph: Graph) -> None:
    lines = draw.mermaid(graph).splitlines()
    assert lines[0] == "flowchart TD"
    assert sum("subgraph" in line for line in lines) == sum(line.strip() == "end" for line in lines)
    boxes = set(re.findall(r"^ +(?:subgraph )?(b\d+)[\[(]", "\n".join(lines), flags=re.MULTILINE))
    arrows = [line for line in lines if "->" in line or "=>" in line]
    assert len(arrows) == 8
    for line in arrows:
        assert set(re.findall(r"\b(b\d+)\b", line)) <= boxes
    assert any("preview #quot;#lt;small#gt; #amp; #35;1#quot;" in line for line in lines)
    assert all(line.count('"') in (0, 2) for line in lines)


def test_svg_is_xml_with_every_text_inside_its_page(graph: Graph) -> None:
    root = ElementTree.fromstring(draw.svg(graph))
    tag = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in root.iter(f"{tag}text")]
    for word in ("paint(ids, latents) → trace", "mix.guide", "when guided", "drop text", "ids", "lm_text (module lm)"):
        assert word in texts
    assert 'latents ⇒ client as preview "<small> & #1"' in texts
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for box in root.iter(f"{tag}rect"):
        assert float(box.get("x", "0")) + float(box.attrib["width"]) <= width
        assert float(box.get("y", "0")) + float(box.attrib["height"]) <= height


def test_walks_stand_after_those_that_feed_them(graph: Graph) -> None:
    root = ElementTree.fromstring(draw.svg(graph))
    walks = [box for box in root.iter("{http://www.w3.org/2000/svg}rect") if box.get("class") == "walk"]
    paint, write, listen = (float(box.attrib["x"]) for box in walks)
    assert paint < write < listen
