"""Batch from bucket to bucket, beside a killed driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from batch_commands import commands, ended, rows_in, work
from breaking import breaking, run_histories
from bucket import s3_server
from hypothesis import settings
from served import Served, until
from tests.unit.test_jobs_fuzz import JobMachine

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


def test_each_row_of_a_job_in_a_bucket_is_answered_once_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with breaking(tmp_path) as storage, s3_server("jobs") as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        examples = min(settings().max_examples // 10, 20)
        run_histories(lambda: JobMachine(storage, "s3://jobs", s3.environment), examples, steps=12)
