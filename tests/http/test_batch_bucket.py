"""Batch from bucket to bucket, beside a killed driver."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from batch_commands import commands, ended, processes, rows_in, run_prompts, work
from bucket import S3, s3_server
from hypothesis import given, settings
from hypothesis import strategies as st
from random_jobs import Job, jobs, read
from served import Served, until

pytestmark = [pytest.mark.full, pytest.mark.parity("X5")]


@pytest.fixture
def command() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    with commands() as started:
        yield started


async def test_a_job_from_bucket_to_bucket_survives_its_driver(served: Served, tmp_path: Path, command):
    await served.replica("m", step_base_ms=60)
    await served.gateway("m")
    with s3_server("jobs") as s3:
        s3.client.upload_file(str(rows_in(tmp_path)), "jobs", "in/a.jsonl")
        environment = {**os.environ, **s3.environment}
        words = (
            "s3://jobs/in/*.jsonl",
            "-o",
            "s3://jobs/out.jsonl",
            "--url",
            served.url,
            "--concurrency",
            "8",
        )

        def objects() -> list[str]:
            found = s3.client.list_objects_v2(Bucket="jobs", Prefix="out.jsonl.journal/0001-engine")
            return [one["Key"] for one in found.get("Contents", [])]

        first = command(*words, env=environment)
        await until(lambda: len(objects()) > 1, limit_s=60)
        for process in (work(first), first.pid):
            os.kill(process, signal.SIGKILL)
        await ended(first)
        code, out, err = await ended(command(*words, env=environment))
        body = s3.client.get_object(Bucket="jobs", Key="out.jsonl")["Body"].read()
    assert code == 0, err
    assert [json.loads(text)["id"] for text in body.splitlines()] == list(range(300))
    assert "This run:  300 rows" not in out


@pytest.fixture
def s3() -> Iterator[S3]:
    with s3_server("jobs") as server:
        yield server


@settings(max_examples=min(settings().max_examples // 10, 20))
@given(job=jobs(), kills_s=st.lists(st.floats(0.1, 2), max_size=2))
async def test_each_row_of_a_killed_job_in_a_bucket_ends_once(
    served: Served, s3: S3, job: Job, kills_s: list[float]
):
    if served.port is None:
        await served.gateway("m")
        await served.replica(step_base_ms=0.5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job.write(folder)
        root = s3.upload(folder, "jobs", folder.name)
        inputs = f"{root}/data" if job.given == "folder" else f"{root}/data/*.{job.form}"
        output = job.output_in(root)
        options = {"said": folder / "said", "environment": s3.environment}
        exits: list[int | None] = []
        for seconds in [*kills_s, None]:
            run = processes.Process(target=run_prompts, args=(inputs, output, served.url), kwargs=options)
            run.start()
            await asyncio.to_thread(run.join, seconds)
            run.kill()
            run.join()
            exits.append(run.exitcode)
        assert exits[-1] == 0
        back = folder / "back"
        for found in s3.client.list_objects_v2(Bucket="jobs", Prefix=job.output_in(folder.name))["Contents"]:
            if not found["Key"].endswith("/") and ".journal/" not in found["Key"]:
                path = back / found["Key"]
                path.parent.mkdir(parents=True, exist_ok=True)
                s3.client.download_file("jobs", found["Key"], str(path))
        job.check(read(Path(job.output_in(back / folder.name))))
