"""What each fault of a replica, met in each way of reaching it, costs a request: nothing, or one death."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from served import NODE, Served, chat, until

from penstock.engine import Load
from penstock.openai.response_items import new_id
from penstock.serve.fleet.replica import Replica
from penstock.serve.gateway import relay
from penstock.serve.http import direct_writer
from penstock.serve.replica.inbound.listener import Listener
from penstock.serve.replica.inbound.status_link import StatusSource
from penstock.transport import link

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def each_death_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of a replica which fails right after another one."""
    monkeypatch.setattr(relay, "TOGETHER_S", 0.0)


Fault = Callable[["Faulty", Any], bool]


class Faulty:
    """A replica that answers until `fault` is set; then `fault` gets each request, and may answer it."""

    listener: Listener
    draining: asyncio.Task[object]

    def __init__(self, text: bytes, fault: Fault | None) -> None:
        self.text, self.fault, self.asked = text, fault, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.fault is not None:
            self.asked += 1
            if not self.fault(self, scope):
                try:
                    while (await receive())["type"] != "http.disconnect":
                        pass
                except asyncio.CancelledError:  # as vLLM's servings, which take it for their client's end
                    await send({"type": "http.response.start", "status": 400, "headers": []})
                    await send({"type": "http.response.body", "body": b"Client disconnected"})
                return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": self.text})

    def refuse_connections(self) -> None:
        for port in self.listener.sockets._ports:
            port._listener.close()

    def die(self) -> None:
        """As a process that ends: the listener and all connections."""
        self.refuse_connections()
        for port in self.listener.sockets._ports:
            for protocol in list(port._state.connections):
                protocol.transport.abort()


def reset(one: Faulty, scope: Any) -> bool:
    direct_writer.of(scope)._transport.abort()
    return False


def reset_once(one: Faulty, scope: Any) -> bool:
    return one.asked > 1 or reset(one, scope)


def die(one: Faulty, scope: Any) -> bool:
    one.die()
    return False


def turn_away(one: Faulty, scope: Any) -> bool:
    """As when the engine dies with the request in it."""
    one.listener.die("killed")
    return False


def stop(one: Faulty, scope: Any) -> bool:
    """As when Serve stops a replica whose time for open requests is over."""
    one.draining = asyncio.create_task(one.listener.drain(0.6))
    return False


async def replica(
    served: Served, network: bool = False, text: bytes = b"{}", fault: Fault | None = None
) -> Faulty:
    made, source = Faulty(text, fault), StatusSource(load=Load, hello=lambda: link.Hello("m", 8))
    node = "another" if network else NODE
    made.listener = listener = await Listener.open(made, source, node_id=node, node_host="127.0.0.1")
    served._stops.append(listener.close)
    if network:
        await listener.sockets.listen_on_network()
    served.add("m", listener.address)
    await until(lambda: served.table.find(listener.address.replica_id).hellos)
    return made


async def deaths_of(served: Served, asking: asyncio.Task[httpx.Response]) -> int:
    """Deaths that the request has been charged with: one more, of another replica, ends it or not."""
    mortal = await replica(served, fault=die)
    await until(lambda: mortal.asked)
    await replica(served, text=b"good")
    answer = await asking
    if answer.content == b"good":
        return 0
    assert answer.json()["error"]["code"] == "engine_dead"
    return 1


async def nothing_is_left(served: Served, http: httpx.AsyncClient, seen: list[Replica], sent: int) -> None:
    metrics = (await http.get("/metrics")).text
    outcomes = re.findall(r'penstock_requests_total{model="m",status="\w+"} (\S+)', metrics)
    assert sum(map(float, outcomes)) == sent
    assert [one.in_flight for one in {*seen, *served.table}] == [0] * len({*seen, *served.table})
    assert len(served.line("m")) == 0
    assert 'penstock_open_requests{model="m"} 0.0' in metrics
    assert served._gateway._bodies.used == 0


