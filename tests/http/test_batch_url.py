"""`penstock batch --url` against a running service: real sockets, and a driver that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from batch_commands import commands, ended, journaled, lines, rows_in, work
from served import Served, until
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.data.job.api import batch
from penstock.data.job.manifest import read as manifest_of
from penstock.data.storage.paths import storage_path
from penstock.errors import Unavailable

pytestmark = pytest.mark.parity("X5")


@pytest.fixture
def command() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    with commands() as started:
        yield started


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return rows_in(tmp_path)


async def test_a_file_is_answered_by_a_service_and_then_left_alone(served: Served, rows: Path, command):
    await served.replica("m", step_base_ms=0.1)
    await served.gateway("m")
    output, report = rows.with_name("out.jsonl"), rows.with_name("report.json")
    code, out, err = await ended(command(rows, "-o", output, "--url", served.url, "--report", report))
    assert (code, [row["id"] for row in lines(output)]) == (0, list(range(300))), err
    assert "300 ok, 0 failed of 300" in out
    assert json.loads(report.read_text())["ok"] == 300
    before = output.read_bytes()
    code, _, err = await ended(command(rows, "-o", output, "--url", served.url))
    assert (code, output.read_bytes()) == (0, before)
    assert "is finished; nothing was run" in err


async def test_a_batch_runs_where_a_loop_runs_already_as_in_a_notebook(served: Served, rows: Path):
    await served.replica("m", step_base_ms=0.1)
    await served.gateway("m")

    async def cell():
        return batch(str(rows), f"{rows.parent}/out.jsonl", url=served.url)

    report = await asyncio.to_thread(asyncio.run, cell())
    assert (report.ok, report.failed) == (300, 0)


async def test_a_killed_driver_goes_on_where_it_was(served: Served, rows: Path, command):
    replica = await served.replica("m", step_base_ms=15)
    await served.gateway("m")
    output = rows.with_name("out.jsonl")
    words = (rows, "-o", output, "--url", served.url, "--concurrency", "8")
    first = command(*words)
    await until(lambda: journaled(output) > 20, limit_s=60)
    for process in (work(first), first.pid):
        os.kill(process, signal.SIGKILL)
    await ended(first)
    assert not output.exists()
    ended_before = journaled(output)
    code, out, err = await ended(command(*words))
    assert (code, [row["id"] for row in lines(output)]) == (0, list(range(300))), err
    assert f"{300 - ended_before:,} rows in" in out
    assert replica.engine.counts().finished <= 300 + 8


async def test_a_killed_command_leaves_the_output_free_at_once(served: Served, rows: Path, command):
    replica = await served.replica("m", step_base_ms=100)
    await served.gateway("m")
    output = rows.with_name("out.jsonl")
    long = ("--max-tokens", "1000", "--param", "ignore_eos=true")  # no row ends while this test runs
    process = command(rows, "-o", output, "--url", served.url, "--concurrency", "2", *long)
    await until(lambda: replica.engine.load().running == 2, limit_s=60)
    worker = psutil.Process(work(process))
    process.kill()
    await asyncio.to_thread(worker.wait, 15)
    assert manifest_of(storage_path(f"{output}.journal")).stop_reason == "SIGKILL"


async def test_while_one_works_a_second_is_refused_and_ctrl_c_stops_it_cleanly(
    served: Served, rows: Path, command
):
    await served.replica("m", step_base_ms=15)
    await served.gateway("m")
    output = rows.with_name("out.jsonl")
    words = (rows, "-o", output, "--url", served.url, "--concurrency", "8")
    process = command(*words)
    await until(lambda: journaled(output) > 8, limit_s=60)
    worker = work(process)
    os.kill(worker, signal.SIGSTOP)  # so that it has not ended before the second asks
    code, _, err = await ended(command(*words))
    os.kill(worker, signal.SIGCONT)
    assert code == 1
    assert "works on this output already" in err
    process.send_signal(signal.SIGINT)
    code, out, _ = await ended(process)
    assert code == 128 + signal.SIGINT
    assert f"penstock batch resume {output}" in out
    found = manifest_of(storage_path(f"{output}.journal"))
    assert found.stop_reason == "SIGINT"
    code, out, err = await ended(command("resume", output))
    assert (code, len(lines(output))) == (0, 300), err


async def test_a_limit_stops_with_a_code_of_its_own(served: Served, rows: Path, command):
    await served.replica("m", step_base_ms=5)
    await served.gateway("m")
    output = rows.with_name("out.jsonl")
    words = ("--url", served.url, "--concurrency", "4", "--max-total-tokens", "200")
    code, _out, _ = await ended(command(rows, "-o", output, *words))
    assert (code, output.exists()) == (3, False)
    status = await asyncio.to_thread(CliRunner().invoke, app, ["batch", "status", str(output), "--json"])
    assert json.loads(status.output)["ended"].startswith("budget: ")


async def test_openais_batch_lines_are_answered_with_their_ids(served: Served, tmp_path: Path, command):
    await served.replica("m", step_base_ms=0.1)
    await served.gateway("m")
    chat = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    requests = [("a", "/v1/chat/completions", chat), ("b", "/v1/embeddings", {"model": "m", "input": "x"})]
    requests.append(("c", "/v1/chat/completions", {**chat, "model": "nobody"}))
    rows = [{"custom_id": id, "method": "POST", "url": url, "body": body} for id, url, body in requests]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "out.jsonl"
    code, _, err = await ended(command(tmp_path / "in.jsonl", "-o", output, "--url", served.url))
    assert code == 0, err
    found = {row["custom_id"]: row["response"] for row in lines(output)}
    assert found["a"]["body"]["choices"][0]["message"]["content"] == "hello"
    assert len(found["b"]["body"]["data"]) == 1
    (error,) = lines(tmp_path / "out.errors.jsonl")
    async with served.http() as http:
        alike = await http.post("/v1/chat/completions", json=requests[2][2])
    assert (error["custom_id"], error["response"]["status_code"]) == ("c", alike.status_code)
    assert error["response"]["body"] == alike.json()
    assert alike.json()["error"]["param"] == "model"


def test_a_service_that_is_not_there_is_one_sentence(rows: Path, free_port: int):
    with pytest.raises(Unavailable, match="cannot be reached"):
        batch(str(rows), f"{rows.parent}/out.jsonl", url=f"http://127.0.0.1:{free_port}")
