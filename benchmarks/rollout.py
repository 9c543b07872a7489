"""How fast are rollouts with a KV cache, against running the whole sequence again at every step?

    python benchmarks/rollout.py [--horizons 4,15,30] [--rounds 3] [--batch 4,30,8,15,4,22,10,27] [--compile]

A random V-JEPA 2-AC with 21M parameters in the predictor and 64 tokens a frame, through the worker (scheduler, pages,
routing, emissions). The other side is the original's way on the same modules: at every step all frames so far, by
scaled dot product attention under a frame-causal mask. Rounds of both alternate and must give the same latents. One
JSON line a horizon, in median seconds from pixels to the last latents, with the KV that the rollout held at its end;
and one for requests of mixed horizons, at once against one after another. Seconds are of processor time with one
thread, which other work on the machine disturbs less, else of the clock.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness import DirectWorker, machine, report
from torch import Tensor

from mstar.config import EngineConfig
from mstar.types import Request, TensorPart
from mstar_plugin_vjepa2 import tiny
from mstar_plugin_vjepa2.modeling.ac import full_sequence
from mstar_plugin_vjepa2.modeling.pose import integrate
from mstar_plugin_vjepa2.plugin import RolloutParams

GRID, MOST_FRAMES = 8, 64
SIZES = {"img_size": 16 * GRID, "patch_size": 16, "num_frames": 2 * MOST_FRAMES, "tubelet_size": 2, "embed_dim": 256}
ENCODER = {**SIZES, "depth": 2, "num_heads": 4, "mlp_ratio": 4}
PREDICTOR = {
    **SIZES, "predictor_embed_dim": 384, "depth": 12, "num_heads": 12, "mlp_ratio": 4, "action_embed_dim": 7,
}  # fmt: skip


class World:
    """A random V-JEPA 2-AC in a worker, and its modules for whoever calls them otherwise.

    Args:
        encoder: what differs from ENCODER.
    """

    def __init__(self, *, encoder: dict[str, Any] | None = None, **settings: Any) -> None:
        sizes = {**ENCODER, **(encoder or {})}
        predictor = {**PREDICTOR, "embed_dim": sizes["embed_dim"]}
        config = {"model_type": "vjepa2_ac", "encoder": sizes, "predictor": predictor}
        with tempfile.TemporaryDirectory(prefix="mstar-rollout-") as folder:
            home = tiny.make_ac(Path(folder), config)
            self.driver = DirectWorker(EngineConfig(plugin="vjepa2", model=str(home), device="cpu", **settings))
        modules = self.driver.worker.modules
        self.encoder, self.predictor = modules["encoder"].node.encoder, modules["ac"].node.predictor
        self.pool = modules["ac"].pool
        self.served = self.most_pages = 0

    def submit(self, task: str, params: Any, **tensors: Tensor) -> str:
        """Queue a request; returns its id."""
        self.served += 1
        request = Request(
            id=str(self.served), model="m", task=task, params=params, outputs=("tensors",), seed=1,
            parts=tuple(TensorPart(name, tensor) for name, tensor in tensors.items()),
        )  # fmt: skip
        self.driver.submit(request, arrival=float(self.served))
        return request.id

    def run(self, name: str) -> dict[str, list[Tensor]]:
        """Serve what is queued: request id -> what it emitted as `name`. Leaves the most pages held in `most_pages`."""
        found: dict[str, list[Tensor]] = {}
        self.most_pages = 0
        while not self.driver.is_idle:
            self.driver.step()
            self.most_pages = max(self.most_pages, self.pool.num_used)
            for emit in self.driver.drain():
                if emit.name == name and emit.value is not None:
                    found.setdefault(emit.request_id, []).append(emit.value)
        return found

    def rollouts(self, pixels: Tensor, state: Tensor, actions: Sequence[Tensor]) -> list[Tensor]:
        """Latents (H, P, D) for actions (H, A) of each of several requests, from a frame (1, 3, S, S) and a state."""
        ids = [
            self.submit("rollout", RolloutParams(), pixel_values=pixels, state=state, actions=some) for some in actions
        ]
        found = self.run("latents")
        return [torch.stack(found[one]) for one in ids]

    def again(self, pixels: Tensor, state: Tensor, actions: Tensor) -> Tensor:
        """`rollouts` of one request in the original's way: every step runs the whole sequence."""
        z, states = self.encoder.encode_frames(pixels)[:, None], state[None, None]
        for step in range(1, len(actions) + 1):
            latents = full_sequence(self.predictor, z, actions[None, :step], states)
            z = torch.cat((z, latents[:, -1:]), dim=1)
            states = torch.cat((states, integrate(states[:, -1], actions[None, step - 1])[:, None]), dim=1)
        return z[0, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--horizons", default="4,15,30")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", default="4,30,8,15,4,22,10,27", help="horizons of the requests that run together")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    world = World(compile=arguments.compile)
    generator = torch.Generator().manual_seed(1)
    pixels, state = torch.randn(1, 3, 16 * GRID, 16 * GRID, generator=generator), torch.rand(7, generator=generator)
    actions = 0.05 * torch.randn(MOST_FRAMES, 7, generator=generator)
    settings = {"parameters": sum(p.numel() for p in world.predictor.parameters()), "compile": arguments.compile}
    with torch.inference_mode():
        world.rollouts(pixels, state, [actions[:2]] * 2)
        world.again(pixels, state, actions[:2])
        for horizon in map(int, arguments.horizons.split(",")):
            compare(world, pixels, state, actions[:horizon], rounds=arguments.rounds, settings=settings)
        if arguments.batch:
            some = [actions[:horizon] for horizon in map(int, arguments.batch.split(","))]
            together(world, pixels, state, some, rounds=arguments.rounds, settings=settings)


