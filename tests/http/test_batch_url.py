"""`penstock batch --url` against a running service: real sockets, and a driver that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from bucket import s3_server
from served import Served, until

from penstock.data.place import place
from penstock.data.record import read as record_of
from penstock.data.run import batch
from penstock.errors import Unavailable

pytestmark = pytest.mark.parity("X5")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f'{{"id": {number}, "prompt": "row {number}"}}\n' for number in range(300)))
    return path


def command(*words: str | Path, **options) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    words = [sys.executable, "-m", "penstock.cli", "batch", *map(str, words)]
    return subprocess.Popen(words, **pipes, **options)


async def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = await asyncio.to_thread(process.communicate)
    return process.returncode, out, err


def lines(path: Path) -> list[dict]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def journaled(output: Path) -> int:
    """Rows that the journal says have ended."""
    folder = output.with_name(output.name + ".journal")
    return sum(file.read_bytes().count(b"\n") for file in folder.glob("*engine*.jsonl"))


async def test_a_file_is_answered_by_a_service(served: Served, rows: Path):
    await served.replica("m", step_base_ms=0.1)
    await served.gateway("m")
    output, told = rows.with_name("out.jsonl"), rows.with_name("report.json")
    code, out, err = await ended(command(rows, "-o", output, "--url", served.url, "--report", told))
    assert (code, [row["id"] for row in lines(output)]) == (0, list(range(300))), err
    assert "300 ok, 0 failed of 300" in out
    assert json.loads(told.read_text())["ok"] == 300


async def test_a_killed_driver_goes_on_where_it_was(served: Served, rows: Path):
    replica = await served.replica("m", step_base_ms=40)
    await served.gateway("m")
    output = rows.with_name("out.jsonl")
    words = (rows, "-o", output, "--url", served.url, "--concurrency", "8")
    first = command(*words)
    await until(lambda: journaled(output) > 20)
    for process in (work(first), first.pid):
        os.kill(process, signal.SIGKILL)
    await ended(first)
    assert not output.exists()
    kept = journaled(output)
    code, out, err = await ended(command(*words))
    assert (code, [row["id"] for row in lines(output)]) == (0, list(range(300))), err
    assert f"{300 - kept:,} rows in" in out
    assert replica.engine.counts().finished <= 300 + 8


def work(process: subprocess.Popen[str]) -> int:
    """The process that works, under its guard."""
    (child,) = psutil.Process(process.pid).children()
    return child.pid


async def test_a_job_from_bucket_to_bucket_survives_its_driver(served: Served, rows: Path):
    await served.replica("m", step_base_ms=60)
    await served.gateway("m")
    with s3_server("jobs") as s3:
        s3.client.upload_file(str(rows), "jobs", "in/a.jsonl")
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
        await until(lambda: len(objects()) > 1)
        for process in (work(first), first.pid):
            os.kill(process, signal.SIGKILL)
        await ended(first)
        code, out, err = await ended(command(*words, env=environment))
        body = s3.client.get_object(Bucket="jobs", Key="out.jsonl")["Body"].read()
    assert code == 0, err
    assert [json.loads(text)["id"] for text in body.splitlines()] == list(range(300))
    assert "This run:  300 rows" not in out


async def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(served: Served, rows: Path):
    await served.replica("m", step_base_ms=60)
    await served.gateway("m")
    output = rows.with_name("out.jsonl")
    process = command(rows, "-o", output, "--url", served.url, "--concurrency", "8")
    await until(lambda: journaled(output) > 8)
    process.send_signal(signal.SIGINT)
    code, out, _ = await ended(process)
    assert code == 128 + signal.SIGINT
    assert f"penstock batch resume {output}" in out
    found = record_of(place(f"{output}.journal"))
    assert found.ended == "SIGINT"
    code, out, err = await ended(command("resume", output))
    assert (code, len(lines(output))) == (0, 300), err


async def test_a_limit_stops_with_a_code_of_its_own(served: Served, rows: Path):
    await served.replica("m", step_base_ms=5)
    await served.gateway("m")
    output = rows.with_name("out.jsonl")
    words = ("--url", served.url, "--concurrency", "4", "--max-total-tokens", "200")
    code, out, _ = await ended(command(rows, "-o", output, *words))
    assert (code, output.exists()) == (3, False)
    code, out, _ = await ended(command("status", output, "--json"))
    assert json.loads(out)["ended"].startswith("budget: ")


async def test_a_second_command_on_one_output_is_refused(served: Served, rows: Path):
    await served.replica("m", step_base_ms=20)
    await served.gateway("m")
    output = rows.with_name("out.jsonl")
    words = (rows, "-o", output, "--url", served.url, "--concurrency", "4")
    first = command(*words)
    await until(lambda: journaled(output) > 4)
    code, _, err = await ended(command(*words))
    first.terminate()
    await ended(first)
    assert code == 1
    assert "works on this output already" in err


async def test_a_finished_output_is_left_alone(served: Served, rows: Path):
    await served.replica("m", step_base_ms=0.1)
    await served.gateway("m")
    output = rows.with_name("out.jsonl")
    await ended(command(rows, "-o", output, "--url", served.url))
    before = output.read_bytes()
    code, _, err = await ended(command(rows, "-o", output, "--url", served.url))
    assert (code, output.read_bytes()) == (2, before)
    assert "is finished" in err


async def test_openais_batch_lines_are_answered_with_their_ids(served: Served, tmp_path: Path):
    await served.replica("m", step_base_ms=0.1)
    await served.gateway("m")
    chat = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    asked = [("a", "/v1/chat/completions", chat), ("b", "/v1/embeddings", {"model": "m", "input": "x"})]
    asked.append(("c", "/v1/chat/completions", {**chat, "model": "nobody"}))
    rows = [{"custom_id": id, "method": "POST", "url": url, "body": body} for id, url, body in asked]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "out.jsonl"
    code, _, err = await ended(command(tmp_path / "in.jsonl", "-o", output, "--url", served.url))
    assert code == 0, err
    found = {row["custom_id"]: row["response"] for row in lines(output)}
    assert found["a"]["body"]["choices"][0]["message"]["content"] == "hello"
    assert len(found["b"]["body"]["data"]) == 1
    (error,) = lines(tmp_path / "out.errors.jsonl")
    assert (error["custom_id"], error["response"]["status_code"]) == ("c", 404)


def test_a_service_that_is_not_there_is_one_sentence(rows: Path, free_port: int):
    with pytest.raises(Unavailable, match="cannot be reached"):
        batch(str(rows), f"{rows.parent}/out.jsonl", url=f"http://127.0.0.1:{free_port}")
