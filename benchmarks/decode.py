"""How fast does the engine decode, against `transformers` generate on the same weights, dtype and threads?

    python benchmarks/decode.py [--batches 1,4,16] [--tokens 32] [--prompt 64] [--repeats 3] [--dtype bfloat16]

A random Llama of about 300M parameters in the Orpheus layout, greedy, eager, through the worker (scheduler, pages,
sampler, routing). Rows of one repeat are interleaved: ours, generate called one request after another, generate with
one padded batch. Rates are decoded tokens per second: ours from the end of the prefills on, theirs from the end of
their first token. `vs_one_by_one` is what the target is about.
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
from harness import DirectWorker, machine, report
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteriaList

from mstar.config import EngineConfig
from mstar.types import Request, TokensPart
from mstar_plugin_orpheus import tiny
from mstar_plugin_orpheus.plugin import SpeechParams


def write_checkpoint(folder: Path) -> Path:
    """A random model of about 300M parameters that uses the tiny checkpoint's tokenizer and codec."""
    model_folder = tiny.make(folder)
    small = LlamaConfig.from_pretrained(model_folder)
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=8,
        head_dim=64, vocab_size=small.vocab_size, max_position_embeddings=4096, rope_theta=500000.0,
        tie_word_embeddings=True, bos_token_id=small.bos_token_id, eos_token_id=small.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    (model_folder / "model.safetensors").unlink()
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(model_folder)
    return model_folder


class Ours:
    """Requests through a worker; `sampling`: parameters of `speech`, greedy without."""

    def __init__(
        self, folder: Path, *, dtype: str, tokens: int, sampling: dict[str, Any] | None = None, **settings: Any
    ) -> None:
        config = EngineConfig(
            plugin="orpheus", model=str(folder), dtype=dtype, device="cpu", max_model_len=1024, max_num_seqs=32,
            enable_prefix_caching=False, **settings,
        )  # fmt: skip
        self.driver = DirectWorker(config)
        self.tokens = tokens
        drawing = sampling or {"temperature": 0.0, "repetition_penalty": 1.0}
        self.params = SpeechParams(max_tokens=tokens, ignore_eos=True, **drawing)
        self.served = 0

    def run(self, prompts: list[list[int]]) -> float:
        """Decoded tokens per second over all prompts at once."""
        for prompt in prompts:
            self.served += 1
            request = Request(
                id=str(self.served), model="m", task="speech", parts=(TokensPart(prompt),),
                outputs=("tensor:codes",), params=self.params,
            )  # fmt: skip
            self.driver.submit(request, arrival=float(self.served))
        while not self.driver.is_decoding:
            self.driver.step()
        started = time.perf_counter()
        while not self.driver.is_idle:
            self.driver.step()
            list(self.driver.drain())
        return len(prompts) * self.tokens / (time.perf_counter() - started)


class Theirs:
    """`generate`; `options`: its further arguments, greedy without."""

    def __init__(self, folder: Path, *, dtype: str, tokens: int, **options: Any) -> None:
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self.tokens = tokens
        self.options = options or {"do_sample": False}

    def padded(self, prompts: list[list[int]], **options: Any) -> float:
        """Decoded tokens per second of one batch, from the end of its first token on."""
        ids, times = torch.tensor(prompts), []

        def watch(so_far: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(so_far), dtype=torch.bool)

        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=self.tokens, min_new_tokens=self.tokens,
            pad_token_id=0, stopping_criteria=StoppingCriteriaList([watch]), **self.options | options,
        )  # fmt: skip
        assert out.shape[1] == len(prompts[0]) + self.tokens == len(prompts[0]) + len(times)
        return len(prompts) * (self.tokens - 1) / (times[-1] - times[0])

    def one_by_one(self, prompts: list[list[int]]) -> float:
        """Decoded tokens per second, one prompt after another."""
        return statistics.fmean(self.padded([prompt]) for prompt in prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folder = Path(tempfile.mkdtemp(prefix="mstar-decode-"))
    try:
        checkpoint = write_checkpoint(folder)
        ours = Ours(checkpoint, dtype=arguments.dtype, tokens=arguments.tokens)
        theirs = Theirs(checkpoint, dtype=arguments.dtype, tokens=arguments.tokens)
        generator = torch.Generator().manual_seed(1)
        with torch.inference_mode():
            for batch in (int(text) for text in arguments.batches.split(",")):
                compare(ours, theirs, batch=batch, arguments=arguments, generator=generator)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def compare(
    ours: Ours, theirs: Theirs, *, batch: int, arguments: argparse.Namespace, generator: torch.Generator
) -> None:
    """Interleave the three ways; one by one does not depend on the number of requests, so two stand for all."""
    prompts = torch.randint(0, 256, (batch, arguments.prompt), generator=generator).tolist()
    ours.run(prompts[:1])
    theirs.one_by_one(prompts[:1])
    rates: dict[str, list[float]] = {"ours": [], "one_by_one": [], "padded_batch": []}
    for _ in range(arguments.repeats):
        rates["ours"].append(ours.run(prompts))
        rates["one_by_one"].append(theirs.one_by_one(prompts[:2]))
        rates["padded_batch"].append(theirs.padded(prompts))
    middle = {name: statistics.median(values) for name, values in rates.items()}
    report(
        benchmark="decode",
        requests=batch,
        dtype=arguments.dtype,
        tokens_per_s={name: round(value, 2) for name, value in middle.items()},
        vs_one_by_one=round(middle["ours"] / middle["one_by_one"], 2),
        vs_padded_batch=round(middle["ours"] / middle["padded_batch"], 2),
        all_tokens_per_s={name: [round(value, 2) for value in values] for name, values in rates.items()},
        **machine(),
    )


if __name__ == "__main__":
    main()
