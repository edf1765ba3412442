"""The Batches API by OpenAI's own client, over a gateway and a simulated engine."""

import json

import openai
import pytest
from jobs_served import CHAT, CONCURRENCY, JobsServed, begun, create, ended, found, line, lines
from served import until

from penstock.jobs import parameters

pytestmark = pytest.mark.parity("X2")

LONG = " ".join(f"word{number}" for number in range(200))


async def test_a_batch_answers_each_line_once_in_openais_form(jobs):
    rows = [line(f"row-{number}", f"text {number}") for number in range(30)]
    rows[7] = line("row-7", max_tokens=-1)
    made = await create(jobs, rows, metadata={"team": "search"})
    assert (made.object, made.status, made.errors, made.output_file_id) == ("batch", "validating", None, None)
    batch = await ended(jobs, made.id)
    assert (batch.status, batch.metadata, batch.model) == ("completed", {"team": "search"}, "m")
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (30, 29, 1)
    stamps = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert stamps == sorted(stamps)
    assert batch.expires_at == batch.created_at + 24 * 3600
    answers = {one["custom_id"]: one for one in await found(jobs, batch.output_file_id)}
    assert sorted(answers) == sorted(f"row-{number}" for number in range(30) if number != 7)
    body = answers["row-3"]["response"]["body"]
    assert answers["row-3"]["error"] is None
    assert answers["row-3"]["response"]["status_code"] == 200
    assert (body["object"], body["choices"][0]["message"]["content"]) == ("chat.completion", "text 3")
    (error,) = await found(jobs, batch.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"]) == ("row-7", 400)
    output = await jobs.openai().files.retrieve(batch.output_file_id)
    assert (output.purpose, output.expires_at) == ("batch_output", output.created_at + 30 * 24 * 3600)
    assert not list((jobs.storage / "batches" / batch.id).glob("*.journal"))


async def test_validation_names_each_fault_with_its_line(jobs):
    rows = [
        line("a"),
        "{not json",
        "[1]",
        line("a"),
        line(None),
        line("b", url="/v1/completions"),
        line("c", method="GET"),
        line("d", model="other"),
        line("e", stream=True),
        "",
        line("f", "x" * (2 << 20)),
        json.dumps({"custom_id": "g", "method": "POST", "url": CHAT, "body": 1}),
        line("h"),
        line("i", background=True),
    ]
    batch = await ended(jobs, (await create(jobs, rows)).id)
    assert (batch.status, batch.output_file_id) == ("failed", None)
    assert batch.failed_at is not None
    assert [(one.line, one.code, one.param) for one in batch.errors.data] == [
        (2, "invalid_json_line", None),
        (3, "invalid_json_line", None),
        (4, "duplicate_custom_id", "custom_id"),
        (5, "missing_custom_id", "custom_id"),
        (6, "mismatched_endpoint", "url"),
        (7, "invalid_method", "method"),
        (8, "model_not_found", "body.model"),
        (9, "stream", "body.stream"),
        (11, "line_too_long", None),
        (12, "invalid_body", "body"),
        (14, "background", "body.background"),
    ]
    assert "line 1" in batch.errors.data[2].message


@pytest.mark.parametrize(
    ("config", "content", "code"),
    [
        ({}, b"\n\n", "empty_file"),
        ({"max_batch_lines": 2}, lines(line(f"{n}") for n in range(3)), "too_many_requests"),
    ],
)
async def test_a_file_without_lines_or_with_too_many_fails(jobs, config, content, code):
    jobs.service.batches._config.__dict__.update(config)
    batch = await ended(jobs, (await create(jobs, content)).id)
    assert [one.code for one in batch.errors.data] == [code]


async def test_a_cancelled_batch_keeps_what_was_done(jobs):
    client = jobs.openai()
    made = await create(jobs, [line(f"row-{number}", LONG, max_tokens=100) for number in range(60)])
    await begun(jobs, made.id)
    assert (await client.batches.cancel(made.id)).status == "cancelling"
    batch = await ended(jobs, made.id)
    assert batch.status == "cancelled"
    assert batch.cancelled_at >= batch.cancelling_at
    await check_each_once(jobs, batch, "batch_cancelled", 60)


async def test_a_batch_above_its_tenants_budget_fails_what_is_left(jobs):
    jobs.budget = 200
    made = await create(jobs, [line(f"row-{number}", LONG, max_tokens=100) for number in range(60)])
    batch = await ended(jobs, made.id)
    assert batch.status == "completed"
    await check_each_once(jobs, batch, "insufficient_quota", 60)
    later = await ended(jobs, (await create(jobs, [line("late")])).id)
    assert (later.request_counts.completed, later.request_counts.failed) == (0, 1)


async def test_an_expired_batch_keeps_what_was_done(jobs, monkeypatch):
    monkeypatch.setitem(parameters._UNITS, "m", 1)
    rows = [line(f"row-{number}", LONG, max_tokens=200) for number in range(100)]
    batch = await ended(jobs, (await create(jobs, rows, completion_window="2m")).id)
    assert batch.status == "expired"
    assert batch.expired_at >= batch.expires_at
    await check_each_once(jobs, batch, "batch_expired", 100)


async def check_each_once(jobs: JobsServed, batch, code: str, total: int) -> None:
    done, left = await found(jobs, batch.output_file_id), await found(jobs, batch.error_file_id)
    assert done
    assert left
    assert {one["error"]["code"] for one in left} == {code}
    assert sorted(one["custom_id"] for one in done + left) == sorted(f"row-{n}" for n in range(total))
    assert (batch.request_counts.completed, batch.request_counts.failed) == (len(done), len(left))


async def test_a_batch_goes_on_after_a_restart_and_runs_no_line_again(jobs):
    """But for lines that were being answered at that moment."""
    rows = [line(f"row-{number}", f"{number} {LONG}", max_tokens=20) for number in range(60)]
    made = await create(jobs, rows)
    seen = await begun(jobs, made.id)
    await jobs.stop()
    answered = set(jobs.requests.answered)
    assert 0 < len(answered) < 60
    await jobs.start()
    again = await jobs.openai().batches.retrieve(made.id)
    assert again.request_counts.completed >= seen.request_counts.completed
    batch = await ended(jobs, made.id)
    assert batch.status == "completed"
    answers = await found(jobs, batch.output_file_id)
    assert sorted(one["custom_id"] for one in answers) == sorted(f"row-{number}" for number in range(60))
    sent = jobs.requests.sent
    assert {sent[body] for body in answered} == {1}
    assert len(sent) == 60
    assert sent.total() <= 60 + CONCURRENCY


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_the_error_of_a_line_is_that_of_the_same_request_by_http(jobs, served, path: str):
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": -1}
    batch = await ended(jobs, (await create(jobs, [line("a", url=path, **body)], endpoint=path)).id)
    (failed,) = await found(jobs, batch.error_file_id)
    async with served.http() as http:
        answer = await http.post(path, json=body)
    response = failed["response"]
    assert (response["status_code"], response["body"]) == (answer.status_code, answer.json())


async def test_an_ended_batch_is_removed_when_its_files_have_expired(jobs, patched):
    batch = await ended(jobs, (await create(jobs, [line("a")])).id)
    kept = await create(jobs, [line("a", LONG, max_tokens=200)])
    patched("penstock.jobs.batches.now_s", lambda: batch.completed_at + 30 * 24 * 3600)
    await jobs.service.batches.remove_expired()
    assert [one.id async for one in jobs.openai().batches.list()] == [kept.id]
    assert not [one for one in (jobs.storage / "batches").iterdir() if batch.id in one.name]
    await jobs.restart()
    assert [one.id async for one in jobs.openai().batches.list()] == [kept.id]


async def test_a_file_that_a_batch_reads_cannot_be_deleted(jobs):
    client = jobs.openai()
    made = await create(jobs, [line(f"{number}", LONG, max_tokens=100) for number in range(20)])
    with pytest.raises(openai.ConflictError, match=made.id):
        await client.files.delete(made.input_file_id)
    await client.batches.cancel(made.id)
    await ended(jobs, made.id)
    assert (await client.files.delete(made.input_file_id)).deleted


async def test_what_cannot_be_a_batch_is_refused_with_a_sentence(jobs):
    client = jobs.openai()
    done = await ended(jobs, (await create(jobs, [line("a")])).id)
    good = {"input_file_id": done.input_file_id, "endpoint": CHAT, "completion_window": "24h"}
    refused = [
        ({"input_file_id": "file-none"}, 404, "There is no file"),
        ({"input_file_id": done.output_file_id}, 400, "purpose 'batch_output'"),
        ({"endpoint": "/admin/sleep"}, 400, "batches may use /v1/chat/completions"),
        ({"endpoint": "/v1/batches"}, 400, "batches may use"),
        ({"completion_window": "-1h"}, 400, "write '24h'"),
        ({"completion_window": "31d"}, 400, "up to 30 days"),
        ({"completion_window": 24}, 400, "completion_window"),
        ({"metadata": {"key": "x" * 513}}, 400, "metadata may have"),
        ({"metadata": {"key": 1}}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, 400, "from 3600"),
        ({"priority": 1}, 400, "priority"),
    ]
    async with jobs.http() as http:
        for change, status, sentence in refused:
            answer = await http.post("/v1/batches", json={**good, **change})
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")
            assert sentence in answer.json()["error"]["message"]
        assert (await http.post("/v1/batches", content=b"{")).status_code == 400
        assert (await http.get("/v1/batches?limit=101")).status_code == 400
    with pytest.raises(openai.ConflictError, match="is completed"):
        await client.batches.cancel(done.id)
    with pytest.raises(openai.NotFoundError):
        await client.batches.retrieve("batch_none")


@pytest.mark.parametrize("jobs", [{"max_batch_bytes": 100}], indirect=True)
async def test_an_input_over_the_limit_of_batches_is_413(jobs):
    with pytest.raises(openai.APIStatusError, match="may have 100") as refused:
        await create(jobs, [line("a")])
    assert refused.value.status_code == 413


async def test_files_without_a_record_are_removed_at_the_start(jobs):
    (jobs.storage / "files").mkdir(exist_ok=True)
    (jobs.storage / "files" / "file-lost.jsonl").write_text("{}")
    await jobs.restart()
    await until(lambda: not list((jobs.storage / "files").iterdir()))
