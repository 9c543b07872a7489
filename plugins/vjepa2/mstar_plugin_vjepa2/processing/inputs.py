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

MOST_CLIPS = 1024
MOST_CLIP_FRAMES = 1024
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
        return preprocess(values, config.preprocess) if values.dtype == torch.uint8 else values


def read_clips(request: Request, config: VJEPA2Config) -> list[Tensor]:
    """The request's clips, (T, 3, S, S) each and all of one shape: videos, images of one frame each, or tensors."""
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
    if not 1 <= len(clips) <= MOST_CLIPS:
        raise RequestError(f"there are {len(clips)} clips; give 1 to {MOST_CLIPS}", param=_name(clips, "pixel_values"))
    for clip in clips:
        _check_length(clip, config)
    if len({len(clip) for clip in clips}) > 1:
        lengths = ", ".join(str(len(clip)) for clip in clips)
        raise RequestError(f"clips have {lengths} frames; those of one request must be as long", param="inputs")
    return [clip.pixels(config) for clip in clips]


def _check_length(clip: Frames, config: VJEPA2Config) -> None:
    number, tubelet = len(clip), config.tubelet_size
    if number != 1 and number % tubelet:
        message = f"a clip has {number} frames; give 1 or a multiple of {tubelet}, which one token spans"
        raise RequestError(message, param=clip.param)
    if not 1 <= number <= MOST_CLIP_FRAMES:
        raise RequestError(f"a clip has {number} frames; give 1 to {MOST_CLIP_FRAMES}", param=clip.param)


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


def _name(clips: Sequence[Frames], other: str) -> str:
    return clips[0].param if clips else other


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
        shapes = " or ".join("[" + "B,N,"[(3 - n) * 2 :] + f"{width}]" for n in dims)
        raise RequestError(f"{name} is {_described(tensor)}; give finite floats {shapes}", param=name)
    return tensor.float()


def read_shaped(request: Request, name: str, shape: tuple[int, ...], meaning: str) -> Tensor | None:
    """A float tensor of exactly this shape; None without it."""
    tensor = request.tensor(name)
    if tensor is None:
        return None
    if not tensor.is_floating_point() or tuple(tensor.shape) != shape:
        message = f"{name} is {_described(tensor)}; give floats {list(shape)} ({meaning})".replace(" ", " ")
        raise RequestError(message, param=name)
    return tensor.float()


def table(rows: Tensor, config: VJEPA2ACConfig) -> Tensor:
    """Rows (N, A), filled up with zeros to (F, A), so that requests of any length share batches."""
    return functional.pad(rows, (0, 0, 0, config.max_frames - len(rows)))


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
