"""Whether an output holds each row of its input exactly once. Compares files; knows not how they came.

    python -m benchmarks.judge INPUT.jsonl OUTPUT.jsonl [FAILED.jsonl]

A row is known by its `id`, and must have its own text, and its own answer where answers are echoes. Exit code
1 when any is lost, double or strange.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Verdict:
    """Rows that are nowhere, rows that are there again, and rows that are not as in the input."""

    rows: int
    answered: int
    failed: int
    lost: int
    double: int
    strange: int
    in_order: bool

    @property
    def good(self) -> bool:
        return not (self.lost or self.double or self.strange) and self.in_order


def judge(given: Path, output: Path, failed: Path | None = None, *, echo: bool = False) -> Verdict:
    """echo: whether the engine answers with the beginning of the prompt."""
    asked = {row["id"]: row["prompt"] for row in _rows(given)}
    answers = _rows(output)
    dead = _rows(failed) if failed is not None and failed.exists() else []
    seen = Counter(row["id"] for row in [*answers, *dead])
    places = {row_id: place for place, row_id in enumerate(asked)}
    order = [places.get(row["id"], -1) for row in answers]
    return Verdict(
        rows=len(asked),
        answered=len(answers),
        failed=len(dead),
        lost=len(asked.keys() - seen.keys()),
        double=sum(count - 1 for count in seen.values()),
        strange=sum(_strange(row, asked, echo) for row in [*answers, *dead]),
        in_order=order == sorted(order),
    )


def _strange(row: dict, asked: dict[int, str], echo: bool) -> bool:
    prompt = asked.get(row["id"])
    echoed = not echo or "error" in row or row["prompt"].startswith(row["generated_text"])
    return row["prompt"] != prompt or not echoed


def _rows(path: Path) -> list[dict]:
    with path.open() as lines:
        return [json.loads(line) for line in lines]


def main() -> int:
    given, output, *failed = map(Path, sys.argv[1:])
    verdict = judge(given, output, failed[0] if failed else None)
    print(verdict)
    return 0 if verdict.good else 1


if __name__ == "__main__":
    sys.exit(main())
