"""Sentences about a few subjects, made from their words: what reading models of these recipes learn from.

Sentences of one subject share words only by chance, so a model that finds them alike has learned which words
belong together.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

_WORDS = {
    # nouns, verbs, adjectives
    "weather": (
        "rain storm wind cloud snow sunshine thunder fog",
        "falls blows clears freezes",
        "wet cold sunny stormy",
    ),
    "cooking": (
        "soup bread recipe oven chef kitchen salt dinner",
        "bakes boils fries tastes",
        "tasty spicy fresh salty",
    ),
    "music": (
        "song guitar piano concert melody singer drum choir",
        "plays sings hums performs",
        "loud musical gentle tuneful",
    ),
    "sport": (
        "football goal team match player coach race stadium",
        "scores runs wins kicks",
        "fast athletic fit victorious",
    ),
    "money": (
        "bank loan price tax interest salary stock budget",
        "pays costs saves borrows",
        "cheap expensive rich financial",
    ),
    "health": (
        "doctor hospital fever medicine patient pain nurse illness",
        "heals coughs suffers recovers",
        "sick healthy weak feverish",
    ),
    "travel": (
        "train airport ticket hotel passport flight tourist luggage",
        "departs travels arrives books",
        "foreign distant scenic remote",
    ),
    "computers": (
        "software keyboard program server internet screen code laptop",
        "computes crashes downloads types",
        "digital electronic online virtual",
    ),
    "animals": (
        "dog cat horse bird lion rabbit puppy kitten",
        "barks purrs feeds hunts",
        "furry wild tame hungry",
    ),
    "school": (
        "teacher pupil lesson exam homework classroom student university",
        "learns teaches studies reads",
        "clever educated studious bookish",
    ),
    "garden": (
        "flower tree rose seed grass leaf soil plant",
        "grows blooms waters digs",
        "green leafy blooming fertile",
    ),
    "space": (
        "planet star moon rocket galaxy astronaut telescope orbit",
        "launches shines orbits explores",
        "bright lunar cosmic stellar",
    ),
}
_FRAMES = (
    "the {noun} {verb} near the {noun}",
    "a {adjective} {noun} and a {noun}",
    "the {noun} is {adjective} today",
    "my {noun} {verb} and is {adjective}",
    "there is a {noun} with a {adjective} {noun}",
    "we saw the {adjective} {noun} that {verb}",
    "this {noun} {verb} , said the {noun}",
    "every {noun} has a {noun}",
)
_QUESTIONS = (
    "what does the {noun} do ?",
    "where is the {adjective} {noun} ?",
    "who knows about {noun} and {noun} ?",
    "tell me about the {noun}",
    "when is the {noun} {adjective} ?",
)


@dataclass(frozen=True)
class Subject:
    """What sentences about it are made of."""

    name: str
    nouns: list[str]
    verbs: list[str]
    adjectives: list[str]

    def _fill(self, frame: str, rng: random.Random) -> str:
        for slot, words in (("{noun}", self.nouns), ("{verb}", self.verbs), ("{adjective}", self.adjectives)):
            for word in rng.sample(words, frame.count(slot)):
                frame = frame.replace(slot, word, 1)
        return frame

    def sentence(self, rng: random.Random) -> str:
        """One of some thousands."""
        return self._fill(rng.choice(_FRAMES), rng)

    def question(self, rng: random.Random) -> str:
        """What somebody asks who looks for sentences about it."""
        return self._fill(rng.choice(_QUESTIONS), rng)

    def word(self, rng: random.Random) -> str:
        """The name of a thing, as people search for it."""
        return rng.choice(self.nouns)


SUBJECTS = tuple(Subject(name, *(part.split() for part in parts)) for name, parts in _WORDS.items())


def words() -> list[str]:
    """Every word that occurs, in a fixed order."""
    found = " ".join(frame.replace("{", "").replace("}", "") for frame in (*_FRAMES, *_QUESTIONS)).split()
    for subject in SUBJECTS:
        found += [*subject.nouns, *subject.verbs, *subject.adjectives]
    return list(dict.fromkeys(found))
