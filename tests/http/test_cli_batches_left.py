"""`penstock batch --submit` that is left before the service has said which batch it is."""

import asyncio
import signal
from typing import Any

import pytest
from batch_submit import begin, run, submit
from jobs_served import line, lines

from penstock.errors import Unavailable

pytestmark = [pytest.mark.full, pytest.mark.parity("X2")]


@pytest.mark.parametrize("created", [True, False])
async def test_a_submit_that_is_left_while_its_batch_is_created_says_what_becomes_of_it(
    jobs, tmp_path, created
):
    """The service's answer is still on its way."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(lines([line("a"), line("b")]))
    create, asked, gone = jobs.service.create_batch, asyncio.Event(), asyncio.Event()

    async def slow(*given: Any):
        if created:
            await create(*given)
        asked.set()
        await gone.wait()
        raise Unavailable("The client has gone.")

    jobs.service.create_batch = slow
    process = await begin(*submit(jobs, source, output))
    async with asyncio.timeout(60):
        await asked.wait()
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    gone.set()
    assert process.returncode == 130
    assert b"if the service has it, it runs. The same command takes it up, or creates it" in err
    jobs.service.create_batch = create
    ended = await run(*submit(jobs, source, output))
    assert ended.code == 0, ended
    assert len(output.read_text().splitlines()) == 2
    assert len((await jobs.openai().batches.list()).data) == 1
    assert len((await jobs.openai().files.list(purpose="batch")).data) == 1


async def test_a_submit_that_is_left_before_its_file_is_sent_says_that_nothing_runs(jobs, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(lines([line("a")]))
    asked, gone = asyncio.Event(), asyncio.Event()

    async def slow(*given: Any):
        asked.set()
        await gone.wait()
        raise Unavailable("The client has gone.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(jobs.service.files), "create", lambda self, *given: slow(*given))
        process = await begin(*submit(jobs, source, output))
        async with asyncio.timeout(60):
            await asked.wait()
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
        gone.set()
    assert (process.returncode, b"there is no batch" in err) == (130, True), err
    assert (await run(*submit(jobs, source, output))).code == 0
