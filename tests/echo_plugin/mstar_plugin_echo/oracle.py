"""What every task must give, computed from the request alone, without the engine. For tests.

Each function below is a task's walks written as a plain loop over `reference`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import msgspec
import torch
from torch import Tensor

from mstar.layers.sampling import draw_key, normal
from mstar.plugin import Part, Request, SamplingParams, TensorPart, TextPart, TokensPart
from mstar_plugin_echo import nodes
from mstar_plugin_echo.config import (
    BOS,
    EOS,
    IMAGE_FEATURES,
    MODULUS,
    SAMPLES_PER_FRAME,
    SEPARATOR,
    sampling,
)
from mstar_plugin_echo.graph import FRAME_SIZES, LEFT_SIZES
from mstar_plugin_echo.plugin import TASKS as TASK_SPECS
from mstar_plugin_echo.processing import NUM_LATENTS, media_facts
from mstar_plugin_echo.reference import Draws, History, Model, Path, Piece, pieces, windows


@dataclass(slots=True)
class Expected:
    """The right result.

    Args:
        texts: index -> token ids; `text` gives their characters.
        tensors: as named in results: `name`, `name-1`, ...
        reasons: index -> finish reason.
        counters: "node.method" -> how often it ran.
        margin: the least distance between the likeliest token and the next, over all greedy picks. Where it is
            below the rounding error of float32 (1e-4, say), another result may be right too.
    """

    texts: dict[int, list[int]] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    audio: Tensor | None = None
    reasons: dict[int, str] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    margin: float = math.inf

    def text(self, index: int = 0) -> str:
        return bytes(token for token in self.texts.get(index, []) if token < BOS).decode(errors="replace")


@dataclass(slots=True)
class SessionMemory:
    """What a session keeps from one turn to the next; empty before the first."""

    history: History | None = None
    said: int = 0
    count: int = 0


def make_request(
    task: str,
    *inputs: str | list[int] | tuple[str, Tensor],
    seed: int = 0,
    outputs: tuple[str, ...] = (),
    session: str | None = None,
    resumed: bool = False,
    **params: Any,
) -> Request:
    """A request as the server makes it: texts, token ids and (name, tensor) pairs in; defaults filled in."""
    declared = TASK_SPECS[task]
    parts: list[Part] = []
    for value in inputs:
        if isinstance(value, str):
            parts.append(TextPart(value))
        else:
            parts.append(TokensPart(value) if isinstance(value, list) else TensorPart(*value))
    return Request(
        id=f"{task}-{seed}",
        model="echo",
        task=task,
        parts=tuple(parts),
        outputs=outputs or declared.default_outputs or declared.outputs[:1],
        params=msgspec.convert(params, declared.params),
        seed=seed,
        session=session,
        resumed=resumed,
    )


# ---- the tasks ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Run:
    """One request being worked out."""

    model: Model
    request: Request
    session: SessionMemory
    expected: Expected = field(default_factory=Expected)
    samplers: list[Draws] = field(default_factory=list)

    def draws(self, name: str, params: SamplingParams | None = None, *, path: Path = (), prompt: Any = ()) -> Draws:
        chosen = params or SamplingParams(temperature=0)
        self.samplers.append(Draws(chosen, self.request.seed, path, name, frozenset(prompt)))
        return self.samplers[-1]

    def count(self, name: str, amount: int = 1) -> None:
        if amount:
            self.expected.counters[name] += amount

    def prefill(self, history: History, ids: list[int]) -> Tensor:
        self.count("lm.prefill")
        return self.model.forward(history, self.model.embed(ids))[-1]

    def decode(
        self, history: History, last: int, *, limit: int, draws: Draws, index: int = 0, node: str = "lm",
        eos_at: int | None = None, ignore_eos: bool = False,
    ) -> list[int]:  # fmt: skip
        """The tokens of a decode loop, end-of-text included; adds to texts, reasons and counters."""
        tokens: list[int] = []
        text = self.expected.texts.setdefault(index, [])
        reason = "length"
        while len(tokens) < limit and reason == "length":
            self.count(f"{node}.decode")
            hidden = self.model.forward(history, self.model.embed([last]))[-1]
            logits = forced(self.model.p["head.weight"] @ hidden, EOS, at=eos_at, step=len(tokens))
            last = draws.pick(logits)
            tokens.append(last)
            if last == EOS and not ignore_eos:
                reason = "stop"
            else:
                text.append(last)
        if self.expected.reasons.get(index) != "length":
            self.expected.reasons[index] = reason
        return tokens


def forced(logits: Tensor, token: int, *, at: int | None, step: int) -> Tensor:
    if at is None:
        return logits
    logits = logits.clone()
    logits[token] += nodes.CERTAIN if step == at else -nodes.CERTAIN
    return logits


def expected(request: Request, *, model: Model | None = None, session: SessionMemory | None = None) -> Expected:
    """The right result of a request.

    Args:
        model: made anew when None; pass one when there are many requests.
        session: the memory of `request.session`, changed by the request.

    Stop strings are not applied: they cut a text when it is read, see `cut`.
    """
    run = Run(model or Model(), request, session or SessionMemory())
    TASKS[request.task](run)
    run.expected.margin = min((draws.margin for draws in run.samplers), default=math.inf)
    return run.expected


def cut(text: str, stops: list[str]) -> str:
    """A text up to its first stop string."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


