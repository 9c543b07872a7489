"""How fast are drawings, and how do they and a chat get on with each other?

    python benchmarks/bagel.py [--parts guidance,batch,chat] [--sides 64,256] [--rounds 1] [--timesteps 24]

A random BAGEL of about 40M parameters in both experts, 16 pixels a latent token, float32, through the worker. Only the
denoising loop is timed: from the first velocities to the last step, less what other methods read and paint meanwhile.

guidance  the default guidance against three separate forwards at every step on the same modules, their contexts
          prefilled, their attention torch's own; the latents must agree
batch     four drawings at once against one after another
chat      two drawings beside a chat against both alone: tokens a second, the longest wait for a token, and seconds

Both sides of guidance and batch run step by step beside each other, whichever has had less time so far. Seconds are of
processor time with one thread, else of the clock. JSON lines.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import DirectWorker, machine, report
from rollout import clock, line
from torch import Tensor
from torch.nn import functional

from mstar.config import EngineConfig
from mstar.ipc.messages import Abort, Close
from mstar.types import Request, TensorPart, TextPart
from mstar.worker.finish import Finished
from mstar.worker.scheduler import Batch
from mstar_plugin_bagel import tiny
from mstar_plugin_bagel.modeling.flow import guide
from mstar_plugin_bagel.modeling.llm import grouped
from mstar_plugin_bagel.modeling.preprocess import latent_positions
from mstar_plugin_bagel.modeling.schedule import guidance, schedule
from mstar_plugin_bagel.plugin import ImageParams, TextParams

SIZES = tiny.Sizes(hidden=512, mlp=1408, layers=7, heads=8, kv_heads=2, multipliers=(1, 1, 2, 2))
PROMPT = "A red fox jumps over a quiet river at dawn, in the manner of an old woodcut."
TOLERANCE = 1e-3
LONE_TOKENS = 60
Timed = Generator[float, None, Tensor]
"""Seconds of a step, one after the other; at the end latents."""
OTHERS = ("llm.prefill", "vae.decode")
"""Methods whose time does not count: they read prompts and paint pixels."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the worker: the method that ran, how long it took, all the worker's work included."""

    method: str
    seconds: float
    tokens: int


