"""A vLLM that has nothing to do, and stands still."""

from __future__ import annotations

from contextlib import aclosing

import psutil
import pytest
from dying import LONG, stopped
from enginetest import serve, vllm_config

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
