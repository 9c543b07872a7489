"""What it costs, and what it gives, to have parts of a model in processes of their own.

    python benchmarks/disaggregation.py moves [--tokens 1000,3000] [--rounds 5] [--tiny]
    python benchmarks/disaggregation.py orpheus [--concurrency 1,4,8] [--rounds 3] [--frames 12] [--tiny]

moves    the time from the end of a prompt's prefill in one process to the start of its first decode step in another
         (`pd` of the plugin orpheus), for each `--kv-transfer`; rounds of all ways take turns. Both moments are stamped
         by the workers, on the machine's one clock. `whole` is one process, which moves nothing.
orpheus  the language model and the codec in two processes (`disaggregated`) against one process, with one thread each:
         tokens and seconds of audio per second, and the time to the first audio; rounds take turns. `seconds` is what
         each part computed, of the wall time: what one process does one after the other two can do at once, so the
         most to be had is their sum over the greater of them.

A random Llama of about 50M parameters (12 layers of 512) and a codec of a tenth of the published one's width, float32,
no prefix cache. Its tokens know no frames, so here any seven of them are one. `--chunk` is `--max-num-batched-tokens`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import machine, report
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from mstar import launch
from mstar.config import EngineConfig
from mstar.plugin.hooks import hookimpl
from mstar.plugin.nodes import Context
from mstar.server.engine import Engine
from mstar.server.native import GenerateRequest, TokensInput
from mstar.types import AudioChunk
from mstar_plugin_orpheus import nodes, tiny
from mstar_plugin_orpheus.modeling.frames import FRAME_CODES, FrameAssembler
from mstar_plugin_orpheus.plugin import SPEC

HERE = Path(__file__).resolve()
PLUGIN = "stamped"
STAMPS = "DISAGGREGATION_STAMPS"  # names the file


# ---- the plugin: Orpheus, whose language model tells when prefill ended and decoding began --------------------------


class AnyFrames(FrameAssembler):
    """Takes whatever comes as the next code."""

    def push(self, tokens: Iterable[int]) -> tuple[list[int], int]:
        self.partial += [token % self.codebook_size for token in tokens]
        codes, self.partial = (self.partial, []) if len(self.partial) == FRAME_CODES else ([], self.partial)
        return codes, 0


class Stamped(nodes.LanguageModel):
    """Notes when prefills end and decode steps begin, in a file that all processes append to."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.host_state = partial(AnyFrames, config.tokens.audio_base, config.codec.codebook_size)
        self.stamps = os.open(os.environ[STAMPS], os.O_WRONLY | os.O_APPEND)

    def prefill(self, ctx: Context, ids: Tensor) -> dict[str, Tensor]:
        found = super().prefill(ctx, ids)
        self.stamp("prefill")
        return found

    def decode(self, ctx: Context, last: Tensor) -> dict[str, Tensor | None]:
        self.stamp("decode")
        return super().decode(ctx, last)

    def stamp(self, what: str) -> None:
        os.write(self.stamps, f"{what} {time.monotonic_ns()}\n".encode())


@hookimpl
def register_models(register: Any) -> None:
    register(replace(SPEC, name=PLUGIN, nodes={**SPEC.nodes, "lm": f"{HERE.stem}:Stamped"}))


def install(folder: Path) -> None:
    """Have this file found as a plugin, here and in workers."""
    info = folder / f"mstar_plugin_{PLUGIN}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mstar-plugin-{PLUGIN}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[mstar]\n{PLUGIN} = {HERE.stem}\n")
    sys.path[:0] = [str(folder), str(HERE.parent)]
    os.environ[STAMPS] = str(folder / "stamps")
    (folder / "stamps").touch()


def take_gap_ms() -> float:
    """From the end of the last prefill to the first decode step after it, of the request that has just run."""
    stamps = Path(os.environ[STAMPS])
    noted = [line.split() for line in stamps.read_text().splitlines()]
    ended = [int(ns) for what, ns in noted if what == "prefill"][-1]
    began = next(int(ns) for what, ns in noted if what == "decode")
    os.truncate(stamps, 0)
    return (began - ended) / 1e6


def write_checkpoint(folder: Path, *, is_tiny: bool) -> Path:
    if not is_tiny:
        tiny.CODEC_CONFIG["decoder_dim"] = 96
    model = tiny.make(folder)
    if is_tiny:
        return model
    small = LlamaConfig.from_pretrained(model)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=4,
        head_dim=64, vocab_size=small.vocab_size, max_position_embeddings=8192, rope_theta=500000.0,
        tie_word_embeddings=True, bos_token_id=small.bos_token_id, eos_token_id=small.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    (model / "model.safetensors").unlink()
    LlamaForCausalLM(config).save_pretrained(model)
    return model


# ---- asking ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Heard:
    first_audio_s: float
    audio_s: float
    num_tokens: int


