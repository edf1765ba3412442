"""An engine that cannot start says why, in its own words, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil
import pytest

import penstock
from penstock.config import LLMConfig
from penstock.engines.vllm import version
from penstock.engines.vllm.engine import VLLMEngine
from penstock.errors import EngineStartFailed

PHASES = ["download", "import", "load", "warm up"]


def engine(source: Path | str = "demo", **engine_kwargs: Any) -> VLLMEngine:
    return VLLMEngine(
        LLMConfig(
            model_loading_config={"model_id": "m", "model_source": str(source)},
            accelerator_config={"kind": "cpu"},
            engine_kwargs=engine_kwargs,
        )
    )


@pytest.fixture(autouse=True)
def _nothing_left():
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) - before == set()


async def test_a_folder_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(EngineStartFailed, match=f"'{tmp_path}/nowhere' does not exist"):
        await engine(tmp_path / "nowhere").start()


@pytest.mark.parametrize("executor", ["uni", "mp"])
async def test_a_folder_without_weights_is_named(tmp_path: Path, executor: str):
    """With "mp" a worker knows the reason, and the core only that a worker failed."""
    shutil.copytree(
        penstock.demo_model(), tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors")
    )
    with pytest.raises(EngineStartFailed, match="Cannot find any model weights"):
        await engine(tmp_path, distributed_executor_backend=executor).start()


async def test_a_window_larger_than_the_models_is_refused():
    with pytest.raises(EngineStartFailed, match=r"max_model_len \(100000\) is greater than .*16384"):
        await engine(max_model_len=100_000).start()


async def test_a_kv_cache_that_holds_no_request_is_refused():
    with pytest.raises(EngineStartFailed, match="KV cache memory"):
        await engine(kv_cache_memory_bytes=1 << 20).start()


async def test_a_start_that_is_given_up_leaves_no_process():
    loading = asyncio.Event()
    start = asyncio.create_task(engine().start(lambda phase: loading.set() if phase == "load" else None))
    await loading.wait()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start


def test_a_hub_id_is_found_in_the_hubs_cache(tmp_path: Path):
    """In a process of its own, because the hub's client reads where its cache is only once."""
    cache = tmp_path / "hub" / "models--some--model"
    shutil.copytree(penstock.demo_model(), cache / "snapshots" / "1")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("1")
    owner = subprocess.Popen(
        [sys.executable, Path(__file__).parent / "owner.py", "some/model"],
        env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    with owner:
        assert owner.stdout
        phases = [line.strip() for line in takewhile(lambda line: line != "ready\n", owner.stdout)]
        owner.kill()
    assert [phase for phase in phases if phase in PHASES] == PHASES


async def test_another_version_of_vllm_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(version, "SUPPORTED", "0.99")
    with pytest.raises(EngineStartFailed, match=r"vLLM 0\.32\.\d+ is installed, .* 0\.99\.x only"):
        await engine().start()


async def test_stopping_what_was_not_started_does_nothing():
    stopped = engine()
    await stopped.stop()
    await stopped.stop()
    assert stopped.max_model_len() is None
    assert stopped.kv_tokens() is None
    assert stopped.load().running == 0
