"""All tests, in two lanes side by side: the fast ones beside those of engines, then those on Ray.

    python -m tests.lanes

The second lane makes the models first. Each has Ray's clusters in a folder of its own, where Ray does not
take the other lane's for the one to join. The last line counts the tests of both.
"""

from __future__ import annotations

import os
import re
import shlex
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
"""Tiers of each lane; a part of the tests on Ray follows."""

SECOND_PART = "test_p"
"""Files of tests on Ray from this name on follow those of engines, which take longer."""

_MODELS = shlex.join([sys.executable, "-m", "recipes", "all"]) + " >/dev/null 2>&1; "
_PATIENT = {"RAY_raylet_start_wait_time_s": "120"}  # its own 30 s are short beside engines on two cores
_CLOSING = re.compile(r"=+ .* in [\d.]+s\b.* =+$")
_COUNTED = ("failed", "error", "passed", "skipped", "xfailed", "xpassed")
_COUNT = re.compile(rf"(\d+) ({'|'.join(_COUNTED)})")


def main() -> int:
    """Status 0 when all tests passed."""
    began = time.monotonic()
    one, two = runs()
    with (
        tempfile.TemporaryFile("w+") as kept,
        _lane(_MODELS + script(two, "-p", "no:cacheprovider"), kept) as second,
        _lane(script(one), subprocess.PIPE) as first,
    ):
        closings = shown(first.stdout or (), "the first lane", len(one))
        statuses = [first.wait(), second.wait()]
        kept.seek(0)
        closings += shown(kept, "the second lane", len(two))
    print(f"\n=== {total(closings)} in {time.monotonic() - began:.2f}s ===", flush=True)
    return int(any(statuses))


def runs() -> tuple[list[list[str]], list[list[str]]]:
    """Paths of each run of pytest, by lane. Ray starts in a process that has run no engine."""
    files = sorted(file.name for file in (ROOT / "tests" / "ray").glob("test_*.py"))
    first = [f"tests/ray/{name}" for name in files if name < SECOND_PART]
    second = [f"tests/ray/{name}" for name in files if name >= SECOND_PART]
    one, two = ([f"tests/{tier}" for tier in tiers] for tiers in LANES)
    return [one, first], [two, second]


def script(lane: Sequence[Sequence[str]], *options: str) -> str:
    """For a shell: one run after the other; its status is 0 when all passed."""
    pytest = [sys.executable, "-m", "pytest", "--durations=12", *options]
    return "".join(f"{shlex.join([*pytest, *paths])} || failed=1; " for paths in lane) + "exit ${failed:-0}"


@contextmanager
def _lane(script: str, output: Any) -> Iterator[subprocess.Popen[str]]:
    folder = tempfile.mkdtemp(prefix="lane-", dir="/tmp")  # short: Ray's socket paths have a limit
    lane = subprocess.Popen(
        ["sh", "-c", script],
        cwd=ROOT,
        env={**_PATIENT, **os.environ, "RAY_TMPDIR": folder},
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield lane
    finally:
        if lane.poll() is None:  # we were interrupted; its fixtures end what they began
            os.killpg(lane.pid, signal.SIGINT)
            lane.wait()
        shutil.rmtree(folder, ignore_errors=True)


def shown(lines: Iterable[str], name: str, count: int) -> list[str]:
    """Prints a lane's output line by line; gives the closing lines of its runs, empty where one broke off."""
    print(f"\n### {name}", flush=True)
    closings: list[str] = []
    for line in lines:
        print(line, end="", flush=True)
        if _CLOSING.match(line.strip()):
            closings.append(line.strip())
    return closings + [""] * (count - len(closings))


def total(closings: Iterable[str]) -> str:
    """Counts of all runs, as pytest says them; one that counted nothing is an error."""
    counts: Counter[str] = Counter()
    for closing in closings:
        for number, what in _COUNT.findall(closing) or [("1", "error")]:
            counts[what] += int(number)
    return ", ".join(f"{counts[what]} {what}" for what in _COUNTED if counts[what])


if __name__ == "__main__":
    sys.exit(main())
