"""How often an idle replica and an idle port wake, and that the first request ends a replica's rest."""

import asyncio

import pytest
from served import Served, chat, until

from penstock.engine import Load
from penstock.serve.http import server
from penstock.transport import link


class Looks:
    """A replica whose load is that of its open requests; counts how often it is looked at."""

    def __init__(self) -> None:
        self.count = 0
        self.running = 0
        self.done = asyncio.Event()

    def load(self) -> Load:
        self.count += 1
        return Load(running=self.running)

    async def __call__(self, scope, receive, send) -> None:
        self.running += 1
        await self.done.wait()
        self.running -= 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


async def test_an_idle_replica_looks_at_its_load_once_for_each_beat(served: Served, monkeypatch, patched):
    beats = []
    monkeypatch.setattr(link, "BEAT_S", 0.3)
    await served.gateway("m")
    report = served.table.report
    patched(served.table, "report", lambda *args: (beats.append(args), report(*args)))
    looks = Looks()
    await served.app(looks, load=looks.load)
    await until(lambda: len(beats) >= 5)
    assert looks.count <= len(beats) + 1


async def test_the_first_request_after_a_rest_is_reported_before_the_next_beat(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(link, "BEAT_S", 3600.0)
    monkeypatch.setattr(link, "SILENCE_S", 3600.0)
    await served.gateway("m")
    looks = Looks()
    await served.app(looks, load=looks.load)
    (replica,) = served.table.members("m")
    async with served.http() as http:
        for running in (1, 2):
            asked = [
                asyncio.create_task(http.post("/v1/chat/completions", json=chat())) for _ in range(running)
            ]
            await until(lambda running=running: replica.reported == running)
            looks.done.set()
            await asyncio.gather(*asked)
            await until(lambda: replica.reported == 0)
            looks.done.clear()


async def test_an_idle_port_wakes_once_a_second(patched):
    ticks = []
    patched(server, "formatdate", lambda **_: ticks.append("now") or "now")
    port = await server.serve_on(Looks(), "127.0.0.1", 0)
    await asyncio.sleep(0.7)
    assert len(ticks) == 1
    await port.close(grace_s=0.2)
