"""Classes of work in a real vLLM: online goes before batch, and batch loses its KV blocks first.

On CPUs vLLM has no async scheduling; `test_scheduler.py` runs that scheduler without a model.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from enginetest import BLOCK_SIZE, Served, serve, vllm_config
from tests.waiting import until

from penstock.request_context import tier
from penstock.tiers import DEFAULT, FLEX, Tier

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="session"), pytest.mark.parity("X1")]

SEATS = 4
BLOCKS = 24
"""Fewer than the four rows of a test need at their ends."""
ROW_TOKENS = 300
GROUP = 16
"""Tokens that may come together."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def by_class() -> AsyncIterator[Served]:
    """An engine of its own: the shared ones take requests as they come."""
    config = vllm_config(
        max_model_len=512,
        max_num_seqs=SEATS,
        scheduling_policy="priority",
        kv_cache_memory_bytes=1 << 26,
        num_gpu_blocks_override=BLOCKS + 1,
    )
    async with serve(config) as served:
        yield served


class Heard:
    """Who got tokens, in the order in which they came."""

    def __init__(self, served: Served) -> None:
        self.order: list[str] = []
        self._served = served

    def ask(self, name: str, work: Tier, tokens: int) -> asyncio.Task[list[int]]:
        return asyncio.create_task(self._read(name, work, tokens))

    async def _read(self, name: str, work: Tier, tokens: int) -> list[int]:
        tier.set(work)
        made: list[int] = []
        params = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        async for delta in self._served.engine.generate(question(name), params):
            made += delta.token_ids
            self.order += [name] * len(delta.token_ids)
        return made

    def longest_wait(self, name: str) -> int:
        """Tokens that another got between two of this one, at most."""
        longest, between = 0, Counter[str]()
        for other in self.order[self.order.index(name) :]:
            if other == name:
                longest = max(longest, *between.values(), 0)
                between.clear()
            else:
                between[other] += 1
        return longest


def question(name: str) -> str:
    return f"What is Penstock, {name}?"


async def test_online_that_waits_goes_before_batch_that_waits_longer(by_class: Served):
    heard = Heard(by_class)
    rows = [heard.ask(f"row {number}", FLEX, 40 + 5 * number) for number in range(SEATS)]
    await until(lambda: len({*heard.order}) == SEATS)
    rows += [heard.ask(f"late row {number}", FLEX, 5) for number in range(2)]
    await until(lambda: by_class.engine.load().waiting == 2)
    online = heard.ask("online", DEFAULT, 5)
    await asyncio.gather(online, *rows)
    begun = list(dict.fromkeys(heard.order))
    assert begun[SEATS:] == ["online", "late row 0", "late row 1"]


async def test_batch_loses_its_blocks_and_online_that_came_last_does_not(by_class: Served):
    heard = Heard(by_class)
    names = [f"row {number}" for number in range(SEATS - 1)]
    rows = [heard.ask(name, FLEX, ROW_TOKENS) for name in names]
    await until(lambda: all(heard.order.count(name) > 4 * BLOCK_SIZE for name in names))
    online = await heard.ask("online", DEFAULT, 6 * BLOCK_SIZE)
    assert len(online) == 6 * BLOCK_SIZE
    together = await asyncio.gather(*rows)
    assert heard.longest_wait("online") <= 2 * GROUP
    assert max(map(heard.longest_wait, names)) > 2 * GROUP
    alone = [await Heard(by_class).ask(name, FLEX, ROW_TOKENS) for name in names]
    assert together == alone
