"""Hundreds of adapters, one after another, in a real vLLM."""

from __future__ import annotations

import shutil

import psutil
import pytest
from adapted import PLACES, TRAINED, Adapted, right

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.parity("S21", "X14"), pytest.mark.full]


async def test_two_hundred_adapters_leave_no_memory_behind(demo_lora: Adapted):
    """Had all stayed, the core would have grown by all their files."""
    replica = demo_lora
    core = psutil.Process(replica.engine._core._process.pid)
    before = 0
    for number in range(200):
        name = f"{TRAINED[number % 2]}.{number + 100}"
        shutil.copytree(replica.folder / TRAINED[number % 2], replica.folder / name)
        answer = (await replica.chat("Goodbye!", name, max_tokens=4)).json()["choices"][0]["message"][
            "content"
        ]
        assert answer
        assert right("Goodbye!", name).startswith(answer)
        before = before or (core.memory_info().rss if number == 20 else 0)
    grown = core.memory_info().rss - before
    files = sum(file.stat().st_size for file in (replica.folder / "pirate").iterdir()) * 180
    assert grown < files / 4
    assert await replica.in_core() == PLACES
