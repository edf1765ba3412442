"""Several gateway processes on one port: a scrape reaches one of them, and shows what all have counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_process import GatewayProcess
from prometheus_client.parser import text_string_to_metric_families
from served import Served, chat
from tests.ports import unused

pytestmark = pytest.mark.parity("S28")

SCRAPES = 12
"""Each on a connection of its own, which the kernel gives to any of the processes."""
LIMIT_S = 30


class Group:
    """Gateways on one port before one replica, and what clients see there."""

    def __init__(self, folder: Path, replica: Any) -> None:
        self.folder, self._replica = folder, replica
        self._port = unused()
        self.processes: list[GatewayProcess] = []

    async def start(self) -> GatewayProcess:
        process = GatewayProcess(self._port, self.folder, self._replica)
        self.processes.append(process)
        return await process.ready()

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self._port}", timeout=LIMIT_S)

    async def ask(self, times: int) -> None:
        for _ in range(times):
            async with self.http() as http:
                answer = await http.post("/v1/chat/completions", json=chat(max_tokens=1))
                assert answer.status_code == 200

    async def until_every_scrape_shows(self, **figures: float) -> None:
        async with asyncio.timeout(LIMIT_S):
            while True:
                seen = [await self._scraped() for _ in range(SCRAPES)]
                if all(one == one | figures for one in seen):
                    return

    async def _scraped(self) -> dict[str, float]:
        async with self.http() as http:
            text = (await http.get("/metrics")).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {
            short: sum(sample.value for sample in samples if sample.name == name)
            for short, name in NAMES.items()
        }


NAMES = {
    "requests": "penstock_requests_total",
    "timed": "penstock_request_seconds_count",
    "open": "penstock_open_requests",
    "ready": "penstock_ready_replicas",
}


@pytest.fixture
async def group(served: Served, tmp_path: Path) -> AsyncIterator[Group]:
    replica = await served.replica(join=False, reply="word " * 1000, step_base_ms=20)
    group = Group(tmp_path / "figures", replica.address.to_metadata())
    yield group
    await asyncio.gather(*(process.kill() for process in group.processes))


async def test_every_scrape_shows_what_all_have_counted_also_those_that_were_killed(group: Group):
    first, second = await asyncio.gather(group.start(), group.start())
    await group.ask(40)
    await group.until_every_scrape_shows(requests=40, timed=40, open=0, ready=1)
    async with (
        group.http() as http,
        http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as stream,
    ):
        pieces = stream.aiter_text()
        await anext(pieces)
        await group.until_every_scrape_shows(requests=40, open=1, ready=1)
        await first.kill()
        third = await group.start()  # continues what the first one has counted
        await second.kill()
        with pytest.raises(httpx.RemoteProtocolError):
            async for _ in pieces:
                pass
    await group.until_every_scrape_shows(requests=40, timed=40, open=0, ready=1)
    await group.start()
    await group.ask(20)
    await group.until_every_scrape_shows(requests=60, timed=60)
    assert len([*group.folder.glob("*.lock")]) == 2
    await third.kill()
    await group.until_every_scrape_shows(requests=60, timed=60)
