"""Positions of conversations with media in any order, the thinker's and the talker's, against `transformers`."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar_plugin_qwen3_omni.config import OmniConfig
from mstar_plugin_qwen3_omni.modeling import pictures
from mstar_plugin_qwen3_omni.modeling.vision import Grid
from mstar_plugin_qwen3_omni.processing.media import Sight, Sound
from mstar_plugin_qwen3_omni.processing.prompt import Prompt
from mstar_plugin_qwen3_omni.processing.spoken import speaker_id, talker_prompt

NONE = torch.empty(0)


class Conversation:
    """A prompt of random media, and what `transformers` wants to know of them."""

    def __init__(self, config: OmniConfig, seed: int) -> None:
        self.config, self.random = config, np.random.default_rng(seed)
        self.prompt = Prompt(config)
        self.images: list[Grid] = []
        self.videos: list[Grid] = []
        self.seconds: list[float] = []
        self.frames: list[int] = []
        turns, is_film = config.turns, seed % 2 == 1
        kinds = ("text", "image", "sound", "film" if is_film else "video")
        for role in (turns.system, turns.user, turns.assistant, turns.user, turns.user):
            self.prompt.add_text([turns.start, role, 198])
            for _ in range(self.random.integers(1, 5)):
                getattr(self, self.random.choice(kinds) if role == turns.user else "text")()
            self.prompt.add_text([turns.end, 198])
        self.prompt.add_text([turns.start, turns.assistant, 198])

    def text(self) -> None:
        self.prompt.add_text([5] * int(self.random.integers(1, 4)))

    def image(self) -> None:
        sight = self._sight(1, seconds=0.0)
        self.images.append(sight.grid)
        self._framed(sight=sight)

    def video(self) -> None:
        self._framed(sight=self._video())

    def sound(self) -> None:
        self._framed(sound=self._sound())

    def film(self) -> None:
        self._framed(sight=self._video(), sound=self._sound())

    def _video(self) -> Sight:
        sight = self._sight(int(self.random.integers(1, 6)), seconds=float(self.random.choice([0.2, 0.5, 1.0, 2.0])))
        self.videos.append(sight.grid)
        self.seconds.append(sight.seconds_per_frame)
        return sight

    def _sight(self, frames: int, *, seconds: float) -> Sight:
        assert self.config.thinker.vision is not None
        grid = (frames, 2 * int(self.random.integers(1, 5)), 2 * int(self.random.integers(1, 12)))
        return Sight(NONE, grid, pictures.num_tokens(grid, self.config.thinker.vision), seconds, b"")

    def _sound(self) -> Sound:
        assert self.config.thinker.audio is not None
        self.frames.append(int(self.random.integers(1, 260)))
        return Sound(NONE, self.config.thinker.audio.num_tokens(self.frames[-1]), 0.0, b"")

    def _framed(self, *, sight: Sight | None = None, sound: Sound | None = None) -> None:
        tokens, prompt = self.config.thinker.tokens, self.prompt
        before = [tokens.vision_start] * (sight is not None) + [tokens.audio_start] * (sound is not None)
        prompt.add_text(before)
        if sight is not None and sound is not None:
            prompt.add_film(sight, sound)
        elif sight is not None:
            prompt.add_sight(sight)
        elif sound is not None:
            prompt.add_sound(sound)
        prompt.add_text([tokens.audio_end] * (sound is not None) + [tokens.vision_end] * (sight is not None))

    def theirs(self, ids: Tensor, *, use_audio_in_video: bool) -> Tensor:
        """(tokens, 3), by the authors' code."""
        from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling

        kind: Any = modeling.Qwen3OmniMoePreTrainedModelForConditionalGeneration
        tokens = self.config.thinker.tokens
        config = SimpleNamespace(
            image_token_id=tokens.image, video_token_id=tokens.video, audio_token_id=tokens.audio,
            vision_start_token_id=tokens.vision_start, audio_start_token_id=tokens.audio_start,
            position_id_per_seconds=self.config.thinker.positions_per_s, audio_config=SimpleNamespace(n_window=50),
        )  # fmt: skip
        model = SimpleNamespace(spatial_merge_size=2, config=config)
        model.get_llm_pos_ids_for_vision = partial(kind.get_llm_pos_ids_for_vision, model)
        found, _ = kind.get_rope_index(
            model,
            ids[None],
            torch.tensor(self.images) if self.images else None,
            torch.tensor(self.videos) if self.videos else None,
            torch.ones_like(ids)[None],
            use_audio_in_video,
            torch.tensor(self.frames),
            torch.tensor(self.seconds),
        )
        return found[:, 0].T


@pytest.mark.parametrize("seed", range(60))
def test_positions_are_the_authors(golden: Any, seed: int) -> None:
    """Their talker is not told that videos have sound, and finds out only where a picture follows."""
    given = Conversation(golden.config, seed)
    ids, places = torch.tensor(given.prompt.ids), given.prompt.positions.whole()
    torch.testing.assert_close(places, given.theirs(ids, use_audio_in_video=seed % 2 == 1))
    prompt = talker_prompt(golden.config, ids, places, speaker=speaker_id(golden.config, None))
    theirs = given.theirs(prompt["talker_ids"], use_audio_in_video=False)
    torch.testing.assert_close(prompt["talker_places"], theirs)
