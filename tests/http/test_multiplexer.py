"""Multiplexed streams: complete, in order, each at its client's own pace."""

import asyncio
import dataclasses
import json
from typing import Any

import httpx
import pytest
from served import NODE, Served, chat, until

from penstock.engine import Load
from penstock.request_context import EventFrame, shortcut
from penstock.serve.http.private_listener import PrivateListener
from penstock.serve.replica.inbound.listener import Listener
from penstock.serve.replica.inbound.status_link import StatusSource
from penstock.transport import link
from penstock.transport.connection import STREAM, ReplicaConnection
from penstock.transport.multiplexer import StreamReceiver, StreamSender
from penstock.transport.pool import Pool

SSE = [(b"content-type", b"text/event-stream")]
CHAT = "/v1/chat/completions"


class Steps:
    """An app whose streams all get a piece at each step, as those of an engine do. It is told how fast."""

    def __init__(self, steps: int, event_bytes: int = 40) -> None:
        self.steps, self.event_bytes = steps, event_bytes
        self.asked: list[bytes | None] = []
        self.sent = 0

    async def __call__(self, scope, receive, send):
        self.asked.append(dict(scope["headers"]).get(STREAM))
        await send({"type": "http.response.start", "status": 200, "headers": SSE})
        for step in range(self.steps):
            event = b"data: %d %s\n\n" % (step, b"x" * self.event_bytes)
            await send({"type": "http.response.body", "body": event, "more_body": True})
            self.sent += 1
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


@pytest.fixture
def carried(monkeypatch, patched) -> list[bytes]:
    """What came over multiplexed connections, in the pieces in which it was read."""
    pieces: list[bytes] = []
    follow = StreamReceiver.follow

    async def noted(self: StreamReceiver, carrier: ReplicaConnection, *words: str) -> None:
        read = carrier.read

        async def note() -> bytes:
            pieces.append(await read())
            return pieces[-1]

        monkeypatch.setattr(carrier, "read", note)
        await follow(self, carrier, *words)

    patched(StreamReceiver, "follow", noted)
    return pieces


def events(data: bytes) -> int:
    return data.count(b"data: ")


async def numbers(http: httpx.AsyncClient) -> list[str]:
    answer = await http.post(CHAT, json=chat(stream=True))
    return [line.split()[1] for line in answer.text.splitlines() if line.startswith("data: ")]


async def test_a_replica_s_first_stream_is_multiplexed_however_late_it_listens(
    served: Served, carried: list[bytes]
):
    await served.gateway("m")
    sockets = PrivateListener("late", NODE, None)
    served.add("m", sockets.own_address)  # Serve names it before it listens
    await asyncio.sleep(0.3)
    facts = StatusSource(load=Load, hello=lambda: link.Hello("m", 8))
    await sockets.listen(Listener(Steps(3), facts, sockets), 4)
    await served.until_ready("m", sockets.own_address)
    async with served.http() as http:
        await numbers(http)
    await sockets.close(grace_s=0)
    assert events(b"".join(carried)) == 4


async def test_streams_arrive_whole_and_in_order_many_in_a_piece(served: Served, carried: list[bytes]):
    await served.gateway("m")
    await served.app(Steps(200))
    async with served.http() as http:
        answers = await asyncio.gather(*(numbers(http) for _ in range(20)))
    assert all(answer == [*map(str, range(200)), "[DONE]"] for answer in answers)
    assert events(b"".join(carried)) == 20 * 201
    assert max(map(events, carried)) > 10


async def test_json_answers_stay_on_their_own_connections(served: Served, carried: list[bytes]):
    await served.gateway("m")
    await served.replica()
    async with served.http() as http:
        assert (await http.post(CHAT, json=chat())).json()["choices"]
    assert not carried


async def test_clients_neither_send_nor_see_a_streams_number(served: Served):
    await served.gateway("m")
    app = Steps(1)
    await served.app(app)
    async with served.http() as http:
        answer = await http.post(CHAT, json=chat(stream=True), headers={STREAM.decode(): "77"})
    assert app.asked == [None]
    assert STREAM.decode() not in answer.headers


