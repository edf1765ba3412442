"""Penstock beside `vllm serve` and Ray Serve LLM, one after the other on this machine: one table.

    python -m benchmarks.online [--only vllm,penstock] [--streams 1,16,64] [--rounds 3] [--json FILE]

Each contestant is started, loaded at every stream count and stopped; then the next. The whole circle is gone
through `--rounds` times, each time from another contestant on, so that a slow hour of the machine hits all.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from benchmarks import processes
from benchmarks.contestants import CONTESTANTS, Contestant, DidNotStart, Running, Stopped
from benchmarks.load import Generator, generator
from benchmarks.record import Record, Run, Start
from benchmarks.table import render
from benchmarks.workload import EXECUTORS, Workload

Entry = tuple[Contestant, Workload]


def main() -> int:
    """Exit code 1 when a contestant did not start or a request failed."""
    options = _options()
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _interrupt)
    processes.adopt_orphans()
    _refuse_strangers(options.shared)
    generator()
    entries = _entries(options)
    record = Record(_settings(options, entries))
    try:
        for round_number in range(options.rounds):
            for entry in _rotated(entries, round_number):
                _measure(entry, round_number, options, record)
                _save(record, options.json)
    except KeyboardInterrupt:
        _say("Interrupted: what was measured so far follows.")
    finally:
        processes.end_all()
    print(render(record))
    failed = any(start.failure for start in record.starts) or any(run.failures for run in record.runs)
    return 1 if failed else 0


def _measure(entry: Entry, round_number: int, options: argparse.Namespace, record: Record) -> None:
    contestant, workload = entry
    whose = {"contestant": contestant.name, "executor": workload.executor, "round": round_number + 1}
    _refuse_strangers(options.shared)
    busy = "" if processes.wait_idle(options.idle_limit) else ", machine busy"
    _say(f"round {round_number + 1}: {contestant.title} ({workload.executor}){busy}")
    running = Running.start(contestant, workload)
    first_token_s, memory_mib, failure = None, None, ""
    try:
        first_token_s = running.first_token(workload)
        _say(f"    first token after {first_token_s:.1f} s")
        running.check_answer(workload)
        for streams in options.streams:
            record.runs.append(_load(running, workload, streams, options, whose))
        memory_mib = processes.memory_mib(running.processes())
    except (DidNotStart, RuntimeError, OSError) as error:
        failure = str(error)
        _say(f"    failed: {failure}")
    finally:
        stopped = _stop(running, failure)
    left_over = tuple(stopped.left_over)
    record.starts.append(
        Start(**whose, first_token_s=first_token_s, stop_s=stopped.seconds, memory_mib=memory_mib,
              left_over=left_over, failure=failure)
    )  # fmt: skip


def _load(
    running: Running, workload: Workload, streams: int, options: argparse.Namespace, whose: dict[str, object]
) -> Run:
    load = Generator(
        running.port, workload, streams=streams, warmup_s=options.warmup, seconds=options.seconds
    )
    before = processes.usage()
    seen = load.result()
    after = processes.usage()
    spent = after.since(before)
    foreign_s = after.machine_s - before.machine_s - sum(spent.values()) - seen.figures["cpu_s"]
    run = Run.of(seen, spent, max(0.0, foreign_s / (after.at_s - before.at_s)), **whose)
    failures = f", FAILED {run.failures}" if run.failures else ""
    ttft_ms = seen.figures["ttft_ms"]["p50"]
    _say(f"    {streams:4} streams: {run.tokens_per_s:8,.0f} tok/s, TTFT {ttft_ms:.1f} ms{failures}")
    return run


def _stop(running: Running, failure: str) -> Stopped:
    stopped = running.stop()
    if stopped.left_over:
        _say(f"    left over: {', '.join(stopped.left_over)}")
    if not failure:
        running.forget()
    return stopped


def _rotated(entries: Sequence[Entry], by: int) -> Iterator[Entry]:
    start = by % len(entries)
    yield from entries[start:]
    yield from entries[:start]


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


def _refuse_strangers(shared: bool) -> None:
    found = processes.strangers()
    if found and not shared:
        listed = "\n  ".join(found)
        raise SystemExit(
            "Ray or vLLM runs on this machine already, which would spoil the figures. End it, or measure all "
            f"the same with --shared:\n  {listed}"
        )


def _save(record: Record, path: Path | None) -> None:
    if path:
        path.write_text(json.dumps(record.to_json(), indent=1) + "\n")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _interrupt(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _options() -> argparse.Namespace:
    names = [contestant.name for contestant in CONTESTANTS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.online", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--only", type=_choices(names), default=names, metavar="NAMES", help=f"some of {','.join(names)}")
    add("--executor", type=_choices(EXECUTORS), default=list(EXECUTORS), help="mp, uni, or mp,uni (both)")
    add("--streams", type=_numbers, default=[1, 16, 64], help="concurrent requests, as 1,16,64")
    add("--rounds", type=int, default=3, help="how often the whole circle is gone through")
    add("--tokens", type=int, default=64, help="tokens of each answer")
    add("--seconds", type=float, default=10.0, help="measured seconds of each run")
    add("--warmup", type=float, default=3.0, help="seconds of load before each measured run")
    add("--model", type=Path, default=None, help="model folder (default: the embedded demo model)")
    add("--json", type=Path, default=None, help="write everything to this file, after each contestant")
    add("--shared", action="store_true", help="run though other Ray or vLLM processes are there")
    add(
        "--idle-limit", type=float, default=60.0, help="seconds to wait for an idle machine before each start"
    )
    options = parser.parse_args()
    options.model = options.model or _demo_model()
    return options


def _choices(known: Sequence[str]):
    def parse(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is not one of {', '.join(known)}")
        return found

    return parse


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _demo_model() -> Path:
    import penstock

    return Path(penstock.demo_model())


if __name__ == "__main__":
    sys.exit(main())
