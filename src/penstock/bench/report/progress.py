"""What the terminal shows while a run goes on: a bar for each level; lines where nobody looks."""

import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from penstock.bench.load.arrivals import Level
from penstock.bench.load.outcome import UNFINISHED, RequestOutcome
from penstock.bench.load.workers import Measured
from penstock.bench.run.figures import Figures
from penstock.bench.run.session import Result, Watcher

_RECENT_S = 2.0


class Screen(Watcher):
    """Progress on `out`. `bar`: a context, in which it is drawn."""

    def __init__(self, out: TextIO) -> None:
        self._console = Console(file=out, highlight=False)
        self._live = self._console.is_terminal
        self.bar = Progress(
            TextColumn("{task.description:>14}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[seen]}"),
            console=self._console,
            disable=not self._live,
        )
        self._task = TaskID(0)
        self._tally = Tally()

    def found(self, result: Result) -> None:
        form = result.work.form
        self._say(f"{form.model} at {result.settings.target.url}{form.path}")
        for note in result.notes:
            self._say(f"Note: {note}")

    def begin(self, level: Level) -> None:
        self._tally = Tally()
        if self._live:
            self._task = self.bar.add_task(level.title, total=1.0, seen="")
        else:
            self._say(f"{level.title}: begun")

    def look(self, measured: Measured) -> None:
        if self._live:
            self._tally.take(measured.outcomes)
            share = _share(measured.level, time.monotonic() - measured.start, self._tally.counted)
            seen = self._tally.text(time.monotonic(), measured.open)
            self.bar.update(self._task, completed=share, seen=seen)

    def end(self, figures: Figures) -> None:
        counts, speed = figures.requests, figures.output_tokens_per_s
        seen = f"{counts.good} good, {counts.failed} failed, {speed:,.0f} tok/s"
        if self._live:
            self.bar.update(self._task, completed=1.0, seen=seen)
            self.bar.stop_task(self._task)
        else:
            self._say(f"{figures.load}: {seen}")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


class Tally:
    """Running counts over a level's outcomes, each looked at once."""

    def __init__(self) -> None:
        self.good = self.failed = self.counted = 0
        self._seen = 0
        self._recent: list[RequestOutcome] = []

    def take(self, outcomes: list[RequestOutcome]) -> None:
        for outcome in outcomes[self._seen :]:
            self.good += outcome.good
            self.failed += not outcome.good and outcome.error != UNFINISHED
            self.counted += outcome.counted
            if outcome.good:
                self._recent.append(outcome)
        self._seen = len(outcomes)

    def text(self, now: float, open_: int) -> str:
        self._recent = [outcome for outcome in self._recent if outcome.ended > now - _RECENT_S]
        parts = [f"{self.good} good", f"{self.failed} failed", f"{open_} open"]
        if self._recent:
            ttfts = sorted(outcome.times()[0] - outcome.due for outcome in self._recent)
            rate = sum(outcome.tokens() for outcome in self._recent) / _RECENT_S
            parts += [f"{rate:,.0f} tok/s", f"TTFT {1e3 * ttfts[len(ttfts) // 2]:,.0f} ms"]
        return " · ".join(parts)


def _share(level: Level, elapsed_s: float, counted: int) -> float:
    """How much of the level is done, 0 to 1; a trace without an end in time tells nothing."""
    if level.limit_s is not None:
        return min(1.0, max(0.0, elapsed_s) / level.limit_s)
    return min(1.0, counted / level.conversations) if level.conversations else 0.0
