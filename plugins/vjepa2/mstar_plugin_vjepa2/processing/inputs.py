"""What a request brings, checked: clips and frames, actions and states, masks, goals. CPU tensors of fixed shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from mstar.plugin import ImagePart, Request, RequestError, VideoPart
from mstar_plugin_vjepa2.config import VJEPA2ACConfig, VJEPA2Config
from mstar_plugin_vjepa2.modeling.preprocess import preprocess

MOST_FRAMES = 1024
"""Of a request, over all its clips."""
MOST_STRETCH = 32
"""How often the shorter side of a frame fits into the longer one; it is resized before it is cropped."""
_PREPROCESSED = 16  # frames at once
_SOURCES = "a video, images, or one of the tensors 'frames' and 'pixel_values'"


# ---- pixels ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frames:
    """Frames as they came: bytes (T, H, W, 3), or normalised pixels (T, 3, H, W) already."""

    values: Tensor
    param: str

    def __len__(self) -> int:
        return len(self.values)

    def pixels(self, config: VJEPA2Config | VJEPA2ACConfig, indices: Sequence[int] | None = None) -> Tensor:
        """Frames `indices` (default: all), normalised: (T, 3, S, S) float32."""
        values = self.values if indices is None else self.values[list(indices)]
        if len(values) > MOST_FRAMES:
            raise RequestError(f"there are {len(values)} frames; give at most {MOST_FRAMES}", param=self.param)
        if values.dtype != torch.uint8:
            return values
        height, width = values.shape[1:3]
        if max(height, width) > MOST_STRETCH * min(height, width):
            message = f"frames are {width}x{height} pixels; one side may be at most {MOST_STRETCH} times the other"
            raise RequestError(message, param=self.param)
        return torch.cat([preprocess(part, config.preprocess) for part in values.split(_PREPROCESSED)])


def read_clips(request: Request, config: VJEPA2Config, *, most_tokens: int) -> list[Tensor]:
    """The request's clips, (T, 3, S, S) each and all of one shape: videos, images of one frame each, or tensors.

    Args:
        most_tokens: of one clip, all of which attend to each other.
    """
    found = [Frames(torch.from_numpy(p.frames), "inputs") for p in request.parts if isinstance(p, VideoPart)]
    images = [Frames(torch.from_numpy(p.pixels)[None], "inputs") for p in request.parts if isinstance(p, ImagePart)]
    tensors = _tensors(request)
    _check_sources(found, images, tensors)
    clips = found or images
    for name, tensor in tensors.items():
        if name == "pixel_values" and tensor.dim() == 5:
            clips = [Frames(_pixel_values(clip, config), name) for clip in tensor]
        else:
            clips = [_tensor_frames(name, tensor, config)]
    if not clips:
        raise RequestError("pixel_values holds no clip; give at least 1", param="pixel_values")
    if (number := sum(map(len, clips))) > MOST_FRAMES:
        message = f"there are {number} frames in {len(clips)} clips; give at most {MOST_FRAMES} at once"
        raise RequestError(message, param=clips[0].param)
    for clip in clips:
        _check_length(clip, config, most_tokens=most_tokens)
    if len({len(clip) for clip in clips}) > 1:
        lengths = ", ".join(str(len(clip)) for clip in clips)
        raise RequestError(f"clips have {lengths} frames; those of one request must be as long", param="inputs")
    return [clip.pixels(config) for clip in clips]


def _check_length(clip: Frames, config: VJEPA2Config, *, most_tokens: int) -> None:
    number, tubelet = len(clip), config.tubelet_size
    if (tokens := number // tubelet * config.patches) > most_tokens:
        message = f"a clip has {number} frames, {tokens} tokens; the limit is {most_tokens} (--max-model-len); "
        message += f"give at most {most_tokens // config.patches * tubelet} frames"
        raise RequestError(message, param=clip.param, code="context_length_exceeded")
    if number != 1 and number % tubelet:
        message = f"a clip has {number} frames; give 1 or a multiple of {tubelet}, which one token spans"
        raise RequestError(message, param=clip.param)


def read_frames(request: Request, config: VJEPA2ACConfig) -> Frames | None:
    """The request's frames in order, of one video, of images, or of a tensor; None if there are none."""
    videos = [part for part in request.parts if isinstance(part, VideoPart)]
    images = [torch.from_numpy(part.pixels) for part in request.parts if isinstance(part, ImagePart)]
    tensors = _tensors(request)
    if not (videos or images or tensors):
        return None
    _check_sources(videos, images, tensors)
    if len(videos) > 1:
        raise RequestError(f"there are {len(videos)} videos; give one", param="inputs")
    if len({image.shape for image in images}) > 1:
        sizes = ", ".join(f"{image.shape[1]}x{image.shape[0]}" for image in images)
        raise RequestError(f"images are {sizes} pixels; frames of one scene must be as large", param="inputs")
    for name, tensor in tensors.items():
        return _tensor_frames(name, tensor, config)
    frames = torch.stack(images) if images else torch.from_numpy(videos[0].frames)
    return Frames(frames, "inputs")


