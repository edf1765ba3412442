"""Engines that start in other ways than most, or fail later."""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import subprocess
import sys
from contextlib import aclosing
from itertools import takewhile
from pathlib import Path

import psutil
import pytest
from starting import engine

import penstock
from penstock.engines.vllm.core.process import READ_BY_IMPORTS
from penstock.errors import EngineStartFailed

pytestmark = pytest.mark.full

PHASES = ["download", "import", "load", "warm up"]


@pytest.mark.parametrize("executor", ["uni", "mp"])
async def test_a_folder_without_weights_is_named(executor: str, tmp_path: Path):
    """An engine of its own, which fails in its core; or in a worker, and the core knows only that it did."""
    ignore = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(penstock.demo_model(), tmp_path, dirs_exist_ok=True, ignore=ignore)
    with pytest.raises(EngineStartFailed, match="Cannot find any model weights"):
        await engine(tmp_path, distributed_executor_backend=executor).start()


async def test_a_kv_cache_that_holds_no_request_is_refused():
    """An engine of its own, which fails when the model has been loaded."""
    with pytest.raises(EngineStartFailed, match="KV cache memory"):
        await engine(kv_cache_memory_bytes=1 << 20).start()


def test_a_hub_id_is_found_in_the_hubs_cache(tmp_path: Path):
    """An engine in a process of its own, because the hub's client reads where its cache is only once."""
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


async def test_a_stop_that_is_given_up_leaves_no_process():
    """An engine of its own, which answers while it is stopped."""
    before = set(psutil.Process().children(recursive=True))
    own = engine()
    await own.start()
    assert set(psutil.Process().children(recursive=True)) - before
    async with aclosing(own.generate("water", {"max_tokens": 10_000, "ignore_eos": True})) as deltas:
        await anext(deltas)
        stop = asyncio.create_task(own.stop())
        await asyncio.sleep(0)  # it waits for the streams' end
        stop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stop
    assert set(psutil.Process().children(recursive=True)) - before == set()


class BreakPoints:
    """Stands for a config: the core unpickles it with its first look at vLLM, and says what it imported."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, (
            "import os\n"
            "from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled\n"
            "from vllm.model_executor.layers.attention.attention import unified_attention_with_output as op\n"
            "print(is_breakable_cudagraph_enabled(), op.__code__.co_qualname)\n"
            "os.sys.stdout.flush()\n"
            "os._exit(0)\n",
        )


def test_what_vllms_config_sets_is_there_when_the_core_imports_vllm():
    """A variable that attention reads while it is imported, and the core's runner later. No engine starts."""
    (name,) = READ_BY_IMPORTS
    core = subprocess.run(
        [sys.executable, "-m", "penstock.engines.vllm.core.process"],
        input=pickle.dumps({name: "1"}) + pickle.dumps(BreakPoints()),
        env={key: value for key, value in os.environ.items() if key != name},
        capture_output=True,
    )
    assert core.stdout.decode().startswith("True eager_break_during_capture"), core.stderr.decode()
