"""Media parts of one request: fetched, decoded and counted against one budget. Runs in threads that may wait."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mstar.media import audio
from mstar.media.fetch import read_source
from mstar.media.images import decode_image
from mstar.media.policy import Budget, MediaPolicy
from mstar.media.video import Sampling, decode_video
from mstar.types import AudioPart, ImagePart, VideoPart


class MediaReader:
    """Reads the media of one request.

    Args:
        deadline: the request's, in seconds of `time.monotonic`.
        base: folder that relative file names start from; None: a client asks.
    """

    def __init__(self, policy: MediaPolicy, *, deadline: float | None = None, base: Path | None = None) -> None:
        self.budget = Budget(policy, deadline=deadline)
        self._base = base

    def image(self, source: str, *, param: str) -> ImagePart:
        """An image part. `param` is the part's name in the request; errors name its `data`."""
        data, param = self._bytes(source, param), f"{param}.data"
        with self.budget.decoding(param):
            return ImagePart(decode_image(data, budget=self.budget, param=param))

    def audio(self, source: str, *, param: str) -> AudioPart:
        """An audio part."""
        data, param = self._bytes(source, param), f"{param}.data"
        with self.budget.decoding(param):
            return self._sound(data, param)

    def video(self, source: str, *, sampling: Sampling, param: str, with_sound: bool = False) -> VideoPart:
        """A video part; `with_sound`: and its sound, if it has a track."""
        sampling.check(param=param)
        data, where = self._bytes(source, param), f"{param}.data"
        with self.budget.decoding(where):
            found = decode_video(data, sampling=sampling, budget=self.budget, param=param)
            if with_sound and audio.has_audio(data, param=where):
                found = replace(found, sound=self._sound(data, where))
            return found

    def _sound(self, data: bytes, param: str) -> AudioPart:
        longest = self.budget.policy.max_audio_s
        return AudioPart(*audio.decode_audio(data, max_s=longest, budget=self.budget, param=param))

    def _bytes(self, source: str, param: str) -> bytes:
        return read_source(source, budget=self.budget, base=self._base, param=f"{param}.data")
