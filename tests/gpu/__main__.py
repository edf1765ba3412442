"""Runs the GPU tier, the most valuable first: `python -m tests.gpu --report FILE --seconds 450`.

Its tests of features are those of tests/engine, which take a GPU where there is one. Each part is a run of
pytest with a limit, after which its processes are ended and the next part begins.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from benchmarks import processes

ROOT = Path(__file__).parents[2]
_LAST_WORDS_S = 15.0
ADAPTERS = "tests/engine/test_adapters.py::test_"
PARTS: tuple[tuple[int, int, tuple[str, ...]], ...] = (
    (
        6,
        240,
        (
            "tests/gpu/test_tokens.py",
            "tests/gpu/test_batch.py",
            f"{ADAPTERS}one_batch_of_base_and_adapters_gives_each_its_own_answers",
            f"{ADAPTERS}twenty_adapters_through_four_places_under_load",
            f"{ADAPTERS}an_adapter_that_is_loaded_while_the_model_sleeps_answers_when_it_wakes",
            "tests/engine/test_structured.py",
            "tests/engine/test_vision.py",
            "tests/engine/test_lane.py",
            "tests/engine/test_gather.py",
        ),
    ),
    (1, 200, ("tests/gpu/test_memory.py", "tests/gpu/test_service.py")),
    (1, 200, ("tests/gpu/test_figures.py",)),
)
"""Engines that may be side by side, seconds, tests. What measures memory or time runs alone."""


def main() -> int:
    """Exit status 0 when all parts have passed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--report", type=Path, help="a line of JSON for each test, as soon as it has ended")
    parser.add_argument("--only", default="1,2,3", help="numbers of parts")
    parser.add_argument("--seconds", type=float, default=590.0, help="limit of all parts together")
    options, words = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process compiles for 20 s, as in many images
    processes.adopt_orphans()
    end = time.monotonic() + options.seconds
    if options.report is not None:
        words += ["--report", str(options.report.resolve())]
    wanted = [PARTS[int(number) - 1] for number in options.only.split(",")]
    status = 0
    for workers, limit_s, tests in wanted:
        status |= run(workers, min(limit_s, end - time.monotonic()), tests, words)
    return status


def run(workers: int, limit_s: float, tests: tuple[str, ...], words: list[str]) -> int:
    if limit_s <= 0:
        return 1
    command = [sys.executable, "-m", "pytest", "--continue-on-collection-errors", *tests, *words]
    if workers > 1 and find_spec("xdist") is not None and (os.cpu_count() or 1) > workers:
        command += ["-n", str(workers), "--dist", "loadscope", "--no-loadscope-reorder"]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"Not done within {limit_s:.0f} s: ended.", flush=True)
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_WORDS_S)
        return 1
    finally:
        processes.end_all()


if __name__ == "__main__":
    sys.exit(main())