async def test_a_client_that_does_not_read_stops_its_own_stream_alone(served: Served):
    await served.gateway("m")
    slow, quick = Steps(500, event_bytes=20_000), Steps(50)

    async def app(scope, receive, send):
        await (slow if (b"x-slow", b"1") in scope["headers"] else quick)(scope, receive, send)

    await served.app(app)
    async with served.http() as http:
        request = http.build_request("POST", CHAT, json=chat(stream=True), headers={"x-slow": "1"})
        answer = await http.send(request, stream=True)
        pool = next(iter(served._gateway._links._pools.values()))
        await until(lambda: any(connection._held for connection in pool.multiplexer._streams.values()))
        sent = slow.sent
        assert await numbers(http) == [*map(str, range(50)), "[DONE]"]
        assert slow.sent - sent < 5
        assert slow.sent < 500
        text = (await answer.aread()).decode()
        await answer.aclose()
    assert [line.split()[1] for line in text.splitlines() if line] == [*map(str, range(500)), "[DONE]"]


async def test_a_client_that_leaves_frees_its_stream(served: Served):
    await served.gateway("m")
    await served.replica(step_base_ms=5)
    pool = next(iter(served._gateway._links._pools.values()))
    async with served.http() as http:
        async with http.stream(
            "POST", CHAT, json=chat(stream=True, max_tokens=5000, ignore_eos=True)
        ) as answer:
            await anext(answer.aiter_lines())
            assert pool.multiplexer._streams
        await until(lambda: not pool.multiplexer._streams)
        await until(lambda: not served.table.ready("m")[0].in_flight)


async def test_a_multiplexed_connection_that_breaks_ends_its_streams_with_an_error_and_comes_back(
    served: Served,
):
    await served.gateway("m")
    await served.replica(version="", step_base_ms=5)
    pool = next(iter(served._gateway._links._pools.values()))
    async with served.http() as http:
        long = chat(stream=True, max_tokens=5000, ignore_eos=True)
        async with http.stream("POST", CHAT, json=long) as answer:
            lines = answer.aiter_lines()
            told = [await anext(lines)]
            pool.multiplexer._carrier.abort()
            told += [line async for line in lines]
        assert any('"error"' in line for line in told)
        assert not any("[DONE]" in line for line in told)
        assert (await http.post(CHAT, json=chat(stream=True))).text.endswith("data: [DONE]\n\n")


async def test_a_connection_that_broke_before_the_answer_began_costs_the_stream_nothing(served: Served):
    gate, entered = asyncio.Event(), asyncio.Event()
    steps = Steps(20)

    async def app(scope, receive, send):
        entered.set()
        await gate.wait()
        await steps(scope, receive, send)

    await served.gateway("m")
    listener = await served.app(app)
    async with served.http() as http:
        asked = asyncio.create_task(numbers(http))
        await entered.wait()
        for sender in listener._multiplexers.values():
            sender.closed = True  # its connection was reset, and the gateway has not noticed yet
        gate.set()
        assert await asked == [*map(str, range(20)), "[DONE]"]
        assert len(steps.asked) == 1


async def test_unmultiplexed_streams_come_on_their_own_connections(served: Served, patched, carried):
    async def refuse(self, receive, send):
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    patched(StreamSender, "serve", refuse)  # as a replica of an older version would
    await served.gateway("m")
    await served.app(Steps(30))
    async with served.http() as http:
        assert await numbers(http) == [*map(str, range(30)), "[DONE]"]
    assert not carried


async def test_a_replica_that_leaves_finishes_its_streams_and_then_its_connection_ends(served: Served):
    await served.gateway("m")
    replica = await served.replica(step_base_ms=5)
    pool = next(iter(served._gateway._links._pools.values()))
    async with served.http() as http:
        long = chat(stream=True, max_tokens=100, ignore_eos=True)
        async with http.stream("POST", CHAT, json=long) as answer:
            lines = answer.aiter_lines()
            told = [await anext(lines)]
            served.remove("m", replica.address)
            told += [line async for line in lines]
    assert "data: [DONE]" in told
    await until(lambda: pool.multiplexer._carrier is None)
    await until(lambda: not served._gateway._links._background)


