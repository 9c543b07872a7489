"""The echo plugin alone, without the engine: graph, processor, and nodes called with hand-made contexts.

What its tasks give through the engine is tested elsewhere; here `oracle`, which those tests trust, is held against
the nodes, the sampler and the stream buffers.
"""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from mstar_plugin_echo import config, nodes, tiny
from mstar_plugin_echo.config import BOS, EOS, SEPARATOR, EchoConfig
from mstar_plugin_echo.graph import graph
from mstar_plugin_echo.oracle import cut, expected, make_request, reports
from mstar_plugin_echo.plugin import NODES, TASKS, register_models
from mstar_plugin_echo.processing import ENCODERS, EchoProcessor
from mstar_plugin_echo.reference import Draws, History, Model, Piece, pieces, uniform, windows
from torch import Tensor

from mstar.errors import ConfigError, PluginError, RequestError
from mstar.layers.sampling import SamplingState, draw_key, sample
from mstar.plugin import (
    Checkpoint,
    Emission,
    Fixed,
    LeftContext,
    Limits,
    ModelSpec,
    Request,
    SamplingParams,
    SlidingWindow,
    TextChunk,
    Whole,
)
from mstar.plugin import graph as vocabulary
from mstar.plugin.graph import Policy, children
from mstar.plugin.nodes import Context, StreamChunk, Task
from mstar.plugin.spec import load_object
from mstar.plugin.validate import validate
from mstar.worker.streams import ChunkCursor

CPU = torch.device("cpu")
CHECKPOINT = Checkpoint(model="tiny", folder=Path(), config=EchoConfig())


def spec() -> ModelSpec:
    found: list[ModelSpec] = []
    register_models(found.append)
    return found[0]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


def load(kind: type[nodes.EchoNode]) -> Any:
    node = kind(EchoConfig())
    node.load_weights(CHECKPOINT, dtype=torch.float32, device=CPU)
    return node.requires_grad_(False)


# ---- graph and spec ---------------------------------------------------------------------------------------


