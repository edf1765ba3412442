"""Runs the GPU tier, the most valuable first: `python -m tests.gpu [--report FILE] [--only 1,2]`.

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
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
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
    options, words = parser.parse_known_args()
    if options.report is not None:
        words += ["--report", str(options.report.resolve())]
    wanted = [PARTS[int(number) - 1] for number in options.only.split(",")]
    return max([run(*part, words) for part in wanted])


def run(workers: int, limit_s: int, tests: tuple[str, ...], words: list[str]) -> int:
    command = [sys.executable, "-m", "pytest", "--durations=15", *tests, *words]
    if workers > 1 and find_spec("xdist") is not None and (os.cpu_count() or 1) > workers:
        command += ["-n", str(workers), "--dist", "loadscope", "--no-loadscope-reorder"]
    process, began = subprocess.Popen(command, cwd=ROOT, start_new_session=True), time.monotonic()
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"Ended after {time.monotonic() - began:.0f} s.", flush=True)
        return 1
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Its engines end with it: each is tied to its owner."""
    for signum, patience_s in ((signal.SIGINT, 10), (signal.SIGKILL, 10)):
        if process.poll() is None:
            os.killpg(process.pid, signum)
            try:
                process.wait(patience_s)
            except subprocess.TimeoutExpired:
                continue


if __name__ == "__main__":
    sys.exit(main())
