"""How fast does Qwen3-Omni's talker speak, against `transformers` generate on the same weights, dtype and threads?

    python benchmarks/qwen3_omni.py [--batches 1,8] [--frames 32] [--repeats 3] [--dtype float32] [--eager]
        [--answer-s 10]

A random talker and code predictor of about 135M parameters, greedy, compiled unless `--eager`, through the worker:
from the first frame of codes to the last, without prompts and without the codec. Ways of one repeat are interleaved:
ours, generate on one request, generate on a batch of all. Rates are frames a second, of which speech has 12.5. The
floor is the time to read once a frame what a frame needs, at the best bandwidth that reading a large buffer reaches in
the same run: the predictor's layers once for each code. Then, with a codec of moderate size, when an answer's first
sound comes.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from end_to_end import bandwidth
from harness import DirectWorker, machine, report
from torch import Tensor
from transformers import Qwen3OmniMoeForConditionalGeneration, StoppingCriteriaList

from mstar.config import EngineConfig
from mstar.types import Request, TokensPart
from mstar_plugin_qwen3_omni import tiny
from mstar_plugin_qwen3_omni.config import OmniConfig, load
from mstar_plugin_qwen3_omni.graph import TALKER_PROMPT
from mstar_plugin_qwen3_omni.plugin import ChatParams
from mstar_plugin_qwen3_omni.processing.spoken import speaker_id, talker_prompt

SIZES = tiny.Sizes(
    talker_hidden=512, talker_mlp=1024, talker_layers=13, talker_heads=8, talker_kv_heads=2, talker_head_dim=64,
    talker_experts=16, talker_chosen=4, talker_expert_mlp=192, shared_mlp=384, codes=2048, predictor_layers=5,
    predictor_heads=8, predictor_kv_heads=4, predictor_head_dim=64, predictor_mlp=1536, codec_hidden=512,
    codec_layers=8, codec_heads=8, codec_mlp=1536, codec_width=384, window=72,
)  # fmt: skip
WORDS = 8
PENALTY = 1.05


class Ours:
    """Requests through a worker."""

    def __init__(self, folder: Path, *, dtype: str, **settings: Any) -> None:
        config = EngineConfig(
            plugin="qwen3_omni", model=str(folder), dtype=dtype, device="cpu", max_model_len=2048, max_num_seqs=8,
            enable_prefix_caching=False, **settings,
        )  # fmt: skip
        self.driver = DirectWorker(config)
        self.served = 0

    def submit(self, prompt: list[int], *, frames: int, outputs: tuple[str, ...]) -> str:
        self.served += 1
        params = ChatParams(
            temperature=0.0, repetition_penalty=1.0, talker_temperature=0.0, talker_repetition_penalty=PENALTY,
            max_tokens=WORDS, ignore_eos=True, talker_max_tokens=frames + 1,
        )  # fmt: skip
        name = str(self.served)
        request = Request(id=name, model="m", task="chat", parts=(TokensPart(prompt),), outputs=outputs, params=params)
        self.driver.submit(request, arrival=float(self.served))
        return name

    def speak(self, prompts: list[list[int]], *, frames: int) -> tuple[float, list[Tensor], list[list[int]]]:
        """Frames a second over all prompts at once, each one's codes (frames, groups), and its words."""
        names = [self.submit(prompt, frames=frames, outputs=("text", "tensor:codes")) for prompt in prompts]
        codes: dict[str, list[Tensor]] = {name: [] for name in names}
        words: dict[str, list[int]] = {name: [] for name in names}
        started = before = 0.0
        while not self.driver.is_idle:
            self.driver.step()
            for emit in self.driver.drain():
                if emit.value is not None:
                    kept: Any = codes if emit.name == "codes" else words
                    kept[emit.request_id] += [emit.value] if emit.name == "codes" else [int(emit.value)]
            if not started and all(codes.values()):  # all speak
                started, before = time.perf_counter(), sum(map(len, codes.values()))
        seconds, made = time.perf_counter() - started, sum(map(len, codes.values())) - before
        return made / seconds, [torch.cat(codes[name]) for name in names], [words[name] for name in names]

    def answer(self, prompt: list[int], *, frames: int) -> tuple[float, float]:
        """Seconds to the first sound of an answer, and to its last."""
        started, heard = time.perf_counter(), list[float]()
        self.submit(prompt, frames=frames, outputs=("text", "audio"))
        while not self.driver.is_idle:
            self.driver.step()
            for emit in self.driver.drain():
                if emit.name == "audio" and emit.value is not None and len(emit.value):
                    heard.append(time.perf_counter() - started)
        return heard[0], heard[-1]


