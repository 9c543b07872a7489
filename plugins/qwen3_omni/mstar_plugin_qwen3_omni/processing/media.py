"""Media as clients send them to what the encoders take, with what is asked of their size. Runs in the server."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import av
import numpy as np
import torch
from torch import Tensor

from mstar.errors import RequestError
from mstar.plugin.media import content_key
from mstar.types import AudioPart, ImagePart, VideoPart
from mstar_plugin_qwen3_omni.config import OmniConfig
from mstar_plugin_qwen3_omni.config.media import SoundConfig
from mstar_plugin_qwen3_omni.modeling import pictures
from mstar_plugin_qwen3_omni.modeling.mel import log_mel
from mstar_plugin_qwen3_omni.modeling.vision import Grid

_BLOCK = 1 << 20  # samples that are resampled at once
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


# ---- sound ----------------------------------------------------------------------------------------------


def hear(part: AudioPart, config: OmniConfig, *, param: str) -> Sound:
    """A sound's spectrogram. Raises RequestError if it is too short or loud to have one, or nobody hears."""
    if config.thinker.audio is None:
        raise RequestError(f"{param} is sound, and this checkpoint has no encoder for it; leave it out", param=param)
    samples = resampled(part.samples.mean(axis=0), part.sample_rate, config.sound.sample_rate)
    if len(samples) < config.sound.fewest:
        raise _too_short(len(samples), config.sound, param=param)
    spectrogram = log_mel(torch.from_numpy(samples), config.sound)
    if not spectrogram.isfinite().all():
        message = f"{param} has samples up to {np.abs(samples).max():g}; they must lie in about -1..1: scale them"
        raise RequestError(message, param=param)
    tokens = config.thinker.audio.num_tokens(spectrogram.shape[1])
    return Sound(spectrogram, tokens, len(samples) / config.sound.sample_rate, content_key(samples))


def resampled(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """Samples (n,) float32 at another rate: n * wanted / rate of them, rounded up."""
    if rate == wanted or not len(samples):
        return np.ascontiguousarray(samples, dtype=np.float32)
    resampler, blocks = av.AudioResampler(format="fltp", layout="mono", rate=wanted), [np.zeros(0, np.float32)]
    for start in range(0, len(samples), _BLOCK):
        block = np.ascontiguousarray(samples[None, start : start + _BLOCK], dtype=np.float32)
        frame = av.AudioFrame.from_ndarray(block, format="fltp", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = rate, start, Fraction(1, rate)
        blocks += [one.to_ndarray()[0] for one in resampler.resample(frame)]
    blocks += [one.to_ndarray()[0] for one in resampler.resample(None)]
    found, count = np.concatenate(blocks), math.ceil(len(samples) * wanted / rate)
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
    return _sight(part.pixels[None], config, pixels=config.pictures.pixels, seconds=0.0, param=param)


def watch(part: VideoPart, config: OmniConfig, *, param: str) -> Sight:
    """A video's patches."""
    vision, frames = config.thinker.vision, len(part.frames)
    rate = frames / part.duration_s if part.duration_s > 0 else 1.0
    fewest, most = config.pictures.frame_pixels
    unit, together = (vision.unit, vision.frames) if vision is not None else (1, 1)
    share = max(VIDEO_TOKENS * unit**2 * together / frames, 1.05 * fewest)
    return _sight(part.frames, config, pixels=(fewest, min(most, int(share))), seconds=together / rate, param=param)


def _sight(frames: np.ndarray, config: OmniConfig, *, pixels: tuple[int, int], seconds: float, param: str) -> Sight:
    vision = config.thinker.vision
    if vision is None:
        message = f"{param} is to be seen, and this checkpoint has no encoder for that; leave it out"
        raise RequestError(message, param=param)
    height, width = frames.shape[1:3]
    if max(height, width) > pictures.LONGEST * min(height, width):
        message = f"{param} is {width}x{height}; no side may be more than {pictures.LONGEST} times the other: cut it"
        raise RequestError(message, param=param, code="media_too_large")
    size = pictures.fitted_size(height, width, unit=vision.unit, pixels=pixels)
    grid = pictures.grid(len(frames), vision, size=size)
    patches = pictures.patches(frames, vision, size=size)
    key = content_key(patches, grid, seconds)
    return Sight(patches, grid, pictures.num_tokens(grid, vision), seconds, key)
