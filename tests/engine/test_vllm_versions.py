"""What `make test-vllm` adds to the engine's tests for one version of vLLM: nothing added to it, and a batch.

Processes of their own: what Penstock adds to vLLM stays in a process, and a batch is a command.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.engines.vllm.capabilities.state import ALL, VARIABLE

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]


def run(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *map(str, words)],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_vllms_own_application_answers_the_contract():
    """Starts an engine with every capability off. Four tests ask for three of them: request_timings,
    scheduler_stats, and adapter_versions, whose register knows the aliases.
    """
    lost = ("where_its_time_went", "share_of_the_cache", "alias", "the_model_is_listed")
    others = " and ".join(f"not {name}" for name in ("sim", "process", "sglang", *lost))
    done = run("pytest", "-q", "tests/engine/test_contract.py", "-k", others, **{VARIABLE: ALL})
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize("off", ["", ALL], ids=["all on", "all off"])
def test_a_batch_answers_every_row(tmp_path: Path, off: str):
    """A command that starts an engine."""
    rows, output = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    rows.write_text("".join(f'{{"id": {number}, "prompt": "What is Penstock?"}}\n' for number in range(200)))
    done = run("penstock.cli", "batch", rows, "-o", output, "--model", "demo", **{VARIABLE: off})
    assert done.returncode == 0, done.stderr[-4000:]
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [answer["id"] for answer in answers] == list(range(200))
    assert all(answer["generated_text"] for answer in answers)
