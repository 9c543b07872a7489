"""The CPU side of V-JEPA 2: requests to walk inputs, emissions to tensors. Runs in the server process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mstar.plugin import (
    Checkpoint,
    Chunk,
    Emission,
    Encoded,
    Limits,
    Processor,
    ProgressChunk,
    Request,
    RequestError,
    TensorChunk,
)
from mstar_plugin_vjepa2.config import VJEPA2ACConfig
from mstar_plugin_vjepa2.processing.actions import ActionInputs
from mstar_plugin_vjepa2.processing.inputs import read_clips, read_mask


@dataclass(slots=True)
class Progress:
    """What `decode` keeps of one request.

    Args:
        firsts: of a rollout, each row's states that are known before any step, (n, A): the first, or all given ones.
        seen: (emission, row) -> how many have come.
    """

    request: Request
    firsts: list[Tensor] = field(default_factory=list)
    seen: Counter[tuple[str, int]] = field(default_factory=Counter)


class VJEPA2Processor(Processor):
    """Frames, actions and states in; features, latents and plans out."""

    def __init__(self, checkpoint: Checkpoint, limits: Limits) -> None:
        super().__init__(checkpoint, limits)
        self.config: Any = checkpoint.config
        self._actions = ActionInputs(self.config) if isinstance(self.config, VJEPA2ACConfig) else None

    def encode(self, request: Request) -> Encoded:
        if self._actions is not None:
            return self._actions.encode(request)
        clips = read_clips(request, self.config, most_tokens=self.limits.max_model_len)
        tokens = max(1, len(clips[0]) // self.config.tubelet_size) * self.config.patches
        inputs: dict[str, Any] = {"clips": [{"pixels": clip} for clip in clips]}
        fields = {}
        if request.task == "predict":
            for name in ("context_mask", "target_mask"):
                mask = read_mask(request, name, clips=len(clips), tokens=tokens)
                for item, row in zip(inputs["clips"], mask, strict=True):
                    item[name] = row
        elif request.task == "anticipate":
            fields["steps"] = request.params.steps
            inputs["offset"] = torch.tensor(request.params.offset)
        return Encoded(inputs=inputs, fields=fields, usage={"prompt_tokens": tokens * len(clips)})

    def start(self, request: Request, encoded: Encoded) -> Progress:
        firsts = encoded.inputs["firsts"] if request.task == "rollout" else []
        return Progress(request, firsts)

    def decode(self, state: Progress, emission: Emission) -> Iterator[Chunk]:
        """Tensors as they come: a feature or a row's prediction is one part of the whole. Refuses NaN and infinity."""
        if emission.final:
            return
        row, name, value = (emission.path or (0,))[0], emission.name, emission.value.float()
        if not bool(value.sum().isfinite()):
            message = f"{name!r} came out as NaN or infinity: an input is too large for the model; give smaller values"
            raise RequestError(message, status=422)
        step = state.seen[name, row]
        state.seen[name, row] += 1
        if name in ("latents", "distances"):
            yield TensorChunk(name, value[None, None], start=(row, step) + (0,) * value.dim())
        elif name == "states":
            firsts = state.firsts[row]
            if step == 0:
                yield TensorChunk(name, firsts[None], start=(row, 0, 0))
            if step + 1 >= len(firsts):
                yield TensorChunk(name, value[None, None], start=(row, step + 1, 0))
        elif name == "predicted" and state.request.task == "anticipate":
            yield TensorChunk(name, value[None], start=(row, step * len(value), 0))
        elif name == "costs":
            yield TensorChunk(name, value[None])
            yield ProgressChunk(step + 1, state.request.params.iterations)
        else:
            yield TensorChunk(name, value if name == "action" else value[None])
