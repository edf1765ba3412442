"""Canaries: versions of models whose share control raises by steps, and takes back when they do worse.

Gateways report what they have counted; what is decided here reaches them over the same link. How far each
canary is, and how it ended, is in control's database, so that neither a kill nor another apply repeats it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from penstock.config.schema.versions import CanaryConfig
from penstock.metrics import FIRST_TOKEN, INTER_TOKEN
from penstock.serve.control.state import CanaryReport, CanaryState

log = logging.getLogger(__name__)

_LOOK_S, _WINDOW = 0.5, 60  # between two looks; how many of them a window has
_KEEP = 50
_LEAST_STREAMS = 10  # of each side, before their times are compared
_SPREAD = 0.03  # variance of logarithms inside a bucket of a histogram
_WIDTH = 2 + len(FIRST_TOKEN.bounds) + 2 + len(INTER_TOKEN.bounds) + 2
_TABLE = "CREATE TABLE IF NOT EXISTS canary (key TEXT PRIMARY KEY, step INTEGER, at REAL, outcome TEXT)"

Counts = Sequence[float]
"""`CanaryReport.counts`, or one half of it."""


class _Canary:
    def __init__(self, config: CanaryConfig, step: int, at: float, outcome: str) -> None:
        """step: -1 after it was taken back. at: when that began, in seconds since 1970."""
        self.config, self.step, self.at, self.outcome = config, step, at, outcome
        self.last: dict[str, CanaryReport] = {}  # by gateway
        self.sum = [0.0] * 2 * _WIDTH
        self.begin = self.sum  # at the begin of the step
        self.looks = deque[Counts](maxlen=_WINDOW)

    @property
    def state(self) -> CanaryState:
        return CanaryState(0.0 if self.step < 0 else self.config.steps[self.step], self.outcome)

    def hear(self, gateway: str, report: CanaryReport) -> None:
        before = self.last.get(gateway, report)
        if before.others == report.others:  # else these counts are not those before, and some of them more
            counted = zip(self.sum, report.counts, before.counts, strict=True)
            self.sum = [total + now - last for total, now, last in counted]
        self.last[gateway] = report

    def look(self, now: float) -> str:
        """What to say if something changed: a fault takes it back, else it may go a step on."""
        self.looks.append(self.sum)
        percent = self.config.steps[self.step]
        for before in (self.begin, self.looks[0]):
            found = [total - last for total, last in zip(self.sum, before, strict=True)]
            if why := fault(self.config, found, self.sum[_WIDTH:]):
                self.step, self.outcome = -1, f"taken back from {percent:g} %: {why}"
                return self.outcome
        if now - self.at < self.config.step_s or self.sum[0] - self.begin[0] < self.config.min_requests:
            return ""
        self.at, self.begin = now, self.sum
        if self.step + 1 == len(self.config.steps):
            self.outcome = f"has passed, at {percent:g} %"
            return self.outcome
        self.step += 1
        return f"goes on to {self.config.steps[self.step]:g} %"


class Canaries:
    """Of one application."""

    def __init__(
        self, database: sqlite3.Connection, changed: Callable[[], None], note: Callable[[str], None]
    ) -> None:
        """changed: called when gateways have to hear something. note: with a sentence for the history."""
        self._database, self._changed, self._note = database, changed, note
        self._canaries: dict[str, _Canary] = {}
        database.execute(_TABLE)

    def hear(self, gateway: str, reports: Sequence[CanaryReport]) -> None:
        """Takes over what a gateway has counted; a canary that is new begins."""
        for report in reports:
            if (canary := self._canaries.get(report.key)) is None:
                canary = self._canaries[report.key] = self._begin(report)
                self._changed()
            canary.hear(gateway, report)

    def states(self) -> Mapping[str, CanaryState]:
        return {key: canary.state for key, canary in self._canaries.items()}

    async def watch(self) -> None:
        """Looks at all of them, for ever."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look(time.time())

    def look(self, now: float) -> None:
        """Goes on with each, or takes it back."""
        for key, canary in self._canaries.items():
            if not canary.outcome and (what := canary.look(now)):
                log.warning("The canary %s %s", key.split()[0], what)
                self._changed()
                self._store(key, canary, f"canary {key.split()[0]} {what}")

    def _begin(self, report: CanaryReport) -> _Canary:
        config = CanaryConfig.model_validate(report.config)
        rows = self._database.execute("SELECT step, at, outcome FROM canary WHERE key = ?", (report.key,))
        if (known := next(rows, None)) is not None:
            return _Canary(config, *known)
        canary = _Canary(config, 0, time.time(), "")
        self._store(report.key, canary)
        return canary

    def _store(self, key: str, canary: _Canary, what: str = "") -> None:
        row = key, canary.step, canary.at, canary.outcome
        try:
            self._database.execute("INSERT OR REPLACE INTO canary VALUES (?, ?, ?, ?)", row)
            old = "SELECT key FROM canary ORDER BY at DESC LIMIT -1 OFFSET ?"
            self._database.execute(f"DELETE FROM canary WHERE key IN ({old})", (_KEEP,))
            if what:
                self._note(what)
        except sqlite3.Error:  # as of a full disk: what gateways do does not depend on it
            log.exception("This is not stored: the next control begins from what was before")


def fault(config: CanaryConfig, found: Counts, others: Counts) -> str:
    """Why the canary is worse than its bounds, for sure enough; "" if it is not.

    found: in a window. others: of the other versions since the canary began, for a window without them.
    """
    mine, beside = found[:_WIDTH], found[_WIDTH:]
    if beside[0] < config.min_requests:
        beside = others
    (count, failed), (count_beside, failed_beside) = mine[:2], beside[:2]
    rate = failed_beside / count_beside if count_beside else 0.0
    expected = count * (rate + config.max_error_rate)
    if failed > expected + 3 * math.sqrt(expected) + 1:  # not by chance, which is a Poisson distribution
        return (
            f"{failed:g} of {count:g} requests failed, beside {rate:.1%} of the others'; the bound is "
            f"{config.max_error_rate:.1%} more."
        )
    begin = 2
    for what, latency, bound in (
        ("time to the first token", FIRST_TOKEN, config.max_ttft_ratio),
        ("inter-token latency", INTER_TOKEN, config.max_itl_ratio),
    ):
        end = begin + len(latency.bounds) + 1
        ours, theirs = (_logarithms(latency.bounds, one[begin:end]) for one in (mine, beside))
        begin = end + 1  # behind the sum
        if min(ours[0], theirs[0]) < _LEAST_STREAMS:
            break
        ratio, unsure = ours[1] - theirs[1], 2 * math.sqrt(ours[2] / ours[0] + theirs[2] / theirs[0])
        if ratio - unsure > math.log(bound):
            return f"its {what} is {math.exp(ratio):.1f} times that of the others; the bound is {bound:g}."
    return ""


def _logarithms(bounds: Sequence[float], counts: Sequence[float]) -> tuple[float, float, float]:
    """Of a histogram: how many, and the mean and variance of their logarithms."""
    ends = [bounds[0] / 2, *bounds, bounds[-1] * 2]
    middles = [(math.log(low) + math.log(high)) / 2 for low, high in pairwise(ends)]
    count = sum(counts)
    mean = sum(n * x for n, x in zip(counts, middles, strict=True)) / (count or 1)
    spread = sum(n * (x - mean) ** 2 for n, x in zip(counts, middles, strict=True)) / (count or 1)
    return count, mean, spread + _SPREAD
