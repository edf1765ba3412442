"""Jobs of odd rows in odd files, broken off and begun again: each row ends once, in order, with its answer.

A run is broken off by a kill, by a disk that is full, or refused because the input is another one by now.
`make fuzz` runs many more of them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pyarrow as pa
import pytest
from batch_commands import journaled, processes, run_prompts
from hypothesis import example, given, settings
from random_jobs import NONE, Fault, Job, jobs, read
from served import Served

pytestmark = pytest.mark.parity("D13")

LIMIT_S = 60
FULL_FROM_THE_START = Job(
    files=[[]],
    types=[pa.string()],
    column="x",
    form="jsonl",
    given="files",
    output="answers.jsonl",
    faults=[Fault(full_after=0)],
)


ends = Counter[int]()
"""Exit statuses of the runs that met a fault."""


@settings(max_examples=min(settings().max_examples, 200))
@given(job=jobs())
@example(job=FULL_FROM_THE_START)
async def test_each_row_of_a_broken_job_ends_once_in_order_with_its_own_answer(served: Served, job: Job):
    if served.port is None:
        await served.gateway("m")
        await served.replica(step_base_ms=0.5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given, output = job.write(folder), job.output_in(folder)
        for fault in job.faults:
            file = folder / f"data/0.{job.form}" if fault.changed else None
            if file and not journaled(Path(output)):
                continue  # nothing is lost by another input
            with changed(file) if file else nullcontext():
                code, said = await run(folder, given, output, served.url, fault)
            assert code in (0, 1, -signal.SIGKILL), said
            ends[code] += 1
            assert bool(said) == (code == 1)
            assert not file or "has changed" in said
        assert await run(folder, given, output, served.url) == (0, "")
        job.check(read(Path(output)))
        assert not list(Path(output).parent.glob("*.failed.*"))


@pytest.mark.skipif("not ends", reason="counts what the jobs above have met")
def test_some_of_these_jobs_were_killed_and_some_met_a_full_disk():
    assert min(ends[1], ends[-signal.SIGKILL]) > 3, ends


async def run(
    folder: Path, given: str | list[str], output: str, url: str, fault: Fault = NONE
) -> tuple[int, str]:
    """The exit status of one run, and what it said about its failure."""
    said = folder / "said"
    said.write_text("")
    options = {"said": said, "disk_bytes": fault.full_after}
    child = processes.Process(target=run_prompts, args=(given, output, url), kwargs=options)
    child.start()
    async with asyncio.timeout(LIMIT_S):
        while child.is_alive():
            if fault.killed_after is not None and journaled(Path(output)) > fault.killed_after:
                child.kill()
            await asyncio.sleep(0.002)
    child.join()
    assert child.exitcode is not None
    return child.exitcode, said.read_text()


@contextmanager
def changed(file: Path) -> Generator[None]:
    before, seen = file.read_bytes(), file.stat()
    file.write_bytes(before + b"\n")
    try:
        yield
    finally:
        file.write_bytes(before)
        os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))
