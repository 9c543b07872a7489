"""Speech faster or slower at the same pitch, as it comes. Used where a model's processor makes audio.

FFmpeg's `atempo` filter does the work. Knows samples only.
"""

from __future__ import annotations

import contextlib
import math
from fractions import Fraction

import av
import numpy as np

_BLOCK = 512
_MIRRORED = 2048
_NOTHING = np.zeros(0, dtype=np.float32)


class TimeStretcher:
    """Changes the length of mono float32 samples, not their pitch: n give round(n / speed), in any pieces.

    Example:
        stretcher = TimeStretcher(sample_rate=24000, speed=1.5)
        heard = np.concatenate([*map(stretcher.feed, pieces), stretcher.flush()])

    Args:
        speed: 0.25 to 4; 2 is twice as fast. At 1 samples pass as they are.
    """

    _waiting: np.ndarray  # less than a block, not yet in the filter
    _ready: np.ndarray  # out of the filter, not yet due
    _last: np.ndarray  # the latest samples fed

    def __init__(self, *, sample_rate: int, speed: float) -> None:
        assert 0.25 <= speed <= 4, f"speed is {speed}; it must be 0.25 to 4"
        self._sample_rate = sample_rate
        self._speed = speed
        self._begin()

    def feed(self, samples: np.ndarray) -> np.ndarray:
        """Take samples in; what can be heard by now."""
        if self._speed == 1:
            return samples
        self._num_in += len(samples)
        self._waiting = np.concatenate((self._waiting, samples))
        self._last = np.concatenate((self._last, samples))[-_MIRRORED:]
        # Where the filter joins depends on what it has seen: blocks of one size make that the same every time.
        blocks = np.split(self._waiting, range(_BLOCK, len(self._waiting) + 1, _BLOCK))
        self._waiting = blocks.pop()
        self._filter(blocks)
        return self._take()

    def flush(self) -> np.ndarray:
        """The rest of what was fed. Another recording may follow."""
        if self._speed == 1 or not self._num_in:
            return _NOTHING
        # The filter loses up to a window at its end, so it never gets there: the last sound, mirrored, pushes all out.
        mirrored = np.resize(np.concatenate((self._last[::-1], self._last)), 2 * self._sample_rate)
        more = iter(np.split(np.concatenate((self._waiting, mirrored)), range(_BLOCK, len(mirrored), _BLOCK)))
        while self._num_out + len(self._ready) < self._goal:
            self._filter([next(more)])
        rest = self._take()
        self._begin()
        return rest

    @property
    def _goal(self) -> int:
        return round(self._num_in / self._speed)

    def _begin(self) -> None:
        self._graph: av.filter.Graph | None = None
        self._num_in = self._num_filtered = self._num_out = 0
        self._waiting = self._ready = self._last = _NOTHING

    def _take(self) -> np.ndarray:
        count = self._goal - self._num_out
        taken, self._ready = self._ready[:count], self._ready[count:]
        self._num_out += len(taken)
        return taken

    def _filter(self, blocks: list[np.ndarray]) -> None:
        pieces = [self._ready]
        for block in blocks:
            if self._graph is None:
                self._graph = _tempo_graph(sample_rate=self._sample_rate, speed=self._speed)
            frame = av.AudioFrame.from_ndarray(block[None], format="flt", layout="mono")
            frame.sample_rate, frame.pts = self._sample_rate, self._num_filtered
            self._num_filtered += len(block)
            self._graph.push(frame)
            with contextlib.suppress(av.error.BlockingIOError):  # until it wants more first
                while True:
                    pieces.append(self._graph.pull().to_ndarray()[0])
        self._ready = np.concatenate(pieces)


def _tempo_graph(*, sample_rate: int, speed: float) -> av.filter.Graph:
    """Filters in a row: one may at most double the speed, for it leaves out sound beyond that, or halve it."""
    graph = av.filter.Graph()
    source = graph.add_abuffer(sample_rate=sample_rate, format="flt", layout="mono", time_base=Fraction(1, sample_rate))
    num_filters = max(1, math.ceil(abs(math.log2(speed))))
    tempos = [graph.add("atempo", repr(speed ** (1 / num_filters))) for _ in range(num_filters)]
    graph.link_nodes(source, *tempos, graph.add("abuffersink")).configure()
    return graph
