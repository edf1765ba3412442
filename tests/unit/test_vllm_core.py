"""The engine core's process as its owner sees it, with another program in its place."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.engines.vllm.core import launch

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)"


async def test_who_gives_up_a_stop_leaves_the_end_of_the_core_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(launch, "_MODULE", "stubborn")
    monkeypatch.setattr(launch, "_GRACE_S", 0.1)
    core = launch.Core(tmp_path, None)
    killed = asyncio.Event()
    with monkeypatch.context() as slow:
        slow.setattr(core._process, "terminate", lambda: None)
        slow.setattr(core._process, "kill", killed.set)  # it takes a while
        stopping = asyncio.create_task(core.stop())
        await killed.wait()
        stopping.cancel()
        await asyncio.wait({stopping})
    core.kill()
    assert await core.ended == "its process was killed by SIGKILL, perhaps because memory ran out"
