"""Online beside batch on a real vLLM on CPU: `python -m benchmarks.one_fleet_cpu`.

Two replicas are asked straight, in turns: one runs all of batch, one as much as its targets allow. These are
what online took alone, times `--factor`. Batch always has more rows; online requests come at a fixed rate.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

from benchmarks.fleet import Replica
from benchmarks.load import Generator
from benchmarks.table import markdown
from benchmarks.trial import Question
from penstock.tiers import FLEX, HEADER

TOKENS = 64
ROWS = 64  # that wait or run at all times
WARM_S = 5.0
HEAD = ("control", "online requests", "TTFT p50 ms", "p99", "ITL p50 ms", "p99", "batch tok/s")

Round = tuple[dict[str, Any], float]
"""What online's load generator saw, and tokens of batch a second."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--online", type=int, default=4, help="requests per second")
    parser.add_argument("--factor", type=float, default=3.0, help="targets: times online's own p99")
    parser.add_argument(
        "--targets", type=float, nargs=2, metavar=("TTFT_MS", "ITL_MS"), help="instead of that"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args()
    with Replica("vllm") as free:
        alone = [asked(free, given, rows=False) for _ in range(2)][1:]  # the first one warms it
        own = [given.factor * alone[0][0][name]["p99"] for name in ("ttft_ms", "itl_ms")]
        slo = {name: ms / 1e3 for name, ms in zip(("ttft_s", "itl_s"), given.targets or own, strict=True)}
        with Replica("vllm", slo=slo) as controlled:
            asked(controlled, given, rows=False)
            found: dict[str, list[Round]] = {"alone": alone, "no limit": [], "controlled": []}
            for _ in range(given.rounds):
                found["no limit"].append(asked(free, given, rows=True))
                found["controlled"].append(asked(controlled, given, rows=True))
    print(f"Targets: TTFT {slo['ttft_s'] * 1e3:.0f} ms, ITL {slo['itl_s'] * 1e3:.1f} ms\n")
    print(markdown(HEAD, [row(control, rounds) for control, rounds in found.items()]))


def asked(replica: Replica, given: argparse.Namespace, *, rows: bool) -> Round:
    """Online alone, or with batch that began before it and ends after it."""
    batch = None
    if rows:
        headers = [*replica.headers, f"{HEADER}: {FLEX}"]
        batch = Generator(
            replica.port,
            Question(False, TOKENS),
            streams=ROWS,
            warmup_s=WARM_S,
            seconds=given.seconds,
            headers=headers,
        )
    online = Generator(
        replica.port,
        Question(True, TOKENS),
        streams=given.online,
        warmup_s=WARM_S,
        seconds=given.seconds,
        headers=replica.headers,
        every=1.0,
    ).result()
    if batch is None:
        return online.figures, 0.0
    figures = batch.result().figures
    return online.figures, figures["requests"] * TOKENS / figures["seconds"]


def row(control: str, rounds: list[Round]) -> list[str]:
    """Medians over the rounds."""
    cells = [control, str(sum(figures["requests"] for figures, _ in rounds))]
    for name in ("ttft_ms", "itl_ms"):
        cells += [f"{median(figures[name][p] for figures, _ in rounds):.1f}" for p in ("p50", "p99")]
    return [*cells, f"{median(tokens for _, tokens in rounds):,.0f}"]


if __name__ == "__main__":
    main()