def test_hook_and_graph_import_no_torch() -> None:
    code = (
        "import sys; from mstar_plugin_echo.plugin import register_models; from mstar_plugin_echo.graph import graph; "
        "found = []; register_models(found.append); graph(None); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_graph_and_spec_are_valid_for_any_sizes() -> None:
    validate(spec().graph(None), spec())
    validate(graph(EchoConfig(depth_steps=5, hidden_size=64)), spec())


def test_walks_use_every_section_and_streams_every_policy() -> None:
    def kinds(section: Any) -> set[str]:
        return {type(section).__name__}.union(*(kinds(child) for child in children(section)))

    found = set().union(*(kinds(walk.section) for walk in graph().walks))
    assert found == {kind.__name__ for kind in vocabulary.Section.__args__}
    assert {type(stream.policy) for stream in graph().streams} == set(Policy.__args__)
    assert {stream.after_end for stream in graph().streams} == {"end", "absent"}


def test_methods_take_the_ports_the_graph_declares() -> None:
    for node in graph().nodes:
        kind = load_object(spec().nodes[node.module], plugin="echo")
        for method in node.methods:
            parameters = list(inspect.signature(getattr(kind, method.name)).parameters)
            assert parameters == ["self", "ctx", *(port.name for port in method.inputs)], (node.name, method.name)


def test_every_task_has_an_encoder() -> None:
    assert list(ENCODERS) == list(TASKS)


def test_tiny_checkpoint_loads(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "echo")
    assert config.load(folder, {}) == EchoConfig()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        config.load(tmp_path, {})


def test_weights_depend_on_names_and_seed_alone() -> None:
    one, other = load(nodes.LanguageModel), load(nodes.LanguageModel)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    reseeded = nodes.LanguageModel(EchoConfig(seed=1))
    reseeded.load_weights(CHECKPOINT, dtype=torch.float32, device=CPU)
    assert not torch.equal(one.head.weight, reseeded.head.weight)


def test_module_paths_that_do_not_exist_are_plugin_errors() -> None:
    with pytest.raises(PluginError, match="has no 'Nothing'"):
        load_object("mstar_plugin_echo.nodes:Nothing", plugin="echo")
    assert set(NODES) == {node.module for node in graph().nodes}


# ---- the oracle's parts -------------------------------------------------------------------------------------


def chunks_of(policy: Policy, count: int, *, arriving: Callable[[int], int]) -> list[Piece]:
    """What the worker's cursor gives of `count` items when `arriving(turn)` items come before each turn."""
    cursor, have, turn = ChunkCursor(policy, {}), 0, 0
    found: list[Piece] = []
    while not cursor.finished:
        have, turn = min(count, have + arriving(turn)), turn + 1
        while (span := cursor.next(have, closed=have == count)) is not None:
            found.append(Piece(span.start, span.end, span.num_new, span.first, span.final))
    return found


@pytest.mark.parametrize("count", range(12))
@pytest.mark.parametrize("burst", [1, 3, 20])
def test_oracle_and_worker_cut_streams_alike(count: int, burst: int) -> None:
    def arriving(turn: int) -> int:
        return burst if turn % 2 else 1

    assert chunks_of(Fixed(3), count, arriving=arriving) == pieces(count, sizes=(3,))
    assert chunks_of(LeftContext((1, 2, 3), 2), count, arriving=arriving) == pieces(count, sizes=(1, 2, 3), context=2)
    assert chunks_of(SlidingWindow(4, 2), count, arriving=arriving) == windows(count, window=4, stride=2)
    assert chunks_of(Whole(), count, arriving=arriving) == [Piece(0, count, count, True, True)]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, repetition_penalty=1.6),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.3, top_k=9),
        SamplingParams(temperature=1.1, top_p=0.7, min_p=0.02),
        SamplingParams(
            temperature=0.9, top_k=40, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.5,
            frequency_penalty=-0.3, logit_bias={"3": 2.0, "7": -5.0},
        ),
    ],
)  # fmt: skip
def test_oracle_and_sampler_draw_alike(params: SamplingParams) -> None:
    prompt, path = [1, 2, 3], (2, 1)
    draws = Draws(params, 11, path, "main", frozenset(prompt))
    state = SamplingState.allocate(2, config.VOCAB_SIZE, "cpu")
    state.set_row(1, params, draw_key(11, path, "main"), prompt)
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        logits = 3 * torch.randn(config.VOCAB_SIZE, generator=generator)
        assert draws.pick(logits) == int(sample(logits[None], state, torch.tensor([1])))


def test_uniform_ignores_trailing_first_items() -> None:
    assert uniform(5, (), "main", 3) == uniform(5, (0, 0), "main", 3) != uniform(5, (0, 1), "main", 3)


def test_history_decides_what_is_said(model: Model) -> None:
    """A wrong page, position or fork must show in the tokens."""
    one = expected(make_request("generate", "the first prompt", max_tokens=8), model=model)
    other = expected(make_request("generate", "The first prompt", max_tokens=8), model=model)
    assert one.texts != other.texts
    assert min(one.margin, other.margin) > 1e-4


def test_cut_ends_at_the_first_stop_string() -> None:
    assert cut("one two three", ["three", "two"]) == "one "
    assert cut("one", []) == "one"


# ---- nodes with hand-made contexts --------------------------------------------------------------------------


@dataclass(slots=True)
class FakeKV:
    """Paged KV as rows of plain tensors."""

    histories: list[History]
    counts: list[int]
    write: bool = True
    full: bool = False
    spans: Sequence[Sequence[tuple[int, int]]] = ()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        rows = zip(self.histories, *(x.split(self.counts) for x in (q, k, v)), strict=True)
        for row, (history, q_row, k_row, v_row) in enumerate(rows):
            past, new = history.keys[layer].shape[0], q_row.shape[0]
            keys, values = torch.cat((history.keys[layer], k_row)), torch.cat((history.values[layer], v_row))
            if self.write:
                history.keys[layer], history.values[layer] = keys, values
            visible = torch.ones(new, past + new, dtype=torch.bool)
            visible = visible if self.full else visible.tril(past)
            for start, end in self.spans[row] if self.spans else ():
                visible[start:end, past + start : past + end] = True
            outs.append(
                torch.nn.functional.scaled_dot_product_attention(
                    *(x.transpose(0, 1) for x in (q_row, keys, values)), attn_mask=visible, enable_gqa=True
                ).transpose(0, 1)
            )
        return torch.cat(outs)


