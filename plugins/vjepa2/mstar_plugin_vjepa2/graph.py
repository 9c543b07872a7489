"""The graphs of V-JEPA 2 and V-JEPA 2-AC: nodes, walks, states. Imports no torch.

    V-JEPA 2     encode      Each(clips): encoder.clip
                 predict     Each(clips): encoder.clip, predictor.predict
                 anticipate  Each(clips): encoder.clip, Loop(steps): predictor.slide
    V-JEPA 2-AC  encode      Each(frames): encoder.frame
                 rollout     Each(frames), Loop(context): ac.step on encoded frames, Loop(horizon): ac.step on its own
                 teach       Each(frames), Each(rows): Loop(context): ac.step
                 plan        Each(frames), Loop(context), Loop(iterations): propose, Each(candidates, fork), select

A step of the action-conditioned predictor is one block of the KV cache: a frame's action, state and patches, which see
each other and every earlier frame. Steps of encoded frames and of predicted ones are the same method, so requests at
any step of any task share its batches.
"""

from __future__ import annotations

from mstar.plugin.graph import (
    KV,
    Call,
    Each,
    Graph,
    Loop,
    Method,
    Node,
    Port,
    Section,
    Sequential,
    Walk,
    When,
)
from mstar.plugin.states import RequestView, Start, States
from mstar_plugin_vjepa2.config import VJEPA2ACConfig, VJEPA2Config

ENCODER_BATCH = 16
"""Clips or frames a batch; more are no faster."""
STEP_BATCH = 128
"""Rollouts and candidates that take a step together."""


def build(config: VJEPA2Config | VJEPA2ACConfig | None = None) -> Graph:
    """The graph of a checkpoint; None stands for the published V-JEPA 2."""
    return _action_graph(config) if isinstance(config, VJEPA2ACConfig) else _video_graph()


# ---- V-JEPA 2 -------------------------------------------------------------------------------------------


def _video_graph() -> Graph:
    features, predicted = Port("features", shape=None), Port("predicted", shape=None)
    mask = {name: Port(f"{name}_mask", dtype="int64", shape=None) for name in ("context", "target")}
    clip = Method(name="clip", inputs=(Port("pixels", shape=None),), outputs=(features,), max_batch=ENCODER_BATCH)
    predict = Method(
        name="predict",
        inputs=(features, mask["context"], mask["target"]),
        outputs=(predicted, Port("context", shape=None), Port("target", shape=None)),
        max_batch=ENCODER_BATCH,
    )
    slide = Method(
        name="slide",
        inputs=(features, Port("offset", dtype="int64")),
        outputs=(features, predicted),
        max_batch=ENCODER_BATCH,
    )
    encode = Call("encoder.clip")
    names = ("predicted", "context", "target")
    return Graph(
        nodes=(Node("encoder", (clip,)), Node("predictor", (predict, slide))),
        walks=(
            _each_clip("encode", Call("encoder.clip", emits={"features": "features"})),
            _each_clip("predict", Sequential(encode, Call("predictor.predict", emits={name: name for name in names}))),
            _each_clip(
                "anticipate",
                Sequential(
                    encode,
                    Loop("steps", Call("predictor.slide", emits={"predicted": "predicted"}), carry=("features",)),
                ),
                "offset",
            ),
        ),
        states=States(tuple(Start(walk=task, task=task) for task in ("encode", "predict", "anticipate"))),
    )


def _each_clip(name: str, section: Section, *inputs: str) -> Walk:
    return Walk(name=name, inputs=("clips", *inputs), section=Each(section, over="clips"))


# ---- V-JEPA 2-AC ----------------------------------------------------------------------------------------


def _action_graph(config: VJEPA2ACConfig) -> Graph:
    return Graph(
        nodes=_action_nodes(config),
        walks=(
            Walk(name="encode", inputs=("frames",), section=Each(_frame(emits={"z": "features"}), over="frames")),
            *_rollout_walks(),
            Walk(
                name="teach",
                inputs=("frames", "start", "rows"),
                section=Sequential(_features(), Each(_context(emits={"z": "latents"}), over="rows")),
            ),
            _plan_walk(),
        ),
        states=States(
            (
                Start(walk="encode", task="encode"),
                Start(walk="resume", task="rollout", when=lambda request: request.resumed),
                Start(walk="rollouts", task="rollout", when=lambda request: "rows" in request.fields),
                Start(walk="rollout", task="rollout"),
                Start(walk="teach", task="teacher_forced"),
                Start(walk="plan", task="plan"),
            )
        ),
    )


