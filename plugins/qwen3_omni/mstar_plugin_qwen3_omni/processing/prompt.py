"""A prompt as it grows: ids, positions on three axes, media and which of their rows stand where."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mstar.plugin.media import content_key
from mstar_plugin_qwen3_omni.config import OmniConfig
from mstar_plugin_qwen3_omni.modeling.positions import Positions
from mstar_plugin_qwen3_omni.processing.media import Sight, Sound

TEXT, SEEN, HEARD = 0, 1, 2


@dataclass(slots=True)
class Prompt:
    """What has been read so far.

    Args:
        kinds: of the tokens: TEXT, SEEN or HEARD.
        keys: (start, end, what its content is known by) of each stretch of media.
    """

    config: OmniConfig
    ids: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    sights: list[Sight] = field(default_factory=list)
    sounds: list[Sound] = field(default_factory=list)
    keys: list[tuple[int, int, bytes]] = field(default_factory=list)
    positions: Positions = field(init=False)

    def __post_init__(self) -> None:
        vision, per_s = self.config.thinker.vision, self.config.thinker.positions_per_s
        self.positions = Positions(merge=vision.merge if vision is not None else 1, per_s=per_s)

    @property
    def num_media(self) -> int:
        return len(self.sights) + len(self.sounds)

    def add_text(self, ids: list[int]) -> None:
        self.ids += ids
        self.kinds += [TEXT] * len(ids)
        self.positions.text(len(ids))

    def add_sound(self, sound: Sound) -> None:
        """Without the tokens that frame it, as all media."""
        self.sounds.append(sound)
        self.positions.text(sound.num_tokens)
        self._add_media(torch.ones(sound.num_tokens, dtype=torch.bool), sound.key)

    def add_sight(self, sight: Sight) -> None:
        self.sights.append(sight)
        if sight.seconds_per_frame:
            self.positions.video(sight.grid, seconds_per_frame=sight.seconds_per_frame)
        else:
            self.positions.picture(sight.grid)
        is_heard = torch.zeros(sight.num_tokens, dtype=torch.bool)
        self._add_media(is_heard, sight.key, is_video=sight.seconds_per_frame > 0)

    def add_film(self, sight: Sight, sound: Sound) -> Tensor:
        """A video with its sound, merged by time. Returns which tokens are sound, (tokens,) bool."""
        self.sights.append(sight)
        self.sounds.append(sound)
        is_heard = self.positions.film(
            sight.grid, seconds_per_frame=sight.seconds_per_frame, num_heard=sound.num_tokens
        )
        self._add_media(is_heard, content_key(sight.key, sound.key), is_video=True)
        return is_heard

    def _add_media(self, is_heard: Tensor, key: bytes, *, is_video: bool = False) -> None:
        tokens, start = self.config.thinker.tokens, len(self.ids)
        seen = tokens.video if is_video else tokens.image
        self.ids += torch.where(is_heard, tokens.audio, seen).tolist()
        self.kinds += torch.where(is_heard, HEARD, SEEN).tolist()
        self.keys.append((start, len(self.ids), key))

    def sources(self) -> Tensor:
        """(tokens,) int64: which row of all that is seen, then heard, stands there; -1: none."""
        kinds = torch.tensor(self.kinds)
        found, start = torch.full_like(kinds, -1), 0
        for kind in (SEEN, HEARD):
            at = kinds == kind
            count = int(at.sum())
            found[at] = torch.arange(start, start + count)
            start += count
        return found

    def inputs(self) -> dict[str, Any]:
        """Walk inputs. The last token is left to what follows."""
        ids, has_media, places = torch.tensor(self.ids), self.num_media > 0, self.positions.whole()
        return {
            "ids": ids[:-1],
            "places": torch.cat((places[:-1], places[1:, :1]), dim=1) if has_media else None,
            "sources": self.sources()[:-1] if has_media else None,
            "pictures": [
                {"patches": sight.patches, "grid": list(sight.grid), "key": sight.key} for sight in self.sights
            ],
            "sounds": [{"spectrogram": sound.spectrogram, "key": sound.key} for sound in self.sounds],
        }