class Theirs:
    """The talker's `generate`, fed as their own `generate` feeds it."""

    def __init__(self, folder: Path, config: OmniConfig, *, dtype: str) -> None:
        self.config = config
        self.model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def _text(self, ids: Any) -> Tensor:
        embedding = self.model.thinker.get_input_embeddings()
        return self.model.talker.text_projection(embedding(torch.as_tensor(ids)))

    def _fed(self, prompt: list[int], words: list[int]) -> dict[str, Tensor]:
        assert self.config.speech is not None
        tokens, codec = self.config.speech.talker.tokens, self.model.talker.get_input_embeddings()
        begin = talker_prompt(self.config, torch.tensor(prompt), None, speaker=speaker_id(self.config, None))
        ids, _, codes, _ = (begin[name] for name in TALKER_PROMPT)
        ids, codes = torch.cat((ids, torch.tensor(words[:1]))), torch.cat((codes, torch.tensor([tokens.bos])))
        codes_side = codec(codes.clamp(min=0)) * (codes >= 0)[:, None]
        return {
            "inputs_embeds": self._text(ids) + codes_side,
            "talker_input_ids": torch.full_like(ids, tokens.text_pad),
            "trailing_text_hidden": self._text([*words[1:], tokens.text_eos]),
            "tts_pad_embed": self._text([tokens.text_pad]),
            "attention_mask": torch.ones_like(ids),
        }

    def speak(self, prompts: list[list[int]], words: list[list[int]], *, frames: int) -> tuple[float, list[Tensor]]:
        """Frames a second of one batch, from its first frame on, and each one's codes (frames, groups)."""
        assert self.config.speech is not None
        shape, times = self.config.speech.talker, list[float]()
        rows = [self._fed(prompt, said) for prompt, said in zip(prompts, words, strict=True)]
        fed = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

        def watch(so_far: Tensor, scores: Any, **_: Any) -> Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(so_far), dtype=torch.bool)

        found = self.model.talker.generate(
            **fed, max_new_tokens=frames + 1, do_sample=False, repetition_penalty=PENALTY, pad_token_id=0,
            suppress_tokens=list(range(shape.num_codes, shape.vocab_size)), output_hidden_states=True,
            return_dict_in_generate=True, stopping_criteria=StoppingCriteriaList([watch]),
        )  # fmt: skip
        codes = torch.stack([hidden[-1] for hidden in found.hidden_states if hidden[-1] is not None], dim=1)
        return len(prompts) * (frames - 1) / (times[-1] - times[1]), list(codes)


def weight_bytes(driver: DirectWorker, *, requests: int) -> tuple[int, int]:
    """Of talker and predictor: all, and what is read for a frame of each of so many requests (experts: at most)."""
    modules, whole, frame = driver.worker.modules, 0, 0
    for name in ("talker", "code_predictor"):
        node = modules[name].node
        codes = node.speech.predictor.num_groups - 1
        moe = node.speech.talker.decoder.moe
        for key, tensor in node.state_dict().items():
            whole += tensor.nbytes
            if key.endswith(("embedding.weight", "embeddings.weight")) or "hidden_projection" in key:
                continue
            is_routed = ".mlp.gate_up." in key or ".mlp.down." in key
            share = min(1.0, requests * moe.num_chosen / moe.num_experts) if name == "talker" and is_routed else 1.0
            times = 1 if name == "talker" or "heads" in key else codes
            frame += int(tensor.nbytes * share * times)
    return whole, frame