def _action_nodes(config: VJEPA2ACConfig) -> tuple[Node, ...]:
    z, goal = (Port(name, shape=(config.patches, config.dim)) for name in ("z", "goal"))
    index = Port("index", dtype="int64")
    features = Port("features", "item", shape=None)
    state = Port("state", dtype="float32", shape=(config.action_dim,))
    table = {
        name: Port(name, dtype="float32", shape=(config.max_frames, config.action_dim))
        for name in ("actions", "states")
    }
    side = config.image_size
    frame = Method(name="frame", inputs=(Port("pixels", shape=(3, side, side)),), outputs=(z,), max_batch=ENCODER_BATCH)
    step = Method(
        name="step",
        inputs=(z, state, table["actions"], table["states"], Port("given", dtype="int64")),
        outputs=(z, state, Port("length", dtype="int64")),
        kv=KV(attention="full", tokens=config.block),
        max_batch=STEP_BATCH,
    )
    pick = Method(name="pick", inputs=(features, index), outputs=(z,))
    target = Method(
        name="target",
        inputs=(features, index, Port("given", "item", shape=None, optional=True)),
        outputs=(goal,),
    )
    to_goal = Port("goal", shape=goal.shape, optional=True)
    distance = Method(name="distance", inputs=(z, to_goal), outputs=(Port("distance", dtype="float32"),))
    return (
        Node("encoder", (frame,)),
        Node("ac", (step,)),
        Node("latent", (pick, target, distance)),
        _cem_node(config, table["actions"]),
    )


def _cem_node(config: VJEPA2ACConfig, actions: Port) -> Node:
    """Distributions of actions have any horizon, so they are items."""
    mean, std, candidates = (Port(name, "item", "float32", None) for name in ("mean", "std", "candidates"))
    costs = Port("costs", "item", "float32", None)
    return Node(
        "cem",
        (
            Method(
                name="propose",
                inputs=(mean, std, Port("noise", "item", "float32", None)),
                outputs=(candidates,),
            ),
            Method(name="select", inputs=(mean, std, candidates, costs), outputs=(mean, std, costs)),
            Method(name="finish", inputs=(mean,), outputs=(Port("action", "item", "float32", None),)),
        ),
    )


def has_goal(request: RequestView, iteration: int) -> bool:
    return "goal" in request.fields


def _frame(emits: dict[str, str]) -> Call:
    return Call("encoder.frame", inputs={"pixels": "frames"}, emits=emits)


def _features() -> Each:
    """Encode the request's frames side by side."""
    return Each(_frame(emits={}), over="frames", collect={"z": "features"})


def _target() -> When:
    inputs = {"index": "goal_index", "given": "given_goal"}
    return When(has_goal, Call("latent.target", inputs=inputs), "goal")


def _context(emits: dict[str, str]) -> Loop:
    """Steps on encoded frames, with what was done then."""
    step = Call(
        "ac.step",
        inputs={"actions": "context_actions", "states": "context_states", "given": "context_given"},
        emits=emits,
    )
    return Loop(
        "context", Sequential(Call("latent.pick", inputs={"index": "start"}), step), carry=("state",), name="context"
    )


def _horizon() -> Loop:
    """Steps on what the step before predicted."""
    step = Call("ac.step", emits={"z": "latents", "state": "states"})
    distance = When(has_goal, Call("latent.distance", emits={"distance": "distances"}), "goal")
    return Loop("horizon", Sequential(step, distance), carry=("z", "state"), name="horizon")


def _from_last_frame(section: Section, *, emits: dict[str, str]) -> Sequential:
    """The context, and then a section that goes on from its last frame."""
    return Sequential(_context(emits), Call("latent.pick", inputs={"index": "last"}), section)


def _rollout_walks() -> tuple[Walk, ...]:
    before = ("frames", "start", "last", "goal_index", "given_goal")
    context, ahead = ("context_actions", "context_states", "context_given", "state"), ("actions", "states", "given")
    kept = ("z", "state", "length")
    rollout = _from_last_frame(_horizon(), emits={"state": "states"})
    return (
        Walk(
            name="rollout",
            inputs=(*before, *context, *ahead),
            section=Sequential(_features(), _target(), rollout),
            outputs=kept,
        ),
        Walk(
            name="rollouts",
            inputs=(*before, "rows"),
            section=Sequential(_features(), _target(), Each(rollout, over="rows")),
        ),
        Walk(
            name="resume",
            inputs=(*ahead, "z", "state", "features", "goal_index", "given_goal"),
            section=Sequential(_target(), _horizon()),
            outputs=kept,
        ),
    )


def _plan_walk() -> Walk:
    """Candidates go on from forks of the context, each with its own actions."""
    candidate = Sequential(
        Loop("horizon", Call("ac.step", inputs={"actions": "candidates"}), carry=("z", "state"), name="horizon"),
        Call("latent.distance"),
    )
    search = Sequential(
        Call("cem.propose"),
        Each(candidate, over="candidates", fork="main", collect={"distance": "costs"}),
        Call("cem.select", emits={"costs": "costs"}),
    )
    before = ("frames", "start", "last", "goal_index", "given_goal")
    context = ("context_actions", "context_states", "context_given", "state")
    return Walk(
        name="plan",
        inputs=(*before, *context, "states", "given", "mean", "std", "noise"),
        section=Sequential(
            _features(),
            _target(),
            _from_last_frame(Loop("iterations", search, carry=("mean", "std"), name="iterations"), emits={}),
            Call("cem.finish", emits={"action": "action"}),
        ),
    )