def context(
    rows: int = 1,
    *,
    kv: FakeKV | None = None,
    iteration: int = 0,
    positions: Tensor | None = None,
    **fields: Any,
) -> Context:
    """A batch of `rows`; greedy sampling; slot rows from 1 on."""
    counts = torch.tensor(kv.counts if kv else [1] * rows)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    if positions is None:
        begins = [history.next for history in kv.histories] if kv else [0] * rows
        positions = torch.cat(
            [torch.arange(b, b + n) for b, n in zip(begins, counts.tolist(), strict=True)]
        )  # fmt: skip
    return Context(
        num_rows=rows,
        query_starts=starts.int(),
        last_tokens=starts[1:] - 1,
        positions=positions,
        rows=torch.arange(1, rows + 1),
        iteration=torch.full((rows,), iteration),
        draw_keys=torch.zeros(rows, dtype=torch.int64),
        sample=lambda name, logits: logits.argmax(-1),
        kv=kv,  # type: ignore[arg-type]
        **fields,
    )


def task(path: tuple[int, ...] = (), **fields: Any) -> Task:
    return Task(request_id="r", path=path, inputs=fields.pop("inputs", {}), **fields)


def advance(kv: FakeKV) -> None:
    """What the engine does after a step that wrote."""
    for history, count in zip(kv.histories, kv.counts, strict=True):
        history.positions += range(history.next, history.next + count)
        history.next += count


def test_decode_batches_forks_of_prompts_of_different_lengths(model: Model) -> None:
    lm, texts = load(nodes.LanguageModel), ["hello", "a longer prompt"]
    prompts = [[BOS, *text.encode()] for text in texts]
    kv = FakeKV([model.history() for _ in prompts], [len(prompt) - 1 for prompt in prompts])
    lm.prefill(context(2, kv=kv), ids=torch.tensor([token for prompt in prompts for token in prompt[:-1]]))
    advance(kv)
    kv = FakeKV([history.fork() for history in kv.histories], [1, 1])
    last, said = torch.tensor([prompt[-1] for prompt in prompts]), []
    for step in range(6):
        ctx = context(2, kv=kv, iteration=step)
        last = lm.decode(ctx, ids=last, eos_at=torch.tensor([-1, 4]))["token"]
        advance(kv)
        said.append(last.tolist())
    whole = expected(make_request("generate", texts[0], max_tokens=6), model=model)
    ended = expected(make_request("generate", texts[1], max_tokens=6, eos_at=4), model=model)
    assert [row[0] for row in said] == whole.texts[0]
    assert [row[1] for row in said][:5] == [*ended.texts[0], EOS]
    assert (whole.reasons, ended.reasons) == ({0: "length"}, {0: "stop"})


def test_decode_leaves_rows_without_eos_port_alone(model: Model) -> None:
    lm = load(nodes.LanguageModel)
    kv = FakeKV([model.history(), model.history()], [1, 1])
    present = {"eos_at": torch.tensor([False, True])}
    ctx = context(2, kv=kv, present=present)
    tokens = lm.decode(ctx, ids=torch.tensor([BOS, BOS]), eos_at=torch.tensor([0, 0]))["token"]
    assert tokens[0] != EOS
    assert tokens[1] == EOS


def test_end_of_text_stops_and_is_no_text() -> None:
    lm = load(nodes.LanguageModel)
    going, ending = (task(params=make_request("generate", "x").params) for _ in range(2))
    ignoring = task(params=make_request("generate", "x", ignore_eos=True).params)
    outputs = {"token": torch.tensor([5, EOS, EOS]), "text": torch.tensor([5, EOS, EOS])}
    text = lm.finish_decode([going, ending, ignoring], outputs)["text"]
    assert (text[0], text[1], text[2]) == (5, None, EOS)
    assert [t.stop_reason for t in (going, ending, ignoring)] == [None, "stop", None]
    assert (going.counts, ending.counts) == ({"completion_tokens": 1}, {})