def compare(
    world: World, pixels: Tensor, state: Tensor, actions: Tensor, *, rounds: int, settings: dict[str, Any]
) -> None:
    """A rollout with a cache against one without."""
    times: dict[str, list[float]] = {"cached": [], "again": []}
    for _ in range(rounds):
        started = clock()
        ours = world.rollouts(pixels, state, [actions])[0]
        times["cached"].append(clock() - started)
        pages = world.most_pages
        started = clock()
        theirs = world.again(pixels, state, actions)
        times["again"].append(clock() - started)
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
    line("rollout", times, horizon=len(actions), kv_pages=pages, kv_bytes=pages * world.pool.page_bytes,
         difference=float((ours - theirs).abs().max()), **settings)  # fmt: skip


def together(
    world: World, pixels: Tensor, state: Tensor, actions: Sequence[Tensor], *, rounds: int, settings: dict[str, Any]
) -> None:
    """Requests of mixed horizons at once, against one after another."""
    times: dict[str, list[float]] = {"together": [], "one_by_one": []}
    for _ in range(rounds):
        started = clock()
        ours = world.rollouts(pixels, state, actions)
        times["together"].append(clock() - started)
        pages = world.most_pages
        started = clock()
        alone = [world.rollouts(pixels, state, [some])[0] for some in actions]
        times["one_by_one"].append(clock() - started)
    difference = max(float((a - b).abs().max()) for a, b in zip(ours, alone, strict=True))
    line("rollouts", times, horizons=[len(some) for some in actions], kv_pages=pages,
         kv_bytes=pages * world.pool.page_bytes, difference=difference, **settings)  # fmt: skip


def clock() -> float:
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def line(benchmark: str, times: dict[str, list[float]], **more: Any) -> None:
    """Report the median seconds of two ways, and how many times as fast the first is: by medians, and each round."""
    first, second = times.values()
    report(
        benchmark=benchmark,
        seconds={name: round(statistics.median(some), 3) for name, some in times.items()},
        speedup=round(statistics.median(second) / statistics.median(first), 2),
        speedups=[round(b / a, 2) for a, b in zip(first, second, strict=True)],
        **more,
        **machine(),
    )


if __name__ == "__main__":
    main()
