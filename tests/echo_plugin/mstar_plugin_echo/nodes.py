"""The echo model's nodes: batched methods over port tensors. Runs on a worker.

B: rows, T: tokens of all rows, H: hidden size. Small exact arithmetic, so that tests know every result beforehand.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mstar.errors import RequestError
from mstar.layers.sampling import logprobs
from mstar.plugin.nodes import Context, KVLayout, Node, Plan, Sampler, Slot, Task
from mstar.plugin.spec import Checkpoint
from mstar_plugin_echo import weights
from mstar_plugin_echo.config import (
    EOS,
    IMAGE_FEATURES,
    MODULUS,
    MOST_LOGPROBS,
    SAMPLES_PER_FRAME,
    VOCAB_SIZE,
    EchoConfig,
    TroubleParams,
)
from mstar_plugin_echo.graph import CONSUMERS
from mstar_plugin_echo.modeling.decoder import Decoder
from mstar_plugin_echo.modeling.depth import DepthPredictor

CERTAIN = 1e6


class EchoNode(Node):
    """A node whose weights, if any, are drawn from the configuration's seed."""

    config: EchoConfig

    def load_weights(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        weights.fill(self, seed=self.config.seed, dtype=dtype, device=device)


# ---- autoregression -------------------------------------------------------------------------------------


class LanguageModel(EchoNode):
    """Bytes and image blocks in; bytes, flow velocities or frames out. The graph's `lm`, `lm_text`, ... share it."""

    def __init__(self, config: EchoConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.kv_layout = KVLayout(
            num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim
        )
        self.samplers = (
            Sampler(name="main", vocab_size=VOCAB_SIZE),
            Sampler(name="frame", vocab_size=config.num_codes + 1),
        )
        self.embed = nn.Embedding(VOCAB_SIZE, hidden)
        self.pixels_in = nn.Linear(IMAGE_FEATURES, hidden, bias=False)
        self.decoder = Decoder(config)
        self.head = nn.Linear(hidden, VOCAB_SIZE, bias=False)
        self.frame_head = nn.Linear(hidden, config.num_codes + 1, bias=False)
        self.velocity_out = nn.Linear(hidden, IMAGE_FEATURES, bias=False)

    def prefill(self, ctx: Context, ids: Tensor) -> dict[str, Tensor]:
        """Prompt ids (T,) -> hidden state (B, H) of each row's last token."""
        hidden = self.decoder(self.embed(ids), positions=ctx.positions, kv=ctx.kv)
        return {"hidden": hidden[ctx.last_tokens]}

    def decode(self, ctx: Context, ids: Tensor, eos_at: Tensor | None) -> dict[str, Tensor]:
        """Last ids (B,) -> next ids (B,)."""
        hidden = self.decoder(self.embed(ids), positions=ctx.positions, kv=ctx.kv)
        logits = force(self.head(hidden).float(), EOS, at=eos_at, fed=ctx.present.get("eos_at"), step=ctx.iteration)
        token = ctx.sample("main", logits)
        return {"token": token, "text": token}

    def finish_decode(self, tasks: Sequence[Task], outputs: dict[str, Tensor]) -> dict[str, list[Any]]:
        """End at end-of-text, which is no text; with `ignore_eos` it is a token like any other."""
        text: list[Tensor | None] = list(outputs["text"])
        for index, task in enumerate(tasks):
            if int(outputs["text"][index]) == EOS and not getattr(task.params, "ignore_eos", False):
                task.stop()
                text[index] = None
            else:
                task.count("completion_tokens")
        return {"text": text}

    def say(self, ctx: Context, ids: Tensor, eos_at: Tensor | None) -> dict[str, Tensor]:
        """Last ids (B,) -> next ids (B,), and with them how likely they and others were, (B, 2 + 2 * most)."""
        hidden = self.decoder(self.embed(ids), positions=ctx.positions, kv=ctx.kv)
        logits = force(self.head(hidden).float(), EOS, at=eos_at, fed=ctx.present.get("eos_at"), step=ctx.iteration)
        token = ctx.sample("main", logits)
        own, best_ids, best = logprobs(logits, token, MOST_LOGPROBS)
        return {"token": token, "said": torch.cat((torch.stack((token.float(), own), 1), best_ids.float(), best), 1)}

    def finish_say(self, tasks: Sequence[Task], outputs: dict[str, Tensor]) -> dict[str, list[Any]]:
        """As `finish_decode`."""
        text = self.finish_decode(tasks, {"text": outputs["said"][:, 0]})["text"]
        return {"said": [None if token is None else row for token, row in zip(text, outputs["said"], strict=True)]}

    def push(self, ctx: Context, ids: Tensor) -> dict[str, Tensor]:
        """Write ids (B,) and ask for nothing."""
        self.decoder(self.embed(ids), positions=ctx.positions, kv=ctx.kv)
        return {}

    def prepare_read(self, tasks: Sequence[Task]) -> Plan:
        """All tokens of an image block take one position."""
        positions, advance = [], []
        for task in tasks:
            found, moved = block_positions(
                task.inputs["spans"].tolist(), start=task.position, first=task.token_start, count=task.num_tokens
            )
            positions += found
            advance.append(moved)
        return Plan(positions=torch.tensor(positions, dtype=torch.int64), advance=advance)

    def read(
        self, ctx: Context, ids: Tensor, pixels: Tensor, is_pixel: Tensor, spans: list[Tensor]
    ) -> dict[str, Tensor]:
        """Text ids and image pixels (T, features), spliced; `spans` are seen whole by their own tokens."""
        x = torch.where(is_pixel[:, None], self.pixels_in(pixels), self.embed(ids))
        self.decoder(x, positions=ctx.positions, kv=ctx.kv)
        return {}

    def flow(self, ctx: Context, latents: Tensor) -> dict[str, Tensor]:
        """Velocities of latents (T, features) that read the sequence, see each other, and are not written."""
        hidden = self.decoder(self.pixels_in(latents), positions=ctx.positions, kv=ctx.kv)
        return {"velocity": self.velocity_out(hidden)}

    def frame(self, ctx: Context, sum: Tensor, end_at: Tensor) -> dict[str, Tensor]:
        """The embedded last frame (B, H) -> hidden state (B, H) and the next frame's first code (B,)."""
        hidden = self.decoder(sum, positions=ctx.positions, kv=ctx.kv)
        logits = force(self.frame_head(hidden).float(), self.config.end_code, at=end_at, fed=None, step=ctx.iteration)
        return {"hidden": hidden, "code": ctx.sample("frame", logits)}


def force(logits: Tensor, token: int, *, at: Tensor | None, fed: Tensor | None, step: Tensor) -> Tensor:
    """Make `token` certain at step `at` (B,), impossible at others; rows negative or not fed stay as they are."""
    if at is None:
        return logits
    asked = at >= 0 if fed is None else fed & (at >= 0)
    sign = torch.where(step == at, 1.0, -1.0) * asked
    column = torch.arange(logits.shape[-1], device=logits.device) == token
    return logits + CERTAIN * sign[:, None] * column


def block_positions(spans: Sequence[Sequence[int]], *, start: float, first: int, count: int) -> tuple[list[int], float]:
    """Positions of tokens [first, first + count), from `start` on, and how far they move the next one."""
    block = {index: number for number, (begin, end) in enumerate(spans) for index in range(begin, end)}
    positions, position = [], int(start)
    for index in range(first, first + count):
        positions.append(position)
        if index not in block or block.get(index + 1) != block[index]:
            position += 1
    return positions, position - int(start)


class Depth(EchoNode):
    """The further codes of a frame: a loop without KV inside the language model's, over dense slots."""

    def __init__(self, config: EchoConfig) -> None:
        super().__init__(config)
        self.predictor = DepthPredictor(config)
        self.samplers = (Sampler(name="depth", vocab_size=config.num_codes),)
        self.slots = (
            Slot(name="cache", shape=(config.frame_size, config.hidden_size)),
            Slot(name="total", shape=(config.hidden_size,)),
            Slot(name="codes", shape=(config.frame_size,), dtype=torch.int64),
            Slot(name="number", shape=(), dtype=torch.int64),
        )

    def start(self, ctx: Context, hidden: Tensor, code: Tensor) -> dict[str, Tensor]:
        """Begin a frame with the language model's hidden state (B, H) and code (B,)."""
        ctx.slots["cache"][ctx.rows, 0] = hidden.float()
        ctx.slots["codes"][ctx.rows, 0] = code
        ctx.slots["total"][ctx.rows] = self.predictor.embed(code, place=torch.zeros_like(code)).float()
        ctx.slots["number"][ctx.rows] += 1
        return {}

    def step(self, ctx: Context, code: Tensor) -> dict[str, Tensor]:
        """The last code (B,) -> the next one (B,)."""
        step, rows = ctx.iteration, ctx.rows
        embedded = self.predictor.embed(code, place=step)
        state, logits = self.predictor(ctx.slots["cache"][rows].to(embedded.dtype), embedded, step=step)
        code = ctx.sample("depth", logits.float())
        ctx.slots["cache"][rows, step + 1] = state.float()
        ctx.slots["codes"][rows, step + 1] = code
        ctx.slots["total"][rows] += self.predictor.embed(code, place=step + 1).float()
        return {"code": code}

    def sum(self, ctx: Context) -> dict[str, Tensor]:
        """The frame's embedding (B, H), its codes (B, K + 1), and how many frames there are so far."""
        total = ctx.slots["total"][ctx.rows].to(self.predictor.embeddings.dtype)
        return {"sum": total, "frame": ctx.slots["codes"][ctx.rows], "number": ctx.slots["number"][ctx.rows]}

    def finish_sum(self, tasks: Sequence[Task], outputs: dict[str, Tensor]) -> dict[str, list[Any]]:
        """A step gives one frame, (1, K + 1); or none, and ends the loop, where it begins with the end code."""
        frames: list[Tensor | None] = []
        for task, frame in zip(tasks, outputs["frame"], strict=True):
            is_end = int(frame[0]) == self.config.end_code
            frames.append(None if is_end else frame[None])
            if is_end:
                task.stop()
            else:
                task.count("frames")
        return {"frame": frames}


class Voice(EchoNode):
    """Frames to samples: each frame's samples hold the frame before it, so a wrong chunk is heard."""

    def render(self, ctx: Context, frames: Tensor) -> dict[str, Tensor]:
        """Frames (B, n, K + 1) -> samples (B, n * SAMPLES_PER_FRAME)."""
        sums = frames.sum(-1)
        before = torch.cat((torch.zeros_like(sums[:, :1]), sums[:, :-1]), dim=1)
        ramp = torch.arange(SAMPLES_PER_FRAME, device=frames.device)
        return {"wave": ((sums * 10 + before)[..., None] + ramp).flatten(1).float() / 32768}

    def finish_render(self, tasks: Sequence[Task], outputs: dict[str, Tensor]) -> dict[str, list[Any]]:
        """Retained context was heard already: keep the samples of new frames, doubled for the loud voice."""
        waves: list[Tensor | None] = []
        for task, wave in zip(tasks, outputs["wave"], strict=True):
            new = task.chunks["frames"].num_new * SAMPLES_PER_FRAME
            gain = 2 if task.params.voice == "loud" else 1
            waves.append(gain * wave[wave.shape[0] - new :] if new else None)
        return {"wave": waves}


# ---- branches, guidance, joins ----------------------------------------------------------------------------


class Affine(EchoNode):
    """The module of three branches."""

    def scale(self, ctx: Context, x: Tensor, factor: Tensor) -> dict[str, Tensor]:
        return {"y": x * factor % MODULUS}


class Mix(EchoNode):
    """What joins branches that may be absent."""

    def combine(self, ctx: Context, left: Tensor, right: Tensor | None, third: Tensor | None) -> dict[str, Tensor]:
        """(left + right + 7 * third + 1) modulo MODULUS, of those present, (B,) each."""
        x = left + 1
        for name, value, weight in (("right", right, 1), ("third", third, 7)):
            if value is not None:
                x = torch.where(present(ctx, name), x + weight * value, x)
        return {"x": x % MODULUS}

    def guide(
        self, ctx: Context, latents: Tensor, main: Tensor, text: Tensor | None, scale: Tensor
    ) -> dict[str, Tensor]:
        """One Euler step along the guided velocity, or along `main` where there is no `text`."""
        velocity = main
        if text is not None:
            counts = ctx.query_starts[1:] - ctx.query_starts[:-1]
            rows = torch.repeat_interleave(counts, output_size=latents.shape[0])
            guided = text + scale[rows, None] * (main - text)
            velocity = torch.where(present(ctx, "text")[rows, None], guided, main)
        return {"latents": latents - 0.25 * velocity, "progress": ctx.iteration + 1}

    def show(self, ctx: Context, latents: Tensor) -> dict[str, Tensor]:
        return {"image": latents}


def present(ctx: Context, port: str) -> Tensor:
    """(B,) bool: which rows of a port are fed."""
    everywhere = torch.ones(ctx.num_rows, dtype=torch.bool, device=ctx.rows.device)
    return ctx.present.get(port, everywhere)


class Join(EchoNode):
    """Reads collected lists."""

    def concat(self, ctx: Context, parts: list[Any]) -> dict[str, list[Tensor]]:
        """Nested lists of integers -> (n,) int64, in order."""
        return {"joined": [torch.tensor([int(v) for v in leaves(part)], dtype=torch.int64) for part in parts]}

    def look(self, ctx: Context, facts: list[list[int]]) -> dict[str, Any]:
        """The facts as tensors, and their sums (B,)."""
        seen = [torch.tensor(one, dtype=torch.int64) for one in facts]
        return {"seen": seen, "total": torch.stack([one.sum() for one in seen])}

    def finish_look(self, tasks: Sequence[Task], outputs: dict[str, Any]) -> None:
        for task in tasks:
            task.count("looked_tokens", len(task.inputs["facts"]))


def leaves(value: Any) -> Iterator[Any]:
    """The values of nested lists."""
    if isinstance(value, list) or (isinstance(value, Tensor) and value.dim()):
        for child in value:
            yield from leaves(child)
    elif value is not None:
        yield value


class Pace(EchoNode):
    """A turn that does nothing, to let others overtake."""

    def lap(self, ctx: Context) -> dict[str, Tensor]:
        return {}


class Tally(EchoNode):
    """A session's counter; also hands on the last token said."""

    def add(self, ctx: Context, count: Tensor, amount: Tensor, last: Tensor) -> dict[str, Tensor]:
        return {"count": count + amount, "said": last + 0}


# ---- streams --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Produced:
    """How many items a producer has sent."""

    count: int = 0


class Source(EchoNode):
    """Sends as many items as the request says; item i of producer p is base + 100 * p + i."""

    host_state = Produced

    def emit(self, ctx: Context, counts: list[Tensor], base: Tensor) -> dict[str, Tensor]:
        return dict.fromkeys(CONSUMERS, base)

    def finish_emit(self, tasks: Sequence[Task], outputs: dict[str, Tensor]) -> dict[str, list[Any]]:
        """Replaces each port's row by the k items of this step."""
        sent = []
        for task in tasks:
            first = int(task.inputs["base"]) + 100 * (task.path[0] if task.path else 0) + task.state.count
            new = int(task.inputs["counts"][task.iteration])
            task.state.count += new
            sent.append(torch.arange(first, first + new) if new else None)
        return dict.fromkeys(outputs, sent)


class Sink(EchoNode):
    """Reports every chunk as `processing.report` lays it out."""

    def take(self, ctx: Context, chunk: list[Tensor | None]) -> dict[str, Tensor]:
        """Totals (B, 1) of the items the method itself got."""
        totals = [int(items.sum()) if items is not None else 0 for items in chunk]
        return {"report": torch.tensor(totals, dtype=torch.int64, device=ctx.rows.device)[:, None]}

    def finish_take(self, tasks: Sequence[Task], outputs: dict[str, Tensor]) -> dict[str, list[Any]]:
        reports = []
        for task, total in zip(tasks, outputs["report"], strict=True):
            chunk = task.chunks.get("chunk")
            report = [task.path[0] if task.path else 0, 0, 0, 0, -1, 0, int(total)]
            if chunk is not None:
                items = [] if chunk.items is None else chunk.items.tolist()
                report[1:6] = [chunk.first, chunk.final, chunk.num_new, chunk.start, len(items)]
                report += items
            reports.append(torch.tensor(report, dtype=torch.int64))
        return {"report": reports}


# ---- trouble --------------------------------------------------------------------------------------------


class Trouble(EchoNode):
    """Fails as told; see the README's list of kinds. Deliberately not traceable."""

    KINDS = ("method", "memory", "shape", "missing", "sleep")

    def prepare_act(self, tasks: Sequence[Task]) -> Plan:
        if any(due(task, "prepare") for task in tasks):
            raise RuntimeError("prepare was told to fail")
        active = [[due(task, kind) for kind in self.KINDS] for task in tasks]
        naps = [task.params.sleep_s if due(task, "sleep", every=True) else 0.0 for task in tasks]
        return Plan(tensors={"active": torch.tensor(active), "naps": torch.tensor(naps)})

    def act(self, ctx: Context, x: Tensor) -> dict[str, Tensor]:
        """x + 1, (B,), unless one of the rows is to go wrong: then the whole batch does, as in real life."""
        active = dict(zip(self.KINDS, ctx.plan["active"].any(0).tolist(), strict=True))
        time.sleep(float(ctx.plan["naps"].max()))
        if active["method"]:
            raise RuntimeError("the method was told to fail")
        if active["memory"]:
            torch.empty(1 << 60, dtype=torch.uint8, device=x.device)
        if active["shape"]:
            return {"x": torch.zeros(x.shape[0] + 1, 2, dtype=x.dtype), "beat": x}
        if active["missing"]:
            return {"beat": x}
        return {"x": x + 1, "beat": x}

    def finish_act(self, tasks: Sequence[Task], outputs: dict[str, Tensor]) -> None:
        for task in tasks:
            if due(task, "finish"):
                raise RuntimeError("finish was told to fail")
            if due(task, "request"):
                task.fail(RequestError("the request was told to fail", status=422, param="kind", code="told_to_fail"))

    def idle(self, ctx: Context) -> dict[str, Tensor]:
        return {}

    def watch(self, ctx: Context, chunk: Tensor) -> dict[str, Tensor]:
        """Number of new beats, (B,)."""
        return {"seen": torch.full((ctx.num_rows,), chunk.shape[1], dtype=torch.int64, device=chunk.device)}

    def finish_watch(self, tasks: Sequence[Task], outputs: dict[str, Tensor]) -> None:
        if any(due(task, "lane") for task in tasks):
            raise RuntimeError("the lane was told to fail")


def due(task: Task, kind: str, *, every: bool = False) -> bool:
    """Whether the task is to go wrong in this way at this step."""
    params: TroubleParams = task.params
    return params.kind == kind and (every or task.iteration == params.at)