@pytest.mark.parametrize("end_at", [None, 2])
def test_nested_frames(model: Model, end_at: int | None) -> None:
    lm, depth = load(nodes.LanguageModel), load(nodes.Depth)
    request = make_request("nested", "frames", max_frames=4, **({} if end_at is None else {"end_at": end_at}))
    slots = {slot.name: torch.zeros((2, *slot.shape), dtype=slot.dtype) for slot in depth.slots}
    slots["cache"][1] = math.nan  # what a row held before must not matter
    prompt = [BOS, *b"frames"]
    kv = FakeKV([model.history()], [len(prompt)])
    total = lm.prefill(context(kv=kv), ids=torch.tensor(prompt))["hidden"]
    advance(kv)
    kv.counts = [1]
    frames, state = [], task(params=request.params)
    for step in range(4):
        end = torch.tensor([-1 if end_at is None else end_at])
        outer = lm.frame(context(kv=kv, iteration=step), sum=total, end_at=end)
        advance(kv)
        depth.start(context(slots=slots), **outer)
        code = outer["code"]
        for place in range(3):
            code = depth.step(context(slots=slots, iteration=place), code=code)["code"]
        outputs = depth.sum(context(slots=slots))
        total = outputs["sum"]
        assert outputs["number"].tolist() == [step + 1]
        frame = depth.finish_sum([state], outputs)["frame"][0]
        if state.stop_reason:
            break
        frames.append(frame)
    right = expected(request, model=model)
    assert torch.equal(torch.cat(frames), right.tensors["frames"])
    assert right.reasons == {0: state.stop_reason or "length"}


@pytest.mark.parametrize("name", ["plain", "loud"])
def test_voice_keeps_the_samples_of_new_frames(model: Model, name: str) -> None:
    request = make_request("nested", "voice", max_frames=5, voice=name)
    voice, right = load(nodes.Voice), expected(request, model=model)
    frames, heard = right.tensors["frames"], []
    for piece in pieces(5, sizes=(1, 2, 4), context=1):
        items = frames[piece.start : piece.end]
        outputs = voice.render(context(), frames=items[None])
        chunk = StreamChunk(items, piece.new, piece.first, piece.final, piece.start)
        wave = voice.finish_render([task(chunks={"frames": chunk}, params=request.params)], outputs)["wave"][0]
        heard += [wave] if wave is not None else []
    assert right.audio is not None
    assert torch.equal(torch.cat(heard), right.audio)


def test_spans_read_in_chunks_and_flow_writes_nothing(model: Model) -> None:
    lm, mix = load(nodes.LanguageModel), load(nodes.Mix)
    image = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))
    request = make_request("spans", "look ", ("image", image), " at it", steps=2)
    inputs = encode(request).inputs
    main, cuts = model.history(), [(0, 4), (4, 11), (11, 17)]  # the image block is [6, 11)
    for start, end in cuts:
        turn = task(inputs=inputs, token_start=start, num_tokens=end - start, position=main.next)
        plan = lm.prepare_read([turn])
        assert plan.positions is not None
        assert plan.advance is not None
        inside = [(a - start, b - start) for a, b in inputs["spans"].tolist() if start <= a and b <= end]
        kv = FakeKV([main], [end - start], spans=[inside])
        ctx = context(kv=kv, positions=plan.positions)
        lm.read(ctx, spans=[inputs["spans"]], **{k: inputs[k][start:end] for k in ("ids", "pixels", "is_pixel")})
        main.positions += plan.positions.tolist()
        main.next += int(plan.advance[0])
    length, position = inputs["text_end"]
    text = main.fork(length)
    assert (length, position, main.next) == (11, 7, 13)
    assert text.next == position
    latents = inputs["latents"]
    for _ in range(2):
        v = [
            lm.flow(context(kv=FakeKV([history], [6], write=False, full=True)), latents=latents)["velocity"]
            for history in (main, text)
        ]
        ctx = context(kv=FakeKV([main], [6]))
        latents = mix.guide(ctx, latents=latents, main=v[0], text=v[1], scale=inputs["scale"][None])["latents"]
    right = expected(request, model=model)
    assert torch.allclose(latents, right.tensors["image"], atol=1e-5)
    kv = FakeKV([main], [1])
    last = lm.decode(context(kv=kv), ids=torch.tensor([SEPARATOR]), eos_at=None)["token"]
    assert last.tolist() == right.texts[0][:1]


