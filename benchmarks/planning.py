"""How fast is planning with shared encoding and batched candidates, against one candidate at a time?

    python benchmarks/planning.py [--samples 64] [--horizon 2] [--iterations 5] [--rounds 2]

The model of rollout.py (21.5M parameters in the predictor, 64 tokens a frame) with an encoder of 71M, which is to the
predictor as the release's is. One request plans by the cross-entropy method through the worker. The other side does
the same search on the same modules with one candidate at a time, each as if it were a request of its own: it encodes
the frame and the goal (with `--share-goal` the frame alone), runs the whole sequence again at every step, and measures
the distance. Both draw the same numbers and must come to the same actions.
"""

from __future__ import annotations

import argparse

import torch
from rollout import GRID, World, clock, line
from torch import Tensor

from mstar_plugin_vjepa2.modeling import cem
from mstar_plugin_vjepa2.plugin import PlanParams

ENCODER = {"embed_dim": 768, "depth": 10, "num_heads": 12}


def one_at_a_time(
    world: World, pixels: Tensor, state: Tensor, noise: Tensor, params: PlanParams, *, share_goal: bool
) -> Tensor:
    """The plan (H, A), of pixels (2, 3, S, S): the frame to go on from and the goal."""
    goal = world.encoder.encode_frames(pixels[1:])[0]

    def cost(actions: Tensor) -> Tensor:
        target = goal if share_goal else world.encoder.encode_frames(pixels[1:])[0]
        return cem.costs(world.again(pixels[:1], state, actions)[-1], target)

    mean, std = cem.begin(1, params.horizon, max_norm=params.max_norm)
    for drawn in noise:
        actions = cem.propose(mean, std, drawn[None], params.max_norm)
        costs = [cost(some) for some in actions[0]]
        mean, std = cem.select(
            actions, torch.stack(costs)[None], mean, std, params.topk,
            momentum_mean=params.momentum_mean, momentum_std=params.momentum_std,
            momentum_mean_gripper=params.momentum_mean_gripper, momentum_std_gripper=params.momentum_std_gripper,
        )  # fmt: skip
    return cem.finish(mean)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--horizon", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--share-goal", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    world = World(encoder=ENCODER)
    params = PlanParams(horizon=arguments.horizon, samples=arguments.samples, iterations=arguments.iterations)
    generator = torch.Generator().manual_seed(1)
    pixels, state = torch.randn(2, 3, 16 * GRID, 16 * GRID, generator=generator), torch.rand(7, generator=generator)
    noise = torch.randn(params.iterations, params.horizon, params.samples, 4, generator=generator)

    def planned() -> Tensor:
        name = world.submit("plan", params, pixel_values=pixels, state=state, noise=noise)
        return world.run("action")[name][0]

    times: dict[str, list[float]] = {"batched": [], "one_at_a_time": []}
    with torch.inference_mode():
        planned()
        for _ in range(arguments.rounds):
            started = clock()
            ours = planned()
            times["batched"].append(clock() - started)
            pages = world.most_pages
            started = clock()
            theirs = one_at_a_time(world, pixels, state, noise, params, share_goal=arguments.share_goal)
            times["one_at_a_time"].append(clock() - started)
    difference = float((ours - theirs).abs().max())
    assert difference < 1e-3, f"the plans differ by {difference}"
    sizes = {name: sum(p.numel() for p in getattr(world, name).parameters()) for name in ("encoder", "predictor")}
    line("planning", times, samples=params.samples, horizon=params.horizon, iterations=params.iterations,
         share_goal=arguments.share_goal, parameters=sizes, kv_pages=pages, difference=difference)  # fmt: skip


if __name__ == "__main__":
    main()
