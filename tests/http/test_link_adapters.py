"""What gateways learn of a replica's adapters, and how soon."""

from __future__ import annotations

import asyncio

import pytest
from served import NODE, Served, Slots, until

from penstock.asgi import Receive, Scope, Send
from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.replica.inbound.listener import Listener
from penstock.transport import link
from penstock.transport.pool import connect

pytestmark = pytest.mark.parity("X14")


async def silent(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.Event().wait()


async def words(listener: Listener) -> asyncio.Queue[link.Message]:
    said: asyncio.Queue[link.Message] = asyncio.Queue()
    connection = await connect(listener.address, NODE, lambda _: None)
    listening = link.listen(connection, listener.address.secret, "g", said.put_nowait)
    said.task = asyncio.create_task(listening)  # type: ignore[attr-defined]  # kept alive by its queue
    return said


async def test_adapters_are_said_before_the_replica_is_ready(served: Served):
    said = await words(await served.app(silent, adapters=Slots("poet")))
    assert [type(await said.get()) for _ in range(3)] == [link.Hello, link.AdapterReport, link.LoadReport]


async def test_adapters_are_said_only_when_they_have_changed(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(link, "BEAT_S", 0.01)
    slots = Slots()
    said = await words(await served.app(silent, adapters=slots))
    assert [await said.get() for _ in range(2)][1] == link.AdapterReport(())
    assert [type(await said.get()) for _ in range(5)] == [link.LoadReport] * 5
    slots.names.add("poet")
    later = [await said.get() for _ in range(8)]
    assert [word for word in later if isinstance(word, link.AdapterReport)] == [link.AdapterReport(("poet",))]


async def test_a_change_that_is_told_waits_for_no_report(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(link, "COALESCE_S", 60)
    await served.gateway(ServedModel("m", 1, adapter_slots=4))
    slots = Slots()
    listener = await served.app(silent, adapters=slots)
    holders = served.table.candidates("m").holders
    slots.names.add("poet")
    listener.links.notify()
    await until(lambda: holders.of("poet"))
    slots.names.clear()
    listener.links.notify()
    await until(lambda: not holders.of("poet"))


async def test_loads_are_counted(served: Served):
    await served.gateway(ServedModel("m", 1, adapter_slots=4))
    slots = Slots("here before")
    listener = await served.app(silent, adapters=slots)
    for names in ({"poet", "clerk"}, {"poet"}, {"poet", "pilot"}):
        slots.names = names
        listener.links.notify()
        await until(lambda names=names: served.table.candidates("m").holders.loaded_count == len(names))
    async with served.http() as http:
        lines = (await http.get("/metrics")).text.splitlines()
    assert 'penstock_adapters_loaded{model="m"} 2.0' in lines
    assert 'penstock_adapter_loads_total{model="m"} 3.0' in lines