def test_guide_takes_the_plain_velocity_where_the_branch_is_absent() -> None:
    mix = load(nodes.Mix)
    ctx = context(2, kv=FakeKV([History([], []), History([], [])], [1, 2]))
    ctx.present["text"] = torch.tensor([False, True])
    latents, main, text = torch.zeros(3, 4), torch.ones(3, 4), torch.full((3, 4), 3.0)
    moved = mix.guide(ctx, latents=latents, main=main, text=text, scale=torch.tensor([9.0, 2.0]))["latents"]
    assert moved[:, 0].tolist() == [-0.25, 0.25, 0.25]


def test_combine_leaves_out_absent_branches() -> None:
    ctx = context(2)
    ctx.present["right"] = torch.tensor([True, False])
    left, right = torch.tensor([10, 20]), torch.tensor([5, 5])
    assert load(nodes.Mix).combine(ctx, left=left, right=right, third=None)["x"].tolist() == [16, 21]


def test_join_flattens_nested_lists_in_order() -> None:
    parts = [[[torch.tensor(1), torch.tensor(2)], []], [[torch.tensor(3)]]]
    assert load(nodes.Join).concat(context(), parts=[parts])["joined"][0].tolist() == [1, 2, 3]


def test_source_and_sink_report_items_and_chunks() -> None:
    source, sink = load(nodes.Source), load(nodes.Sink)
    state = nodes.Produced()
    inputs = {"counts": torch.tensor([0, 2]), "base": torch.tensor(1000)}
    sent = [
        source.finish_emit([task((3,), inputs=inputs, state=state, iteration=step)], {"left": torch.zeros(1)})["left"]
        for step in range(2)
    ]
    assert sent[0] == [None]
    assert sent[1][0].tolist() == [1300, 1301]
    chunk = StreamChunk(sent[1][0], 1, False, True, 7)
    rows = sink.take(context(2), chunk=[chunk.items, None])
    flat = sink.finish_take([task((3,), chunks={"chunk": chunk}), task()], rows)["report"]
    assert flat[0].tolist() == [3, 0, 1, 1, 7, 2, 2601, 1300, 1301]
    assert flat[1].tolist() == [0, 0, 0, 0, -1, 0, 0]
    assert list(reports(torch.cat(flat))) == [row.tolist() for row in flat]


@pytest.mark.parametrize(
    ("kind", "error"), [("method", "method was told"), ("memory", "memory"), ("prepare", "prepare was told")]
)
def test_trouble_takes_the_whole_batch_down(kind: str, error: str) -> None:
    node = load(nodes.Trouble)
    tasks = [task(params=make_request("trouble", "x", kind=k).params, iteration=1) for k in ("none", kind)]
    with pytest.raises(RuntimeError, match=error):
        node.act(context(2, plan=node.prepare_act(tasks).tensors), x=torch.tensor([1, 1]))


def test_trouble_returns_what_its_ports_do_not_declare() -> None:
    node = load(nodes.Trouble)
    found = {}
    for kind in ("none", "shape", "missing"):
        tasks = [task(params=make_request("trouble", "x", kind=kind).params, iteration=1)]
        found[kind] = node.act(context(1, plan=node.prepare_act(tasks).tensors), x=torch.tensor([1]))
    assert found["none"]["x"].tolist() == [2]
    assert found["shape"]["x"].shape == (2, 2)
    assert "x" not in found["missing"]


