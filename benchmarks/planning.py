"""How fast is planning when candidates share encodings and predictor steps, against one candidate after another?

    python benchmarks/planning.py [--samples 64] [--horizon 2] [--iterations 5] [--rounds 3] [--alone 8]

The cross-entropy method with the predictor of benchmarks/rollout.py and an encoder 3.3 times as large, as in the
release, through the worker. The other side runs each candidate as if it were a request of its own, on the same modules:
encode the frame and the goal, roll out in the original's way, compare. `--alone` candidates of the first iteration stand
for all of them, and must cost the same on both sides; `encode_once` is that side without the encoding.
"""

from __future__ import annotations

import argparse

import torch
from rollout import GRID, World, clock, line
from torch import Tensor

from mstar_plugin_vjepa2.modeling import cem
from mstar_plugin_vjepa2.plugin import PlanParams

ENCODER = {"embed_dim": 768, "depth": 10, "num_heads": 12, "mlp_ratio": 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"samples": 64, "horizon": 2, "iterations": 5, "rounds": 3, "alone": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    world = World(encoder=ENCODER)
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(2, 3, 16 * GRID, 16 * GRID, generator=generator)  # where it is, where it is to be
    state = torch.rand(7, generator=generator)
    shape = (arguments.iterations, arguments.horizon, arguments.samples, 4)
    noise = torch.randn(shape, generator=generator)
    params = PlanParams(
        horizon=arguments.horizon, samples=arguments.samples, iterations=arguments.iterations,
        topk=min(10, arguments.samples),
    )  # fmt: skip
    mean, std = cem.begin(1, arguments.horizon, max_norm=params.max_norm)
    candidates = cem.propose(mean, std, noise[:1], params.max_norm)[0, : arguments.alone]
    with torch.inference_mode():
        alone(world, pixels, state, candidates[:1])
        compare(world, pixels, state, noise, candidates, params=params, rounds=arguments.rounds)


def compare(
    world: World, pixels: Tensor, state: Tensor, noise: Tensor, candidates: Tensor, *, params: PlanParams, rounds: int
) -> None:
    times: dict[str, list[float]] = {"together": [], "alone": [], "encode_once": []}
    share = params.samples * params.iterations / len(candidates)
    for _ in range(rounds):
        started = clock()
        world.submit("plan", params, pixel_values=pixels, state=state, noise=noise)
        (costs,) = world.run("costs").values()
        times["together"].append(clock() - started)
        pages = world.most_pages
        started = clock()
        theirs, encoding = alone(world, pixels, state, candidates)
        times["alone"].append((clock() - started) * share)
        times["encode_once"].append(times["alone"][-1] - encoding * share)
    torch.testing.assert_close(costs[0][: len(theirs)], theirs, atol=1e-3, rtol=0)
    difference = float((costs[0][: len(theirs)] - theirs).abs().max())
    once = times.pop("encode_once")
    line("planning", times, samples=params.samples, horizon=params.horizon, iterations=params.iterations,
         speedups_encode_once=[round(b / a, 2) for a, b in zip(times["together"], once, strict=True)],
         kv_pages=pages, kv_bytes=pages * world.pool.page_bytes, difference=difference,
         parameters={name: sum(p.numel() for p in getattr(world, name).parameters())
                     for name in ("encoder", "predictor")})  # fmt: skip


def alone(world: World, pixels: Tensor, state: Tensor, candidates: Tensor) -> tuple[Tensor, float]:
    """What candidates (S, H, A) cost, one after another, and how long their encodings took."""
    costs, encoding = [], 0.0
    for actions in candidates:
        started = clock()
        z, goal = world.encoder.encode_frames(pixels)
        encoding += clock() - started
        costs.append(cem.costs(world.again(z, state, actions)[-1], goal))
    return torch.stack(costs), encoding


if __name__ == "__main__":
    main()
