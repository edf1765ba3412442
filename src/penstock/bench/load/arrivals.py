"""When requests are sent: by so many users who each wait for an answer, or at times that no answer moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random

from penstock.bench.load.trace import Arrival


@dataclass(frozen=True, slots=True)
class Level:
    """One load. Closed with `concurrency`, open with `rate`; with neither, arrivals are a trace's.

    seconds:       measured time; None: until `conversations` of them were had.
    warmup_s:      load of the same kind before the measured time.
    """

    number: int
    concurrency: int | None = None
    rate: float | None = None
    steady: bool = False
    warmup_s: float = 0.0
    seconds: float | None = None
    conversations: int | None = None

    @property
    def title(self) -> str:
        if self.concurrency is not None:
            return f"{self.concurrency} stream{'s' if self.concurrency > 1 else ''}"
        return "trace" if self.rate is None else f"{self.rate:g}/s"

    @property
    def limit_s(self) -> float | None:
        """From the start until nothing more is begun."""
        return None if self.seconds is None else self.warmup_s + self.seconds


@dataclass(frozen=True, slots=True)
class Begin:
    """A conversation to begin `at_s` after the level's start. counted: it is part of what is measured."""

    at_s: float
    index: int
    counted: bool


WARMING = 1_000_000_000
"""Conversations of the warm-up have numbers from here on."""


def arrivals(level: Level, seed: int, trace: Sequence[Arrival]) -> Iterator[Begin]:
    """Conversations of an open load, in order. The same for every worker, which takes its share of them."""
    times = (arrival.at_s for arrival in trace) if level.rate is None else _times(level, seed)
    first = 0 if trace else WARMING  # a trace's requests keep their own lengths
    warming = counted = 0
    for at_s in times:
        if level.limit_s is not None and at_s >= level.limit_s:
            return
        if at_s < level.warmup_s:
            yield Begin(at_s, first + warming, False)
            warming += 1
            continue
        if counted == level.conversations:
            return
        yield Begin(at_s, counted + (warming if trace else 0), True)
        counted += 1


def _times(level: Level, seed: int) -> Iterator[float]:
    """Poisson arrivals, or steady ones. The first comes at once."""
    assert level.rate is not None
    if level.steady:
        yield from (number / level.rate for number in count())
    random, at_s = Random(f"arrivals {seed}"), 0.0
    while True:
        yield at_s
        at_s += random.expovariate(level.rate)
