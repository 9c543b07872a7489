"""What V-JEPA 2 registers with mstar. Imports neither torch nor the model's code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from msgspec import Meta, Struct

from mstar.plugin.hooks import hookimpl
from mstar.plugin.spec import ModelSpec, Task
from mstar_plugin_vjepa2 import graph
from mstar_plugin_vjepa2.config import CHECKPOINT

MOST_STEPS = 1024
"""Of an anticipation."""
MOST_DRAWS = 4_000_000
"""Random numbers of a plan: iterations times horizon times samples times 4."""

Cost = Annotated[
    Literal["l1", "l2", "cosine"], Meta(description="mean absolute, mean squared, or 1 - mean cosine distance")
]
Momentum = Annotated[float, Meta(ge=0, le=1, description="share of the old value that is kept")]
Index = Annotated[int, Meta(ge=0)]


class NoParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task without parameters."""


class AnticipateParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of `anticipate`."""

    steps: Annotated[int, Meta(ge=1, le=MOST_STEPS, description="tubelets to predict, one after the other")] = 1
    offset: Annotated[int, Meta(ge=0, le=MOST_STEPS, description="tubelets skipped after the clip")] = 2


class RolloutParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of `rollout`."""

    context_frames: Annotated[int, Meta(ge=1, description="the first frames, which are encoded")] = 1
    horizon: Annotated[int, Meta(ge=1, description="frames to predict; null: as many as there are actions")] | (
        None
    ) = None
    goal_frame: Annotated[
        Index, Meta(description="the frame that 'distances' are to; null: tensor 'goal', if given")
    ] | (None) = None
    cost: Cost = "l1"


class PlanParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of `plan`: the cross-entropy method's."""

    context_frames: Annotated[int, Meta(ge=1, description="the first frames, which the plan begins after")] = 1
    horizon: Annotated[int, Meta(ge=1, description="actions to plan")] = 2
    samples: Annotated[int, Meta(ge=2, le=65536, description="candidates an iteration")] = 400
    topk: Annotated[int, Meta(ge=2, description="candidates that the next iteration is drawn around")] = 10
    iterations: Annotated[int, Meta(ge=1, le=1000)] = 10
    momentum_mean: Momentum = 0.15
    momentum_mean_gripper: Momentum = 0.15
    momentum_std: Momentum = 0.15
    momentum_std_gripper: Momentum = 0.15
    max_norm: Annotated[float, Meta(gt=0, le=100, description="most that an action moves along an axis")] = 0.05
    cost: Cost = "l1"
    close_gripper_at: Annotated[
        Index, Meta(description="from this action on the gripper closes; null: it is planned")
    ] | (None) = None


PIXELS = ("pixel_values",)
FRAMES = ("frames", *PIXELS)
VIDEO = ("video", "image", "tensor")

SPEC = ModelSpec(
    name="vjepa2",
    description="V-JEPA 2 and V-JEPA 2-AC: video features, predictions, rollouts of actions, planning",
    graph=graph.build,
    config="mstar_plugin_vjepa2.config:load",
    checkpoint=CHECKPOINT,
    processor="mstar_plugin_vjepa2.processing:VJEPA2Processor",
    nodes={
        "encoder": "mstar_plugin_vjepa2.nodes:VideoEncoder",
        "predictor": "mstar_plugin_vjepa2.nodes:MaskedPredictor",
        "ac": "mstar_plugin_vjepa2.nodes:ActionPredictor",
        "latent": "mstar_plugin_vjepa2.nodes:Latents",
        "cem": "mstar_plugin_vjepa2.nodes:CrossEntropyMethod",
    },
    tasks={
        "encode": Task(
            params=NoParams, inputs=VIDEO, tensors_in=FRAMES, outputs=("tensors",), tensors_out=("features",)
        ),
        "predict": Task(
            params=NoParams,
            inputs=VIDEO,
            tensors_in=(*FRAMES, "context_mask", "target_mask"),
            outputs=("tensors",),
            tensors_out=("predicted", "context", "target"),
        ),
        "anticipate": Task(
            params=AnticipateParams, inputs=VIDEO, tensors_in=FRAMES, outputs=("tensors",), tensors_out=("predicted",)
        ),
        "rollout": Task(
            params=RolloutParams,
            inputs=VIDEO,
            tensors_in=(*FRAMES, "actions", "state", "states", "goal"),
            outputs=("tensors",),
            tensors_out=("latents", "states", "distances"),
            sessions=True,
        ),
        "teacher_forced": Task(
            params=NoParams,
            inputs=VIDEO,
            tensors_in=(*FRAMES, "actions", "states"),
            outputs=("tensors",),
            tensors_out=("latents",),
        ),
        "plan": Task(
            params=PlanParams,
            inputs=VIDEO,
            tensors_in=(*FRAMES, "state", "states", "actions", "goal", "noise"),
            outputs=("tensors",),
            tensors_out=("action", "costs"),
        ),
    },
    offers="mstar_plugin_vjepa2.config:offers",
    tiny={"tiny": "mstar_plugin_vjepa2.tiny:make", "tiny-ac": "mstar_plugin_vjepa2.tiny:make_ac"},
    max_model_len="mstar_plugin_vjepa2.config:max_model_len",
    plot="mstar_plugin_vjepa2.processing.plot:draw",
)


@hookimpl
def register_models(register: Callable[[ModelSpec], None]) -> None:
    register(SPEC)
