"""The Batches API over a bucket: restarts, and an owner that is stopped while another one takes over."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import openai
import pytest
from bucket import S3, s3_server
from jobs_process import JobsProcess
from jobs_served import JobsServed, begun, create, ended, found, line
from served import Served

pytestmark = [pytest.mark.full, pytest.mark.parity("X2")]

ROWS = [line(f"row-{number}", f"{number} " + "word " * 100, max_tokens=20) for number in range(80)]
IDS = sorted(f"row-{number}" for number in range(80))
STORAGE = "s3://files/penstock"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    with s3_server("files") as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        yield s3


@pytest.fixture
async def stored(bucket: S3, served: Served) -> AsyncIterator[JobsServed]:
    """Files and Batches over a bucket, not started."""
    await served.replica("m", step_base_ms=20)
    await served.gateway("m")
    jobs = JobsServed(served, STORAGE, {})
    yield jobs
    await jobs.stop()


def objects(bucket: S3) -> dict[str, str]:
    """Digests of all files and records; journals and locks are left out."""
    listed = bucket.client.list_objects_v2(Bucket="files").get("Contents", [])
    keys = {one["Key"]: one["ETag"] for one in listed}
    return {key: tag for key, tag in keys.items() if ".journal/" not in key and "/owner/" not in key}


async def ask_until_refused(jobs: JobsProcess, batch_id: str) -> None:
    """It answers from its memory until its next heartbeat."""
    while True:
        await jobs.openai().batches.retrieve(batch_id)


async def test_a_batch_in_a_bucket_goes_on_after_a_restart(stored: JobsServed, bucket: S3):
    await stored.start()
    made = await create(stored, ROWS)
    await begun(stored, made.id)
    await stored.restart()
    batch = await ended(stored, made.id)
    assert batch.status == "completed"
    assert sorted(one["custom_id"] for one in await found(stored, batch.output_file_id)) == IDS
    records = [key for key in objects(bucket) if key.endswith(".json")]
    assert len(records) == 3, "the input, the output and the batch have one record each"
    await stored.openai().files.delete(batch.output_file_id)
    await stored.restart()
    assert [one.id async for one in stored.openai().files.list()] == [batch.input_file_id]


async def test_an_owner_that_wakes_up_beside_its_successor_changes_nothing(
    stored: JobsServed, served: Served, bucket: S3
):
    first = await JobsProcess(served.url, STORAGE).ready()
    try:
        made = await create(first, ROWS)
        await begun(first, made.id)
        first.freeze()
        await stored.start()
        batch = await ended(stored, made.id)
        kept = objects(bucket)
        first.thaw()
        with pytest.raises(openai.InternalServerError, match=r"moved to another process|not ready"):
            await first.openai().batches.create(
                input_file_id=made.input_file_id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
            )
        with pytest.raises(openai.InternalServerError):
            await ask_until_refused(first, made.id)
        assert objects(bucket) == kept
    finally:
        first.kill()
    assert batch.status == "completed"
    assert sorted(one["custom_id"] for one in await found(stored, batch.output_file_id)) == IDS