def prompt_of(request: Request) -> list[int]:
    ids = [token for part in request.parts if isinstance(part, TokensPart) for token in part.ids]
    return ids or [BOS, *text_of(request)]


def text_of(request: Request) -> bytes:
    return b"".join(part.text.encode() for part in request.parts if isinstance(part, TextPart))


def generate(run: Run) -> None:
    params, prompt = run.request.params, prompt_of(run.request)
    history = run.model.history()
    run.prefill(history, prompt[:-1])
    for index in range(params.n):
        run.decode(
            history.fork(), prompt[-1], limit=params.max_tokens, index=index, eos_at=params.eos_at,
            draws=run.draws("main", sampling(params), path=(index,), prompt=prompt), ignore_eos=params.ignore_eos,
        )  # fmt: skip


def nested(run: Run) -> None:
    params, config, p = run.request.params, run.model.config, run.model.p
    first = run.draws("frame", SamplingParams(temperature=params.temperature))
    more = run.draws("depth", SamplingParams(temperature=params.depth_temperature, top_k=params.depth_top_k))
    history = run.model.history()
    total = run.prefill(history, prompt_of(run.request))
    frames: list[list[int]] = []
    for step in range(params.max_frames):
        run.expected.counters.update(
            {"lm.frame": 1, "depth.start": 1, "depth.step": config.depth_steps, "depth.sum": 1}
        )
        hidden = run.model.forward(history, total[None])[-1]
        logits = forced(p["frame_head.weight"] @ hidden, config.end_code, at=params.end_at, step=step)
        frame, states = [first.pick(logits)], [hidden]
        for place in range(config.depth_steps):
            past = torch.stack(states).mean(0)
            states.append(torch.tanh(p["predictor.mix.weight"] @ past + p["predictor.embeddings"][place, frame[-1]]))
            frame.append(more.pick(p["predictor.heads"][place] @ states[-1]))
        if frame[0] == config.end_code:
            run.expected.reasons[0] = "stop"
            break
        total = sum((p["predictor.embeddings"][place, code] for place, code in enumerate(frame)), torch.zeros(()))
        frames.append(frame)
    run.expected.reasons.setdefault(0, "length")
    if frames:
        run.expected.tensors["frames"] = torch.tensor(frames)
    if "audio" in run.request.outputs:
        run.count("voice.render", len(pieces(len(frames), sizes=FRAME_SIZES, context=1)))
        sums = [0, *map(sum, frames)]
        samples = [
            (sums[at] * 10 + sums[at - 1] + s) / 32768 for at in range(1, len(sums)) for s in range(SAMPLES_PER_FRAME)
        ]
        run.expected.audio = torch.tensor(samples) * (2 if params.voice == "loud" else 1)


