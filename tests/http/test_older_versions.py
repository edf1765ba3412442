"""What commit 6a0fbd4 left on disk goes on: a job's journal, control's store, a config.

`tests/older` holds what it wrote, with `{folder}` for the job's folder and `{url}` for its service: a job
whose driver was killed after some of 24 rows, a database with the outcome of three operations, and a config
with its meaning as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from pathlib import Path

import pytest
from batch_commands import commands, ended, lines
from served import Served

from penstock.config import load_applications
from penstock.serve.control.desired import DesiredStates
from penstock.serve.control.state import DesiredState, Weights

OLDER = Path(__file__).parents[1] / "older"


def _job(folder: Path, url: str) -> tuple[Path, Path]:
    """Its input and its output, as they lay."""
    shutil.copytree(OLDER / "job", folder, dirs_exist_ok=True)
    record = folder / "out.jsonl.journal" / "job.json"
    record.write_text(record.read_text().replace("{folder}", str(folder)).replace("{url}", url))
    (part,) = json.loads(record.read_text())["source"]["parts"]
    given = folder / "in.jsonl"
    os.utime(given, ns=(int(part["version"]), int(part["version"])))
    return given, folder / "out.jsonl"


@pytest.mark.parity("X5")
async def test_a_job_goes_on_where_its_driver_was_killed(served: Served, tmp_path: Path):
    await served.replica("m", step_base_ms=0.1)
    await served.gateway("m")
    given, output = _job(tmp_path, served.url)
    journal = output.with_name("out.jsonl.journal")
    before = _answered(journal)
    words = ("--url", served.url, "--prompt", "{question}", "--max-tokens", "8")
    with commands() as command:
        code, out, err = await ended(command(given, "-o", output, *words))
    assert (code, "24 ok, 0 failed of 24" in out) == (0, True), err
    assert [(row["id"], row["generated_text"]) for row in lines(output)] == [
        (number, f"row {number}") for number in range(24)
    ]
    assert 0 < len(before) < 24
    assert sorted(_answered(journal)) == list(range(24))  # none was asked again


def _answered(journal: Path) -> list[int]:
    return [line["row"] for file in sorted(journal.glob("*engine*.jsonl")) for line in lines(file)]


@pytest.mark.parity("S25")
def test_what_was_desired_is_read(tmp_path: Path):
    file = tmp_path / "control.sqlite"
    with sqlite3.connect(file) as database:
        database.executescript((OLDER / "control.sql").read_text())
    store = DesiredStates(file)
    assert store.version == 5
    assert store.get("qwen", "other") == DesiredState(version=3, sleep=1, sleep_mode="abort")
    assert store.get("qwen", "3f0c21b4") == DesiredState(
        version=4, replica="3f0c21b4", pause="keep", clear_cache=True
    )
    weights = Weights("/models/v2", "v2", "wait")
    assert store.get("llama") == DesiredState(version=5, weights=weights, application="blue")


@pytest.mark.parity("S1")
def test_a_config_says_what_it_said():
    found = load_applications(str(OLDER / "config.yaml"))
    said = json.loads((OLDER / "config.json").read_text())
    assert [json.loads(one.args.model_dump_json(exclude_unset=True, warnings=False)) for one in found] == said
