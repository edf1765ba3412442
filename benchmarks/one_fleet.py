"""What control of batch is worth: `python -m benchmarks.one_fleet`, online and batch on one simulated engine.

Virtual time, and the H100-like engine of docs/serve/simulator.md. Online alone first, which sets the targets;
then with batch that always has more rows: without a limit, with static ones, controlled. `--burst` shows
online that comes back at once, `--plot` draws a run in which its load changes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks import one_fleet_plot
from benchmarks.one_fleet_run import ENGINE, FULL_PER_S, WANTED, Rate, Run, Seen
from penstock.serve.replica.tiers.controller import Targets

STATIC = (4, 16, 64)
WARM_S = 10.0
BURST_AT_S, BURST_S = 15.0, 20.0
FIRST_S = 5.0
"""After a burst, in which late requests are counted."""
PLOTTED = ((20, 0.0), (40, 0.3), (60, 1.0), (80, 0.1), (110, 0.0))
"""Ends of the phases of the plotted run in seconds, and their loads."""


Runs = Sequence[Seen]
"""Of one kind of control, one for each seed."""


def quantile(values: list[float], share: float) -> float:
    """Of unsorted values; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def every(windows: dict[int, list[float]]) -> list[float]:
    """The values of all windows."""
    return [value for values in windows.values() for value in values]


def pooled(runs: Runs) -> tuple[list[float], list[float]]:
    """All of their TTFT and ITL, in seconds."""
    return [v for seen in runs for v in every(seen.ttft_s)], [v for seen in runs for v in every(seen.itl_s)]


def kept(runs: Runs, targets: Targets) -> float:
    """Share of their windows whose p99 are within the targets."""
    good = [
        quantile(seen.ttft_s[window], 0.99) <= (targets.ttft_s or 0)
        and quantile(seen.itl_s[window], 0.99) <= (targets.itl_s or 0)
        for seen in runs
        for window in set(seen.ttft_s) | set(seen.itl_s)
    ]
    return sum(good) / len(good) if good else 1.0


def run(rate: Rate, control: str, targets: Targets, given: argparse.Namespace, seconds: float) -> Runs:
    """One run for each seed. control: "alone", "controlled", or a static limit."""
    limit = "0" if control == "alone" else control
    return [
        Run(rate, limit, targets, seed, control != "alone").go(WARM_S, seconds) for seed in range(given.seeds)
    ]


def aimed(alone: Runs, factor: float) -> Targets:
    """Online's own p99 without batch, times `factor`."""
    ttft_s, itl_s = pooled(alone)
    return Targets(factor * quantile(ttft_s, 0.99), factor * quantile(itl_s, 0.99)) if ttft_s else Targets()


def compare(given: argparse.Namespace) -> list[dict[str, object]]:
    """Prints a line for each load and kind of control, over all seeds."""
    found = []
    head = "load | control | TTFT p50 | TTFT p99 | ITL p50 | ITL p99 | windows kept | batch tok/s | requeued"
    print(f"| {head} |\n|---:|---|---:|---:|---:|---:|---:|---:|---:|")
    for load in given.loads:
        rate = steady(load)
        alone = run(rate, "alone", Targets(), given, given.seconds)
        targets = aimed(alone, given.factor)
        found.append(line(load, "alone", alone, targets, given.seconds))
        for control in given.controls:
            runs = run(rate, control, targets, given, given.seconds)
            found.append(line(load, control, runs, targets, given.seconds))
    return found


def steady(load: float) -> Rate:
    """Always this share of `FULL_PER_S`."""
    return lambda _: load * FULL_PER_S


def line(load: float, control: str, runs: Runs, targets: Targets, seconds: float) -> dict[str, object]:
    ttft, itl = pooled(runs)
    figures: dict[str, object] = {
        "load": load,
        "control": named(control),
        "ttft_p50_ms": quantile(ttft, 0.5) * 1e3,
        "ttft_p99_ms": quantile(ttft, 0.99) * 1e3,
        "itl_p50_ms": quantile(itl, 0.5) * 1e3,
        "itl_p99_ms": quantile(itl, 0.99) * 1e3,
        "kept": kept(runs, targets),
        "batch_tok_s": median(seen.batch_tokens / seconds for seen in runs),
        "requeued": median(seen.requeued for seen in runs),
    }
    print(
        f"| {load:.0%} | {figures['control']} | {figures['ttft_p50_ms']:.0f} "
        f"| {figures['ttft_p99_ms']:.0f} | {figures['itl_p50_ms']:.1f} | {figures['itl_p99_ms']:.1f} "
        f"| {figures['kept']:.1%} | {figures['batch_tok_s']:.0f} | {figures['requeued']:.0f} |",
        flush=True,
    )
    return figures


def named(control: str) -> str:
    return "no limit" if control == str(WANTED) else control


def burst(given: argparse.Namespace) -> list[dict[str, object]]:
    """Batch alone, then all of online's load at once. Prints a line for each kind of control."""
    found = []
    seconds = BURST_AT_S + BURST_S - WARM_S

    def rate(now: float) -> float:
        return FULL_PER_S if now >= BURST_AT_S else 0.0

    targets = aimed(run(rate, "alone", Targets(), given, seconds), given.factor)
    print(
        f"| control | requests of {FIRST_S:g} s | late | the last of them after s | batch tok/s | requeued |"
    )
    print("|---|---:|---:|---:|---:|---:|")
    for control in ["alone", *given.controls]:
        runs = run(rate, control, targets, given, seconds)
        first = [(at, ttft_s) for seen in runs for at, ttft_s in seen.firsts if at < BURST_AT_S + FIRST_S]
        late = [at - BURST_AT_S for at, ttft_s in first if ttft_s > (targets.ttft_s or 0)]
        figures: dict[str, object] = {
            "control": named(control),
            "requests": len(first),
            "late": len(late),
            "last_late_s": max(late, default=None),
            "batch_tok_s": median(seen.batch_tokens / seconds for seen in runs),
            "requeued": median(seen.requeued for seen in runs),
        }
        last = f"{max(late):.1f}" if late else "-"
        print(
            f"| {figures['control']} | {len(first)} | {len(late)} | {last} "
            f"| {figures['batch_tok_s']:.0f} | {figures['requeued']:.0f} |",
            flush=True,
        )
        found.append(figures)
    return found


def plot(given: argparse.Namespace) -> str:
    """SVG of one controlled run in which online's load changes."""

    def rate(now: float) -> float:
        return FULL_PER_S * next((load for until, load in PLOTTED if now - WARM_S < until), 0.0)

    seconds = float(PLOTTED[-1][0])
    targets = aimed(run(rate, "alone", Targets(), given, seconds), given.factor)
    seen = Run(rate, "controlled", targets, 0, True).go(WARM_S, seconds)
    return one_fleet_plot.drawn(seen, targets, WARM_S, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--loads", type=float, nargs="*", default=[0.1, 0.3, 0.7])
    parser.add_argument("--controls", nargs="*", default=[str(WANTED), *map(str, STATIC), "controlled"])
    parser.add_argument("--factor", type=float, default=1.5, help="targets: times online's own p99")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--scheduling-policy", choices=["fcfs", "priority"], default="fcfs")
    parser.add_argument("--burst", action="store_true", help="online comes back at once, instead of --loads")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw one run, and do no more")
    parser.add_argument("--json")
    given = parser.parse_args()
    ENGINE["scheduling_policy"] = given.scheduling_policy
    if given.plot:
        given.plot.write_text(plot(given))
        return
    found = burst(given) if given.burst else compare(given)
    if given.json:
        with open(given.json, "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
