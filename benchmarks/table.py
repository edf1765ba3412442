"""From a record to Markdown tables, which are as readable in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from benchmarks.contestants import CONTESTANTS
from benchmarks.processes import KINDS
from benchmarks.record import Record, Run, Spread, Start

BASELINE = "vllm"
_NOISY_CORES = 0.1
_STARVED = (
    "The load generator had no real-time priority (root or CAP_SYS_NICE gives it): TTFT and ITL contain its "
    "own waiting for a core."
)
_TITLES = {contestant.name: contestant.title for contestant in CONTESTANTS}

Row = Sequence[str]
Runs = Sequence[Run]


def render(record: Record) -> str:
    """Tables of speed, cost and life, and what must be known to read them."""
    groups = _grouped(record.runs)
    speed = markdown(_SPEED_HEAD, [_speed_row(runs, _baseline(groups, runs)) for runs in groups.values()])
    cost = markdown(_COST_HEAD, [_cost_row(runs) for runs in groups.values()])
    life = markdown(_LIFE_HEAD, _life_rows(record.starts))
    return "\n\n".join(part for part in (speed, cost, life, "\n".join(_remarks(record))) if part)


def markdown(head: Row, rows: Iterable[Row]) -> str:
    """A Markdown table, the first column to the left, numbers to the right; without rows, nothing."""
    lines = [head, *rows]
    if len(lines) == 1:
        return ""
    widths = [max(2, *map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join("| " + " | ".join(_cells(line, widths)) + " |" for line in [head, rule, *lines[1:]])


def _cells(line: Row, widths: Sequence[int]) -> list[str]:
    numbers = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
    return [line[0].ljust(widths[0]), *numbers]


def _grouped(runs: Runs) -> dict[tuple[int, str, int], list[Run]]:
    """All rounds of one cell together: by streams, then executor, then in the contestants' order."""
    groups: dict[tuple[int, str, int], list[Run]] = {}
    order = list(_TITLES)
    for run in sorted(runs, key=lambda run: (run.streams, run.executor, order.index(run.contestant))):
        groups.setdefault((run.streams, run.executor, order.index(run.contestant)), []).append(run)
    return groups


def _baseline(groups: dict[tuple[int, str, int], list[Run]], runs: Runs) -> Runs:
    return groups.get((runs[0].streams, runs[0].executor, list(_TITLES).index(BASELINE)), [])


def _who(one: Run | Start) -> str:
    return f"{_TITLES[one.contestant]} ({one.executor})"


def _over(runs: Runs, value: Callable[[Run], float]) -> Spread:
    return Spread.of(value(run) for run in runs)


def _figure(runs: Runs, name: str, percentile: str) -> Spread:
    return _over(runs, lambda run: run.figures[name][percentile])


_SPEED_HEAD = [
    *("streamed", "streams", "tok/s", "min-max", f"of {BASELINE}"),
    *("TTFT p50", "min-max", "TTFT p99", "ITL p50", "ITL p99", "failed"),
]


def _speed_row(runs: Runs, baseline: Runs) -> Row:
    speed = _over(runs, lambda run: run.tokens_per_s)
    ratio = speed.middle / _over(baseline, lambda run: run.tokens_per_s).middle if baseline else None
    ttft = _figure(runs, "ttft_ms", "p50")
    failed = sum(sum(run.failures.values()) for run in runs)
    return [
        *(_who(runs[0]), str(runs[0].streams)),
        *(f"{speed.middle:,.0f}", f"{speed.low:,.0f}-{speed.high:,.0f}", f"{ratio:.2f}" if ratio else "-"),
        *(f"{ttft.middle:.1f}", f"{ttft.low:.1f}-{ttft.high:.1f}"),
        f"{_figure(runs, 'ttft_ms', 'p99').middle:.1f}",
        f"{_figure(runs, 'itl_ms', 'p50').middle:.1f}",
        f"{_figure(runs, 'itl_ms', 'p99').middle:.1f}",
        f"{failed} (!)" if failed else "0",
    ]


_COST_HEAD = [
    *("CPU s per 1,000 tokens", "streams", *KINDS),
    *("all but engine", "tokens per event", "load generator"),
]


def _cost_row(runs: Runs) -> Row:
    def per_thousand(seconds: Callable[[Run], float]) -> str:
        return f"{_over(runs, lambda run: 1e3 * seconds(run) / (run.tokens_all or 1)).middle:.3f}"

    return [
        *(_who(runs[0]), str(runs[0].streams)),
        *(per_thousand(lambda run, kind=kind: run.cpu_s[kind]) for kind in KINDS),
        per_thousand(lambda run: sum(run.cpu_s.values()) - run.cpu_s["engine"]),
        f"{_over(runs, lambda run: run.tokens_per_event).middle:.2f}",
        per_thousand(lambda run: run.figures["cpu_s"]),
    ]


_LIFE_HEAD = ["from start to stop", "first token s", "min-max", "memory MiB", "stop s", "left over"]


def _life_rows(starts: Sequence[Start]) -> list[Row]:
    groups: dict[str, list[Start]] = {}
    for start in starts:
        if not start.failure:
            groups.setdefault(_who(start), []).append(start)
    return [_life_row(who, group) for who, group in groups.items()]


def _life_row(who: str, starts: Sequence[Start]) -> Row:
    first = Spread.of(start.first_token_s for start in starts)
    return [
        *(who, f"{first.middle:.1f}", f"{first.low:.1f}-{first.high:.1f}"),
        f"{Spread.of(start.memory_mib for start in starts).middle:,.0f}",
        f"{Spread.of(start.stop_s for start in starts).middle:.1f}",
        str(max(len(start.left_over) for start in starts)),
    ]


def _remarks(record: Record) -> list[str]:
    remarks = ["Medians over rounds, with the least and the most; TTFT and ITL in ms."]
    if not all(run.figures["real_time"] for run in record.runs):
        remarks.append(_STARVED)
    for start in record.starts:
        if start.failure:
            remarks.append(f"Failed: {_who(start)}, round {start.round}: {start.failure}")
    for run in record.runs:
        where = f"{_who(run)}, {run.streams} streams, round {run.round}"
        if run.failures:
            remarks.append(f"Requests failed: {where}: {run.failures}, statuses {run.figures['statuses']}.")
        if run.foreign_cores > _NOISY_CORES:
            remarks.append(f"Noisy: {where}: other processes took {run.foreign_cores:.1f} cores.")
    return remarks
