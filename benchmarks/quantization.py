"""What do weights of four bits gain in a decode step, and what do they do to the logits?

    python benchmarks/quantization.py [--batches 1,4,16] [--tokens 32] [--repeats 3] [--dtype bfloat16] [--compile]

Speed: two workers in one process, one with `--quantization int4`, decode the same greedy requests on a random Llama of
about 300M parameters; runs alternate. Logits: the same tokens through both networks, teacher-forced, for that model and
for the golden checkpoint (as far as its tiny layers can be quantised), by group size. Random weights are no trained
ones: they say what rounding does, not what it does to a model's speech.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import statistics
import tempfile
from pathlib import Path

import torch
from decode import Ours, write_checkpoint
from harness import machine, report
from torch import Tensor
from torch.nn import functional

from mstar.layers.decoder import Decoder
from mstar.layers.quantized import GROUP_SIZES, quantize_int4
from mstar.plugin import checkpoint, loader
from mstar_plugin_orpheus.nodes import LanguageModel

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "orpheus"


class DenseCausal:
    """Attention over one whole sequence, in place of pages."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(T, H, D), (T, Hkv, D) -> (T, H, D)."""
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def logits_of(decoder: Decoder, ids: Tensor) -> Tensor:
    """(T,) ids -> (T, vocab) float32."""
    hidden = decoder(decoder.embed(ids), torch.arange(len(ids)), DenseCausal())
    return decoder.logits(hidden).float()


def compare_logits(name: str, folder: Path, ids: Tensor, *, dtype: torch.dtype, parts: dict[str, Path]) -> None:
    """One row a group size: how far the distributions over the next token move."""
    found = checkpoint.resolve(loader.load("orpheus").spec, str(folder), parts=parts)
    node = LanguageModel(found.config)
    node.load_weights(found, dtype=dtype, device=torch.device("cpu"))
    node.eval().requires_grad_(False)
    exact = logits_of(node.decoder, ids)
    for group_size in GROUP_SIZES:
        changed = copy.deepcopy(node.decoder)
        done = quantize_int4(changed, group_size=group_size)
        logits = logits_of(changed, ids)
        log_p, log_q = exact.log_softmax(-1), logits.log_softmax(-1)
        report(
            benchmark="quantization_logits",
            model=name,
            dtype=str(dtype).removeprefix("torch."),
            group_size=group_size,
            layers=done.num_layers,
            mib=[round(size / 2**20, 2) for size in (done.bytes_before, done.bytes_after)],
            layer_error=round(statistics.fmean(done.errors.values()), 4) if done.errors else None,
            tokens=len(ids),
            kl_nats=round(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()), 5),
            same_argmax=round(float((exact.argmax(-1) == logits.argmax(-1)).float().mean()), 3),
            max_difference=round(float((exact - logits).abs().max()), 4),
            spread_of_logits=round(float(exact.std(-1).mean()), 4),
        )


def compare_speed(sides: dict[str, Ours], *, batch: int, arguments: argparse.Namespace) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, 256, (batch, arguments.prompt), generator=generator).tolist()
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side.run(prompts[:1])
    for _ in range(arguments.repeats):
        for name, side in sides.items():
            rates[name].append(side.run(prompts))
    ratios = [fast / plain for plain, fast in zip(*rates.values(), strict=True)]
    report(
        benchmark="quantization_speed",
        requests=batch,
        dtype=arguments.dtype,
        compiled=arguments.compile,
        tokens_per_s={name: round(statistics.median(values), 2) for name, values in rates.items()},
        ratio=round(statistics.median(ratios), 2),
        ratios=[round(ratio, 2) for ratio in ratios],
        **machine(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folder = Path(tempfile.mkdtemp(prefix="mstar-quantization-"))
    try:
        model = write_checkpoint(folder)
        with torch.inference_mode():
            random_ids = torch.randint(0, 256, (256,), generator=torch.Generator().manual_seed(2))
            compare_logits("300m", model, random_ids, dtype=getattr(torch, arguments.dtype), parts={})
            golden = json.loads((GOLDEN / "golden.json").read_text())
            ids = torch.tensor([*golden["prompts"][0]["input_ids"], *golden["p0"]["greedy_ids"]])
            parts = {"snac_24khz": GOLDEN / "checkpoint" / "snac_24khz"}
            small = GOLDEN / "checkpoint" / "orpheus-3b-0.1-ft"
            compare_logits("golden", small, ids, dtype=torch.float32, parts=parts)
            common = {"dtype": arguments.dtype, "tokens": arguments.tokens, "compile": arguments.compile}
            sides = {name: Ours(model, **common, quantization=name) for name in ("none", "int4")}
            for batch in (int(text) for text in arguments.batches.split(",")):
                compare_speed(sides, batch=batch, arguments=arguments)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