def branches(run: Run) -> None:
    params, x = run.request.params, sum(text_of(run.request)) % MODULUS
    steps: list[int] = []
    trace: list[int] = []
    for _ in range(params.rounds):
        trace = []
        for step in range(params.steps):
            after = x * 2 % MODULUS + 1
            run.expected.counters.update(("left.scale", "mix.combine"))
            if params.first_step <= step < params.end_step:
                run.count("right.scale")
                after += x * 3 % MODULUS
            if params.third:
                run.count("third.scale")
                after += 7 * (x * 5 % MODULUS)
            x = after % MODULUS
            trace.append(x)
        steps += trace
    run.count("join.concat")
    run.expected.tensors |= {"x": torch.tensor(x), "last_round": torch.tensor(trace, dtype=torch.int64)}
    if steps:
        run.expected.tensors |= {"steps": torch.tensor(steps), "trace": torch.tensor(trace)}


def fanout(run: Run) -> None:
    params = run.request.params
    replies, laps, left = cycle(params.reply_tokens), cycle(params.laps), params.max_tokens
    shared = run.model.history()
    run.prefill(shared, [BOS, *params.prefix.encode()])
    joined: list[int] = []
    for number, part in enumerate(run.request.parts):
        assert isinstance(part, TextPart)
        group = shared.fork()
        run.prefill(group, list(f"#{number}".encode()))
        for item, text in enumerate(part.text.encode().split(b"|")):
            history = group.fork()
            run.prefill(history, list(text))
            run.count("pace.lap", next(laps))
            limit = min(next(replies), left)
            tokens = run.decode(history, SEPARATOR, limit=limit, draws=run.draws("main", path=(number, item)))
            left -= len(tokens)
            joined += tokens
    run.count("join.concat")
    run.expected.tensors["joined"] = torch.tensor(joined, dtype=torch.int64)


def spans(run: Run) -> None:
    params, model = run.request.params, run.model
    tokens, blocks, text_end, latents = [BOS], [], 1, run.request.tensor("latents")
    rows = [model.embed([BOS])]
    positions, position = [0], 1
    for part in run.request.parts:
        if isinstance(part, TensorPart) and part.name == "latents":
            continue
        text_end = len(tokens)
        if isinstance(part, TensorPart):
            tokens += [0] * len(part.tensor)
            blocks.append((text_end, len(tokens)))
            rows.append(part.tensor.float() @ model.p["pixels_in.weight"].T)
            positions += [position] * len(part.tensor)
            position += 1
        elif isinstance(part, TextPart):
            ids = list(part.text.encode())
            tokens += ids
            rows.append(model.embed(ids))
            positions += range(position, position + len(ids))
            position += len(ids)
    main = model.history()
    run.count("lm.read")
    model.forward(main, torch.cat(rows), positions=positions, spans=blocks)
    text = main.fork(text_end)
    latents = default_latents(run.request.seed) if latents is None else latents.float()
    for step in range(params.steps):
        run.expected.counters.update(("lm.flow", "mix.guide"))
        velocity = flow(model, main, latents)
        if params.scale != 1 and params.first_step <= step < params.end_step:
            run.count("lm_text.flow")
            other = flow(model, text, latents)
            velocity = other + params.scale * (velocity - other)
        latents = latents - 0.25 * velocity
    run.count("mix.show")
    run.expected.tensors["image"] = latents
    run.decode(main, SEPARATOR, limit=params.max_tokens, draws=run.draws("main"), node="lm_view")


def flow(model: Model, history: History, latents: Tensor) -> Tensor:
    block = [(0, latents.shape[0])]
    hidden = model.forward(history, latents @ model.p["pixels_in.weight"].T, spans=block, write=False)
    return hidden @ model.p["velocity_out.weight"].T


def default_latents(seed: int) -> Tensor:
    count = NUM_LATENTS * IMAGE_FEATURES
    return normal(torch.tensor(draw_key(seed, (), "latents")), torch.arange(count)).view(NUM_LATENTS, -1)


