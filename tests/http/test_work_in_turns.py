"""What clients send is parsed in turns of the event loop; what waits for its turn is bounded and counted."""

import asyncio
import socket
from typing import Any

import pytest
from served import until

from penstock.serve.gateway.body import BodyBudget, NoRoom, RequestBody
from penstock.serve.http import limits
from penstock.serve.http.connection_limits import Connections
from penstock.serve.http.direct_writer import of
from penstock.serve.http.server import Port
from penstock.serve.http.sockets import bind


async def accepts_and_never_reads(scope, receive, send):
    of(scope).accept()
    await asyncio.Event().wait()


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch):
    """Its turns have little room, so that nearly everything waits for a later one."""
    monkeypatch.setattr(limits, "WORK_AT_ONCE", 64)
    port = Port(accepts_and_never_reads, bind("127.0.0.1", 0), connections=Connections(), requests_at_once=64)
    yield port
    await port.close(grace_s=0.0)


def bodies(port: Port) -> int:
    """Bytes of bodies that the port holds."""
    connections: Any = port._state.connections
    return sum(len(one.cycle.body) for one in connections if one.cycle)


async def test_a_body_that_the_app_does_not_read_is_held_back(port: Port):
    _, writer = await asyncio.open_connection("127.0.0.1", port.number)
    size = 32 << 20
    writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size)
    connections: Any = port._state.connections
    await until(lambda: any(one.flow._wanted and not one._unread for one in connections))
    assert 0 < bodies(port) < 1 << 20
    writer.transport.abort()


async def test_no_connection_counts_as_waiting_once_it_is_gone(port: Port):
    connections = port._config.connections
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", port.number)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n" + b"x" * 70_000)
        await asyncio.sleep(0)
    await until(lambda: not connections.open and not port._state.connections)
    assert (connections.open, connections.waiting) == (0, 0)


async def test_a_body_that_was_given_up_is_not_given_up_again():
    """Five come in one turn, while two that wait fill the memory."""
    budget = BodyBudget(1_000_000)

    async def read(size: int) -> RequestBody:
        body = RequestBody(budget)

        async def receive():
            return {"type": "http.request", "body": b"x" * size}

        try:
            await body.read(receive, size, size)
        except NoRoom:
            body.drop()
            raise
        return body

    async def wait():
        body = await read(400_000)
        try:
            await body.while_waiting("m", asyncio.get_running_loop().create_future())
        finally:
            body.drop()

    waiting = [asyncio.create_task(wait()) for _ in range(2)]
    await asyncio.sleep(0)
    coming = await asyncio.gather(*(read(199_999) for _ in range(7)), return_exceptions=True)
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(one) for one in ended] == [NoRoom, NoRoom]
    assert {type(one) for one in coming} == {RequestBody, NoRoom}
    for body in coming:
        if isinstance(body, RequestBody):
            body.drop()
    assert budget.used == 0
