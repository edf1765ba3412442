"""All tests, two lanes at a time: the fast ones beside those of engines, then those on Ray in two halves.

    python -m tests.lanes

The second lane makes the models first. Each half of those on Ray has clusters in a folder of its own, where
Ray does not take the other half's for the one to join. The last line counts the tests of all.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LANES = (("unit", "http"), ("engine", "mission"))
"""Tiers beside each other; that on Ray follows."""

SECOND_HALF = "test_e"
"""Files of tests on Ray from this name on take about as long as those before."""

_PATIENT = {"RAY_raylet_start_wait_time_s": "120"}  # its own 30 s are short beside engines on two cores

_PYTEST = '"$0" -m pytest --durations=12 "$@"'
_MODELS = '"$0" -m recipes all >/dev/null 2>&1'
_CLOSING = re.compile(r"=+ .* in [\d.]+s\b.* =+$")
_COUNTED = ("failed", "error", "passed", "skipped", "xfailed", "xpassed")
_COUNT = re.compile(rf"(\d+) ({'|'.join(_COUNTED)})")


def main() -> int:
    """Status 0 when all lanes passed."""
    began = time.monotonic()
    one, two = ([f"tests/{tier}" for tier in tiers] for tiers in LANES)
    closings, statuses = side_by_side(one, two, before=f"{_MODELS}; ")
    for found, more in zip((closings, statuses), side_by_side(*on_ray()), strict=True):
        found += more
    print(f"\n=== {total(closings)} in {time.monotonic() - began:.2f}s ===", flush=True)
    return int(any(statuses))


def on_ray() -> tuple[list[str], list[str]]:
    """Files of both halves."""
    files = sorted(file.name for file in (ROOT / "tests" / "ray").glob("test_*.py"))
    first = [name for name in files if name < SECOND_HALF]
    second = [name for name in files if name >= SECOND_HALF]
    return [f"tests/ray/{name}" for name in first], [f"tests/ray/{name}" for name in second]


def side_by_side(one: Sequence[str], two: Sequence[str], before: str = "") -> tuple[list[Any], list[Any]]:
    """Closing lines and statuses. The second lane's output follows the first one's.

    before: what a shell does before the second one's tests.
    """
    with (
        tempfile.TemporaryFile("w+") as kept,
        _lane(f"{before}exec {_PYTEST} -p no:cacheprovider", two, kept) as second,
        _lane(f"exec {_PYTEST}", one, subprocess.PIPE) as first,
    ):
        closings = [shown(first.stdout or (), one)]
        statuses = [first.wait(), second.wait()]
        kept.seek(0)
        closings.append(shown(kept, two))
    return closings, statuses


@contextmanager
def _lane(script: str, paths: Sequence[str], output: Any) -> Iterator[subprocess.Popen[str]]:
    command = ["sh", "-c", script, sys.executable, *paths]
    folder = tempfile.mkdtemp(prefix="lane-", dir="/tmp")  # short: Ray's socket paths have a limit
    environment = {**_PATIENT, **os.environ, "RAY_TMPDIR": folder}
    lane = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield lane
    finally:
        if lane.poll() is None:  # we were interrupted; its fixtures end what they began
            lane.send_signal(signal.SIGINT)
            lane.wait()
        shutil.rmtree(folder, ignore_errors=True)


def shown(lines: Iterable[str], paths: Sequence[str]) -> str:
    """Prints a lane's output line by line; gives its closing line, empty where it broke off."""
    print(f"\n### {' '.join(paths)}", flush=True)
    closing = ""
    for line in lines:
        print(line, end="", flush=True)
        closing = line if _CLOSING.match(line.strip()) else closing
    return closing.strip()


def total(closings: Iterable[str]) -> str:
    """Counts of all lanes, as pytest says them; a lane that counted nothing is an error."""
    counts: Counter[str] = Counter()
    for closing in closings:
        for number, what in _COUNT.findall(closing) or [("1", "error")]:
            counts[what] += int(number)
    return ", ".join(f"{counts[what]} {what}" for what in _COUNTED if counts[what])


if __name__ == "__main__":
    sys.exit(main())
