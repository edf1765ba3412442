"""Nothing outlives its owner, and nobody waits for the dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from enginetest import MODEL_ID, Served, serve, vllm_config

from penstock.errors import EngineDead

LIMIT_S = 30
FOLDER = Path(__file__).parent
LONG = {"max_tokens": 1900, "ignore_eos": True}


@pytest.mark.parametrize("phase", ["import", "load", "ready"])
def test_no_process_is_left_when_the_owner_is_killed(phase: str):
    owner = subprocess.Popen(
        [sys.executable, FOLDER / "owner.py"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert owner.stdout
    said = iter(owner.stdout.readline, "")
    assert phase in (line.strip() for line in said)
    below = until_children(owner.pid)
    owner.kill()
    owner.wait()
    _, left = psutil.wait_procs(below, timeout=LIMIT_S)
    assert left == []


def until_children(pid: int) -> list[psutil.Process]:
    """The core is started right after the phase "import" is told."""
    while not (below := psutil.Process(pid).children(recursive=True)):
        os.sched_yield()
    return below


@pytest_asyncio.fixture
async def doomed() -> AsyncIterator[Served]:
    async with serve(vllm_config()) as served:
        yield served


async def test_a_killed_core_ends_streams_and_refuses_requests(doomed: Served):
    """One engine for all facts: a start takes seconds."""
    engine, http = doomed.engine, doomed.http
    body = {"model": MODEL_ID, "prompt": "water", "stream": True} | LONG
    async with (
        aclosing(engine.generate("water", LONG)) as deltas,
        http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        await anext(deltas)
        lines = answer.aiter_lines()
        await anext(lines)
        (core,) = psutil.Process().children()
        core.send_signal(signal.SIGKILL)
        assert "SIGKILL" in await engine.wait_dead()
        with pytest.raises(EngineDead):
            async for _ in deltas:
                pass
        events = [line async for line in lines if line]
    assert '"engine_dead"' in events[-1]
    with pytest.raises(EngineDead):
        await engine.check_health()
    with pytest.raises(EngineDead):
        await anext(engine.generate("water", {}))
    refused = await http.post("/v1/completions", json=body)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "engine_dead"
    assert (await http.get("/health")).status_code == 503
