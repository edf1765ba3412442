"""Figures as a terminal shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.bench.run.figures import BUSY, LATE_S, FailureGroup, Figures, Spread
from penstock.bench.run.session import Result

_WIDTH = 110
_SPREAD = ("", "mean", "p50", "p90", "p95", "p99", "max")


def print_tables(result: Result, out: TextIO) -> None:
    """A table for each level, and one that compares them."""
    console = Console(file=out, highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    for figures in result.figures:
        console.print()
        console.print(Text(title(figures), style="bold"))
        for line in summary(figures, result):
            console.print(line, markup=False, soft_wrap=True)
        console.print(_table(latencies(figures)))
        console.print(Text(f"Client     {client(figures)}", style="dim"), soft_wrap=True)
        for line in remarks(figures):
            console.print(Text(line, style="yellow"), soft_wrap=True)
    if len(result.figures) > 1:
        console.print()
        console.print(_table(comparison(result.figures)))


def title(figures: Figures) -> str:
    """What the load was, and how long it was measured."""
    early = ", stopped early" if figures.stopped else ""
    return f"{figures.level.title}, {figures.seconds:.1f} s measured{early}"


def summary(figures: Figures, result: Result) -> list[str]:
    """Counts and rates, a line each."""
    unfinished = f", {figures.unfinished} unfinished" if figures.unfinished else ""
    per_event = f"{figures.tokens_per_event:.2f} tokens per event"
    if figures.counted_by == "events":
        per_event = "events counted as tokens: the service gave no usage"
    counts = f"{figures.good} good, {figures.failed} failed{unfinished}"
    tokens = f"{figures.output_tokens_per_s:,.1f}/s out, {figures.input_tokens_per_s:,.1f}/s in"
    lines = [f"Requests   {counts}; {figures.requests_per_s:.2f}/s", f"Tokens     {tokens}; {per_event}"]
    if figures.cached is not None:
        lines.append(f"Cached     {figures.cached:.1%} of prompt tokens, by the service's word")
    if figures.goodput is not None and result.settings.slo is not None:
        share = (figures.kept or 0) / max(1, figures.good + figures.failed)
        lines.append(f"Goodput    {figures.goodput:.2f}/s kept {result.settings.slo.text} ({share:.1%})")
    return lines + [f"Failed     {_failure(failure)}" for failure in figures.failures]


def _failure(failure: FailureGroup) -> str:
    example = f": {failure.example}" if failure.example else ""
    when = "in the answer" if failure.begun else "before any text"
    return f"{failure.count} x {failure.kind} {when}{example}"


def remarks(figures: Figures) -> list[str]:
    """What stands between the figures and the service: the client, when it was in the way."""
    strain = figures.strain
    workers = f"{strain.workers} worker{'s' if strain.workers > 1 else ''}"
    found: list[str] = []
    if strain.cpu > BUSY:
        found.append(
            f"The client was the bottleneck: one of its {workers} used {strain.cpu:.0%} of a core. "
            "Use more --workers, or a larger machine."
        )
    lag_s = strain.lag_s.p99 if strain.lag_s else 0.0
    if lag_s > LATE_S:
        found.append(
            f"The client waited for a core: its event loop was {1e3 * lag_s:.1f} ms late (p99), as latencies "
            f"may be; the machine was {strain.machine_cpu:.0%} busy. Run the client on another one."
        )
    return found


def client(figures: Figures) -> str:
    """The client's own load; always shown."""
    strain = figures.strain
    parts = [f"{strain.workers} workers" if strain.workers > 1 else "1 worker", f"{strain.cpu:.0%} of a core"]
    if strain.lag_s:
        parts.append(
            f"loop late by {1e3 * strain.lag_s.p50:.1f} ms (p50), {1e3 * strain.lag_s.p99:.1f} ms (p99)"
        )
    if strain.late_s:
        parts.append(
            f"sent late by {1e3 * strain.late_s.p50:.1f} ms (p50), {1e3 * strain.late_s.p99:.1f} ms (p99)"
        )
    return ", ".join([*parts, f"machine {strain.machine_cpu:.0%} busy"])


def latencies(figures: Figures) -> list[Sequence[str]]:
    """The names of columns, and a row for each latency and count of tokens."""
    turns = " first turn" if figures.ttft_later_turns else ""
    named = [
        (f"TTFT{turns} ms", figures.ttft, 1e3),
        ("TTFT later turns ms", figures.ttft_later_turns, 1e3),
        ("ITL ms", figures.itl, 1e3),
        ("TPOT ms", figures.tpot, 1e3),
        ("E2E ms", figures.e2e, 1e3),
        ("prompt tokens", figures.prompt_tokens, 1.0),
        ("answer tokens", figures.completion_tokens, 1.0),
    ]
    return [_SPREAD, *([name, *_cells(spread, scale)] for name, spread, scale in named if spread)]


def _cells(spread: Spread, scale: float) -> list[str]:
    values = (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99, spread.max)
    return [number(value * scale) for value in values]


def number(value: float) -> str:
    """Three digits or so, whatever the size."""
    if value >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def comparison(levels: Sequence[Figures]) -> list[Sequence[str]]:
    """The names of columns, and a row for each level; with goodput when there is one."""
    head = ["load", "requests/s", "tok/s out"]
    head += ["TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "TPOT p50", "failed"]
    with_goodput = levels[0].goodput is not None
    return [[*head, "goodput/s"] if with_goodput else head, *map(_compared, levels)]


def _compared(figures: Figures) -> list[str]:
    row = [
        figures.level.title,
        f"{figures.requests_per_s:.2f}",
        f"{figures.output_tokens_per_s:,.0f}",
        *(_ms(spread, name) for spread in (figures.ttft, figures.itl) for name in ("p50", "p99")),
        _ms(figures.tpot, "p50"),
        str(figures.failed),
    ]
    return row if figures.goodput is None else [*row, f"{figures.goodput:.2f}"]


def _table(lines: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for i, name in enumerate(lines[0]):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for line in lines[1:]:
        table.add_row(*line)
    return table


def _ms(spread: Spread | None, name: str) -> str:
    return "-" if spread is None else number(1e3 * getattr(spread, name))
