"""Commands `penstock batch` as processes: what their tests start, wait for and read."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil


def rows_in(folder: Path) -> Path:
    """A file of 300 rows."""
    path = folder / "in.jsonl"
    path.write_text("".join(f'{{"id": {number}, "prompt": "row {number}"}}\n' for number in range(300)))
    return path


@contextmanager
def commands() -> Generator[Callable[..., subprocess.Popen[str]]]:
    """What starts one. Those that a failed test has left are killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def command(*words: str | Path, **options: Any) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        words = (sys.executable, "-m", "penstock.cli", "batch", *map(str, words))
        started.append(subprocess.Popen(words, **pipes, **options))
        return started[-1]

    try:
        yield command
    finally:
        for process in started:
            if process.poll() is None:
                left = [*psutil.Process(process.pid).children(recursive=True), process]
                for one in left:
                    one.kill()
                process.communicate()


async def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = await asyncio.to_thread(process.communicate)
    return process.returncode, out, err


def work(process: subprocess.Popen[str]) -> int:
    """The process that works, under its guard."""
    (child,) = psutil.Process(process.pid).children()
    return child.pid


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def journal(output: Path) -> Path:
    return output.with_name(output.name + ".journal")


def journaled(output: Path) -> int:
    """Rows that the journal says have ended."""
    return sum(file.read_bytes().count(b"\n") for file in journal(output).glob("*engine*.jsonl"))
