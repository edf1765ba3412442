"""Memory that is given back: by each kind of sleep, and by a core that is killed; the same tokens after.

Other processes must not start or end on the GPU meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import torch
from enginetest import Served, serve, vllm_config
from safetensors.torch import save_file
from tests.device import DEVICE, memory_used
from tests.waiting import until
from transformers import AutoConfig, AutoModelForCausalLM

from penstock import demo_model
from penstock.engines.vllm.engine import VLLMEngine
from penstock.errors import EngineDead

LIMIT_S = 150 if DEVICE == "gpu" else 900  # a busy CPU starts four engines
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.full, pytest.mark.timeout(LIMIT_S)]

SIZES = {
    "gpu": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    "cpu": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4},
}
"""Some 1.1 billion parameters; on the CPU 70 million."""

CACHE_BYTES = 4 << 30 if DEVICE == "gpu" else 1 << 28
PART = 0.8
"""Of what was taken: so much, at least, must come back."""

PROMPT = list(range(5, 69))
GREEDY = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights."""
    folder = tmp_path_factory.mktemp("large")
    for file in Path(demo_model()).iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= SIZES[DEVICE] | {"num_attention_heads": 16, "num_key_value_heads": 16}
    config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).state_dict()
    shapes.pop("lm_head.weight")  # tied to the embedding
    noise = (0.02 * torch.randn(1 << 24, generator=torch.Generator().manual_seed(0))).bfloat16()
    tensors = {
        name: torch.ones(one.shape, dtype=torch.bfloat16)
        if "norm" in name
        else noise.roll(9973 * number).repeat(1 + one.numel() // len(noise))[: one.numel()].view(one.shape)
        for number, (name, one) in enumerate(shapes.items())
    }
    save_file(
        {name: one.contiguous().clone() for name, one in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


@asynccontextmanager
async def engine(model: Path, **arguments: object) -> AsyncIterator[Served]:
    share = {"gpu_memory_utilization": 0.3} if DEVICE == "gpu" else {"enforce_eager": True}
    config = vllm_config(str(model), **share, kv_cache_memory_bytes=CACHE_BYTES, max_num_seqs=16, **arguments)
    async with serve(config) as served:
        yield served


async def tokens(served: Served) -> list[int]:
    deltas = [delta async for delta in served.engine.generate(PROMPT, GREEDY)]
    return [token for delta in deltas for token in delta.token_ids]


async def given_back(before: int, least: float) -> int:
    """How much less than `before` is in use, as soon as it is at least so much. Raises: AssertionError."""
    try:
        await until(lambda: before - memory_used() >= least, limit_s=20)
    except TimeoutError:
        raise AssertionError(f"{before - memory_used():,} bytes came back, not {least:,.0f}") from None
    return before - memory_used()


def taken(model: Path) -> int:
    """By weights and cache."""
    return (model / "model.safetensors").stat().st_size + CACHE_BYTES


@pytest.mark.gpu
async def test_sleep_mode_frees_weights_and_cache_and_wakes_with_the_same_tokens(
    large: Path, record_property
):
    """Levels 1 and 2, as a whole and part by part, of one engine with CUDA graphs."""
    async with engine(large, enable_sleep_mode=True) as served:
        expected, control = await tokens(served), served.engine.control
        for level, parts in [
            (1, None),
            (2, None),
            (2, ("weights", "kv_cache")),
            (1, ("kv_cache", "weights")),
        ]:
            before = memory_used()
            await control.sleep(level=level)
            freed = await given_back(before, PART * taken(large))
            record_property(
                f"level_{level}_{'parts' if parts else 'whole'}_freed_gib", round(freed / 2**30, 2)
            )
            waiting = asyncio.create_task(tokens(served))
            for part in parts or ():
                assert not waiting.done()
                await control.wakeup_parts([part])
            await control.wakeup()
            assert await waiting == expected, f"level {level}, {parts}"
            assert memory_used() > before - freed / 2


async def test_without_sleep_mode_a_sleeping_engine_holds_nothing_and_a_killed_one_neither(
    large: Path, record_property
):
    async with engine(large) as served:
        expected, control, awake = await tokens(served), served.engine.control, memory_used()
        await control.sleep()
        freed = await given_back(awake, PART * taken(large))
        record_property("asleep_freed_gib", round(freed / 2**30, 2))
        await control.wakeup()
        assert await tokens(served) == expected
        awake = memory_used()
        assert isinstance(served.engine, VLLMEngine)
        assert served.engine._core is not None
        running = asyncio.create_task(tokens(served))
        psutil.Process(served.engine._core.pid).kill()
        assert "SIGKILL" in await asyncio.wait_for(served.engine.wait_dead(), 20)
        with pytest.raises(EngineDead):
            await running
        freed = await given_back(awake, PART * taken(large))
        record_property("killed_freed_gib", round(freed / 2**30, 2))
    async with engine(large) as successor:
        assert await tokens(successor) == expected