async def test_streams_that_have_ended_at_a_replica_that_stops_reach_a_busy_gateway_whole(served: Served):
    """Their ends come on their own connections, before the pieces that wait for the gateway to read."""
    await served.gateway("m")
    app = Steps(6, event_bytes=20_000)
    listener = await served.app(app)
    pool = next(iter(served._gateway._links._pools.values()))
    async with served.http() as http:
        asked = [asyncio.create_task(numbers(http)) for _ in range(2)]
        await until(lambda: len(app.asked) == 2)
        carrier = pool.multiplexer._carrier
        assert carrier is not None
        carrier._pause()
        await until(lambda: app.sent == 12 and not listener.open_requests)
        stopping = asyncio.create_task(listener.close())
        await until(lambda: all(one._transport.is_closing() for one in pool.multiplexer._streams.values()))
        carrier.resume()
        await stopping
        for answer in await asyncio.gather(*asked):
            assert answer == [*map(str, range(6)), "[DONE]"]


class Texts:
    """An app that sends texts past the layers, as vLLM's fast path does. It is told which ones at once."""

    frame = EventFrame(b'data: {"t":"', b'"}\n\n')

    def __init__(self, *turns: list[bytes]) -> None:
        """turns: texts that are pushed in one turn of the loop; the next turn comes when they have left."""
        self.turns = turns

    async def __call__(self, scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": SSE})
        await send({"type": "http.response.body", "body": self.frame.around(b"first"), "more_body": True})
        way: Any = shortcut.get()
        for texts in self.turns:
            for text in texts:
                way.push(self.frame, text)
            await until(lambda: not way._sender._waiting_bytes)
        for text in (b"a", b"b"):
            way.push(self.frame, text)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def test_texts_that_wait_leave_as_one_event_and_others_alone(served: Served):
    await served.gateway("m")
    await served.app(Texts([b"x"], [b"y", b"z\\n", b"w"], [b"v"]))
    async with served.http() as http:
        answer = await http.post(CHAT, json=chat(stream=True))
    told = [line[6:] for line in answer.text.splitlines() if line]
    assert told.pop() == "[DONE]"
    assert [json.loads(event)["t"] for event in told] == ["first", "x", "yz\nw", "v", "ab"]


async def test_pieces_of_a_stream_that_come_together_leave_in_one_chunk(served: Served):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": SSE})
        await send({"type": "http.response.body", "body": b"data: 0\n\n", "more_body": True})
        way: Any = shortcut.get()
        await until(lambda: not way._sender._waiting_bytes)
        for n in range(1, 6):
            way._sender.push(way._number, b"data: %d\n\n" % n)
        await until(lambda: not way._sender._waiting_bytes)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    await served.gateway("m")
    await served.app(app)
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port.number)
    body = json.dumps(chat(stream=True)).encode()
    fields = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    writer.write(f"POST {CHAT} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body)
    await reader.readuntil(b"\r\n\r\n")
    chunks: list[bytes] = []
    while size := int(await reader.readline(), 16):
        chunks.append((await reader.readexactly(size + 2))[:-2])
    writer.close()
    assert b"".join(b"data: %d\n\n" % n for n in range(1, 6)) in chunks


@pytest.mark.parametrize("network", [False, True], ids=["unix", "tcp"])
async def test_slow_clients_may_stop_their_streams_any_number_of_times(served: Served, network: bool):
    await served.gateway("m")
    replica = await served.replica(network=network)
    address = replica.address if not network else dataclasses.replace(replica.address, unix=None)
    pool = Pool(address, NODE)
    connection = await pool.connect()
    following = asyncio.create_task(pool.multiplexer.follow(connection, address.secret, "a gateway"))
    await pool.multiplexer.settled.wait()
    for number in range(30_000):
        pool.multiplexer._hold(number % 10, number % 2 == 0)
    (sender,) = (one for name, one in replica.listener._multiplexers.items() if name == b"a gateway")
    sender.open(11, [])
    pool.multiplexer._hold(11, True)
    await until(lambda: following.done() or not sender._writable[11].is_set())
    assert not following.done()
    following.cancel()
    connection.abort()
    pool.close()
