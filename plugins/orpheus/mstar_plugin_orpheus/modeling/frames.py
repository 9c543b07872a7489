"""Frames: how the language model's tokens become whole frames of codes, and which samples of a window are new.

Host-side arithmetic of the nodes, on plain integers. Knows nothing about tensors, requests or streams.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

FRAME_CODES = 7
LEVEL_SLOTS = ((0,), (1, 4), (2, 3, 5, 6))
"""Which codes of a frame belong to which codebook level, coarse to fine."""

WINDOW_FRAMES = 4
"""The original streaming decoder decodes four frames at a time, one frame apart, and keeps the second."""


@dataclass(slots=True)
class FrameAssembler:
    """Collects whole frames from token ids, one request's or segment's worth of state.

    Slot s of a frame holds ids [audio_base + s * codebook_size, audio_base + (s + 1) * codebook_size), so a token
    says itself which slot it is for. A token that is not for the slot in turn drops the frame begun so far; only a
    token for slot 0 begins the next one. So whatever is inserted, lost or replaced costs at most the frame it is in.

    Args:
        audio_base: id of code 0 in slot 0.
        codebook_size: codes per slot.
    """

    audio_base: int
    codebook_size: int
    partial: list[int] = field(default_factory=list)

    def push(self, tokens: Iterable[int]) -> tuple[list[int], int]:
        """Codes of the frames that `tokens` complete, in stream order, and the number of tokens dropped."""
        codes: list[int] = []
        num_dropped = 0
        for token in tokens:
            slot, code = divmod(token - self.audio_base, self.codebook_size)
            if slot != len(self.partial):
                num_dropped += self.drop()
                if slot != 0:
                    num_dropped += 1
                    continue
            self.partial.append(code)
            if len(self.partial) == FRAME_CODES:
                codes += self.partial
                self.partial = []
        return codes, num_dropped

    def drop(self) -> int:
        """Forget the frame begun so far; returns how many tokens it had."""
        num_dropped = len(self.partial)
        self.partial = []
        return num_dropped


def token_ids(codes: Iterable[int], *, first: int, audio_base: int, codebook_size: int) -> list[int]:
    """Vocabulary ids of codes in stream order, the first of which is number `first` of its stream."""
    return [audio_base + codebook_size * (index % FRAME_CODES) + code for index, code in enumerate(codes, start=first)]


def new_frames(*, num_frames: int, num_new_frames: int, first: bool, final: bool) -> tuple[int, int]:
    """Which frames [start, end) of a window are heard, so that every frame of a stream is heard exactly once.

    A window inside the stream gives its second frame, the only one the original decoder keeps. The first window also
    gives its first frame, and the final one everything after what the window before it gave.

    Args:
        num_frames: in the window; fewer than WINDOW_FRAMES only when the whole stream has no more.
        num_new_frames: that no window before held.
    """
    if first:
        return 0, num_frames if final else 2
    if not final:
        return 1, 2
    # The window before ended `num_new_frames` earlier and gave all but its last two frames.
    return num_frames - num_new_frames - 2, num_frames
