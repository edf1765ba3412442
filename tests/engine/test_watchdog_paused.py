"""A vLLM that is paused, or has nothing to do, and one that stands still."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import psutil
import pytest
from dying import FOUND_S, LONG, stopped
from enginetest import serve, vllm_config

from penstock.engines import watchdog
from penstock.errors import DeadlineExceeded, EngineDead

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.parity("S26"), pytest.mark.full]


async def test_a_stopped_idle_vllm_dies_though_it_is_paused():
    """An engine of its own, which it kills."""
    others = set(psutil.Process().children())
    async with serve(vllm_config(kv_cache_memory_bytes=1 << 26)) as served:
        (core,) = set(psutil.Process().children()) - others
        async with aclosing(served.engine.generate("water", LONG)) as deltas:
            await anext(deltas)
            await served.engine.control.pause()
        assert "stopped" in await stopped(core, served)


async def test_a_paused_vllm_lives_and_a_stopped_one_dies_with_what_runs(monkeypatch: pytest.MonkeyPatch):
    """An engine of its own, which it kills."""
    others = set(psutil.Process().children())
    async with serve(vllm_config(kv_cache_memory_bytes=1 << 26)) as served:
        (core,) = set(psutil.Process().children()) - others
        died = asyncio.create_task(served.engine.wait_dead())
        async with aclosing(served.engine.generate("water", LONG)) as deltas:
            await anext(deltas)
            await served.engine.control.pause()
            with monkeypatch.context() as patch:
                patch.setattr(watchdog, "STUCK_S", FOUND_S - 1)
                assert not (await asyncio.wait({died}, timeout=FOUND_S))[0]
            await served.engine.control.resume()
            await anext(deltas)
            assert "stopped" in await stopped(core, served)
            with pytest.raises(EngineDead):
                _ = [delta async for delta in deltas]


async def test_a_vllm_whose_workers_wait_in_a_call_lives_and_one_that_hangs_in_a_step_dies(
    monkeypatch: pytest.MonkeyPatch,
):
    """An engine of its own, which it kills."""
    monkeypatch.setattr(watchdog, "IDLE_S", FOUND_S)
    monkeypatch.setattr(watchdog, "PROBE_S", 0.5)
    stalling = vllm_config(kv_cache_memory_bytes=1 << 26, worker_extension_cls="stalling.Stalling")
    async with serve(stalling) as served:
        control = served.engine.control
        assert await control.collective_rpc("wait_for_trainer", args=(2 * FOUND_S,)) == ["joined"]
        with pytest.raises(DeadlineExceeded):
            await control.collective_rpc("wait_for_trainer", timeout=0.1, args=(2 * FOUND_S,))
        assert await control.collective_rpc("wait_for_trainer", args=(0,)) == ["joined"]
        await control.collective_rpc("hang")
        async with aclosing(served.engine.generate("water", LONG)) as deltas:
            asked = asyncio.create_task(anext(deltas))
            assert "did nothing" in await asyncio.wait_for(served.engine.wait_dead(), 4 * FOUND_S)
            with pytest.raises(EngineDead):
                await asked
