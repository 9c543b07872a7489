"""Tasks of world models by name: frames and tensors in, tensors out. Both clients inherit these methods.

Keywords become inputs and parameters here; what is a valid value of one, the server says. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import httpx
import msgspec
import numpy as np

from mstar.client import parts, wire
from mstar.client.errors import StreamBroken
from mstar.client.results import Result, read_output, read_result
from mstar.client.wire import Call, EventDecoder

Answer = TypeVar("Answer")
Events = TypeVar("Events")
Array = Any
"""NumPy's, torch's, or lists of numbers. Lists and float64 are sent as float32, lists of a mask as int64."""

SAFETENSORS = "application/octet-stream"
_SAMPLING = ("fps", "num_frames", "frame_indices")
_FIELDS = ("model", "session", "seed", "timeout_s")


class Tasks(Generic[Answer, Events]):
    """What a client can ask of a model of frames, latents and actions.

    All methods take these keywords; any other one is a parameter of the task. A result's tensors are its attributes
    and its items: `result.features`, `result["features"]`; NumPy's, or torch's with `as_torch`.

    Args:
        video: a file (Path), its bytes, a URL, frames uint8 (T, H, W, 3), or a list of such; with one of `fps`,
            `num_frames` and `frame_indices`, or none for those that the task usually takes.
        images: files, bytes, URLs, PIL images or uint8 (H, W, 3), in order.
        frames: uint8 (T, H, W, 3).
        pixel_values: normalised already, (T, 3, H, W), or (B, T, 3, H, W) where the model takes several clips.
        session: a name that keeps what later requests go on with.
        outputs: which tensors, such as ["tensor:latents"]; all of the task's unless given.
        as_torch: whether tensors are torch's.
        model, seed, timeout_s: as in `generate`.
    """

    def run_task(self, task: str, *, tensors: Mapping[str, Array | None] | None = None, **keywords: Any) -> Answer:
        """Any task whose outputs are tensors. `tensors`: its inputs by name, of which None counts as absent."""
        return self._send(_whole(task, tensors or {}, keywords))

    def stream_task(self, task: str, *, tensors: Mapping[str, Array | None] | None = None, **keywords: Any) -> Events:
        """The same as events: parts of tensors, each with its place (`start`) in the whole, and progress."""
        return self._stream(_streamed(task, tensors or {}, keywords))

    def encode(self, **keywords: Any) -> Answer:
        """Features of clips, or of frames one by one."""
        return self.run_task("encode", **keywords)

    def predict(
        self, *, context_mask: Array | None = None, target_mask: Array | None = None, **keywords: Any
    ) -> Answer:
        """Features of target patches from those of context patches; masks are indices (B, K), all if absent."""
        masks = {"context_mask": context_mask, "target_mask": target_mask}
        return self.run_task("predict", tensors=masks, **keywords)

    def anticipate(self, **keywords: Any) -> Answer:
        """Features of what follows a clip, `steps` predictions long."""
        return self.run_task("anticipate", **keywords)

    def rollout(
        self, *, actions: Array, state: Array | None = None, states: Array | None = None, goal: Array | None = None,
        **keywords: Any,
    ) -> Answer:  # fmt: skip
        """Latents of the frames that follow actions (N, A) or (B, N, A), from a state or with given states.

        Of an open session only actions (and states) are given: it goes on from its latest frame.
        """
        tensors = {"actions": actions, "state": state, "states": states, "goal": goal}
        return self.run_task("rollout", tensors=tensors, **keywords)

    def stream_rollout(
        self, *, actions: Array, state: Array | None = None, states: Array | None = None, goal: Array | None = None,
        **keywords: Any,
    ) -> Events:  # fmt: skip
        """A rollout frame by frame: `event.tensor` belongs at `event.start` of the tensor called `event.name`."""
        tensors = {"actions": actions, "state": state, "states": states, "goal": goal}
        return self.stream_task("rollout", tensors=tensors, **keywords)

    def teacher_forced(self, *, actions: Array, states: Array, **keywords: Any) -> Answer:
        """Latents of every next frame, each predicted from the encoded frames before it."""
        return self.run_task("teacher_forced", tensors={"actions": actions, "states": states}, **keywords)

    def plan(
        self, *, state: Array | None = None, states: Array | None = None, actions: Array | None = None,
        goal: Array | None = None, noise: Array | None = None, **keywords: Any,
    ) -> Answer:  # fmt: skip
        """Actions that lead to a goal: the last frame, or latents `goal` (P, D)."""
        tensors = {"state": state, "states": states, "actions": actions, "goal": goal, "noise": noise}
        return self.run_task("plan", tensors=tensors, **keywords)

    # -- of the client ---------------------------------------------------------------------------------------

    def _send(self, call: Call[Result]) -> Answer:
        raise NotImplementedError

    def _stream(self, call: Call[EventDecoder]) -> Events:
        raise NotImplementedError


def _whole(task: str, tensors: Mapping[str, Array | None], keywords: dict[str, Any]) -> Call[Result]:
    body, as_torch = _body(task, tensors, keywords)
    read = partial(_read, as_torch=as_torch)
    return Call(method="POST", path=wire.GENERATE, body=body, read=read, accept=SAFETENSORS)


def _streamed(task: str, tensors: Mapping[str, Array | None], keywords: dict[str, Any]) -> Call[EventDecoder]:
    body, as_torch = _body(task, tensors, keywords)
    read = partial(EventDecoder, as_torch=as_torch)
    return Call(method="POST", path=wire.GENERATE, body=body | {"stream": True}, read=read)


def _body(task: str, tensors: Mapping[str, Array | None], keywords: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The body that keywords come to, and whether its answer is to be torch's."""
    given = {name: value for name, value in keywords.items() if value is not None}
    sampling = {name: given.pop(name) for name in _SAMPLING if name in given}
    named = {**{name: given.pop(name, None) for name in ("frames", "pixel_values")}, **tensors}
    outputs = list(given.pop("outputs", ("tensors",)))
    if wrong := [name for name in outputs if name.partition(":")[0] not in ("tensors", "tensor")]:
        raise TypeError(f"outputs {wrong} are no tensors; use generate for others")
    inputs = [*_media(given.pop("video", None), given.pop("images", ()), sampling)]
    inputs += [_tensor(name, value) for name, value in named.items() if value is not None]
    body = {"task": task, "inputs": inputs, "outputs": outputs}
    body |= {name: given.pop(name) for name in _FIELDS if name in given}
    as_torch = bool(given.pop("as_torch", False))
    return body | {"params": given}, as_torch


