"""Tokens per second of batch: one call of `LLM.generate` against everything else, on the same rows.

`python -m benchmarks.batch --rows 5000 --lengths lognormal,fixed --rounds 2`. Every contestant is a process
of its own, one after the other, with the same engine arguments, executor, prompts and token counts; the start
of its engine is not counted. Ratios are within a round, to the faster one of LLM's two forms.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.batch_side import SIDES, Stamps
from benchmarks.command import add_common, choices, cleaned_up, refuse_strangers, say
from benchmarks.record import machine
from benchmarks.workload import Workload

_LIMIT_S = 900
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


def run(name: str, lengths: str, turn: int, job: dict[str, object], workload: Workload) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.json"
        file.write_text(json.dumps(job))
        command = [sys.executable, "-m", "benchmarks.batch_side", name, folder]
        environment = workload.environment(Path(folder))
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S)
        told = None if done.returncode else json.loads((Path(folder) / "told.json").read_text())
    if told is None:
        return Result(name, lengths, turn, failure=done.stderr.strip().splitlines()[-1][:300])
    return measured(Result(name, lengths, turn, told["ready_s"]), told["stamps"], workload)


def measured(start: Result, stamps: Stamps, workload: Workload) -> Result:
    """The figures of a run."""
    first = min(begin for begin, _, _ in stamps)
    ends = sorted(end - first for _, end, _ in stamps)
    tokens = sum(count for *_, count in stamps)
    seats = workload.engine_kwargs()["max_num_seqs"]
    steps = [(n + 0.5) / _WIDTH * ends[-1] + first for n in range(_WIDTH)]
    inside = [min(seats, sum(begin <= at < end for begin, end, _ in stamps)) / seats for at in steps]
    known = asdict(start) | {
        "tokens": tokens,
        "tokens_per_s": tokens / ends[-1],
        "half_s": ends[len(ends) // 2],
        "most_s": ends[len(ends) * 9 // 10],
        "all_s": ends[-1],
        "occupancy": tuple(inside),
    }
    return Result(**known)


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
                for name in options.contestants:
                    results.append(run(name, lengths, turn, job, workload))
                    say(
                        f"{lengths} {name}: {results[-1].failure or f'{results[-1].tokens_per_s:,.0f} tok/s'}"
                    )
    print(json.dumps(machine()))
    print(table(results))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
