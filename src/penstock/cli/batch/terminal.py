"""What the terminal shows of a batch job: a bar and its speed, lines where nobody looks, and the report."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from penstock.data.job.manifest import FINISHED
from penstock.data.job.report import JobReport, ProgressListener, RunStats
from penstock.data.results.columns import ANSWERS, result_schema
from penstock.data.rows.request import Task
from penstock.data.storage.source import find_input

_RECENT_S = 10.0
_LINE_S = 10.0
_MOST_ROWS, _MOST_CHARS = 20, 500
_SHOWN = {*ANSWERS.values(), "error"}
_BESIDE_THE_ANSWER = {name for kind in ANSWERS for name in result_schema(Task(kind)).names} - _SHOWN
_MOST_KINDS, _MOST_KINDS_AT_END = 3, 8


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
        (then, rows, tokens), (now, more_rows, more_tokens) = self._seen[0], self._seen[-1]
        seconds = max(1e-9, now - then)
        return (more_rows - rows) / seconds, (more_tokens - tokens) / seconds


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def table_of(output: str) -> Iterator[Table | str]:
    """The first rows of a finished output, one line each: the user's columns and the answer."""
    rows = find_input([output]).rows()
    first = [row.fields or {} for row in islice(rows, _MOST_ROWS)]
    names = [name for name in dict.fromkeys(chain(*first)) if name not in _BESIDE_THE_ANSWER]
    table = Table(*names, box=SIMPLE_HEAD)
    for fields in first:
        values = ["" if (value := fields.get(name)) is None else str(value) for name in names]
        cells = [" ".join(value[:_MOST_CHARS].split()) for value in values]
        table.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in cells))
    yield table
    if more := sum(1 for _ in rows):
        yield f"And {more:,} more rows."


def shown(report: JobReport, *, whole: bool = True) -> list[str]:
    """whole: with what the last run did; without, the state of the job alone."""
    return [*_rows(report), *(_run(report) if whole else ()), *_next(report)]


def _rows(report: JobReport) -> Iterator[str]:
    yield f"Job:       {report.ended}"
    counts = [f"{report.ok:,} ok", f"{report.failed:,} failed"]
    if report.skipped:
        counts.append(f"{report.skipped:,} skipped")
    if report.waiting:
        counts.append(f"{report.waiting:,} not run yet")
    of = f" of {report.rows:,}" if report.rows is not None else ""
    yield f"Rows:      {', '.join(counts)}{of}"
    for kind in report.error_kinds[:_MOST_KINDS_AT_END]:
        yield f"           {kind.count:,} x {kind.code}: {kind.message}"
    if (more := sum(kind.count for kind in report.error_kinds[_MOST_KINDS_AT_END:])) > 0:
        yield f"           {more:,} for other reasons"
    if report.reused:
        yield f"Reused:    {report.reused:,} rows have the answer of an identical request"
    cached = f" ({report.cached_tokens:,} of them cached)" if report.cached_tokens else ""
    yield f"Tokens:    {report.prompt_tokens:,} in prompts{cached}, {report.generated_tokens:,} generated"
    if report.cost is not None:
        yield f"Cost:      {report.cost:,.4f}"


def _run(report: JobReport) -> Iterator[str]:
    speed = f"{report.run_rows_per_s:,.1f} rows/s, {report.run_generated_tokens_per_s:,.0f} tok/s generated"
    seconds = f"{report.run_work_s:,.1f} s of {report.run_s:,.1f} s"
    yield f"This run:  {report.run_rows:,} rows in {seconds}, {speed}"
    if report.run_retries or report.run_engine_deaths:
        yield f"           {report.run_retries:,} retries, {report.run_engine_deaths:,} workers died"


def _next(report: JobReport) -> Iterator[str]:
    for file in report.files:
        yield f"Written:   {file}"
    if report.ended not in (FINISHED, "running"):
        yield f"Resume:    penstock batch resume {report.output}"
    elif report.ended == FINISHED and report.failed and report.retry_may_help:
        yield f"Try again: penstock batch resume {report.output} --retry-failed"
