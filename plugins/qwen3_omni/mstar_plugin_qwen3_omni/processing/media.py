"""Media as clients send them to what the encoders take, with what is asked of their size. Runs in the server."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Self

import av
import numpy as np
import torch
from torch import Tensor

from mstar.errors import RequestError
from mstar.plugin.media import content_key
from mstar.types import AudioPart, ImagePart, Part, VideoPart
from mstar_plugin_qwen3_omni.config import OmniConfig
from mstar_plugin_qwen3_omni.config.media import SoundConfig
from mstar_plugin_qwen3_omni.config.thinker import VisionConfig
from mstar_plugin_qwen3_omni.modeling import pictures
from mstar_plugin_qwen3_omni.modeling.mel import log_mel
from mstar_plugin_qwen3_omni.modeling.vision import Grid

_BLOCK = 1 << 20  # samples that are resampled at once
HIGHEST_RATE = 768_000
"""Most samples of a sound in a second."""
VIDEO_TOKENS = 115_200
"""Most tokens of all frames of a video together; more frames are made smaller, but not below a twentieth more than the
fewest pixels."""


@dataclass(frozen=True, slots=True)
class Sight:
    """A picture or video.

    Args:
        patches: (n, patch_dim) uint8.
        seconds_per_frame: of a video, that a patch stands for; 0: a picture.
        key: of its content and geometry.
    """

    patches: Tensor
    grid: Grid
    num_tokens: int
    seconds_per_frame: float
    key: bytes


@dataclass(frozen=True, slots=True)
class Sound:
    """A spectrogram (bins, frames) float32."""

    spectrogram: Tensor
    num_tokens: int
    seconds: float
    key: bytes


# ---- how much it is -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Amount:
    """What media are in a prompt, known before the work of seeing and hearing them.

    Args:
        seen, heard: tokens.
        seconds: of sound.
    """

    seen: int = 0
    heard: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, parts: Iterable[Part], config: OmniConfig) -> Self:
        """Parts that are refused later may count nothing."""
        vision, audio = config.thinker.vision, config.thinker.audio
        seen, heard, samples = 0, 0, 0
        for part in parts:
            if vision is not None and isinstance(part, ImagePart | VideoPart):
                seen += pictures.num_tokens(_shape(part, config, vision)[1], vision)
            sound = part.sound if isinstance(part, VideoPart) else part
            if audio is not None and isinstance(sound, AudioPart):
                count = resampled_count(sound.samples.shape[-1], sound.sample_rate, config.sound.sample_rate)
                heard, samples = heard + audio.num_tokens(count // config.sound.hop), samples + count
        return cls(seen, heard, samples / config.sound.sample_rate)


# ---- sound ----------------------------------------------------------------------------------------------


def hear(part: AudioPart, config: OmniConfig, *, param: str) -> Sound:
    """A sound's spectrogram. Raises RequestError if it is too short or loud to have one, or nobody hears."""
    if config.thinker.audio is None:
        raise RequestError(f"{param} is sound, and this checkpoint has no encoder for it; leave it out", param=param)
    rate, wanted = part.sample_rate, config.sound.sample_rate
    if rate > HIGHEST_RATE:
        message = f"{param} has {rate} samples a second; the most is {HIGHEST_RATE}; send it at a lower rate"
        raise RequestError(message, param=param, code="invalid_media")
    if (count := resampled_count(part.samples.shape[-1], rate, wanted)) < config.sound.fewest:
        raise _too_short(count, config.sound, param=param)
    samples = resampled(part.samples.mean(axis=0), rate, wanted)
    spectrogram = log_mel(torch.from_numpy(samples), config.sound)
    if not spectrogram.isfinite().all():
        message = f"{param} has samples up to {np.abs(samples).max():g}; they must lie in about -1..1: scale them"
        raise RequestError(message, param=param)
    tokens = config.thinker.audio.num_tokens(spectrogram.shape[1])
    return Sound(spectrogram, tokens, len(samples) / config.sound.sample_rate, content_key(samples))


def resampled_count(count: int, rate: int, wanted: int) -> int:
    return count if rate == wanted else math.ceil(count * wanted / rate)


