"""Walk inputs of the action-conditioned tasks: encode, rollout, teacher forcing, plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mstar.plugin import Encoded, ImagePart, Request, RequestError, VideoPart
from mstar_plugin_vjepa2.config import VJEPA2ACConfig
from mstar_plugin_vjepa2.modeling import cem
from mstar_plugin_vjepa2.plugin import MOST_DRAWS, PlanParams, RolloutParams
from mstar_plugin_vjepa2.processing.inputs import Frames, read_frames, read_rows, read_shaped, table

MOST_ROWS = 1024
"""Rollouts of a request."""
MOST_BYTES = 4 << 30
"""Of a request's latents, which a server holds until they are sent."""


class ActionInputs:
    """Walk inputs of the action-conditioned tasks."""

    def __init__(self, config: VJEPA2ACConfig) -> None:
        self.config = config
        self.width = config.action_dim

    def encode(self, request: Request) -> Encoded:
        if request.task == "encode":
            pixels = self._frames(request).pixels(self.config)
            return Encoded(inputs={"frames": list(pixels)}, usage={"prompt_tokens": len(pixels) * self.config.patches})
        if request.task == "rollout":
            return self._resume(request) if request.resumed else self._rollout(request)
        return self._teacher_forced(request) if request.task == "teacher_forced" else self._plan(request)

    # -- rollouts --------------------------------------------------------------------------------------------

    def _rollout(self, request: Request) -> Encoded:
        params: RolloutParams = request.params
        context = params.context_frames
        frames = self._frames(request)
        if len(frames) < context:
            message = (
                f"params.context_frames is {context}, but there are {len(frames)} frames; give more, or ask for less"
            )
            raise RequestError(message, param="params.context_frames")
        actions = self._actions(request, dims=(2, 3))
        horizon = self._horizon(params, actions, before=context - 1)
        needed = context - 1 + horizon
        self._check_room(needed, kept=0, horizon=horizon)
        first, given = self._states(request, needed)
        rows = self._broadcast(actions[:, :needed], first, given)
        inputs = self._context(request, frames, context, goal_frame=params.goal_frame)
        items = [self._row(*row, context=context) for row in rows]
        inputs["firsts"] = [row[1] for row in rows]
        fields = {"context": context - 1, "horizon": horizon}
        if params.goal_frame is not None or inputs["given_goal"] is not None:
            fields["goal"] = 1
        self._check_goal(request, fields)
        if len(items) > 1:
            if request.session is not None:
                message = (
                    f"actions and states have {len(items)} rows; a session holds one rollout: give [N,{self.width}]"
                )
                raise RequestError(message, param="actions")
            inputs["rows"] = items
            fields["rows"] = len(items)
        else:
            inputs |= items[0]
        return self._encoded(inputs, fields, tokens=len(inputs["frames"]), blocks=needed)

    def _resume(self, request: Request) -> Encoded:
        """Go on with a session's rollout, from its latest latents and state."""
        params: RolloutParams = request.params
        for name in ("frames", "pixel_values", "state"):
            if request.tensor(name) is not None:
                self._refuse_opening(request, name)
        if any(isinstance(part, VideoPart | ImagePart) for part in request.parts):
            self._refuse_opening(request, "inputs")
        if params.context_frames != 1 or params.goal_frame is not None:
            self._refuse_opening(
                request, "params.context_frames" if params.context_frames != 1 else "params.goal_frame"
            )
        actions = self._actions(request, dims=(2, 3))
        horizon = self._horizon(params, actions, before=0)
        length = int(request.kept["length"])
        self._check_room(length + horizon, kept=length, horizon=horizon)
        given = read_rows(request, "states", self.width, dims=(2, 3))
        if given is not None and given.shape[-2] < horizon:
            self._too_few("states", given, horizon)
        kept = torch.as_tensor(request.kept["state"]).float()
        rows = self._broadcast(
            actions[:, :horizon], kept[None], None if given is None else _batched(given)[:, :horizon]
        )
        if len(rows) > 1:
            message = f"actions and states have {len(rows)} rows; a session holds one rollout: give [N,{self.width}]"
            raise RequestError(message, param="actions")
        item = self._row(*rows[0], context=1)
        goal = self._goal(request)
        inputs = {name: item[name] for name in ("actions", "states", "given")} | {
            "features": [], "goal_index": torch.tensor(0), "given_goal": goal,
            "firsts": [rows[0][1]],
        }  # fmt: skip
        fields = {"horizon": horizon} | ({} if goal is None else {"goal": 1})
        self._check_goal(request, fields)
        return self._encoded(inputs, fields, tokens=0, blocks=length + horizon)

    def _refuse_opening(self, request: Request, param: str) -> None:
        message = (
            f"session {request.session!r} is open and goes on from its latest frame and state; give only 'actions' "
        )
        message += f"(and 'states'), not {param!r}, or delete the session first"
        raise RequestError(message, status=409, param=param, code="session_open")

    def _teacher_forced(self, request: Request) -> Encoded:
        frames = self._frames(request)
        number = len(frames) - 1
        if number < 1:
            raise RequestError("there is 1 frame; teacher forcing needs at least 2", param=frames.param)
        if number > (most := self.config.max_frames):
            message = f"there are {len(frames)} frames; the checkpoint has positions for {most} steps: give at most "
            raise RequestError(f"{message}{most + 1}", param=frames.param, code="context_length_exceeded")
        actions, given = self._actions(request, dims=(2, 3)), read_rows(request, "states", self.width, dims=(2, 3))
        if given is None:
            raise RequestError(f"tensor 'states' is missing; give [{number},{self.width}]", param="states")
        for name, rows in (("actions", actions), ("states", given)):
            if rows.shape[-2] != number:
                message = f"{name} has {rows.shape[-2]} rows for {len(frames)} frames; give {number}, one a step"
                raise RequestError(message, param=name)
        inputs = {"frames": list(frames.pixels(self.config, range(number))), "start": torch.tensor(0)}
        each = self._broadcast(actions, _batched(given)[:, 0], _batched(given))
        items = [self._row(*row, context=number + 1) for row in each]
        names = ("context_actions", "context_states", "context_given", "state")
        inputs["rows"] = [{name: item[name] for name in names} for item in items]
        return self._encoded(inputs, {"context": number}, tokens=number, blocks=number)

    # -- plans -----------------------------------------------------------------------------------------------

    def _plan(self, request: Request) -> Encoded:
        params: PlanParams = request.params
        context, horizon = params.context_frames, params.horizon
        frames = self._frames(request)
        has_goal = request.tensor("goal") is not None
        if len(frames) < context + (not has_goal):
            message = f"{len(frames)} frames are no {context} of context and a goal; give one more frame, the goal, "
            message += f"or a tensor 'goal' [{self.config.patches},{self.config.dim}]"
            raise RequestError(message, param=frames.param)
        if params.topk > params.samples:
            message = f"params.topk is {params.topk}, more than the {params.samples} samples it is taken from"
            raise RequestError(message, param="params.topk")
        if params.close_gripper_at is not None and params.close_gripper_at >= horizon:
            message = f"params.close_gripper_at is {params.close_gripper_at}; the plan's actions are 0 to {horizon - 1}"
            raise RequestError(message, param="params.close_gripper_at")
        self._check_room(context - 1 + horizon, kept=0, horizon=horizon)
        actions, given = self._before_plan(request, context)
        first, given = self._states(request, context) if given is None else (given[:, 0], given)
        if len(first) > 1:
            raise RequestError(f"there are {len(first)} states; a plan starts from one", param="state")
        ahead = torch.zeros(1, horizon, self.width)
        row = self._row(torch.cat([actions, ahead], dim=1)[0], first if given is None else given[0], context=context)
        inputs = self._context(request, frames, context, goal_frame=None if has_goal else len(frames) - 1)
        mean, std = cem.begin(1, horizon, max_norm=params.max_norm)
        del row["actions"]
        inputs |= row | {"mean": mean[0], "std": std[0], "noise": self._noise(request, params)}
        fields = {"context": context - 1, "horizon": horizon, "iterations": params.iterations, "goal": 1}
        if params.close_gripper_at is not None:
            fields["close_gripper_at"] = params.close_gripper_at
        return self._encoded(inputs, fields, tokens=len(inputs["frames"]), blocks=context - 1 + horizon)

    def _before_plan(self, request: Request, context: int) -> tuple[Tensor, Tensor | None]:
        """The actions (1, C - 1, A) between context frames, and their states (1, C, A) if they are given."""
        given = read_rows(request, "states", self.width, dims=(2,))
        if given is not None and len(given) != context:
            self._too_few("states", given, context)
        actions = read_rows(request, "actions", self.width, dims=(2,))
        number = context - 1
        if number and (actions is None or len(actions) != number):
            message = (
                f"a plan after {context} frames needs the actions between them; give 'actions' [{number},{self.width}]"
            )
            raise RequestError(message, param="actions")
        if not number and actions is not None:
            raise RequestError("actions lead from one context frame to the next, and there is one", param="actions")
        if given is not None and request.tensor("state") is not None:
            self._states(request, context)  # says that one is too many
        return torch.zeros(1, 0, self.width) if actions is None else actions[None], None if given is None else given[
            None
        ]

    def _noise(self, request: Request, params: PlanParams) -> Tensor:
        """Standard normal draws (I, H, S, 4): given, or the ones that torch's generator gives the original in turn."""
        shape = (params.iterations, params.horizon, params.samples, 4)
        given = read_shaped(request, "noise", shape, "iterations, horizon, samples, 4")
        if given is not None:
            return given
        if (number := torch.Size(shape).numel()) > MOST_DRAWS:
            message = f"iterations x horizon x samples x 4 are {number} draws; ask for at most {MOST_DRAWS}"
            raise RequestError(message, param="params.samples")
        generator = torch.Generator().manual_seed(request.seed)
        draws = [torch.randn(shape[2:], generator=generator) for _ in range(shape[0] * shape[1])]
        return torch.stack(draws).unflatten(0, shape[:2])

    # -- what they share ---------------------------------------------------------------------------------------

    def _frames(self, request: Request) -> Frames:
        frames = read_frames(request, self.config)
        if frames is None:
            if request.session is not None:  # of which the engine knows whether it has expired, or never was
                raise RequestError("there are no frames to open the session with", status=404, param="session")
            message = "there are no frames; give a video, images, or one of the tensors 'frames' and 'pixel_values'"
            raise RequestError(message, param="inputs")
        return frames

    def _actions(self, request: Request, *, dims: tuple[int, ...]) -> Tensor:
        """(B, N, A)."""
        actions = read_rows(request, "actions", self.width, dims=dims)
        if actions is None:
            raise RequestError(f"tensor 'actions' is missing; give [N,{self.width}]", param="actions")
        return _batched(actions)

    def _states(self, request: Request, number: int) -> tuple[Tensor, Tensor | None]:
        """The first state (B, A), and all `number` (B, N, A) if they are given."""
        state = read_rows(request, "state", self.width, dims=(1, 2))
        states = read_rows(request, "states", self.width, dims=(2, 3))
        if (state is None) == (states is None):
            wrong = "there is neither 'state' nor 'states'" if state is None else "there are both 'state' and 'states'"
            message = f"{wrong}; give 'state' [{self.width}], to be integrated, or 'states' [{number},{self.width}]"
            raise RequestError(message, param="state")
        if state is not None:
            return (state if state.dim() == 2 else state[None]), None
        assert states is not None
        if states.shape[-2] < number:
            self._too_few("states", states, number)
        return _batched(states)[:, 0], _batched(states)[:, :number]

    def _horizon(self, params: RolloutParams, actions: Tensor, *, before: int) -> int:
        """How many frames to predict, with `before` actions spent on context."""
        number = actions.shape[1]
        horizon = params.horizon if params.horizon is not None else number - before
        if horizon < 1 or number < before + horizon:
            self._too_few("actions", actions, before + max(horizon, 1))
        return horizon

    def _too_few(self, name: str, rows: Tensor, needed: int) -> None:
        message = f"{name} has {rows.shape[-2]} rows; {needed} are needed: one for each context frame but the last, "
        message += "and one for each predicted frame"
        raise RequestError(message, param=name)

    def _check_room(self, needed: int, *, kept: int, horizon: int) -> None:
        """Refuse what goes beyond the positions that the checkpoint has."""
        most = self.config.max_frames
        if needed > most:
            spent = f", of which {kept} are spent" if kept else ""
            message = f"{needed} frames would be stepped from; the checkpoint has positions for {most}{spent}; "
            message += f"a horizon of {max(0, horizon - (needed - most))} fits"
            raise RequestError(message, param="params.horizon", code="context_length_exceeded")

    def _broadcast(self, actions: Tensor, first: Tensor, given: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """For each row its actions (N, A), and the states known: all given ones (N, A), or the first (1, A)."""
        states = first[:, None] if given is None else given
        sizes = {len(actions), len(states)} - {1}
        if len(sizes) > 1:
            message = (
                f"actions have {len(actions)} rows and states {len(states)}; give as many of both, or one of either"
            )
            raise RequestError(message, param="actions")
        number = max(sizes, default=1)
        if number > MOST_ROWS:
            message = f"there are {number} rollouts in one request; give at most {MOST_ROWS} rows"
            raise RequestError(message, param="actions" if len(actions) > 1 else "states")
        latents = number * actions.shape[1] * self.config.patches * self.config.dim * torch.float32.itemsize
        if latents > MOST_BYTES:
            message = f"the latents would take {latents / 2**30:.1f} GiB, more than {MOST_BYTES >> 30} GiB; "
            raise RequestError(message + "give fewer rows, or a shorter horizon", param="actions")
        return list(zip(actions.expand(number, -1, -1), states.expand(number, -1, -1), strict=True))

    def _row(self, actions: Tensor, states: Tensor, *, context: int) -> dict[str, Any]:
        """What one rollout's loops read. `states` beyond the first are given ones."""
        before = context - 1
        number = len(states) if len(states) > 1 or len(actions) == 1 else 0
        return {
            "context_actions": table(actions[:before], self.config),
            "context_states": table(states[:before], self.config),
            "context_given": torch.tensor(min(number, before)),
            "state": states[0],
            "actions": table(actions[before:], self.config),
            "states": table(states[before:], self.config),
            "given": torch.tensor(max(number - before, 0)),
        }

    def _context(self, request: Request, frames: Frames, context: int, *, goal_frame: int | None) -> dict[str, Any]:
        """The frames to encode, those alone, and where among them the context ends and the goal is."""
        goal = self._goal(request)
        if goal is not None and goal_frame is not None:
            raise RequestError(
                "there are both params.goal_frame and tensor 'goal'; give one", param="params.goal_frame"
            )
        if goal_frame is not None and goal_frame >= len(frames):
            message = f"params.goal_frame is {goal_frame}; the frames are 0 to {len(frames) - 1}"
            raise RequestError(message, param="params.goal_frame")
        indices = list(range(context))
        if goal_frame is not None and goal_frame not in indices:
            indices.append(goal_frame)
        return {
            "frames": list(frames.pixels(self.config, indices)),
            "start": torch.tensor(0),
            "last": torch.tensor(context - 1),
            "goal_index": torch.tensor(0 if goal_frame is None else indices.index(goal_frame)),
            "given_goal": goal,
        }

    def _check_goal(self, request: Request, fields: dict[str, int]) -> None:
        """Refuse to give distances to nothing."""
        if "goal" not in fields and "tensor:distances" in request.outputs:
            message = "there is no goal that 'distances' could be to; give tensor 'goal'"
            raise RequestError(message + ("" if request.resumed else ", or params.goal_frame"), param="outputs")

    def _goal(self, request: Request) -> Tensor | None:
        return read_shaped(request, "goal", (self.config.patches, self.config.dim), "patches, width")

    def _encoded(self, inputs: dict[str, Any], fields: dict[str, int], *, tokens: int, blocks: int) -> Encoded:
        return Encoded(
            inputs=inputs,
            fields=fields,
            kv_tokens={"ac.main": blocks * self.config.block},
            usage={"prompt_tokens": tokens * self.config.patches},
        )


def _batched(rows: Tensor) -> Tensor:
    """(B, N, A) of what may lack the first dimension."""
    return rows if rows.dim() == 3 else rows[None]