def compare(ours: Ours, theirs: Theirs, *, batch: int, arguments: argparse.Namespace) -> None:
    generator = torch.Generator().manual_seed(batch)
    turns, frames = theirs.config.turns, arguments.frames
    asked = torch.randint(0, 256, (batch, 24), generator=generator).tolist()
    prompts = [[turns.start, turns.user, *words, turns.end, turns.start, turns.assistant, 198] for words in asked]
    _, codes, words = ours.speak(prompts, frames=frames)
    theirs.speak(prompts[:1], words[:1], frames=3)
    rates: dict[str, list[float]] = {"ours": [], "generate": [], "generate_batch": []}
    read, equal = list[float](), 0
    for _ in range(arguments.repeats):
        read.append(bandwidth(repeats=2))
        rates["ours"].append(ours.speak(prompts, frames=frames)[0])
        alone, one = theirs.speak(prompts[:1], words[:1], frames=frames)
        together, every = (alone, one) if batch == 1 else theirs.speak(prompts, words, frames=frames)
        rates["generate"].append(alone)
        rates["generate_batch"].append(together)
        equal = sum(torch.equal(mine, their) for mine, their in zip(codes, every, strict=True))
    middle = {name: statistics.median(values) for name, values in rates.items()}
    whole, frame = weight_bytes(ours.driver, requests=batch)
    floor_ms, step_ms = 1e3 * frame / max(read), 1e3 * batch / middle["ours"]
    report(
        benchmark="qwen3_omni",
        requests=batch,
        dtype=arguments.dtype,
        compiled=not arguments.eager,
        parameters_m=round(whole / torch.finfo(getattr(torch, arguments.dtype)).bits * 8 / 1e6, 1),
        frames_per_s={name: round(value, 2) for name, value in middle.items()},
        vs_generate=round(middle["ours"] / middle["generate"], 2),
        vs_generate_batch=round(middle["ours"] / middle["generate_batch"], 2),
        same_codes=f"{equal} of {batch}",
        floor_ms=round(floor_ms, 1),
        step_ms=round(step_ms, 1),
        over_floor=round(step_ms / floor_ms, 2),
        gb_per_s=round(max(read) / 1e9, 1),
        all_frames_per_s={name: [round(value, 2) for value in values] for name, values in rates.items()},
        **machine(),
    )


def first_sound(ours: Ours, theirs: Theirs, *, seconds: float) -> None:
    turns, frames = theirs.config.turns, round(12.5 * seconds)
    prompt = [turns.start, turns.user, *range(65, 90), turns.end, turns.start, turns.assistant, 198]
    ours.answer(prompt, frames=8)
    first, last = ours.answer(prompt, frames=frames)
    report(
        benchmark="qwen3_omni first sound",
        answer_s=seconds,
        first_sound_s=round(first, 2),
        whole_s=round(last, 2),
        share=round(first / last, 3),
        **machine(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--frames", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="the loop as it is, not compiled")
    parser.add_argument("--answer-s", type=float, default=10.0, help="0: leave the first sound out")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folder = Path(tempfile.mkdtemp(prefix="mstar-qwen3-omni-"))
    try:
        checkpoint = tiny.write(folder, SIZES)
        settings = {} if arguments.eager else {"compile": True, "overlap": True}
        ours = Ours(checkpoint, dtype=arguments.dtype, **settings)
        theirs = Theirs(checkpoint, load(checkpoint, {}), dtype=arguments.dtype)
        with torch.inference_mode():
            for batch in (int(text) for text in arguments.batches.split(",") if text):
                compare(ours, theirs, batch=batch, arguments=arguments)
            if arguments.answer_s:
                first_sound(ours, theirs, seconds=arguments.answer_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