class Studio:
    """A random BAGEL in a worker, and its modules for whoever calls them otherwise."""

    def __init__(self, timesteps: int) -> None:
        with tempfile.TemporaryDirectory(prefix="mstar-bagel-") as folder:
            home = tiny.write(Path(folder) / "model", SIZES)
            config = EngineConfig(plugin="bagel", model=str(home), device="cpu", dtype="float32", max_model_len=4096)
            self.driver = DirectWorker(config)
        worker = self.driver.worker
        self.llm: Any = worker.modules["llm"].node
        self.config, self.timesteps = worker.checkpoint.config, timesteps
        self.num_parameters = sum(p.numel() for m in worker.modules.by_name.values() for p in m.node.parameters())
        self.latents: dict[str, Tensor] = {}
        self._count, self._ran = 0, ""
        run = worker.runner.run

        def watched(batch: Batch) -> Finished:
            self._ran = ".".join(batch.key)
            return run(batch)

        worker.runner.run = watched  # type: ignore[method-assign]

    def draw(self, side: int, seed: int) -> str:
        """Queue a drawing; returns its id."""
        params = ImageParams(height=side, width=side, num_timesteps=self.timesteps)
        return self._submit("image", params, TensorPart("latents", self.noise(side, seed)))

    def chat(self) -> str:
        """Queue an answer without end; returns its id."""
        return self._submit("text", TextParams(max_tokens=3000, ignore_eos=True, temperature=1.0))

    def _submit(self, task: str, params: Any, *parts: Any) -> str:
        self._count += 1
        name = str(self._count)
        outputs = ("tensors",) if task == "image" else ("text",)
        request = Request(
            id=name, model="m", task=task, params=params, outputs=outputs, seed=1, parts=(TextPart(PROMPT), *parts)
        )
        self.driver.submit(request, arrival=float(self._count))
        return name

    def stop(self, name: str) -> None:
        self.driver.end.inbox += [Abort(request_id=name), Close(request_id=name)]
        list(self.turns())

    def noise(self, side: int, seed: int) -> Tensor:
        count = (side // self.config.latent_stride) ** 2
        return torch.randn(count, self.config.latent_dim, generator=torch.Generator().manual_seed(seed))

    def turns(self) -> Iterator[Turn]:
        """Serve what is queued, turn by turn."""
        while not self.driver.is_idle:
            self._ran, started = "", clock()
            self.driver.step()
            seconds, tokens = clock() - started, 0
            for emit in self.driver.drain():
                tokens += emit.name == "text" and not emit.final
                if emit.name == "latents" and emit.value is not None:
                    self.latents[emit.request_id] = emit.value
            yield Turn(self._ran, seconds, tokens)

    def warm(self, side: int) -> None:
        """Compile kernels and fill caches, by short drawings."""
        timesteps, self.timesteps = self.timesteps, 3
        alternate(1, engine=lambda: self.drawn(side, [1, 2]), plain=lambda: self.plainly(side, 1))
        self.timesteps = timesteps

    def drawn(self, side: int, seeds: Sequence[int]) -> Timed:
        """Several drawings at once; latents (B, N, D)."""
        names = [self.draw(side, seed) for seed in seeds]
        for turn in self.turns():
            yield 0.0 if turn.method in OTHERS else turn.seconds
        return torch.stack([self.latents.pop(name) for name in names])

    def drawn_in_sequence(self, side: int, seeds: Sequence[int]) -> Timed:
        """One after the other."""
        found = []
        for seed in seeds:
            found.append((yield from self.drawn(side, [seed])))
        return torch.cat(found)

    # ---- without the engine -----------------------------------------------------------------------------

    def contexts(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Keys and values (T, Hkv, D) of each layer: of the prompt, of nothing, and of the prompt again."""
        request = Request(
            id="", model="m", task="image", params=ImageParams(height=16, width=16), parts=(TextPart(PROMPT),), seed=1
        )
        ids = self.driver.processor.encode(request).inputs["prompt"]
        kept: list[tuple[Tensor, Tensor]] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kept.append((k, v))
            return attention(q, k, v, is_causal=True)

        self.llm.llm(self.llm.llm.embed(ids), torch.arange(len(ids)), None, attend)
        return [kept, [(k[:0], v[:0]) for k, v in kept], [(k.clone(), v.clone()) for k, v in kept]]

    def plainly(self, side: int, seed: int) -> Timed:
        """`drawn` of one by a plain loop of three forwards a step."""
        how = guidance(ImageParams(num_timesteps=self.timesteps), num_images=0)
        x, cells = self.noise(side, seed), latent_positions(side, side, self.config)
        contexts = self.contexts()
        for step, (time, length) in enumerate(zip(*schedule(how.num_timesteps, how.shift), strict=True)):
            started = clock()
            v, v_text, v_img = (self._velocity(x, cells, float(time), context) for context in contexts)
            whole = guide(
                v, v_text if how.branches(step)[0] else None, v_img, cfg_text_scale=how.text_scale,
                cfg_img_scale=how.img_scale, renorm_type=how.renorm_type, renorm_min=how.renorm_min,
            )  # fmt: skip
            x = x - whole * float(length)
            yield clock() - started
        return x[None]

    def _velocity(self, x: Tensor, cells: Tensor, time: float, context: list[tuple[Tensor, Tensor]]) -> Tensor:
        """One branch: x (N, D) at `cells` and `time` -> (N, D)."""
        node, marks = self.llm, self.config.tokens
        tokens = node.head.embed(x, torch.tensor([time]), cells)
        start, end = node.llm.embed(torch.tensor([marks.image_start, marks.image_end])).split(1)
        rows = torch.arange(len(x) + 2)
        routing = grouped(rows[[0, -1]], rows[1:-1])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            before = context[layer]
            return attention(q, torch.cat((before[0], k)), torch.cat((before[1], v)))

        positions = torch.full((len(rows),), len(context[0][0]))
        hidden = node.llm(torch.cat((start, tokens, end)), positions, routing, attend)
        return node.head.velocity(hidden[1:-1])


def attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """q (T, H, D), k and v (S, Hkv, D) -> (T, H, D), by torch's own."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)[0].transpose(0, 1)


def window(turns: Sequence[Turn]) -> list[Turn]:
    """What counts, from the first velocities to the last step."""
    first = next(at for at, turn in enumerate(turns) if turn.method == "llm.flow")
    last = max(at for at, turn in enumerate(turns) if turn.method == "combine_cfg.step")
    return [turn for turn in turns[first : last + 1] if turn.method not in OTHERS]


def denoising(turns: Sequence[Turn]) -> float:
    """Seconds of it."""
    return sum(turn.seconds for turn in window(turns))


# ---- the parts ------------------------------------------------------------------------------------------


def alternate(rounds: int, **ways: Callable[[], Timed]) -> tuple[dict[str, list[float]], dict[str, Tensor]]:
    """Seconds of each way in each round, and what each gave at last."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    given = {}
    for _ in range(rounds):
        running, spent = {name: way() for name, way in ways.items()}, dict.fromkeys(ways, 0.0)
        while running:
            name = min(running, key=lambda name: spent[name])
            try:
                spent[name] += next(running[name])
            except StopIteration as end:
                given[name] = end.value
                del running[name]
        for name, seconds in spent.items():
            times[name].append(seconds)
    return times, given


def ways_at(studio: Studio, other: Studio, side: int) -> dict[str, dict[str, Callable[[], Timed]]]:
    """What is compared of drawings of a size: part -> two ways, each with a worker of its own."""
    return {
        "guidance": {
            "engine": lambda: studio.drawn(side, [1]),
            "three_forwards": lambda: other.plainly(side, 1),
        },
        "batch": {
            "at_once": lambda: studio.drawn(side, range(4)),
            "in_sequence": lambda: other.drawn_in_sequence(side, range(4)),
        },
    }


def compare(studio: Studio, part: str, side: int, rounds: int, **ways: Callable[[], Timed]) -> None:
    """One line on two ways to the same latents."""
    times, given = alternate(rounds, **ways)
    ours, theirs = (given[name] for name in ways)
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)
    line(f"bagel {part}", times, side=side, timesteps=studio.timesteps, parameters=studio.num_parameters,
         difference=float((ours - theirs).abs().max()))  # fmt: skip


def compare_chat(studio: Studio, side: int) -> None:
    """Two drawings without a chat, a chat before them, both, and the chat after them."""
    without = sum(studio.drawn(side, [1, 2]))
    chat, turns = studio.chat(), studio.turns()
    answer(turns, 5)
    lone = answer(turns, LONE_TOKENS)
    names = [studio.draw(side, seed) for seed in (1, 2)]
    both: list[Turn] = []
    while len(studio.latents) < len(names):
        both.append(next(turns))
    lone += answer(turns, LONE_TOKENS)
    studio.latents.clear()
    studio.stop(chat)
    counted = window(both)
    flows = [turn.seconds for turn in counted if turn.method == "llm.flow"]
    decodes = [turn.seconds for turn in counted if turn.method == "llm.decode"]
    lone_rate, rate = tokens_a_second(lone), tokens_a_second(counted)
    limit = max(flows) + 2 * statistics.median(decodes)
    longest = {"denoising": max(gaps(counted)), "all": max(gaps(both)), "limit": limit}
    report(
        benchmark="bagel chat", side=side, timesteps=studio.timesteps, parameters=studio.num_parameters,
        tokens_s={"lone": round(lone_rate, 1), "beside": round(rate, 1)}, kept=round(rate / lone_rate, 3),
        longest_gap_ms={name: round(1e3 * some, 1) for name, some in longest.items()},
        flow_ms=[round(1e3 * some(flows), 1) for some in (statistics.median, max)],
        decode_ms=[round(1e3 * some(decodes), 1) for some in (statistics.median, max)],
        seconds={"without": round(without, 3), "beside": round(denoising(both), 3)},
        slowdown=round(denoising(both) / without, 2), **machine(),
    )  # fmt: skip


def answer(turns: Iterator[Turn], count: int) -> list[Turn]:
    """The turns in which the next `count` tokens are written."""
    found: list[Turn] = []
    while sum(turn.tokens for turn in found) < count:
        found.append(next(turns))
    return found


def tokens_a_second(turns: Sequence[Turn]) -> float:
    return sum(turn.tokens for turn in turns) / sum(turn.seconds for turn in turns)


def gaps(turns: Sequence[Turn]) -> Iterator[float]:
    """Seconds from token to token, what passes before the first and after the last included."""
    waited = 0.0
    for turn in turns:
        waited += turn.seconds
        if turn.tokens:
            yield waited
            waited = 0.0
    yield waited


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="guidance,batch,chat")
    parser.add_argument("--sides", default="64,256", help="pixels along a side of the drawings of guidance and batch")
    parser.add_argument("--chat-side", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--timesteps", type=int, default=24)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    studio, other = (Studio(arguments.timesteps) for _ in range(2))
    parts, rounds = arguments.parts.split(","), arguments.rounds
    with torch.inference_mode():
        for side in map(int, arguments.sides.split(",")):
            studio.warm(side)
            other.warm(side)
            for part, ways in ways_at(studio, other, side).items():
                if part in parts:
                    compare(studio, part, side, rounds, **ways)
        for _ in range(rounds if "chat" in parts else 0):
            compare_chat(studio, arguments.chat_side)


if __name__ == "__main__":
    main()
