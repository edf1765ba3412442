"""Figures as a terminal shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.bench.run.figures import FailureGroup, Figures, Spread
from penstock.bench.run.session import Result

_WIDTH = 110
_SPREAD = ("mean", "p50", "p90", "p95", "p99", "max")


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
    early = ", stopped early" if figures.stopped_early else ""
    return f"{figures.load}, {figures.seconds:.1f} s measured{early}"


def summary(figures: Figures, result: Result) -> list[str]:
    """Counts and rates, a line each."""
    requests = figures.requests
    unfinished = f", {requests.unfinished} unfinished" if requests.unfinished else ""
    per_event = f"{figures.tokens_per_event:.2f} tokens per event"
    if figures.tokens_counted_by == "events":
        per_event = "events counted as tokens: the service gave no usage"
    counts = f"{requests.good} good, {requests.failed} failed{unfinished}"
    tokens = f"{figures.output_tokens_per_s:,.1f}/s out, {figures.input_tokens_per_s:,.1f}/s in"
    lines = [f"Requests   {counts}; {figures.requests_per_s:.2f}/s", f"Tokens     {tokens}; {per_event}"]
    if figures.cached_share is not None:
        lines.append(f"Cached     {figures.cached_share:.1%} of prompt tokens, by the service's word")
    if figures.goodput_per_s is not None and result.settings.slo is not None:
        share = (figures.kept_slo or 0) / max(1, requests.good + requests.failed)
        kept = f"{figures.goodput_per_s:.2f}/s kept {result.settings.slo.text}"
        lines.append(f"Goodput    {kept} ({share:.1%})")
    return lines + [f"Failed     {_failure(failure)}" for failure in figures.failures]


def _failure(failure: FailureGroup) -> str:
    example = f": {failure.example}" if failure.example else ""
    when = "in the answer" if failure.begun else "before any text"
    return f"{failure.count} x {failure.kind} {when}{example}"


def remarks(figures: Figures) -> list[str]:
    """What stands between the figures and the service: the client, when it was in the way."""
    strain = figures.client
    found: list[str] = []
    if strain.was_bottleneck:
        found.append(
            f"The client was the bottleneck: one of its {_workers(figures)} used {strain.cpu:.0%} of a core. "
            "Use more --workers, or a larger machine."
        )
    if strain.waited_for_a_core and strain.loop_late_ms:
        found.append(
            f"The client waited for a core: its event loop was {strain.loop_late_ms.p99:.1f} ms late (p99), "
            f"as latencies may be; the machine was {strain.machine_cpu:.0%} busy. Run the client on another "
            "one."
        )
    return found


def client(figures: Figures) -> str:
    """The client's own load; always shown."""
    strain = figures.client
    late = {"loop": strain.loop_late_ms, "sent": strain.sent_late_ms}
    parts = [
        f"{name} late by {ms.p50:.1f} ms (p50), {ms.p99:.1f} ms (p99)" for name, ms in late.items() if ms
    ]
    first = [_workers(figures), f"{strain.cpu:.0%} of a core"]
    return ", ".join([*first, *parts, f"machine {strain.machine_cpu:.0%} busy"])


def _workers(figures: Figures) -> str:
    return f"{figures.client.workers} worker{'s' if figures.client.workers > 1 else ''}"


def latencies(figures: Figures) -> list[Sequence[str]]:
    """The names of columns, and a row for each latency and count of tokens."""
    turns = " first turn" if figures.ttft_later_turns_ms else ""
    named = {
        f"TTFT{turns} ms": figures.ttft_ms,
        "TTFT later turns ms": figures.ttft_later_turns_ms,
        "ITL ms": figures.itl_ms,
        "TPOT ms": figures.tpot_ms,
        "E2E ms": figures.e2e_ms,
        "prompt tokens": figures.prompt_tokens,
        "answer tokens": figures.completion_tokens,
    }
    cells = {name: [_cell(spread, column) for column in _SPREAD] for name, spread in named.items() if spread}
    return [("", *_SPREAD), *([name, *row] for name, row in cells.items())]


def number(value: float) -> str:
    """Three digits or so, whatever the size."""
    if value >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def comparison(levels: Sequence[Figures]) -> list[Sequence[str]]:
    """The names of columns, and a row for each level; with goodput when there is one."""
    head = ["load", "requests/s", "tok/s out"]
    head += ["TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "TPOT p50", "failed"]
    with_goodput = levels[0].goodput_per_s is not None
    return [[*head, "goodput/s"] if with_goodput else head, *map(_compared, levels)]


def _compared(figures: Figures) -> list[str]:
    row = [
        figures.load,
        f"{figures.requests_per_s:.2f}",
        f"{figures.output_tokens_per_s:,.0f}",
        *(_cell(spread, name) for spread in (figures.ttft_ms, figures.itl_ms) for name in ("p50", "p99")),
        _cell(figures.tpot_ms, "p50"),
        str(figures.requests.failed),
    ]
    return row if figures.goodput_per_s is None else [*row, f"{figures.goodput_per_s:.2f}"]


def _table(lines: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for i, name in enumerate(lines[0]):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for line in lines[1:]:
        table.add_row(*line)
    return table


def _cell(spread: Spread | None, name: str) -> str:
    return "-" if spread is None else number(getattr(spread, name))