def chunks(run: Run) -> None:
    params = run.request.params
    base = 1000 * len(text_of(run.request))
    for producer, counts in enumerate(params.counts):
        count = sum(counts)
        run.count("source.emit", len(counts))
        found = {
            "fixed": pieces(count, sizes=(params.size,)),
            "sliding": windows(count, window=params.window, stride=params.stride),
            "left": pieces(count, sizes=LEFT_SIZES, context=params.context),
            "whole": [Piece(0, count, count, True, True)],
            "follow": pieces(count, sizes=(1,)),
        }
        for name in dict.fromkeys(params.consumers):
            reports = [report(piece, producer=producer, base=base) for piece in found[name]]
            if name == "follow":
                absent = [[producer, 0, 0, 0, -1, 0, 0]] * params.follow_steps
                reports = [*reports, *absent][: params.follow_steps]
            run.count("sink.take", len(reports))
            flat = [value for values in reports for value in values]
            run.expected.tensors[f"{name}-{producer}" if producer else name] = torch.tensor(flat)


def report(piece: Piece, *, producer: int, base: int) -> list[int]:
    items = [base + 100 * producer + index for index in range(piece.start, piece.end)]
    return [producer, piece.first, piece.final, piece.new, piece.start, len(items), sum(items), *items]


def reports(flat: Tensor) -> Iterator[list[int]]:
    """The single reports of a consumer's tensor."""
    values = flat.tolist()
    while values:
        size = 7 + values[5]
        yield values[:size]
        values = values[size:]


def trouble(run: Run) -> None:
    """What a request gives that does not fail."""
    params = run.request.params
    run.expected.counters.update({"lm.prefill": 1, "trouble.idle": params.steps, "trouble.act": params.steps})
    run.expected.tensors["x"] = torch.arange(1, params.steps + 1)
    if params.watch:
        run.count("trouble.watch", params.steps + 1)
        run.expected.tensors["seen"] = torch.tensor([1] * params.steps + [0])


def session(run: Run) -> None:
    params, memory = run.request.params, run.session
    history = memory.history or run.model.history()
    if memory.history is not None:
        run.count("lm.push")
        run.model.forward(history, run.model.embed([memory.said]))
    prompt = [BOS if memory.history is None else SEPARATOR, *text_of(run.request)]
    run.prefill(history, prompt[:-1])
    tokens = run.decode(history, prompt[-1], limit=params.max_tokens, draws=run.draws("main"), eos_at=params.eos_at)
    run.count("tally.add")
    memory.history, memory.said, memory.count = history, tokens[-1], memory.count + params.amount
    run.expected.tensors["total"] = torch.tensor([memory.count])


def states(run: Run) -> None:
    params, prompt = run.request.params, prompt_of(run.request)
    history = run.model.history()
    run.prefill(history, prompt[:-1])
    draws = run.draws("main")
    draft = run.decode(history.fork(), prompt[-1], limit=params.draft_tokens, draws=draws, node="lm_draft")
    if params.revise:
        said = bytes(token for token in draft if token < BOS).upper()
        run.prefill(history, [prompt[-1], *said])
        revised = run.decode(history, SEPARATOR, limit=params.max_tokens, draws=draws)
        run.expected.tensors["revised"] = torch.tensor(revised)
    if params.tally:
        run.count("join.concat")
    run.expected.tensors["draft"] = torch.tensor(draft)


def media(run: Run) -> None:
    run.count("join.concat")
    for _ in run.request.parts:
        run.count("join.look")
    facts = [fact for part in run.request.parts for fact in media_facts(part)]
    run.expected.tensors["facts"] = torch.tensor(facts)


TASKS: dict[str, Callable[[Run], None]] = {
    "generate": generate,
    "nested": nested,
    "branches": branches,
    "fanout": fanout,
    "spans": spans,
    "chunks": chunks,
    "chunks_each": chunks,
    "trouble": trouble,
    "session": session,
    "states": states,
    "media": media,
}
