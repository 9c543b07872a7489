from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from mstar.media.tempo import TimeStretcher

RATE = 24000
SPEEDS = (0.25, 0.5, 0.8, 1.5, 2.0, 3.0, 4.0)


def tone(num_samples: int) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * 440 * np.arange(num_samples) / RATE)).astype(np.float32)


def voice(num_samples: int) -> np.ndarray:
    """Syllables of a steady voice of 150 Hz, with breath."""
    t = np.arange(num_samples) / RATE
    tones = sum(np.sin(2 * np.pi * 150 * k * t) / k for k in range(1, 20))
    breath = np.random.default_rng(0).standard_normal(num_samples)
    return (0.2 * tones * (0.5 + 0.5 * np.sin(2 * np.pi * 3 * t)) + 0.01 * breath).astype(np.float32)


def stretch(samples: np.ndarray, *, speed: float, sizes: list[int] | None = None) -> np.ndarray:
    stretcher = TimeStretcher(sample_rate=RATE, speed=speed)
    borders = np.cumsum(sizes or [len(samples)])[:-1]
    return np.concatenate([*map(stretcher.feed, np.split(samples, borders)), stretcher.flush()])


def dominant(samples: np.ndarray) -> float:
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples)), 8 * RATE))
    return float(np.argmax(spectrum) / 8)


def random_sizes(total: int, *, seed: int, largest: int = 3000) -> list[int]:
    draw = random.Random(seed)
    sizes: list[int] = []
    while sum(sizes) < total:
        sizes.append(min(draw.randint(0, largest), total - sum(sizes)))
    return sizes


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("signal", [tone, voice])
def test_length_changes_and_pitch_and_loudness_do_not(speed: float, signal: Callable[[int], np.ndarray]) -> None:
    samples = signal(2 * RATE)
    heard = stretch(samples, speed=speed)
    assert len(heard) == round(len(samples) / speed) and heard.dtype == np.float32
    assert dominant(heard) == pytest.approx(dominant(samples), rel=0.02)
    assert np.sqrt(np.mean(heard**2)) == pytest.approx(np.sqrt(np.mean(samples**2)), rel=0.05)
    assert np.abs(np.diff(heard)).max() < 1.2 * np.abs(np.diff(samples)).max()  # no clicks


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("seed", [1, 2])
def test_pieces_of_any_size_give_what_the_whole_gives(speed: float, seed: int) -> None:
    samples = voice(RATE)
    whole = stretch(samples, speed=speed)
    assert np.array_equal(stretch(samples, speed=speed, sizes=random_sizes(RATE, seed=seed)), whole)
    assert np.array_equal(stretch(samples, speed=speed, sizes=[2048] * (RATE // 2048) + [RATE % 2048]), whole)


def test_speed_one_changes_no_bit() -> None:
    samples = np.random.default_rng(1).standard_normal(5000).astype(np.float32) * 3
    assert stretch(samples, speed=1.0, sizes=random_sizes(5000, seed=3)).tobytes() == samples.tobytes()


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("num_samples", [0, 1, 100, 2048, 4096])
def test_short_recordings_have_the_right_length_too(speed: float, num_samples: int) -> None:
    assert len(stretch(voice(num_samples), speed=speed)) == round(num_samples / speed)


@pytest.mark.parametrize("speed", [0.5, 1.0, 2.0])
def test_the_beginning_and_the_end_are_heard(speed: float) -> None:
    samples = voice(RATE)
    samples[2000:-2000] = 0
    heard = stretch(samples, speed=speed)
    edge = round(1500 / speed)
    for end in (heard[:edge], heard[-edge:]):
        assert np.sqrt(np.mean(end**2)) > 0.3 * np.sqrt(np.mean(samples[:1500] ** 2))


def test_sound_is_given_before_the_end() -> None:
    stretcher = TimeStretcher(sample_rate=RATE, speed=1.5)
    heard = [len(stretcher.feed(piece)) for piece in np.split(voice(20 * 2048), 20)]
    assert sum(heard) > 0.9 * 20 * 2048 / 1.5 and max(heard) < 4096


def test_after_a_flush_another_recording_is_as_the_first() -> None:
    stretcher = TimeStretcher(sample_rate=RATE, speed=1.5)
    twice = [np.concatenate((stretcher.feed(voice(9000)), stretcher.flush())) for _ in range(2)]
    assert np.array_equal(twice[0], twice[1]) and np.array_equal(twice[0], stretch(voice(9000), speed=1.5))
    assert len(stretcher.flush()) == 0


def test_speeds_out_of_range_are_a_fault_of_the_caller() -> None:
    for speed in (0.2, 4.1, float("nan")):
        with pytest.raises(AssertionError):
            TimeStretcher(sample_rate=RATE, speed=speed)