def _media(video: Any, images: Sequence[Any], sampling: dict[str, Any]) -> Iterator[Any]:
    if sampling and video is None:
        raise TypeError(f"{', '.join(sampling)} choose frames of video=, which is missing")
    if video is not None:
        for source in video if isinstance(video, list | tuple) else [video]:
            yield source | sampling if isinstance(source, dict) else parts.video(source, **sampling)
    for source in images:
        yield source if isinstance(source, dict) else parts.image(source)


def _tensor(name: str, value: Array) -> dict[str, Any]:
    if str(getattr(value, "dtype", "")) == "torch.float64":
        value = value.float()
    elif not hasattr(value, "dtype"):
        value = np.asarray(value)
        if name != "frames":
            value = value.astype(np.int64 if name.endswith("_mask") else np.float32, casting="same_kind")
    elif value.dtype == np.float64:
        value = value.astype(np.float32)
    return parts.tensor(name, value)


def _read(response: httpx.Response, *, as_torch: bool) -> Result:
    """A result from a safetensors body: its JSON lies in the metadata, its tensors behind the header."""
    data = bytearray(response.content)  # the tensors are views of it that may be written to
    try:
        end = 8 + int.from_bytes(data[:8], "little")
        header = msgspec.json.decode(data[8:end])
        fields = msgspec.json.decode(header["__metadata__"]["result"], type=dict[str, Any])
        outputs = []
        for entry in fields.pop("outputs"):
            begin, stop = header[entry["name"]]["data_offsets"]
            content = memoryview(data)[end + begin : end + stop]
            outputs.append(read_output({**entry, "data": content}, kind="tensor", as_torch=as_torch))
        return read_result(fields, outputs=outputs)
    except (KeyError, TypeError, ValueError, msgspec.DecodeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise StreamBroken(f"the server sent what is not a result in safetensors ({problem}): {data[:60]!r}") from error
