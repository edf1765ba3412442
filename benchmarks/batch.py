"""Tokens per second of batch: one call of `LLM.generate` against everything else, on the same rows.

`python -m benchmarks.batch --rows 5000 --lengths lognormal,fixed --rounds 3`. Every contestant is a process
of its own, with the same engine arguments, executor, prompts and token counts; the start of its engine is not
counted. In a round they work in turns of a few seconds, in which the processes of the others are stopped
(SIGSTOP), so that a slow minute of the machine hits all alike; times are of a contestant's own turns. Ratios
are within a round, to the faster one of LLM's two forms.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks import processes
from benchmarks.batch_side import BEGUN, SIDES, TOLD, Stamps
from benchmarks.command import add_common, choices, cleaned_up, refuse_strangers, say
from benchmarks.contestants import Running
from benchmarks.record import machine
from benchmarks.workload import Workload

_START_LIMIT_S, _LIMIT_S, _END_S = 240.0, 900.0, 30.0
"""Of one contestant: until its rows begin, in all its turns, and from its last row until it has ended."""

_TURN_S, _LOOK_S = 3.0, 0.02
_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 40


@dataclass(frozen=True, slots=True)
class Result:
    """One contestant's run. Times: seconds from the first row's begin. occupancy: share of the batch."""

    contestant: str
    lengths: str
    round: int
    ready_s: float = 0.0
    tokens: int = 0
    tokens_per_s: float = 0.0
    half_s: float = 0.0
    most_s: float = 0.0
    all_s: float = 0.0
    occupancy: tuple[float, ...] = ()
    failure: str = ""

    def summary(self) -> str:
        return self.failure or f"{self.tokens_per_s:,.0f} tok/s"


def rows(count: int, lengths: str, seed: int) -> list[dict[str, object]]:
    """Prompts of some 20 tokens. lognormal: median 40 tokens, sigma 0.9, at most 400; fixed: 64 each."""
    draw = random.Random(seed)
    tokens = {
        "lognormal": lambda: min(400, max(4, round(draw.lognormvariate(math.log(40), 0.9)))),
        "fixed": lambda: 64,
    }[lengths]
    return [
        {"prompt": f"Question {n}: What is Penstock, in a few words?", "max_tokens": tokens()}
        for n in range(count)
    ]


class Side:
    """One contestant while it lives: started, then given turns until its rows are done."""

    def __init__(self, name: str, job: Mapping[str, object], workload: Workload) -> None:
        """Returns when its rows have begun, or when it has ended; it is stopped until its first turn."""
        self.name = name
        folder = Path(tempfile.mkdtemp(prefix="bench-", dir="/tmp"))  # short: Ray's socket paths have a limit
        (folder / "job.json").write_text(json.dumps(job))
        command = [sys.executable, "-m", "benchmarks.batch_side", name, str(folder)]
        self._running = Running(command, workload.environment(folder), folder, 0)
        self._begun, self._told = folder / BEGUN, folder / TOLD
        self._spans: list[tuple[float, float]] = []
        self._run_s, self._began_at = 0.0, time.time()
        self._until(self._begun, _START_LIMIT_S)
        self._pause()

    def turn(self) -> bool:
        """A few seconds of work; whether all rows are done, or it failed."""
        self._running.resume()
        self._began_at = time.time()
        if self._until(self._told, _TURN_S) or self._run_s > _LIMIT_S:
            self._spans.append((self._began_at, time.time()))
            return True
        self._pause()
        return False

    def end(self) -> tuple[float, Stamps] | str:
        """Seconds until its engine was ready, and its rows in seconds of its turns; or why there are none."""
        if self._running.wait(_END_S) is None:
            self._running.pause()  # it would run beside the others; the round's end ends it
        told = json.loads(self._told.read_text()) if self._told.exists() else None
        if told is None:
            return self._running.last_words()
        self._running.forget()
        return told["ready_s"], [
            (self._own(begin), self._own(end), tokens) for begin, end, tokens in told["stamps"]
        ]

    def _until(self, file: Path, limit_s: float) -> bool:
        """Whether the file is there, or nothing runs any more, within the limit."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if file.exists() or self._running.wait(_LOOK_S) is not None:
                return True
        return False

    def _pause(self) -> None:
        self._running.pause()
        now = time.time()
        self._spans.append((self._began_at, now))
        self._run_s += now - self._began_at

    def _own(self, at: float) -> float:
        """Seconds of its own turns until then."""
        return sum(min(at, end) - begin for begin, end in self._spans if begin < at)


