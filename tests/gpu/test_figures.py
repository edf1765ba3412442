"""The benchmarks' figures on this device, kept in the report: beside `vllm serve` and `LLM.generate`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.device import DEVICE

pytestmark = [pytest.mark.full, pytest.mark.timeout(200 if DEVICE == "gpu" else 600)]

ROOT = Path(__file__).parents[2]
LIMIT_S = 190 if DEVICE == "gpu" else 580
SHORT = ("--streams", "1,64,256", "--seconds", "4", "--warmup", "2") if DEVICE == "gpu" else ()
ONLINE = ("--only", "vllm,penstock", "--executor", "uni", "--rounds", "1", "--idle-limit", "1")
BATCH = ("--contestants", "llm,own", "--lengths", "lognormal", "--rows", "3000" if DEVICE == "gpu" else "100")


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Where the report is: a benchmark that is cut off leaves what it has measured."""
    report = request.config.getoption("report")
    return report.resolve().parent if report else tmp_path


def measured(name: str, folder: Path, *words: str) -> Any:
    """What a benchmark writes as JSON."""
    file = folder / f"gpu_{name}.json"
    file.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *words, "--shared", "--json", str(file)],
        env=os.environ | {"PENSTOCK_ACCELERATOR": DEVICE},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert file.exists(), done.stderr[-3000:]
    return json.loads(file.read_text())


def test_figures_online(folder: Path, record_property):
    found = measured("online", folder, *ONLINE, *(SHORT or ("--streams", "4", "--seconds", "1")))
    for run in found["runs"]:
        figures = {name: run["figures"][name] for name in ("ttft_ms", "latency_ms") if name in run["figures"]}
        name = f"{run['contestant']}_{run['streams']}"
        record_property(
            name, {"tokens_per_s": round(run["tokens_per_s"]), **figures, "failures": run["failures"]}
        )
    for start in found["starts"]:
        record_property(
            f"{start['contestant']}_start", {"s": start["first_token_s"], "why": start["failure"]}
        )
    assert {run["contestant"] for run in found["runs"]} == {"vllm", "penstock"}


def test_figures_of_a_batch(folder: Path, record_property):
    found = measured("batch", folder, *BATCH)
    for run in found:
        kept = ("tokens_per_s", "tokens", "ready_s", "all_s", "failure")
        record_property(run["contestant"], {name: run[name] for name in kept})
    assert [run["failure"] for run in found] == ["", ""]
