"""An engine that cannot start says why, in its own words, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from starting import engine

from penstock.engines.vllm.capabilities import version
from penstock.errors import EngineStartFailed


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) - before == set()


async def test_a_folder_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(EngineStartFailed, match=f"'{tmp_path}/nowhere' does not exist"):
        await engine(tmp_path / "nowhere").start()


async def test_a_window_larger_than_the_models_is_refused():
    with pytest.raises(EngineStartFailed, match=r"max_model_len \(100000\) is greater than .*16384"):
        await engine(max_model_len=100_000).start()


async def test_a_chat_template_with_an_error_is_named(tmp_path: Path):
    """Its line, too: by a check that covers tokenizers as well. The core is still loading then."""
    template = tmp_path / "bad.jinja"
    template.write_text("{{ messages }}\n{% if %}")
    with pytest.raises(EngineStartFailed, match=f"template in '{template}' has an error in line 2: Expected"):
        await engine(chat_template=str(template)).start()


async def test_a_start_that_is_given_up_leaves_no_process():
    """An engine of its own, which is never ready."""
    loading = asyncio.Event()
    start = asyncio.create_task(engine().start(lambda phase: loading.set() if phase == "load" else None))
    await loading.wait()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start


async def test_an_older_version_of_vllm_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(version, "OLDEST", (0, 99))
    with pytest.raises(EngineStartFailed, match=r"vLLM 0\.\d+\.\d+ is installed, .* 0\.99 and newer"):
        await engine().start()


async def test_stopping_what_was_not_started_does_nothing():
    stopped = engine()
    await stopped.stop()
    await stopped.stop()
    assert stopped.max_model_len() is None
    assert stopped.kv_tokens() is None
    assert stopped.load().running == 0
