"""Waiting for what nothing tells of."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any


async def until(true: Callable[[], object], limit_s: float = 20.0) -> float:
    """Seconds until `true()`; fails after the limit."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    while not true():
        assert loop.time() - begun < limit_s, "did not happen in time"
        await asyncio.sleep(0.002)
    return loop.time() - begun


def wait_until(true: Callable[[], Any], limit_s: float = 60.0) -> Any:
    """What it says, once that is true; fails after the limit. Blocks."""
    deadline = time.monotonic() + limit_s
    while not (said := true()):
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)
    return said
