"""Penstock beside `vllm serve` and Ray Serve LLM, one after the other on this machine: one table.

    python -m benchmarks.online [--only vllm,penstock] [--streams 1,16,64] [--rounds 3] [--json FILE]

Each contestant is started, loaded at every stream count and stopped; then the next. The whole circle is gone
through `--rounds` times, each time from another contestant on, so that a slow hour of the machine hits all.

With `--together` all are started first, then loaded in turns, `--rounds` times at every stream count, while
the processes of the others are stopped (SIGSTOP). A slow minute hits all then; starts and memory are not
measured. `PENSTOCK_BEFORE=FOLDER ... --only vllm,penstock-before,penstock --together` compares with another
commit, whose tree is in FOLDER (`git worktree add`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from benchmarks import processes
from benchmarks.command import add_common, choices, cleaned_up, numbers, refuse_strangers, say
from benchmarks.contestants import CONTESTANTS, Contestant, DidNotStart, Running
from benchmarks.load import Generator
from benchmarks.record import Record, Run, Start
from benchmarks.table import render
from benchmarks.workload import EXECUTORS, Workload

Entry = tuple[Contestant, Workload]
Item = TypeVar("Item")

_WAKE_S = 0.5
"""After a SIGCONT, for timers that were due meanwhile."""


def main() -> int:
    """Exit code 1 when a contestant failed or a request did."""
    options = _options()
    entries = _entries(options)
    record = Record(_settings(options, entries))
    with cleaned_up():
        if options.together:
            _measure_together(entries, options, record)
        for number in range(0 if options.together else options.rounds):
            for entry in _rotated(entries, number):
                _measure(entry, number + 1, options, record)
                _save(record, options.json)
    print(render(record))
    failed = any(start.failure for start in record.starts) or any(run.failures for run in record.runs)
    return 1 if failed else 0


def _measure(entry: Entry, number: int, options: argparse.Namespace, record: Record) -> None:
    """One life of one contestant, with a run at each stream count."""
    contestant, workload = entry
    refuse_strangers(options.shared)
    busy = "" if processes.wait_idle(options.idle_limit) else ", on a machine that is busy"
    say(f"round {number}: {contestant.title} ({workload.executor}){busy}")
    start = Start(contestant.name, workload.executor, number)
    running = Running.start(contestant, workload)
    try:
        start = replace(start, first_token_s=running.first_token(workload))
        say(f"    first token after {start.first_token_s:.1f} s")
        running.check_answer(workload)
        for streams in options.streams:
            record.runs.append(_load(running, start, workload, streams, options))
        start = replace(start, memory_mib=processes.memory_mib(running.processes()))
    except (DidNotStart, RuntimeError, OSError) as error:
        start = replace(start, failure=str(error))
        say(f"    failed: {error}")
    finally:
        stopped = running.stop()
    record.starts.append(replace(start, stop_s=stopped.seconds, left_over=stopped.left_over))
    if stopped.left_over:
        say(f"    left over: {', '.join(stopped.left_over)}")
    if not start.failure:
        running.forget()


def _measure_together(entries: Sequence[Entry], options: argparse.Namespace, record: Record) -> None:
    """All contestants live at once; at any time one of them runs. Raises: DidNotStart."""
    refuse_strangers(options.shared)
    lives: list[tuple[Start, Workload, Running]] = []
    for contestant, workload in entries:
        say(f"starting {contestant.title} ({workload.executor})")
        running = Running.start(contestant, workload)
        running.first_token(workload)
        running.check_answer(workload)
        running.pause()
        lives.append((Start(contestant.name, workload.executor, 0), workload, running))
    for number in range(options.rounds):
        for streams in options.streams:
            for start, workload, running in _rotated(lives, number):
                say(f"round {number + 1}: {start.contestant} ({workload.executor})")
                running.resume()
                time.sleep(_WAKE_S)
                at = replace(start, round=number + 1)
                record.runs.append(_load(running, at, workload, streams, options))
                running.pause()
            _save(record, options.json)
    for *_, running in lives:
        running.resume()
        running.stop()
        running.forget()


def _load(
    running: Running, start: Start, workload: Workload, streams: int, options: argparse.Namespace
) -> Run:
    before = processes.usage()
    generator = Generator(
        running.port, workload, streams=streams, warmup_s=options.warmup, seconds=options.seconds
    )
    load = generator.result()
    after = processes.usage()
    spent = after.since(before)
    foreign_s = after.machine_s - before.machine_s - sum(spent.values()) - load.figures["cpu_s"]
    run = Run.of(start, load, spent, max(0.0, foreign_s / (after.at_s - before.at_s)))
    ttft_ms = load.figures["ttft_ms"]["p50"]
    failures = f", FAILED {run.failures}" if run.failures else ""
    say(f"    {streams:4} streams: {run.tokens_per_s:8,.0f} tok/s, TTFT p50 {ttft_ms:.1f} ms{failures}")
    return run


def _rotated(items: Sequence[Item], by: int) -> Iterator[Item]:
    start = by % len(items)
    yield from items[start:]
    yield from items[:start]


def _entries(options: argparse.Namespace) -> list[Entry]:
    return [
        (contestant, Workload(options.model, executor, options.tokens))
        for executor in options.executor
        for contestant in CONTESTANTS
        if contestant.name in options.only and executor in contestant.executors
    ]


def _settings(options: argparse.Namespace, entries: Sequence[Entry]) -> dict[str, object]:
    given = {"streams": options.streams, "rounds": options.rounds, "seconds": options.seconds}
    return {**given, "warmup_s": options.warmup, "workload": entries[0][1].describe()}


def _save(record: Record, path: Path | None) -> None:
    if path:
        path.write_text(json.dumps(record.to_json(), indent=1) + "\n")


def _options() -> argparse.Namespace:
    names = [contestant.name for contestant in CONTESTANTS]
    usual = [contestant.name for contestant in CONTESTANTS if not contestant.by_name_only]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.online", description=_FIRST_LINE)
    add = parser.add_argument
    add("--only", type=choices(names), default=usual, metavar="NAMES", help=f"some of {','.join(names)}")
    add("--executor", type=choices(EXECUTORS), default=list(EXECUTORS), help="mp, uni, or mp,uni (both)")
    add("--streams", type=numbers, default=[1, 16, 64, 256], metavar="N,N", help="concurrent requests")
    add("--rounds", type=int, default=3, help="how often the whole circle is gone through")
    add("--seconds", type=float, default=10.0, help="measured seconds of each run")
    add("--warmup", type=float, default=3.0, help="seconds of load before each measured run")
    add(
        "--idle-limit", type=float, default=60.0, help="seconds to wait for an idle machine before each start"
    )
    add("--together", action="store_true", help="all live at once and are loaded in turns")
    add_common(parser)
    options = parser.parse_args()
    if not _entries(options):
        parser.error("none of --only can run with this --executor: Ray Serve LLM takes only mp on CPU")
    return options


_FIRST_LINE = (__doc__ or "").partition("\n")[0]

if __name__ == "__main__":
    sys.exit(main())