def run(
    names: list[str], lengths: str, turn: int, job: Mapping[str, object], workload: Workload
) -> list[Result]:
    """One round."""
    sides = [Side(name, job, workload) for name in names]
    results = {name: Result(name, lengths, turn) for name in names}
    while sides:
        for side in list(sides):
            if side.turn():
                sides.remove(side)
                results[side.name] = measured(results[side.name], side.end(), workload)
                say(f"{lengths} {side.name}: {results[side.name].summary()}")
    processes.end_all()
    return list(results.values())


def measured(start: Result, told: tuple[float, Stamps] | str, workload: Workload) -> Result:
    """The figures of a run."""
    if isinstance(told, str):
        return replace(start, failure=told.splitlines()[-1][-300:])
    ready_s, stamps = told
    first = min(begin for begin, _, _ in stamps)
    ends = sorted(end - first for _, end, _ in stamps)
    tokens = sum(count for *_, count in stamps)
    seats = workload.engine_kwargs()["max_num_seqs"]
    steps = [(n + 0.5) / _WIDTH * ends[-1] + first for n in range(_WIDTH)]
    inside = [min(seats, sum(begin <= at < end for begin, end, _ in stamps)) / seats for at in steps]
    return replace(
        start,
        ready_s=ready_s,
        tokens=tokens,
        tokens_per_s=tokens / ends[-1],
        half_s=ends[len(ends) // 2],
        most_s=ends[len(ends) * 9 // 10],
        all_s=ends[-1],
        occupancy=tuple(inside),
    )


def table(results: list[Result]) -> str:
    """Markdown: medians over rounds, ratios within rounds."""
    lines = [
        "| lengths | contestant | tok/s | of `LLM` | 50 / 90 / 100 % after s | ready s | engine's batch |",
        "|---|---|---|---|---|---|---|",
    ]
    for lengths in dict.fromkeys(result.lengths for result in results):
        of_kind = [result for result in results if result.lengths == lengths]
        base: dict[int, float] = {}
        for result in of_kind:
            if result.contestant.startswith("llm"):
                base[result.round] = max(result.tokens_per_s, base.get(result.round, 0.0))
        for name in dict.fromkeys(result.contestant for result in of_kind):
            lines.append(_line([result for result in of_kind if result.contestant == name], base))
    return "\n".join(lines)


def _line(runs: list[Result], base: dict[int, float]) -> str:
    good = [run for run in runs if not run.failure]
    if not good:
        return f"| {runs[0].lengths} | {runs[0].contestant} | failed: {runs[0].failure} | | | | |"
    ratios = [run.tokens_per_s / base[run.round] for run in good if base.get(run.round)]
    ratio = f"{median(ratios):.2f} ({', '.join(f'{ratio:.2f}' for ratio in ratios)})" if ratios else ""
    half, most, whole = (median(getattr(run, name) for run in good) for name in ("half_s", "most_s", "all_s"))
    bars = "".join(_BARS[round(share * (len(_BARS) - 1))] for share in good[0].occupancy)
    if good[0].contestant == "ray-data":  # its rows come out by blocks, so nobody knows
        bars = ""
    rate = f"{median(run.tokens_per_s for run in good):,.0f}"
    ready = f"{median(run.ready_s for run in good):.1f}"
    times = f"{half:.1f} / {most:.1f} / {whole:.1f}"
    return f"| {good[0].lengths} | {good[0].contestant} | {rate} | {ratio} | {times} | {ready} | `{bars}` |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--lengths", type=choices(("lognormal", "fixed")), default=["lognormal", "fixed"])
    parser.add_argument("--contestants", type=choices(tuple(SIDES)), default=list(SIDES))
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    refuse_strangers(options.shared)
    workload = Workload(options.model, "uni")
    results: list[Result] = []
    with cleaned_up():
        for turn in range(options.rounds):
            for lengths in options.lengths:
                work = rows(options.rows, lengths, turn)
                job = {"model": str(options.model), "engine": workload.engine_kwargs(), "rows": work}
                results += run(options.contestants, lengths, turn, job, workload)
    print(json.dumps(machine()))
    print(table(results))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