def _tensors(request: Request) -> dict[str, Tensor]:
    named = {name: request.tensor(name) for name in ("frames", "pixel_values")}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _check_sources(*sources: object) -> None:
    number = sum(map(bool, sources[:2])) + len(sources[2])  # type: ignore[arg-type]
    if number != 1:
        wrong = "there are no frames" if not number else "frames come from several places"
        raise RequestError(f"{wrong}; give {_SOURCES}", param="inputs")


def _tensor_frames(name: str, tensor: Tensor, config: VJEPA2Config | VJEPA2ACConfig) -> Frames:
    if name == "pixel_values":
        return Frames(_pixel_values(tensor, config), name)
    if tensor.dtype != torch.uint8 or tensor.dim() != 4 or tensor.shape[-1] != 3 or not tensor.numel():
        raise RequestError(f"frames is {_described(tensor)}; give uint8 [T,H,W,3], none of them 0", param="frames")
    return Frames(tensor, name)


def _pixel_values(tensor: Tensor, config: VJEPA2Config | VJEPA2ACConfig) -> Tensor:
    side = config.image_size
    if not tensor.is_floating_point() or tensor.dim() != 4 or tensor.shape[1:] != (3, side, side) or not len(tensor):
        more = "" if isinstance(config, VJEPA2ACConfig) else f", or [B,T,3,{side},{side}]"
        message = f"pixel_values is {_described(tensor)}; give normalised floats [T,3,{side},{side}]{more}"
        raise RequestError(message, param="pixel_values")
    return tensor.float()


# ---- other tensors --------------------------------------------------------------------------------------


def read_mask(request: Request, name: str, *, clips: int, tokens: int) -> Tensor:
    """Patch indices (B, K) int64; without the tensor all of them, in order."""
    mask = request.tensor(name)
    if mask is None:
        return torch.arange(tokens).expand(clips, tokens)
    if mask.is_floating_point() or mask.dtype == torch.bool or mask.dim() not in (1, 2) or not mask.numel():
        raise RequestError(
            f"{name} is {_described(mask)}; give patch indices, integers [B,K], K at least 1", param=name
        )
    mask = (mask[None].expand(clips, -1) if mask.dim() == 1 else mask).to(torch.int64)
    if len(mask) != clips:
        raise RequestError(f"{name} has {len(mask)} rows for {clips} clips; give one a clip", param=name)
    if mask.shape[1] > tokens:
        raise RequestError(f"{name} has {mask.shape[1]} indices a clip, which has {tokens} patches", param=name)
    if mask.min() < 0 or mask.max() >= tokens:
        wrong = int(mask[(mask < 0) | (mask >= tokens)][0])
        raise RequestError(f"{name} contains {wrong}; the clip's patches are 0 to {tokens - 1}", param=name)
    return mask


def read_rows(request: Request, name: str, width: int, *, dims: tuple[int, ...]) -> Tensor | None:
    """A float tensor whose last dimension is `width`, with as many dimensions as `dims` allow; None without it."""
    tensor = request.tensor(name)
    if tensor is None:
        return None
    if not tensor.is_floating_point() or tensor.dim() not in dims or tensor.shape[-1] != width or not tensor.numel():
        axes = {1: "", 2: "B," if 1 in dims else "N,", 3: "B,N,"}
        shapes = " or ".join(f"[{axes[n]}{width}]" for n in dims)
        raise RequestError(f"{name} is {_described(tensor)}; give finite floats {shapes}", param=name)
    return tensor.float()


def read_shaped(request: Request, name: str, shape: tuple[int, ...], meaning: str) -> Tensor | None:
    """A float tensor of exactly this shape; None without it."""
    tensor = request.tensor(name)
    if tensor is None:
        return None
    if not tensor.is_floating_point() or tuple(tensor.shape) != shape:
        message = f"{name} is {_described(tensor)}; give floats {list(shape)} ({meaning})"
        raise RequestError(message, param=name)
    return tensor.float()


def table(rows: Tensor, config: VJEPA2ACConfig) -> Tensor:
    """Rows (N, A), filled up with zeros to (F, A), so that requests of any length share batches."""
    return functional.pad(rows, (0, 0, 0, config.max_frames - len(rows)))


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
