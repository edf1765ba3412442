"""The child of an engine that is another program: what is seen of it when this process lacks something."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys

import pytest

from penstock.config import LLMConfig
from penstock.engines.process.child import Child
from penstock.engines.process.engine import ProcessEngine
from penstock.errors import EngineStartFailed


class Full:
    """A file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self) -> None: ...


async def test_the_end_of_a_command_is_seen_though_its_output_goes_nowhere(monkeypatch: pytest.MonkeyPatch):
    """What it has said until then is copied when it has ended."""
    monkeypatch.setattr(sys, "stderr", Full())
    child = Child(["sh", "-c", "echo y; yes & kill -9 $PPID"], {}, grace_s=1.0)
    await asyncio.wait({child.ended}, timeout=20)
    assert child.ended.result() == "its process was killed by SIGKILL, perhaps because memory ran out"
    assert child.last_words().endswith("y")


async def test_an_engine_without_a_process_is_one_that_cannot_start(monkeypatch: pytest.MonkeyPatch):
    """Any other error would be taken for one of the row that is sent to it."""

    def refused(*args: object, **options: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(subprocess, "Popen", refused)
    model = {"model_id": "m"}
    engine = ProcessEngine(
        LLMConfig(model_loading_config=model, llm_engine="process", engine_kwargs={"command": ["server"]})
    )
    with pytest.raises(EngineStartFailed, match=r"no process can be started \(Cannot allocate memory\)"):
        await engine.start()
