"""Figures over time, for plots: what a level did in each second, and how its latencies are distributed.

Times are seconds from the beginning of the measured time; what is below 0 is the warm-up.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from penstock.bench.load.outcome import UNFINISHED, RequestOutcome, RequestTiming
from penstock.bench.load.workers import Measured
from penstock.bench.run.figures import Figures, percentile

_BINS = 150
_POINTS = 1_500
_STEPS = 200
_WORST = 100


def over_time(measured: Measured, figures: Figures) -> dict[str, list[Any]]:
    """Over `at`, the middle of bins of a second, longer in long runs; None where there is nothing to say."""
    outcomes, zero = measured.outcomes, figures.begin
    begin = min((outcome.due for outcome in outcomes), default=zero) - zero
    end = max((outcome.ended for outcome in outcomes), default=zero) - zero
    width = max(1.0, (end - begin) / _BINS)
    first = math.floor(begin / width)
    count = math.floor(end / width) - first + 1
    tokens, refused, broken = [0.0] * count, [0] * count, [0] * count
    gaps: list[list[float]] = [[] for _ in range(count)]

    def bin_of(at: float) -> int:
        return math.floor((at - zero) / width) - first

    for outcome in outcomes:
        if outcome.good:
            _spread_over(outcome, tokens, gaps, bin_of)
        elif outcome.error != UNFINISHED:
            (broken if outcome.events else refused)[bin_of(outcome.ended)] += 1
    ordered = [sorted(values) for values in gaps]
    middles = [(first + i + 0.5) * width for i in range(count)]
    return {
        "at": [round(at, 3) for at in middles],
        "tokens_per_s": [round(made / width, 2) for made in tokens],
        "open": _open(outcomes, [at + zero for at in middles]),
        "itl_p50_ms": [_percentile_ms(values, 50) for values in ordered],
        "itl_p99_ms": [_percentile_ms(values, 99) for values in ordered],
        "refused": refused,
        "broken": broken,
    }


def _spread_over(
    outcome: RequestOutcome, tokens: list[float], gaps: list[list[float]], bin_of: Callable[[float], int]
) -> None:
    weight = outcome.tokens() / outcome.event_count()
    before: float | None = None
    for at in outcome.times():
        place = bin_of(at)
        tokens[place] += weight
        if before is not None:
            gaps[place].append(at - before)
        before = at


def _open(outcomes: Sequence[RequestOutcome], moments: Sequence[float]) -> list[int]:
    """Requests under way at each moment."""
    begun, ended = sorted(o.due for o in outcomes), sorted(o.ended for o in outcomes)
    return [bisect_right(begun, moment) - bisect_right(ended, moment) for moment in moments]


def _percentile_ms(ordered: Sequence[float], percent: float) -> float | None:
    return round(1e3 * percentile(ordered, percent), 3) if ordered else None


def first_tokens(measured: Measured, figures: Figures) -> dict[str, list[float]]:
    """TTFT of single requests, over when they were due; of very many, a sample with the slowest."""
    found = [(o.due - figures.begin, 1e3 * (o.times()[0] - o.due)) for o in measured.outcomes if o.good]
    if len(found) > _POINTS:
        worst = sorted(found, key=lambda point: -point[1])[:_WORST]
        found = [*found[:: math.ceil(len(found) / _POINTS)], *worst]
    found = sorted(set(found))
    return {"at": [round(at, 3) for at, _ in found], "ttft_ms": [round(ms, 3) for _, ms in found]}


def distributions(measured: Measured) -> dict[str, list[list[float]]]:
    """By latency: values in ms, ascending, and the share of requests (or gaps) that are no slower."""
    timings = [RequestTiming.of(outcome) for outcome in measured.outcomes if outcome.good and outcome.counted]
    return {
        "ttft": _distribution(timing.ttft for timing in timings),
        "itl": _distribution(gap for timing in timings for gap in timing.gaps),
        "tpot": _distribution(timing.tpot for timing in timings if timing.tpot is not None),
        "e2e": _distribution(timing.e2e for timing in timings),
    }


def _distribution(values: Iterable[float]) -> list[list[float]]:
    ordered = sorted(values)
    if not ordered:
        return [[], []]
    found: dict[float, float] = {}
    for step in range(_STEPS + 1):
        percent = 100 * step / _STEPS
        found[round(1e3 * percentile(ordered, percent), 3)] = percent  # equal values: the highest share
    return [list(found), list(found.values())]
