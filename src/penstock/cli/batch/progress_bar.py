"""What the terminal shows while a batch job runs: a bar and its speed; lines where nobody looks."""

import time
from collections import deque
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from penstock.data.job.report import ProgressListener, RunStats

_RECENT_S = 10.0
_LINE_S = 10.0
_MOST_KINDS = 3


class Meter(ProgressListener):
    """Progress on `out`. `bar`: a context, in which it is drawn."""

    def __init__(self, out: TextIO) -> None:
        self._console = Console(file=out, highlight=False)
        self._live = self._console.is_terminal
        self.bar = Progress(
            BarColumn(bar_width=24),
            TextColumn("{task.fields[seen]}"),
            console=self._console,
            disable=not self._live,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task: TaskID | None = None
        self._pace = Pace()
        self._lined = time.monotonic()
        self._phases: dict[str, str] = {}

    def on_start(self, output: str, inputs: Sequence[str], rows: int | None) -> None:
        what = f"'{inputs[0]}'" if len(inputs) == 1 else f"{len(inputs)} files"
        counted = "" if rows is None else f", {rows:,} rows"
        self.on_message(f"Input: {what}{counted}. Output: '{output}'.")
        if self._live:
            self._task = self.bar.add_task("", total=rows, seen="starting")

    def on_phase(self, worker: str, phase: str) -> None:
        if self._phases.get(worker) != phase:
            self._phases[worker] = phase
            if phase != "gone":
                self.on_message(f"{worker}: {phase}")

    def on_tick(self, stats: RunStats) -> None:
        now = time.monotonic()
        self._pace.note(now, stats)
        if self._task is not None:
            done = stats.before + stats.completed
            seen = self._pace.text(stats)
            self.bar.update(self._task, total=stats.total, completed=done, seen=seen)
        elif stats.completed and now - self._lined > _LINE_S:
            self._lined = now
            self.on_message(self._pace.text(stats))

    def on_message(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


class Pace:
    """Speed of the last seconds, and what follows from it."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()

    def note(self, now: float, stats: RunStats) -> None:
        self._seen.append((now, stats.completed, stats.generated_tokens))
        while self._seen[0][0] < now - _RECENT_S:
            self._seen.popleft()

    def text(self, stats: RunStats) -> str:
        rows_per_s, tokens_per_s = self._speed()
        done = stats.before + stats.completed
        of = f" of {stats.total:,}" if stats.total is not None else ""
        parts = [f"{done:,}{of} rows", f"{rows_per_s:,.1f} rows/s"]
        if stats.tokens:
            parts.append(f"{tokens_per_s:,.0f} tok/s")
        if stats.total is not None and rows_per_s:
            parts.append(f"{_clock((stats.total - done) / rows_per_s)} left")
        if stats.errors:
            most = stats.errors.most_common(_MOST_KINDS)
            parts.append("failed: " + ", ".join(f"{count:,} {kind}" for kind, count in most))
        return " · ".join(parts)

    def _speed(self) -> tuple[float, float]:
        if len(self._seen) < 2:
            return 0.0, 0.0
        (then, rows, tokens), (now, more_rows, more_tokens) = self._seen[0], self._seen[-1]
        seconds = max(1e-9, now - then)
        return (more_rows - rows) / seconds, (more_tokens - tokens) / seconds


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
