"""What a job has done so far and in all: for the terminal, `--report` and `penstock batch status`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.data.execution.retry import is_lasting
from penstock.data.job.protocol import RowCompleted
from penstock.data.journal.index import Index

_SHOWN_CHARS = 300


class Prices(msgspec.Struct, frozen=True):
    """Per million tokens. cached: of prompt tokens in the engine's cache; None for the price of `input`."""

    input: float = 0.0
    output: float = 0.0
    cached: float | None = None

    def cost(self, prompt: int, cached: int, generated: int) -> float:
        of_cached = self.input if self.cached is None else self.cached
        return ((prompt - cached) * self.input + cached * of_cached + generated * self.output) / 1e6


class ErrorKind(msgspec.Struct, frozen=True):
    """Failed rows whose messages differ by values only: how many, the first of them, and its message."""

    code: str
    count: int
    row: int
    message: str


class JobReport(msgspec.Struct, frozen=True, kw_only=True):
    """A job over all its runs; fields that begin with `run_` are of the last one.

    ended: "finished", or why it stopped. errors: failed rows by code. error_kinds: by code and message, the
    most frequent first. retry_may_help: False if every failed row would fail again. waiting: rows not
    completed; None if the total is unknown.
    Units: seconds; tokens as the engines counted them. run_s: the whole run; run_work_s: from the first ready
    engine to the last completed row, the time that the speeds refer to.
    """

    output: str
    ended: str
    rows: int | None = None
    ok: int = 0
    failed: int = 0
    skipped: int = 0
    waiting: int | None = None
    reused: int = 0
    errors: dict[str, int] = {}
    error_kinds: list[ErrorKind] = []
    retry_may_help: bool = True
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    cost: float | None = None
    run_s: float = 0.0
    run_work_s: float = 0.0
    run_rows: int = 0
    run_prompt_tokens: int = 0
    run_generated_tokens: int = 0
    run_rows_per_s: float = 0.0
    run_generated_tokens_per_s: float = 0.0
    run_engine_deaths: int = 0
    run_retries: int = 0
    files: list[str] = []


@dataclass(slots=True)
class RunStats:
    """Counts of one run. total: rows of the input, if known. before: rows completed in earlier runs, of which
    failed_before had failed.
    """

    total: int | None = None
    before: int = 0
    failed_before: int = 0
    ok: int = 0
    failed: int = 0
    skipped: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    retries: int = 0
    worker_deaths: int = 0
    running: int = 0
    errors: Counter[str] = field(default_factory=Counter[str])
    started: float = field(default_factory=time.monotonic)
    working_since: float | None = None
    worked_until: float = 0.0

    def ready(self) -> None:
        """A worker can take rows. Speed is measured from the first call on."""
        self.working_since = self.working_since or time.monotonic()

    def add(self, done: RowCompleted) -> None:
        self.worked_until = time.monotonic()
        self.ok += done.state == "ok"
        self.failed += done.state == "failed"
        self.skipped += done.state == "skipped"
        self.prompt_tokens += done.prompt_tokens
        self.cached_tokens += done.cached_tokens
        self.generated_tokens += done.output_tokens
        self.retries += max(0, done.attempts - 1)
        if done.code is not None:
            self.errors[done.code] += 1

    @property
    def completed(self) -> int:
        """Rows completed in this run."""
        return self.ok + self.failed + self.skipped

    @property
    def worked_s(self) -> float:
        """From the first ready worker to the last completed row."""
        return max(1e-9, self.worked_until - (self.working_since or self.started))

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.generated_tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop although rows are left; None for never. Counted over one run.

    Units: seconds; tokens of prompts and answers together; failed rows. grace_s: for running rows, after a
    stop; None until they end, or a second request to stop.
    """

    seconds: float | None = None
    tokens: int | None = None
    failures: int | None = None
    grace_s: float | None = 30.0

    def reached(self, stats: RunStats) -> str | None:
        """Which limit on tokens or failures is reached, as a reason to stop."""
        if self.tokens is not None and stats.tokens >= self.tokens:
            return f"{BUDGET}: {stats.tokens:,} tokens, the limit is {self.tokens:,}"
        if self.failures is not None and stats.failed >= self.failures:
            return f"{BUDGET}: {stats.failed:,} rows failed, the limit is {self.failures:,}"
        return None


BUDGET = "budget"
"""Prefix of the stop reasons that are limits."""


class ProgressListener:
    """Called on the job's event loop, so its methods must not block. This one does nothing."""

    def on_start(self, output: str, inputs: Sequence[str], rows: int | None) -> None:
        """The input was found: its files, and the number of its rows if they were counted."""

    def on_phase(self, worker: str, phase: str) -> None:
        """A worker entered a phase of its start; the last ones are "ready" and "gone"."""

    def on_tick(self, stats: RunStats) -> None:
        """Called several times a second."""

    def on_writing(self) -> None:
        """Every row is completed: the output is written now."""

    def on_message(self, text: str) -> None:
        """A sentence for the user."""


def report(
    output: str, ended: str, index: Index, stats: RunStats, files: list[str], prices: Prices | None
) -> JobReport:
    """The report of a job with this index of its journal."""
    counts = index.counts()
    prompt, cached, generated = index.tokens
    counted = Counter(index.error_kinds.values())
    first = {kind: row for row, kind in sorted(index.error_kinds.items(), reverse=True)}
    kinds: list[ErrorKind] = []
    retry_may_help = not counted
    for kind, count in counted.most_common():
        if (failure := index.outcome(first[kind]).failure) is not None:
            kinds.append(ErrorKind(kind[0], count, first[kind], failure.message[:_SHOWN_CHARS]))
            # A row that has no status would fail again where no request can be made of it.
            same_again = failure.stage != "engine" if failure.status is None else is_lasting(failure.status)
            retry_may_help |= not same_again
    return JobReport(
        output=output,
        ended=ended,
        rows=stats.total,
        ok=counts["ok"],
        failed=counts["failed"],
        skipped=counts["skipped"],
        waiting=None if stats.total is None else stats.total - sum(counts.values()),
        reused=index.reused,
        errors=dict(Counter(code for code, _ in index.error_kinds.values()).most_common()),
        error_kinds=kinds,
        retry_may_help=retry_may_help,
        prompt_tokens=prompt,
        cached_tokens=cached,
        generated_tokens=generated,
        cost=prices.cost(prompt, cached, generated) if prices is not None else None,
        run_s=round(time.monotonic() - stats.started, 3),
        run_work_s=round(stats.worked_s, 3) if stats.completed else 0.0,
        run_rows=stats.completed,
        run_prompt_tokens=stats.prompt_tokens,
        run_generated_tokens=stats.generated_tokens,
        run_rows_per_s=round(stats.completed / stats.worked_s, 3),
        run_generated_tokens_per_s=round(stats.generated_tokens / stats.worked_s, 3),
        run_engine_deaths=stats.worker_deaths,
        run_retries=stats.retries,
        files=files,
    )
