"""`penstock batch --submit` and `penstock batches` as processes."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

from jobs_served import JobsServed


@dataclass
class Ended:
    code: int
    out: str
    err: str


async def begin(*words: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock.cli", *words, stdout=pipe, stderr=pipe
    )


async def run(*words: str) -> Ended:
    process = await begin(*words)
    out, err = await process.communicate()
    return Ended(process.returncode or 0, out.decode(), err.decode())


def submit(jobs: JobsServed, source: Path, output: Path, *more: str) -> tuple[str, ...]:
    return "batch", str(source), "-o", str(output), "--submit", jobs.url, *more