def test_trouble_can_blame_the_request() -> None:
    turn = task(params=make_request("trouble", "x", kind="request").params, iteration=1)
    load(nodes.Trouble).finish_act([turn], {})
    assert turn.error is not None
    assert turn.error.status == 422


# ---- the processor ------------------------------------------------------------------------------------------


def processor(max_model_len: int = 512) -> EchoProcessor:
    return EchoProcessor(CHECKPOINT, Limits(max_model_len=max_model_len))


def encode(request: Request) -> Any:
    return processor().encode(request)


def test_encode_gives_every_walk_its_inputs_and_fields() -> None:
    image = ("image", torch.zeros(2, 4))
    for name in TASKS:
        request = make_request(name, "text", *([image] if name == "spans" else []))
        encoded = encode(request)
        start = next(s for s in graph().states.starts if s.task == name)
        walk = graph().walk(start.walk)
        assert walk is not None
        assert set(walk.inputs) <= set(encoded.inputs), name


@pytest.mark.parametrize(
    ("task_name", "inputs", "params", "message"),
    [
        ("generate", [""], {}, "empty"),
        ("generate", [[256]], {}, "at least 2"),
        ("generate", [[256, 258]], {}, "0 to 257"),
        ("generate", ["x" * 600], {}, "the limit is 512"),
        ("fanout", ["a||b"], {}, "empty text"),
        ("spans", [("image", torch.zeros(2, 3))], {}, r"shape \[2, 3\]"),
        ("chunks", ["x"], {"counts": [[1], [1]]}, "use chunks_each"),
        ("trouble", ["x"], {"kind": "encode"}, "told to refuse"),
    ],
)
def test_encode_refuses(task_name: str, inputs: list[Any], params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        encode(make_request(task_name, *inputs, **params))
    assert caught.value.status == 400
    assert caught.value.param


def test_text_is_put_together_from_bytes_per_item() -> None:
    made = processor()
    request = make_request("generate", "x", n=2)
    state = made.start(request, made.encode(request))
    chunks: list[Any] = []
    for path, token in [((0,), 0xC3), ((1,), 104), ((0,), 0xA9), ((1,), 0xC3)]:
        chunks += made.decode(state, Emission("text", path, torch.tensor(token)))
    for path in ((0,), (1,)):
        chunks += made.decode(state, Emission("text", path, None, final=True))
    assert [(c.text, c.index) for c in chunks] == [("", 0), ("h", 1), ("é", 0), ("", 1), ("\ufffd", 1)]
    assert all(isinstance(c, TextChunk) for c in chunks)


def test_step_says_the_draft_again_in_capitals() -> None:
    request = make_request("states", "ab")
    given = processor().step("reencode", request, {"draft": [torch.tensor(t) for t in (104, EOS, 105)]})
    assert given["ids"].tolist() == [ord("b"), *b"HI"]


# ---- the oracle's tasks that need no network -----------------------------------------------------------------


def test_branches_by_hand(model: Model) -> None:
    found = expected(make_request("branches", "\x01", steps=2, first_step=1, end_step=2), model=model)
    assert found.tensors["steps"].tolist() == [3, 3 * 2 + 1 + 3 * 3]
    assert found.counters == {"left.scale": 2, "right.scale": 1, "mix.combine": 2, "join.concat": 1}


def test_chunks_by_hand(model: Model) -> None:
    request = make_request("chunks", "x", counts=[[2, 0, 1]], consumers=["sliding", "follow"], window=2, stride=1)
    found = expected(request, model=model)
    assert list(reports(found.tensors["sliding"])) == [
        [0, 1, 0, 2, 0, 2, 2001, 1000, 1001],
        [0, 0, 0, 1, 1, 2, 2003, 1001, 1002],
        [0, 0, 1, 0, 1, 2, 2003, 1001, 1002],
    ]
    assert [row[1:5] for row in reports(found.tensors["follow"])] == [
        [1, 0, 1, 0], [0, 0, 1, 1], [0, 0, 1, 2], [0, 1, 0, 3], [0, 0, 0, -1], [0, 0, 0, -1],
    ]  # fmt: skip
    assert found.counters == {"source.emit": 3, "sink.take": 9}
