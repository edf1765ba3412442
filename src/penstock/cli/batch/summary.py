"""The report of a batch job as lines for people."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.data.job.manifest import FINISHED
from penstock.data.job.report import JobReport

_MOST_KINDS = 8


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
    for kind in report.error_kinds[:_MOST_KINDS]:
        yield f"           {kind.count:,} x {kind.code}: {kind.message}"
    if (more := sum(kind.count for kind in report.error_kinds[_MOST_KINDS:])) > 0:
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
