"""From a record to Markdown tables, which are as readable in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from benchmarks.contestants import CONTESTANTS
from benchmarks.processes import KINDS
from benchmarks.record import Record, Run, Spread, Start

BASELINE = "vllm"
_NOISY_CORES = 0.1
_TITLES = {contestant.name: contestant.title for contestant in CONTESTANTS}

Row = Sequence[str]


def render(record: Record) -> str:
    """Both tables and what must be known to read them."""
    parts = [_speed(record.runs), _life(record.starts), "\n".join(_remarks(record))]
    return "\n\n".join(part for part in parts if part)


def markdown(head: Row, rows: Iterable[Row]) -> str:
    """A Markdown table: the first column to the left, numbers to the right."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip_longest(*lines, fillvalue="")]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join("| " + " | ".join(_cells(line, widths)) + " |" for line in [head, rule, *lines[1:]])


def _cells(line: Row, widths: Sequence[int]) -> list[str]:
    return [
        line[0].ljust(widths[0]),
        *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
    ]


def _speed(runs: Sequence[Run]) -> str:
    head = [
        "contestant (executor)",
        "streams",
        "tok/s",
        "min-max",
        "of vllm",
        "TTFT p50",
        "p99",
        "ITL p50",
        "p99",
    ]
    head += [f"CPU {kind}" for kind in KINDS] + ["failed"]
    groups: dict[tuple[int, str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.streams, run.executor, run.contestant), []).append(run)
    rows = [
        _speed_row(group, groups.get((*key[:2], BASELINE)))
        for key, group in sorted(groups.items(), key=_place)
    ]
    return markdown(head, rows) if rows else ""


def _place(item: tuple[tuple[int, str, str], list[Run]]) -> tuple[int, str, int]:
    streams, executor, contestant = item[0]
    return streams, executor, list(_TITLES).index(contestant)


def _speed_row(runs: Sequence[Run], baseline: Sequence[Run] | None) -> Row:
    first = runs[0]
    speed = Spread.of(run.tokens_per_s for run in runs)
    row = [f"{_TITLES[first.contestant]} ({first.executor})", str(first.streams)]
    row += [f"{speed.middle:,.0f}", f"{speed.low:,.0f}-{speed.high:,.0f}", _ratio(speed, baseline)]
    for name, percentile in (("ttft_ms", "p50"), ("ttft_ms", "p99"), ("itl_ms", "p50"), ("itl_ms", "p99")):
        row.append(f"{Spread.of(run.figures[name][percentile] for run in runs).middle:.1f}")
    for kind in KINDS:
        row.append(f"{Spread.of(1e3 * run.cpu_s[kind] / (run.tokens_all or 1) for run in runs).middle:.3f}")
    failed = sum(sum(run.failures.values()) for run in runs)
    return [*row, f"{failed} (!)" if failed else "0"]


def _ratio(speed: Spread, baseline: Sequence[Run] | None) -> str:
    if not baseline:
        return "-"
    middle = Spread.of(run.tokens_per_s for run in baseline).middle
    return f"{speed.middle / middle:.2f}" if middle else "-"


def _life(starts: Sequence[Start]) -> str:
    head = ["contestant (executor)", "first token s", "min-max", "memory MiB", "stop s", "left over"]
    groups: dict[tuple[str, str], list[Start]] = {}
    for start in starts:
        if start.first_token_s is not None:
            groups.setdefault((start.contestant, start.executor), []).append(start)
    rows: list[Row] = []
    for (contestant, executor), group in groups.items():
        first = Spread.of(start.first_token_s or 0 for start in group)
        row = [
            f"{_TITLES[contestant]} ({executor})",
            f"{first.middle:.1f}",
            f"{first.low:.1f}-{first.high:.1f}",
        ]
        row += [f"{Spread.of(start.memory_mib or 0 for start in group).middle:,.0f}"]
        row += [f"{Spread.of(start.stop_s or 0 for start in group).middle:.1f}"]
        rows.append([*row, str(max(len(start.left_over) for start in group))])
    return markdown(head, rows) if rows else ""


def _remarks(record: Record) -> list[str]:
    remarks = ["TTFT and ITL in ms; CPU in seconds per 1,000 tokens by kind of process; medians over rounds."]
    for start in record.starts:
        if start.failure:
            whose = f"{_TITLES[start.contestant]} ({start.executor}), round {start.round}"
            remarks.append(f"Failed: {whose}: {start.failure}")
    for run in record.runs:
        whose = f"{_TITLES[run.contestant]} ({run.executor}), {run.streams} streams, round {run.round}"
        if run.failures:
            remarks.append(f"Requests failed: {whose}: {run.failures}, statuses {run.figures['statuses']}.")
        if run.foreign_cores > _NOISY_CORES:
            remarks.append(f"Noisy: {whose}: other processes took {run.foreign_cores:.1f} cores.")
    return remarks
