"""How media become what the encoders take: preprocessor_config.json. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from mstar.plugin.fields import Fields
from mstar_plugin_qwen3_omni.config.thinker import AudioConfig, VisionConfig

USUAL_PIXELS = (56 * 56, 28 * 28 * 1280)
FRAME_PIXELS = (128 * 32 * 32, 768 * 32 * 32)
"""Fewest and most pixels of a video's frame, as published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureConfig:
    """Pictures: (fewest, most) pixels after the resize, and what is subtracted and divided by, of 0..1."""

    pixels: tuple[int, int]
    frame_pixels: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundConfig:
    """Sound: samples a second; of the spectrogram, samples of a frame and from one frame to the next, and bins."""

    sample_rate: int
    frame_size: int
    hop: int
    num_bins: int

    @property
    def fewest(self) -> int:
        """Samples of the shortest sound that can be heard: frames at its ends mirror half a frame."""
        return max(self.hop, self.frame_size // 2 + 1)


def read_pictures(fields: Fields, vision: VisionConfig | None, *, video: Fields) -> PictureConfig:
    """Of a preprocessor_config.json, and of a video_preprocessor_config.json, whose fields may all be left out.

    Frames have the published limits where the files set none for videos and images may be as large; else those of
    images.
    """
    for one in (fields, video):
        for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            one.require(name, True, "pictures are always brought to the size and range that the model was trained with")
        one.require("resample", 3, "pictures are resized bicubically")
        if vision is not None:
            one.require("patch_size", vision.patch_size, "vision_config says so")
            one.require("merge_size", vision.merge, "vision_config says so")
            one.require("temporal_patch_size", vision.frames, "vision_config says so")
    pixels = _pixels(fields, USUAL_PIXELS)
    given = video.has("min_pixels") or video.has("max_pixels") or video.has("size")
    usual = FRAME_PIXELS if pixels[1] >= FRAME_PIXELS[1] else pixels
    return PictureConfig(
        pixels=pixels,
        frame_pixels=_pixels(video, usual) if given else usual,
        mean=fields.numbers("image_mean", (0.5, 0.5, 0.5), count=3),
        std=fields.numbers("image_std", (0.5, 0.5, 0.5), count=3),
    )


def _pixels(fields: Fields, usual: tuple[int, int]) -> tuple[int, int]:
    size = fields.part("size", {})
    least = fields.whole("min_pixels", size.whole("shortest_edge", usual[0]))
    most = fields.whole("max_pixels", size.whole("longest_edge", usual[1]))
    if least > most:
        raise fields.refuse("min_pixels", f"it must be at most max_pixels ({most})")
    return least, most


def read_sound(fields: Fields, audio: AudioConfig | None) -> SoundConfig:
    """Of a preprocessor_config.json."""
    fields.require("feature_extractor_type", "WhisperFeatureExtractor", "spectrograms are made in one way")
    if fields.values.get("dither"):
        raise fields.refuse("dither", "spectrograms here have no noise", "set it to 0")
    config = SoundConfig(
        sample_rate=fields.whole("sampling_rate", 16000),
        frame_size=fields.whole("n_fft", 400),
        hop=fields.whole("hop_length", 160),
        num_bins=fields.whole("feature_size", 128 if audio is None else audio.num_bins),
    )
    if audio is not None and config.num_bins != audio.num_bins:
        raise fields.refuse("feature_size", f"audio_config.num_mel_bins is {audio.num_bins}")
    return config