def resampled(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """Samples (n,) float32 at another rate: n * wanted / rate of them, rounded up."""
    if rate == wanted or not len(samples):
        return np.ascontiguousarray(samples, dtype=np.float32)
    count = resampled_count(len(samples), rate, wanted)
    resampler, blocks = av.AudioResampler(format="fltp", layout="mono", rate=wanted), [np.zeros(0, np.float32)]
    for start in range(0, len(samples), _BLOCK):
        block = np.ascontiguousarray(samples[None, start : start + _BLOCK], dtype=np.float32)
        frame = av.AudioFrame.from_ndarray(block, format="fltp", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = rate, start, Fraction(1, rate)
        blocks += [one.to_ndarray()[0] for one in resampler.resample(frame)]
    blocks += [one.to_ndarray()[0] for one in resampler.resample(None)]
    found = np.concatenate(blocks)
    return np.pad(found[:count], (0, max(0, count - len(found))))


def _too_short(count: int, config: SoundConfig, *, param: str) -> RequestError:
    lasts, least = count / config.sample_rate, config.fewest / config.sample_rate
    message = f"{param} lasts {lasts:.4f} s ({count} samples at {config.sample_rate} Hz); the least is {least:.4f} s; "
    return RequestError(message + "send more of it, or leave it out", param=param, code="media_too_short")


def samples_of(tensor: Tensor, config: SoundConfig, *, param: str) -> AudioPart:
    """A tensor `audio`, mono at the rate that the model takes. Raises RequestError for any other."""
    if tensor.dim() != 1 or tensor.dtype not in (torch.int16, torch.float32):
        kind = str(tensor.dtype).removeprefix("torch.")
        message = f"{param} is {kind} {list(tensor.shape)}; it must be int16 or float32 [samples], mono, "
        raise RequestError(message + f"at {config.sample_rate} Hz", param=param)
    if not len(tensor):
        raise _too_short(0, config, param=param)
    scaled = tensor.float() / 32768 if tensor.dtype is torch.int16 else tensor
    return AudioPart(scaled.numpy()[None], config.sample_rate)


# ---- pictures -------------------------------------------------------------------------------------------


def see(part: ImagePart, config: OmniConfig, *, param: str) -> Sight:
    """A picture's patches. Raises RequestError for one that is too long for its width, or if nobody here sees."""
    return _sight(part, config, seconds=0.0, param=param)


def watch(part: VideoPart, config: OmniConfig, *, param: str) -> Sight:
    """A video's patches."""
    frames, vision = len(part.frames), config.thinker.vision
    rate = frames / part.duration_s if part.duration_s > 0 else 1.0
    return _sight(part, config, seconds=(1 if vision is None else vision.frames) / rate, param=param)


def _sight(part: ImagePart | VideoPart, config: OmniConfig, *, seconds: float, param: str) -> Sight:
    vision, frames = config.thinker.vision, _frames(part)
    if vision is None:
        message = f"{param} is to be seen, and this checkpoint has no encoder for that; leave it out"
        raise RequestError(message, param=param)
    height, width = frames.shape[1:3]
    if max(height, width) > pictures.LONGEST * min(height, width):
        message = f"{param} is {width}x{height}; no side may be more than {pictures.LONGEST} times the other: cut it"
        raise RequestError(message, param=param, code="media_too_large")
    size, grid = _shape(part, config, vision)
    patches = pictures.patches(frames, vision, size=size)
    key = content_key(patches, grid, seconds)
    return Sight(patches, grid, pictures.num_tokens(grid, vision), seconds, key)


def _frames(part: ImagePart | VideoPart) -> np.ndarray:
    return part.pixels[None] if isinstance(part, ImagePart) else part.frames


def _shape(part: ImagePart | VideoPart, config: OmniConfig, vision: VisionConfig) -> tuple[tuple[int, int], Grid]:
    """The size (height, width) that frames are brought to, and the grid of their patches."""
    count, height, width, _ = _frames(part).shape
    pixels = config.pictures.pixels
    if isinstance(part, VideoPart):
        fewest, most = config.pictures.frame_pixels
        share = max(VIDEO_TOKENS * vision.unit**2 * vision.frames / count, 1.05 * fewest)
        pixels = fewest, min(most, int(share))
    size = pictures.fitted_size(height, width, unit=vision.unit, pixels=pixels)
    return size, pictures.grid(count, vision, size=size)
