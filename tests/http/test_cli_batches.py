"""`penstock batch --submit` and `penstock batches`, against a service's Batches API."""

import json
import signal

import pytest
from batch_submit import begin, run, submit
from jobs_served import line, lines
from served import until

pytestmark = pytest.mark.parity("X2")

LONG = " ".join(f"word{number}" for number in range(200))


async def test_a_file_is_submitted_and_its_answers_fetched(jobs, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(lines([line("a", "one"), line("b", max_tokens=-1), line("c", "three")]))
    ended = await run(*submit(jobs, source, output))
    assert (ended.code, ended.out.split(":")[0]) == (0, "completed"), ended
    assert [json.loads(one)["custom_id"] for one in output.read_text().splitlines()] == ["a", "c"]
    (error,) = (tmp_path / "out.errors.jsonl").read_text().splitlines()
    assert json.loads(error)["custom_id"] == "b"
    again = await run(*submit(jobs, source, output))
    assert again.code == 0
    assert len((await jobs.openai().batches.list()).data) == 1


async def test_a_submitted_batch_may_be_left_and_taken_up(jobs, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(lines(line(f"row-{number}", LONG, max_tokens=50) for number in range(40)))
    process = await begin(*submit(jobs, source, output))
    await until(lambda: (tmp_path / "out.jsonl.batch.json").exists(), limit_s=60)
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert (process.returncode, b"The same command takes it up" in err) == (130, True), err
    refused = await run(*submit(jobs, source, output, "--window", "7d"))
    assert (refused.code, "has the window 24h" in refused.err) == (2, True), refused
    ended = await run(*submit(jobs, source, output))
    assert ended.code == 0, ended
    assert len(output.read_text().splitlines()) == 40
    assert len((await jobs.openai().batches.list()).data) == 1


async def test_a_submit_that_cannot_work_says_why(jobs, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(lines([line("a"), line("a"), line("b", model="other")]))
    ended = await run(*submit(jobs, source, output))
    assert ended.code == 1
    assert "line 2: custom_id 'a' is that of line 1, too." in ended.err
    assert "line 3: There is no model 'other'" in ended.err
    assert not output.exists()
    refused = await run(*submit(jobs, source, output, "--max-tokens", "3"))
    assert (refused.code, "--max-tokens has no effect with --submit" in refused.err) == (2, True), refused
    source.write_text('{"prompt": "no batch line"}\n')
    refused = await run(*submit(jobs, source, output))
    assert (refused.code, "OpenAI's batch lines" in refused.err) == (2, True), refused


async def test_batches_are_listed_shown_and_cancelled(jobs, tmp_path):
    client = jobs.openai()
    content = lines(line(f"row-{number}", LONG, max_tokens=200) for number in range(3000))
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    listed = await run("batches", "list", "--url", jobs.url)
    assert (listed.code, listed.out.split()[0]) == (0, batch.id)
    cancelled = await run("batches", "cancel", batch.id, "--url", jobs.url, "--json")
    assert json.loads(cancelled.out)["status"] == "cancelling"
    shown = await run("batches", "show", batch.id, "--url", jobs.url)
    assert file.id in shown.out
    unknown = await run("batches", "show", "batch_none", "--url", jobs.url)
    assert (unknown.code, "There is no batch" in unknown.err) == (1, True)
