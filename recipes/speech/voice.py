"""A voice for a few words: each word is two chords of three tones, one gliding into the other.

Which tones they are follows from the word's letters; pitch, speed, loudness and noise vary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RATE = 16_000
WORD_S = 0.4
MOST_PITCH, MOST_SPEED = 0.04, 0.15
_TONES = np.geomspace(250, 6500, 16)


@dataclass(frozen=True)
class Spoken:
    """Sound, and when each word begins and ends. Shapes: samples (n,), float in -1..1. Units: seconds."""

    samples: np.ndarray
    times: tuple[tuple[float, float], ...]

    @property
    def seconds(self) -> float:
        return len(self.samples) / RATE


def word(spelled: str, pitch: float = 1.0, speed: float = 1.0) -> np.ndarray:
    """One word without noise, faded in and out."""
    count = round(WORD_S * RATE / speed)
    at = np.linspace(0, 1, count)
    chance = random.Random(spelled)
    chords = [_TONES[sorted(chance.sample(range(len(_TONES)), 3))] for _ in range(2)]
    tracks = [np.interp(at, (0.4, 0.6), ends) * pitch for ends in zip(*chords, strict=True)]
    waves = sum(np.sin(2 * np.pi * np.cumsum(track) / RATE) for track in tracks)
    return waves * np.clip(np.minimum(at, 1 - at) * 20, 0, 1) / 4


def speak(
    words: Sequence[str],
    rng: np.random.Generator | None = None,
    pause_s: tuple[float, float] = (0.2, 0.2),
    before_s: float = 0.2,
    after_s: float = 0.2,
) -> Spoken:
    """`words` one after the other; `rng` varies pauses, pitch, speed and loudness, and adds noise."""
    pitch = 1 + rng.uniform(-MOST_PITCH, MOST_PITCH) if rng else 1.0
    speed = 1 + rng.uniform(-MOST_SPEED, MOST_SPEED) if rng else 1.0
    pieces = [np.zeros(round(before_s * RATE))]
    times: list[tuple[float, float]] = []
    at = len(pieces[0])
    for place, spelled in enumerate(words):
        pause = np.zeros(round((rng.uniform(*pause_s) if rng else pause_s[0]) * RATE) if place else 0)
        said = word(spelled, pitch, speed)
        began, at = at + len(pause), at + len(pause) + len(said)
        times.append((began / RATE, at / RATE))
        pieces += [pause, said]
    samples = np.concatenate([*pieces, np.zeros(round(after_s * RATE))])
    if rng:
        noise = rng.choice([0, 10 ** rng.uniform(-6, -2)], p=[0.2, 0.8])
        samples = samples * rng.uniform(0.3, 1) + rng.normal(0, 1, len(samples)) * noise
    return Spoken(samples.astype(np.float32), tuple(times))
