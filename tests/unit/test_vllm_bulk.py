"""Rows that are rendered in few jobs of a pool of threads."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import truediv

import pytest

from penstock.engines.vllm.rows.bulk import Bulk


async def test_calls_end_with_the_threads_that_they_wait_for():
    """vLLM drops what waits for a thread that is stuck in a chat template."""
    pool, go = ThreadPoolExecutor(1), threading.Event()
    stuck = pool.submit(go.wait)
    bulk = Bulk[int](pool)
    calls = [asyncio.create_task(bulk(partial(int, "2"))) for _ in range(40)]
    for _ in range(5):  # turns of the loop, after which they wait
        await asyncio.sleep(0)
    pool.shutdown(wait=False, cancel_futures=True)
    ended, waiting = await asyncio.wait(calls, timeout=10)
    go.set()
    assert stuck.result()
    assert not waiting
    for call in ended:
        with pytest.raises(RuntimeError, match="Its threads have ended"):
            call.result()


async def test_each_call_gets_its_own_result_or_error():
    with ThreadPoolExecutor(1) as pool:
        bulk = Bulk[float](pool)
        calls = [bulk(partial(truediv, 1, number)) for number in (2, 0, 4)]
        found = await asyncio.gather(*calls, return_exceptions=True)
    assert found[::2] == [0.5, 0.25]
    assert isinstance(found[1], ZeroDivisionError)