async def ask(engine: Engine, ids: list[int], *, tokens: int, outputs: list[str]) -> Heard:
    started, first, samples = time.monotonic(), None, 0.0
    params = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.0, "repetition_penalty": 1.0}
    request = GenerateRequest(
        task="speech", inputs=[TokensInput(ids=ids)], params=params, seed=0, outputs=outputs, stream=True
    )
    handle = await engine.submit(request)
    async for chunk in handle:
        if isinstance(chunk, AudioChunk):
            first = first or time.monotonic()
            samples += len(chunk.samples) / chunk.sample_rate
    return Heard((first or time.monotonic()) - started, samples, tokens)


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Sides(contextlib.AsyncExitStack):
    """Engines side by side."""

    async def start(self, model: Path, **settings: Any) -> Engine:
        config = EngineConfig(
            plugin=PLUGIN, model=str(model), device="cpu", enable_prefix_caching=False, threads=1, max_num_seqs=8,
            max_model_len=4096, kv_cache_memory_bytes=1 << 30, **settings,
        )  # fmt: skip
        return await self.enter_async_context(launch.started_engine(config))


async def moves(model: Path, arguments: argparse.Namespace) -> None:
    settings = {"max_num_batched_tokens": arguments.chunk}
    async with Sides() as sides:
        engines = {"whole": await sides.start(model, **settings)}
        for way in ("end", "chunks", "layers"):
            engines[way] = await sides.start(model, placement=str(arguments.pd), kv_transfer=way, **settings)
        for length in arguments.tokens:
            found: dict[str, list[float]] = {name: [] for name in engines}
            for number in range(arguments.rounds + 1):
                for name, engine in engines.items():
                    await ask(engine, prompt(length, number), tokens=2, outputs=["tensor:codes"])
                    gap_ms = take_gap_ms()
                    found[name] += [gap_ms] if number else []
            report(
                benchmark="moves", tokens=length, chunk=arguments.chunk, kv_bytes=length * arguments.kv_token_bytes,
                gap_ms={name: round(statistics.median(gaps), 2) for name, gaps in found.items()},
                worst_ms={name: round(max(gaps), 2) for name, gaps in found.items()}, **machine(),
            )  # fmt: skip


async def orpheus(model: Path, arguments: argparse.Namespace) -> None:
    async with Sides() as sides:
        engines = {"one": await sides.start(model), "two": await sides.start(model, placement=str(arguments.apart))}
        tokens = arguments.frames * FRAME_CODES
        for concurrency in arguments.concurrency:
            rows: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
            for number in range(arguments.rounds + 1):
                for name, engine in engines.items():
                    row = await _round(engine, concurrency, tokens=tokens, seed=number)
                    rows[name] += [row] if number else []
            found = {name: {key: _median(many, key) for key in many[0]} for name, many in rows.items()}
            report(benchmark="orpheus", concurrency=concurrency, **found, reason=_reason(found), **machine())


async def _round(engine: Engine, concurrency: int, *, tokens: int, seed: int) -> dict[str, float]:
    before, started = _seconds(engine), time.monotonic()
    asked = [ask(engine, prompt(64, 100 * seed + n), tokens=tokens, outputs=["audio"]) for n in range(concurrency)]
    heard = await asyncio.gather(*asked)
    wall = time.monotonic() - started
    await asyncio.sleep(0.3)  # statistics come a little later
    spent = {name: seconds - before.get(name, 0.0) for name, seconds in _seconds(engine).items()}
    return {
        "tokens_per_s": sum(one.num_tokens for one in heard) / wall,
        "audio_s_per_s": sum(one.audio_s for one in heard) / wall,
        "first_audio_ms": 1e3 * statistics.median(one.first_audio_s for one in heard),
        "lm_share": spent.get("lm", 0.0) / wall,
        "codec_share": spent.get("snac", 0.0) / wall,
    }


def _seconds(engine: Engine) -> dict[str, float]:
    """Module -> what its methods have taken so far."""
    found: dict[str, float] = {}
    for name, (_, _, seconds) in (engine.state.stats.method_s if engine.state.stats else {}).items():
        module = name.partition(".")[0]
        found[module] = found.get(module, 0.0) + seconds
    return found


def _median(rows: list[dict[str, float]], key: str) -> float:
    return round(statistics.median(row[key] for row in rows), 3)


def _reason(found: dict[str, dict[str, float]]) -> str:
    one, two = found["one"], found["two"]
    lm, codec = one["lm_share"], one["codec_share"]
    most = 1 / max(lm, codec, 1 - lm - codec, 1e-9)
    return (
        f"two processes gave {two['tokens_per_s'] / one['tokens_per_s']:.2f} times the tokens and first audio after "
        f"{two['first_audio_ms'] / one['first_audio_ms']:.2f} times the time; one process computes the language model "
        f"{lm:.0%} and the codec {codec:.0%} of the time, one after the other, so {most:.2f} is the most that running "
        f"them at once can give; with two processes the language model computes {two['lm_share']:.0%} of the time and "
        f"the codec {two['codec_share']:.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("what", choices=["moves", "orpheus"])
    parser.add_argument("--tokens", type=numbers, default=[1000, 3000])
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--concurrency", type=numbers, default=[1, 4, 8])
    parser.add_argument("--frames", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the program")
    arguments = parser.parse_args()
    placements = Path(nodes.__file__).parent / "placements"
    arguments.pd, arguments.apart = placements / "pd.yaml", placements / "disaggregated.yaml"
    arguments.kv_token_bytes = 2 * 4 * (2 * 2 * 16 if arguments.tiny else 12 * 4 * 64)
    scratch = Path(tempfile.mkdtemp(prefix="mstar-disaggregation-"))
    try:
        install(scratch)
        model = write_checkpoint(scratch, is_tiny=arguments.tiny)
        asyncio.run((moves if arguments.what == "moves" else orpheus)(model, arguments))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
