"""The nodes of V-JEPA 2 and V-JEPA 2-AC. Run in a worker; batched, and pure but for the predictor's KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from mstar.plugin.nodes import Context, KVLayout, Node, Plan, Task
from mstar.plugin.spec import Checkpoint
from mstar_plugin_vjepa2 import weights
from mstar_plugin_vjepa2.config import VJEPA2ACConfig, VJEPA2Config
from mstar_plugin_vjepa2.modeling import cem
from mstar_plugin_vjepa2.modeling.ac import ACPredictor
from mstar_plugin_vjepa2.modeling.encoder import Encoder
from mstar_plugin_vjepa2.modeling.pose import integrate
from mstar_plugin_vjepa2.modeling.predictor import Predictor


class VideoEncoder(Node):
    """The video encoder of both."""

    def __init__(self, config: VJEPA2Config | VJEPA2ACConfig) -> None:
        super().__init__(config)
        with torch.device("meta"):  # filled by load_weights
            self.encoder = Encoder(config)

    def load_weights(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        weights.load_encoder(self.encoder, checkpoint, dtype=dtype, device=device)

    def clip(self, ctx: Context, pixels: Tensor) -> dict[str, Tensor]:
        """pixels (B, T, 3, H, W), normalised -> features (B, N, D)."""
        return {"features": self.encoder(pixels)}

    def frame(self, ctx: Context, pixels: Tensor) -> dict[str, Tensor]:
        """pixels (B, 3, S, S), normalised -> z (B, P, D), each frame encoded alone and layer-normed."""
        return {"z": self.encoder.encode_frames(pixels)}


class MaskedPredictor(Node):
    """V-JEPA 2's predictor of masked patches."""

    def __init__(self, config: VJEPA2Config) -> None:
        super().__init__(config)
        with torch.device("meta"):
            self.predictor = Predictor(config)

    def load_weights(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        weights.load_predictor(self.predictor, checkpoint, dtype=dtype, device=device)

    def predict(self, ctx: Context, features: Tensor, context_mask: Tensor, target_mask: Tensor) -> dict[str, Tensor]:
        """features (B, N, D), masks (B, K) and (B, M) int64 -> predicted and target (B, M, D), context (B, K, D)."""
        return {
            "predicted": self.predictor(features, context_mask, target_mask),
            "context": _gather(features, context_mask),
            "target": _gather(features, target_mask),
        }

    def slide(self, ctx: Context, features: Tensor, offset: Tensor) -> dict[str, Tensor]:
        """Predict a tubelet `offset` (B,) tubelets past the clip, and let it take the place of the oldest.

        features (B, N, D) -> features (B, N, D), predicted (B, P, D). As in V-JEPA 2's anticipation, the positions
        asked for are the same at every step.
        """
        (batch, length, _), patches = features.shape, self.config.patches
        at = torch.arange(length, device=features.device).expand(batch, length)
        first = length + offset[:, None] * patches
        predicted = self.predictor(features, at, first + torch.arange(patches, device=features.device))
        return {"features": torch.cat([features[:, patches:], predicted], dim=1), "predicted": predicted}


def _gather(features: Tensor, mask: Tensor) -> Tensor:
    return features.gather(1, mask[..., None].expand(-1, -1, features.shape[-1]))


class ActionPredictor(Node):
    """V-JEPA 2-AC's predictor: one frame a step, attending to earlier ones through the KV cache."""

    def __init__(self, config: VJEPA2ACConfig) -> None:
        super().__init__(config)
        with torch.device("meta"):
            self.predictor = ACPredictor(config)
        shape = config.predictor
        self.kv_layout = KVLayout(num_layers=shape.depth, num_kv_heads=shape.heads, head_dim=shape.head_dim)

    def load_weights(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        weights.load_predictor(self.predictor, checkpoint, dtype=dtype, device=device)

    def step(
        self, ctx: Context, z: Tensor, state: Tensor, actions: Tensor, states: Tensor, given: Tensor
    ) -> dict[str, Tensor]:
        """A frame and what is done in it -> the next frame.

        z (B, P, D), state (B, A); actions and states (B, F, A), of which a loop's iteration takes its own row: the
        first `given` (B,) states come from there -> z (B, P, D), layer-normed, state (B, A), the pose that the
        action leads to, and length (B,), the frames that the cache holds now.
        """
        is_given = ctx.iteration < given
        at = ctx.iteration.clamp(max=actions.shape[1] - 1)[:, None, None].expand(-1, 1, actions.shape[2])
        action = actions.gather(1, at)[:, 0]
        state = torch.where(is_given[:, None], states.gather(1, at)[:, 0], state)
        frame = ctx.positions[ctx.query_starts[:-1].long()].long() // self.config.block
        predicted = self.predictor(z, action, state, frame, ctx.kv.attend)
        return {"z": predicted, "state": integrate(state, action), "length": frame + 1}


class Latents(Node):
    """Latents of encoded frames: which one, and how far from the goal."""

    def pick(self, ctx: Context, features: list[list[Tensor]], index: Tensor) -> dict[str, Tensor]:
        """features [F of (P, D)] a row, index (B,) -> z (B, P, D): frame `index`, and its followers in a loop."""
        at = (index + ctx.iteration).tolist()
        return {"z": torch.stack([frames[i] for frames, i in zip(features, at, strict=True)])}

    def target(
        self, ctx: Context, features: list[list[Tensor]], index: Tensor, given: list[Tensor | None]
    ) -> dict[str, Tensor]:
        """goal (B, P, D): the one that is given, or else frame `index`."""
        rows = zip(features, index.tolist(), given, strict=True)
        return {"goal": torch.stack([frames[i] if goal is None else goal for frames, i, goal in rows])}

    def prepare_distance(self, tasks: Sequence[Task]) -> Plan:
        return Plan(tensors={"kind": torch.tensor([cem.COSTS.index(task.params.cost) for task in tasks])})

    def distance(self, ctx: Context, z: Tensor, goal: Tensor) -> dict[str, Tensor]:
        """z and goal (B, P, D) -> distance (B,) float32, of the kind each request asks for."""
        z, goal = z.float(), goal.float()
        kinds = torch.stack([cem.costs(z, goal, kind) for kind in cem.COSTS])
        return {"distance": kinds.gather(0, ctx.plan["kind"][None])[0]}


class CrossEntropyMethod(Node):
    """The planner: draws candidates, keeps the best, draws again around them. One task after the other."""

    def prepare_propose(self, tasks: Sequence[Task]) -> Plan:
        settings = [(task.params.max_norm, task.fields.get("close_gripper_at", -1)) for task in tasks]
        return Plan(tensors={"settings": torch.tensor(settings)})

    def propose(
        self, ctx: Context, mean: list[Tensor], std: list[Tensor], noise: list[Tensor]
    ) -> dict[str, list[Tensor]]:
        """mean and std (H, 4), noise (I, H, S, 4) -> candidates (S, F, A), of which the first H actions count."""
        tables = []
        settings = zip(ctx.iteration.tolist(), ctx.plan["settings"].tolist(), strict=True)
        for m, s, n, (iteration, (max_norm, closing)) in zip(mean, std, noise, settings, strict=True):
            close_at = int(closing) if closing >= 0 else None
            actions = cem.propose(m[None], s[None], n[iteration][None], max_norm, close_gripper_at=close_at)[0]
            room = self.config.max_frames - actions.shape[1]
            tables.append(functional.pad(actions, (0, 0, 0, room)))
        return {"candidates": tables}

    def prepare_select(self, tasks: Sequence[Task]) -> Plan:
        settings = [
            (p.topk, p.momentum_mean, p.momentum_std, p.momentum_mean_gripper, p.momentum_std_gripper)
            for p in (task.params for task in tasks)
        ]
        return Plan(tensors={"settings": torch.tensor(settings)})

    def select(
        self,
        ctx: Context,
        mean: list[Tensor],
        std: list[Tensor],
        candidates: list[Tensor],
        costs: list[list[Tensor]],
    ) -> dict[str, list[Tensor]]:
        """candidates (S, F, A) with costs [S of ()] -> mean and std (H, 4), costs (S,)."""
        found: dict[str, list[Tensor]] = {"mean": [], "std": [], "costs": []}
        rows = zip(mean, std, candidates, costs, ctx.plan["settings"].tolist(), strict=True)
        for m, s, tables, each, (topk, momentum_mean, momentum_std, mean_gripper, std_gripper) in rows:
            of_row = torch.stack(each)
            new_mean, new_std = cem.select(
                tables[None, :, : len(m)], of_row[None], m[None], s[None], int(topk),
                momentum_mean=momentum_mean, momentum_std=momentum_std,
                momentum_mean_gripper=mean_gripper, momentum_std_gripper=std_gripper,
            )  # fmt: skip
            for name, value in zip(found, (new_mean[0], new_std[0], of_row), strict=True):
                found[name].append(value)
        return found

    def finish(self, ctx: Context, mean: list[Tensor]) -> dict[str, list[Tensor]]:
        """mean (H, 4) -> action (H, A)."""
        return {"action": [cem.finish(m[None])[0] for m in mean]}
