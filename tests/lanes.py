"""All tests: the fast ones beside those of engines, then those on Ray.

    python -m tests.lanes

The second lane makes the models first. Tests on Ray run alone: beside engines on two cores, Ray's own start
passes its time limit. The last line counts the tests of all.
"""

from __future__ import annotations

import re
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
LANES = (("unit", "http"), ("engine", "mission"), ("ray",))
"""Each tier is in one of them. The first two run side by side, the last one after them."""

_PYTEST = '"$0" -m pytest --durations=12 "$@"'
_MODELS = '"$0" -m recipes all >/dev/null 2>&1'
_CLOSING = re.compile(r"=+ .* in [\d.]+s\b.* =+$")
_COUNTED = ("failed", "error", "passed", "skipped", "xfailed", "xpassed")
_COUNT = re.compile(rf"(\d+) ({'|'.join(_COUNTED)})")


def main() -> int:
    """Status 0 when all lanes passed."""
    began = time.monotonic()
    one, two, last = ([f"tests/{tier}" for tier in tiers] for tiers in LANES)
    closings, statuses = side_by_side(one, two)
    with _lane(f"exec {_PYTEST}", last, subprocess.PIPE) as lane:
        closings.append(shown(lane.stdout or (), last))
        statuses.append(lane.wait())
    print(f"\n=== {total(closings)} in {time.monotonic() - began:.2f}s ===", flush=True)
    return int(any(statuses))


def side_by_side(one: Sequence[str], two: Sequence[str]) -> tuple[list[str], list[int]]:
    """Closing lines and statuses. The second lane's output follows the first one's."""
    with (
        tempfile.TemporaryFile("w+") as kept,
        _lane(f"{_MODELS}; exec {_PYTEST} -p no:cacheprovider", two, kept) as second,
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
    lane = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, text=True)
    try:
        yield lane
    finally:
        if lane.poll() is None:  # we were interrupted; its fixtures end what they began
            lane.send_signal(signal.SIGINT)
            lane.wait()


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
