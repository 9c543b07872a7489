"""Encoders and what they are fed, against what the authors' code gave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar_plugin_qwen3_omni.modeling import pictures
from mstar_plugin_qwen3_omni.modeling.audio import AudioEncoder
from mstar_plugin_qwen3_omni.modeling.mel import log_mel
from mstar_plugin_qwen3_omni.modeling.positions import Positions
from mstar_plugin_qwen3_omni.modeling.vision import VisionEncoder
from mstar_plugin_qwen3_omni.weights import thinker as weights

CPU = torch.device("cpu")


def close(found: Tensor, expected: Tensor, within: float = 2e-4) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=within)


@pytest.fixture(scope="module")
def vision(golden: Any) -> VisionEncoder:
    assert golden.config.thinker.vision is not None
    with torch.device("meta"):
        encoder = VisionEncoder(golden.config.thinker.vision)
    weights.load_vision(encoder, golden.checkpoint, torch.float32, CPU)
    return encoder


@pytest.fixture(scope="module")
def audio(golden: Any) -> AudioEncoder:
    assert golden.config.thinker.audio is not None
    with torch.device("meta"):
        encoder = AudioEncoder(golden.config.thinker.audio)
    weights.load_audio(encoder, golden.checkpoint, torch.float32, CPU)
    return encoder


def cut(golden: Any, name: str) -> tuple[Tensor, tuple[int, int, int]]:
    """Patches of a picture or video of the inputs, resized as it needs."""
    vision = golden.config.thinker.vision
    assert vision is not None
    frames = golden.inputs[name].numpy()
    frames = frames if frames.ndim == 4 else frames[None]
    limits = golden.config.pictures.pixels
    size = pictures.fitted_size(*frames.shape[1:3], unit=vision.unit, pixels=limits)
    found = pictures.patches(frames, vision, size=size)
    return pictures.normalised(found, golden.config.pictures), pictures.grid(len(frames), vision, size=size)


def spectrogram(golden: Any) -> Tensor:
    return log_mel(golden.inputs["audio_pcm16"].float() / 32768, golden.config.sound)


def test_spectrograms_are_the_authors(golden: Any) -> None:
    close(spectrogram(golden), golden.tensors["audio.input_features"], 1e-4)


def test_sound_is_encoded_as_by_the_authors(golden: Any, audio: AudioEncoder) -> None:
    found = audio([golden.tensors["audio.input_features"]])[0]
    close(found, golden.tensors["audio.encoder_out"])
    assert len(found) == golden.facts["geometry"]["audio_tokens"]


def test_sounds_do_not_see_each_other(golden: Any, audio: AudioEncoder) -> None:
    whole = golden.tensors["audio.input_features"]
    sounds = [whole, whole[:, :7], whole[:, :100], whole.repeat(1, 3)[:, :401], whole[:, :1]]
    for found, sound in zip(audio(sounds), sounds, strict=True):
        close(found, audio([sound])[0], 1e-5)


@pytest.mark.parametrize(("name", "expected"), [("image_uint8", "image."), ("raw_image_uint8", "image.raw_")])
def test_pictures_are_cut_as_by_the_authors(golden: Any, name: str, expected: str) -> None:
    found, grid = cut(golden, name)
    close(found, golden.tensors[f"{expected}pixel_values"], 1e-6)
    if name.startswith("raw"):
        assert [list(grid)] == golden.tensors["image.raw_grid_thw"].tolist()


@pytest.mark.parametrize("name", ["image", "video"])
def test_pictures_are_encoded_as_by_the_authors(golden: Any, vision: VisionEncoder, name: str) -> None:
    found, grid = cut(golden, f"{name}_uint8")
    assert list(grid) == golden.facts["geometry"][f"{name}_grid_thw"]
    tokens = vision([found], [grid])[0]
    for place, expected in enumerate(("encoder_out", "deepstack0", "deepstack1")):
        close(tokens[:, place], golden.tensors[f"{name}.{expected}"])


def test_pictures_do_not_see_each_other(golden: Any, vision: VisionEncoder) -> None:
    given = [cut(golden, name) for name in ("image_uint8", "video_uint8", "raw_image_uint8", "image_uint8")]
    together = vision(*map(list, zip(*given, strict=True)))
    for found, (patches, grid) in zip(together, given, strict=True):
        close(found, vision([patches], [grid])[0], 1e-5)


def test_a_video_of_odd_length_holds_its_last_frame(golden: Any) -> None:
    vision = golden.config.thinker.vision
    assert vision is not None
    frames = golden.inputs["video_uint8"].numpy()[:3]
    longer = np.concatenate((frames, frames[-1:]))
    found, expected = (pictures.patches(one, vision, size=(64, 64)) for one in (frames, longer))
    assert torch.equal(found, expected)
    assert pictures.grid(3, vision, size=(64, 64)) == (2, 4, 4)


def test_positions_are_the_authors(golden: Any) -> None:
    """Of each run, rebuilt from where its media stand."""
    geometry, tokens = golden.facts["geometry"], golden.config.thinker.tokens
    image, video = tuple(geometry["image_grid_thw"]), tuple(geometry["video_grid_thw"])
    for name, run in golden.facts["runs"].items():
        ids, found, at = run["input_ids"], Positions(merge=2, per_s=13), 0
        while at < len(ids):
            start = at
            if ids[at] == tokens.image:
                found.picture(image)
            elif name == "video_audio" and ids[at] == tokens.video:
                seconds = geometry["video_second_per_grid"]
                heard = found.film(video, seconds_per_frame=seconds, num_heard=geometry["audio_tokens"])
                expected = [token == tokens.audio for token in ids[at : at + len(heard)]]
                assert heard.tolist() == expected
            elif ids[at] == tokens.video:
                found.video(video, seconds_per_frame=geometry["video_second_per_grid"])
            else:
                found.text(1)
            at += len(found.parts[-1])
            assert at > start
        close(found.whole().T, golden.tensors[f"thinker.{name}.position_ids"], 0)
        assert float(found.whole().max()) + 1 - len(ids) == run["rope_delta"]
