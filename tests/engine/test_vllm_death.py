"""Nothing outlives its owner, and nobody waits for the dead."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest
from enginetest import MODEL_ID, Served, serve, vllm_config

from penstock.errors import EngineDead

LIMIT_S = 30
FOLDER = Path(__file__).parent
LONG = {"max_tokens": 1900, "ignore_eos": True}
BODY = {"model": MODEL_ID, "prompt": "water", "stream": True} | LONG


@pytest.mark.parametrize("phase", ["import", "load", "ready"])
def test_nothing_is_left_when_the_owner_is_killed(phase: str, tmp_path: Path):
    owner = subprocess.Popen(
        [sys.executable, FOLDER / "owner.py", "demo"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert owner.stdout
    said = iter(owner.stdout.readline, "")
    assert phase in (line.strip() for line in said)
    below = until_children(owner.pid)
    owner.kill()
    owner.wait()
    _, left = psutil.wait_procs(below, timeout=LIMIT_S)
    assert left == []
    assert list(tmp_path.glob("penstock-*")) == []


def until_children(pid: int) -> list[psutil.Process]:
    """The core is started right after the phase "import" is told."""
    while not (below := psutil.Process(pid).children(recursive=True)):
        os.sched_yield()
    return below


async def test_a_killed_core_ends_streams_and_refuses_requests():
    """One engine for all facts: a start takes seconds."""
    others = psutil.Process().children()
    async with serve(vllm_config()) as doomed:
        (core,) = set(psutil.Process().children()) - set(others)
        await lose(core, doomed)
        with pytest.raises(EngineDead):
            await doomed.engine.check_health()
        with pytest.raises(EngineDead):
            await anext(doomed.engine.generate("water", {}))
        refused = await doomed.http.post("/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_dead"
        assert (await doomed.http.get("/health")).status_code == 503


async def lose(core: psutil.Process, doomed: Served) -> None:
    """Kills it under a stream of each kind; both end with the reason."""
    async with (
        aclosing(doomed.engine.generate("water", LONG)) as deltas,
        doomed.http.stream("POST", "/v1/completions", json=BODY) as answer,
    ):
        await anext(deltas)
        lines = answer.aiter_lines()
        await anext(lines)
        core.kill()
        assert "SIGKILL" in await doomed.engine.wait_dead()
        with pytest.raises(EngineDead):
            _ = [delta async for delta in deltas]
        events = [line async for line in lines if line]
    assert '"engine_dead"' in events[-1]
