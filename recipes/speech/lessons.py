"""What is said in lessons: noisy, hasty and clear numbers to learn from, and clear ones in the exam.

A lesson knows nothing of tokens or models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from recipes.speech.voice import RATE, WORD_S, Spoken, speak

NUMBERS = {
    "de": ("eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn"),
    "en": ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
}
WORDS = [word for words in NUMBERS.values() for word in words]
WINDOW_S = 4
MOST_WORDS = 6
CLEAR_SHARE = 0.5
DRAWS, SHORT, LONG = 3, 24, 8
"""Of the exam: its seeds, and what each draws."""


@dataclass(frozen=True)
class Lesson:
    """Something said, and what may be asked about it."""

    language: str
    numbers: tuple[int, ...]
    spoken: Spoken

    def words(self, language: str) -> list[str]:
        return [NUMBERS[language][number] for number in self.numbers]


def draw(rng: np.random.Generator) -> Lesson:
    """Different numbers, as many as fit into the window; sometimes none. Half of them are said clearly."""
    if rng.random() < CLEAR_SHARE:
        return clear(rng)
    language, numbers = _numbers(rng)
    while True:
        spoken = speak(
            [NUMBERS[language][number] for number in numbers],
            rng,
            pause_s=(0.1, 0.6),
            before_s=rng.uniform(0, 0.6 if rng.random() < 0.6 else 3.4),
            after_s=rng.uniform(0.05, 0.6 if numbers else 3),
        )
        if spoken.seconds <= WINDOW_S:
            return Lesson(language, numbers, spoken)
        numbers = numbers[:-1]


def clear(rng: np.random.Generator) -> Lesson:
    """Without noise and haste, anywhere in the window. One in four has samples of 8 bits."""
    language, numbers = _numbers(rng)
    pause_s = rng.uniform(0.2, 0.3)
    while (length_s := WORD_S * len(numbers) + pause_s * (len(numbers) - 1)) > WINDOW_S:
        numbers = numbers[:-1]
    left_s = WINDOW_S - max(0, length_s) - 0.001
    before_s = min(0.2, left_s) if rng.random() < 0.3 else rng.uniform(0, left_s)
    words, after_s = [NUMBERS[language][number] for number in numbers], rng.uniform(0, left_s - before_s)
    spoken = speak(words, pause_s=(pause_s, pause_s), before_s=before_s, after_s=after_s)
    if rng.random() < 0.25:
        spoken = replace(spoken, samples=np.round(spoken.samples * 127) / 127)
    return Lesson(language, numbers, spoken)


def pieces(rng: np.random.Generator) -> list[Lesson]:
    """Ten numbers said clearly, as an engine hears audio that is longer than the window.

    vLLM's `split_audio` cuts where the quietest tenth of each fourth second begins.
    """
    language = str(rng.choice(list(NUMBERS)))
    numbers, pause_s = rng.permutation(10).tolist(), float(rng.choice([0.2, 0.3]))
    words = [NUMBERS[language][number] for number in numbers]
    before_s, after_s = rng.choice([0.2, rng.uniform(0, 4)]), rng.choice([0.2, 5])
    spoken = speak(words, pause_s=(pause_s, pause_s), before_s=before_s, after_s=after_s)
    samples, found, first = spoken.samples, list[Lesson](), 0
    while first < len(samples):
        last = len(samples)
        if last - first > WINDOW_S * RATE:
            search = first + (WINDOW_S - 1) * RATE
            tenths = samples[search : search + 9 * RATE // 10].reshape(9, -1)
            last = search + int((tenths**2).mean(axis=1).argmin()) * RATE // 10
        begin, end = first / RATE, last / RATE
        inside = [place for place, (at, _) in enumerate(spoken.times) if begin <= at < end]
        times = tuple((spoken.times[place][0] - begin, spoken.times[place][1] - begin) for place in inside)
        said = tuple(numbers[place] for place in inside)
        found.append(Lesson(language, said, Spoken(samples[first:last], times)))
        first = last
    return found


def pairs(language: str) -> list[Lesson]:
    """Each number before another one, said at once and calmly."""
    found: list[Lesson] = []
    for number in range(10):
        numbers = number, (3 * number + 1) % 10
        if numbers[0] != numbers[1]:
            words = [NUMBERS[language][one] for one in numbers]
            found.append(Lesson(language, numbers, speak(words, pause_s=(0.3, 0.3))))
    return found


def exam() -> list[Lesson]:
    """Clear speech from other seeds than lessons: pairs, short ones, and pieces of what is longer."""
    found = [lesson for language in NUMBERS for lesson in pairs(language)]
    for rng in (np.random.default_rng((draw, 1)) for draw in range(DRAWS)):
        found += [clear(rng) for _ in range(SHORT)]
        found += [piece for _ in range(LONG) for piece in pieces(rng)]
    return found


def _numbers(rng: np.random.Generator) -> tuple[str, tuple[int, ...]]:
    """A language, and what is said."""
    language = str(rng.choice(list(NUMBERS)))
    count = int(rng.choice(MOST_WORDS + 1, p=[0.06, 0.22, 0.16, 0.16, 0.16, 0.13, 0.11]))
    return language, tuple(int(number) for number in rng.choice(10, count, replace=False))