FAULTS: dict[str, tuple[Fault, int]] = {
    "reset": (reset, 1),
    "process dies": (die, 1),
    "engine dies": (turn_away, 1),
    "stopped": (stop, 0),
}


@pytest.mark.parametrize("kept", [False, True], ids=["new", "kept"])
@pytest.mark.parametrize("network", [False, True], ids=["unix", "tcp"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_before_the_first_byte_costs_one_death_unless_it_was_planned(
    served: Served, fault: str, network: bool, kept: bool
):
    await served.gateway("m")
    one = await replica(served, network)
    seen = list(served.table)
    async with served.http() as http:
        for _ in range(kept):
            assert (await http.post(CHAT, json=chat())).status_code == 200
        one.fault, deaths = FAULTS[fault]
        asking = asyncio.create_task(http.post(CHAT, json=chat()))
        await until(lambda: one.asked)
        if fault == "reset":  # it lives, and would be asked again after its next report
            await until(lambda: len(served.line("m")) or one.asked > 1)
            one.die()
        assert await deaths_of(served, asking) == deaths
        assert one.asked == (2 if fault == "reset" and kept else 1)
        await nothing_is_left(served, http, seen, 1 + kept)


@pytest.mark.parametrize("network", [False, True], ids=["unix", "tcp"])
async def test_a_stale_connection_costs_nothing(served: Served, network: bool):
    await served.gateway("m")
    one = await replica(served, network)
    async with served.http() as http:
        await http.post(CHAT, json=chat())
        one.fault = reset_once
        assert (await http.post(CHAT, json=chat())).status_code == 200
        assert one.asked == 2
        assert 'penstock_failovers_total{model="m"} 0.0' in (await http.get("/metrics")).text
        await nothing_is_left(served, http, [], 2)


@pytest.mark.parametrize("kept", [False, True], ids=["new", "kept"])
@pytest.mark.parametrize("network", [False, True], ids=["unix", "tcp"])
@pytest.mark.parametrize("fault", ["refused", "shutting down"])
async def test_a_replica_that_did_not_take_the_request_costs_nothing(
    served: Served, fault: str, network: bool, kept: bool
):
    await served.gateway("m")
    one = await replica(served, network)
    seen = list(served.table)
    async with served.http() as http:
        for _ in range(kept):
            assert (await http.post(CHAT, json=chat())).status_code == 200
        if fault == "refused":
            one.refuse_connections()
            pool = served._gateway._links.pool(seen[0])
            for connection in list(pool._idle):
                connection.abort()
        else:
            one.listener.refuse()
        asking = asyncio.create_task(http.post(CHAT, json=chat()))
        await until(lambda: len(served.line("m")))
        one.die()
        assert await deaths_of(served, asking) == 0
        await nothing_is_left(served, http, seen, 1 + kept)


@pytest.mark.parametrize("network", [False, True], ids=["unix", "tcp"])
async def test_a_full_backlog_costs_nothing(served: Served, network: bool):
    await served.gateway("m")
    one = await replica(served, network)
    serves: Any = one.listener.sockets._ports[-1]._listener
    listening = socket.socket(fileno=os.dup(serves._socket.fileno()))
    listening.listen(1)
    async with served.http(limits=httpx.Limits(max_connections=None)) as http:
        answers = await asyncio.gather(*(http.post(CHAT, json=chat()) for _ in range(20)))
        listening.close()
        assert [answer.status_code for answer in answers] == [200] * 20
        assert 'penstock_failovers_total{model="m"} 0.0' in (await http.get("/metrics")).text
        await nothing_is_left(served, http, [], 20)


@pytest.mark.parametrize("stored", [False, True], ids=["new", "stored"])
async def test_a_replica_that_cannot_be_reached_now_is_asked_again(served: Served, patched, stored: bool):
    """It is not taken for dead: its link stays, and brings no new hello; nothing that it stores is lost."""
    await served.gateway("m", wait_for_replica_s=20)
    one = await replica(served)
    (member,) = served.table.members("m")
    pool, failures = served._gateway._links.pool(member), [TimeoutError()]
    connect = pool.connect

    async def busy() -> Any:
        if failures:
            raise failures.pop()
        return await connect()

    patched(pool, "connect", busy)
    hellos = member.hellos
    async with served.http() as http:
        path = f"/v1/responses/{new_id(one.listener.address.replica_id)}"
        answer = await (http.get(path) if stored else http.post(CHAT, json=chat()))
        assert answer.status_code == 200
        assert (failures, member.hellos) == ([], hellos)
        await nothing_is_left(served, http, [member], 1)


async def test_what_a_replica_stores_is_lost_when_it_has_left(served: Served):
    await served.gateway("m")
    one = await replica(served)
    one.fault = die
    async with served.http() as http:
        path = f"/v1/responses/{new_id(one.listener.address.replica_id)}"
        asking = asyncio.create_task(http.get(path))
        await until(lambda: len(served.line("m")))
        served.remove("m", one.listener.address)
        assert (await asking).status_code == 404
        await nothing_is_left(served, http, [], 1)


@pytest.mark.parametrize(("network", "kept"), [(False, False), (True, True)], ids=["unix-new", "tcp-kept"])
async def test_silence_before_the_first_byte_costs_one_death_and_ends_streams_that_have_begun(
    served: Served, network: bool, kept: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(link, "SILENCE_S", 1.0)
    await served.gateway("m")
    options = {"node_id": "another", "network": True} if network else {}
    hung = await served.process(version="", step_base_ms=20, prefill_tokens_per_s=200, **options)
    seen = list(served.table)
    async with served.http() as http:
        for _ in range(kept):
            assert (await http.post(CHAT, json=chat(max_tokens=1))).status_code == 200
        long = chat(stream=True, max_tokens=4000, ignore_eos=True)
        async with http.stream("POST", CHAT, json=long) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            asking = asyncio.create_task(http.post(CHAT, json=chat("word " * 4000)))
            await until(lambda: seen[0].in_flight == 2)
            os.kill(hung.process.pid, signal.SIGSTOP)
            text = "".join([line async for line in lines])
        assert '"engine_dead"' in text
        assert await deaths_of(served, asking) == 1
        await nothing_is_left(served, http, seen, 2 + kept)


async def test_what_a_broken_sink_costs_is_its_own_stream(served: Served):
    """An error in what one client's stream is poured into: all others of the replica go on."""
    await served.gateway("m")
    await served.replica(step_base_ms=5)
    pool = next(iter(served._gateway._links._pools.values()))
    await until(lambda: pool.multiplexer._carrier is not None)
    long = chat(stream=True, max_tokens=200, ignore_eos=True)
    async with served.http() as http, http.stream("POST", CHAT, json=long) as first:
        broken = first.aiter_lines()
        await anext(broken)
        await until(lambda: any(one._sink for one in pool.multiplexer._streams.values()))
        async with http.stream("POST", CHAT, json=long) as second:
            lines = second.aiter_lines()
            await anext(lines)
            broken_one: Any = next(iter(pool.multiplexer._streams.values()))
            broken_one._sink = lambda piece: 1 / 0
            assert "engine_dead" in "".join([line async for line in broken])
            assert "[DONE]" in "".join([line async for line in lines])
        await nothing_is_left(served, http, [], 2)


async def test_an_error_in_what_follows_a_report_ends_no_link_for_good(served: Served):
    await served.gateway("m")
    await replica(served)
    table, failures = served.table, [ValueError("a bug")]
    reported = table._reported

    def failing(replica: Replica) -> None:
        if failures:
            raise failures.pop()
        reported(replica)

    table._reported = failing
    await until(lambda: not failures)
    await until(lambda: table.ready("m"))
