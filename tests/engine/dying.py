"""Ends of engines: what is left of one whose owner is killed, and what is said of one that stands still."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psutil
from enginetest import Served

LIMIT_S = 30
FOUND_S = 5
"""Within which an engine that stands still must be found."""

FOLDER = Path(__file__).parent
LONG = {"max_tokens": 1900, "ignore_eos": True}


def nothing_is_left_when_the_owner_is_killed(phase: str, folder: Path) -> None:
    """phase: of its engine's start, or "ready". folder: for its temporary files."""
    owner = subprocess.Popen(
        [sys.executable, FOLDER / "owner.py", "demo"],
        env=os.environ | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert owner.stdout
        said = iter(owner.stdout.readline, "")
        assert phase in (line.strip() for line in said)
        below = until_children(owner.pid)
    finally:
        owner.kill()
        owner.wait()
    _, left = psutil.wait_procs(below, timeout=LIMIT_S)
    assert left == []
    assert list(folder.glob("penstock-*")) == []


def until_children(pid: int) -> list[psutil.Process]:
    """The core is started right after the phase "import" is told."""
    while not (below := psutil.Process(pid).children(recursive=True)):
        os.sched_yield()
    return below


async def stopped(core: psutil.Process, served: Served) -> str:
    """Stops the core, and gives what is said of its engine's death."""
    core.suspend()
    reason = await asyncio.wait_for(served.engine.wait_dead(), FOUND_S)
    core.wait(10)
    return reason
