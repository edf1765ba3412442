"""Bytes on their way: none held back, none piled up, none made for a client that has gone."""

import asyncio
import hashlib
import json
import logging
import socket
from collections import Counter

import pytest
from served import NODE, Served, chat, until

from penstock.transport import headers
from penstock.transport.connection import ReplicaConnection
from penstock.transport.pool import Pool, connect

pytestmark = pytest.mark.parity("X3")

PIECE = b"x" * 65_536
LONG = {"max_tokens": 4000, "ignore_eos": True}


def stream_of(pieces: list[bytes], gates: list[asyncio.Event]):
    """A replica that sends each piece when its gate opens."""

    async def app(scope, receive, send):
        kind = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        for piece, gate in zip(pieces, gates, strict=True):
            await gate.wait()
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return app


async def test_each_event_is_passed_on_before_the_next_is_made(served: Served):
    await served.gateway("m")
    events = [f"data: {i}\n\n".encode() for i in range(5)]
    gates = [asyncio.Event() for _ in events]
    await served.app(stream_of(events, gates))
    async with served.http() as http:
        gates[0].set()
        async with http.stream("POST", "/v1/chat/completions", json=chat()) as answer:
            pieces = answer.aiter_bytes()
            for event, following in zip(events, [*gates[1:], asyncio.Event()], strict=True):
                assert await anext(pieces) == event
                following.set()


async def test_a_stream_that_breaks_inside_an_event_still_ends_in_whole_events(served: Served):
    await served.gateway("m")

    async def app(scope, receive, send):
        kind = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        await send({"type": "http.response.body", "body": b'data: {"a": 1}\n\ndata: {"b"', "more_body": True})

    await served.app(app)
    async with served.http() as http:
        text = (await http.post("/v1/chat/completions", json=chat())).text
    first, last, end = text.split("\n\n")
    assert (first.replace('"service_tier":"default",', ""), end) == ('data: {"a": 1}', "")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_dead"


async def test_a_connection_that_is_not_read_holds_little_and_loses_nothing(served: Served):
    total = 80 * len(PIECE)

    async def app(scope, receive, send):
        length = [(b"content-length", str(total).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        for _ in range(80):
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    address = (await served.app(app)).address
    connection: ReplicaConnection = await connect(address, NODE, lambda _: None)
    connection.request(headers.to_replica("GET", b"/x", [], headers.own(address.secret, "g", "r"), 0))
    await until(lambda: connection._paused)
    assert connection._unread_bytes < 1_000_000
    size = 0
    while piece := await connection.read():
        size += len(piece)
    assert size == total
    connection.abort()


async def test_an_answer_that_nobody_read_is_never_given_to_the_next_request(served: Served):
    """Its client left at the moment when it had come: the connection holds it, and must not be used again."""

    async def app(scope, receive, send):
        body = scope["path"].encode()
        length = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": body})

    address = (await served.app(app)).address
    pool = Pool(address, NODE)
    ours = headers.own(address.secret, "g", "r")
    left = await pool.acquire()
    left.request(headers.to_replica("GET", b"/left", [], ours, 0))
    await until(lambda: left.finished)
    pool.release(left)
    connection = await pool.acquire()
    connection.request(headers.to_replica("GET", b"/next", [], ours, 0))
    await connection.head()
    assert await connection.read() == b"/next"
    pool.release(connection)
    pool.close()


async def test_a_client_that_does_not_read_stops_the_replica_from_making_more(served: Served):
    await served.gateway("m")
    blocked: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for i in range(2000):
            try:
                async with asyncio.timeout(2):
                    await send({"type": "http.response.body", "body": PIECE, "more_body": True})
            except TimeoutError:
                blocked.set_result(i * len(PIECE))
                return
        blocked.set_result(2000 * len(PIECE))

    await served.app(app)
    _, writer = await asyncio.open_connection("127.0.0.1", served.port.number, limit=1)
    writer.write(b"GET /tokenizer_info HTTP/1.1\r\nhost: x\r\n\r\n")
    assert await blocked < 32_000_000  # what the kernel's socket buffers take, and a little of ours
    writer.transport.abort()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_ends_its_request_in_the_engine(served: Served, stream: bool):
    await served.gateway("m")
    replica = await served.replica(step_base_ms=20)
    async with served.http() as http:
        request = asyncio.create_task(http.post("/v1/chat/completions", json=chat(stream=stream, **LONG)))
        await until(lambda: replica.engine.load().running == 1)
        request.cancel()
        await until(lambda: replica.engine.load().running == 0, limit_s=1.0)
        metrics = (await http.get("/metrics")).text
    assert 'penstock_requests_total{model="m",status="gone"} 1.0' in metrics


async def test_a_client_that_goes_with_requests_sent_ahead_is_no_error(
    served: Served, caplog: pytest.LogCaptureFixture
):
    await served.gateway("m")
    replica = await served.replica(step_base_ms=20)
    body = json.dumps(chat(**LONG)).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", served.port.number)
    writer.write(
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        * 2
    )
    await until(lambda: replica.engine.load().running == 1)
    writer.transport.abort()
    await until(lambda: replica.engine.load().running == 0, limit_s=1.0)
    async with served.http() as http:
        metrics = (await http.get("/metrics")).text
    assert 'penstock_requests_total{model="m",status="gone"} 1.0' in metrics
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_the_deadline_before_the_first_byte_is_504(served: Served):
    await served.gateway("m", request_timeout_s=0.3)
    replica = await served.replica(step_base_ms=20)
    async with served.http() as http:
        answer = await http.post("/v1/chat/completions", json=chat(**LONG))
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    await until(lambda: replica.engine.load().running == 0)


async def test_the_deadline_in_a_stream_is_an_error_event(served: Served):
    await served.gateway("m", request_timeout_s=0.6)
    replica = await served.replica(step_base_ms=20)
    async with served.http() as http:
        text = (await http.post("/v1/chat/completions", json=chat(stream=True, **LONG))).text
    assert '"code":"deadline_exceeded"' in text.strip().split("\n\n")[-1]
    assert "[DONE]" not in text
    await until(lambda: replica.engine.load().running == 0)


async def test_a_large_body_reaches_the_replica_byte_for_byte(served: Served):
    await served.gateway("m")

    async def app(scope, receive, send):
        digest, more = hashlib.sha256(), True
        while more:
            message = await receive()
            digest.update(message["body"])
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": digest.hexdigest().encode()})

    await served.app(app)
    body = json.dumps(chat("word " * 1_000_000)).encode()
    async with served.http() as http:
        answer = await http.post("/v1/chat/completions", content=body)
    assert answer.text == hashlib.sha256(body).hexdigest()


async def test_connections_to_a_replica_are_kept_and_used_again(served: Served):
    await served.gateway("m")
    clients = set()

    async def app(scope, receive, send):
        clients.add(receive.__self__.flow)  # one for each connection
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    await served.app(app)
    async with served.http() as http:
        for _ in range(5):
            await http.post("/v1/chat/completions", json=chat())
    assert len(clients) == 1


async def test_headers_without_end_are_refused_and_the_connection_closed(served: Served):
    await served.gateway("m")
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port.number)
    writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 66_000)
    assert b"larger than 65536 bytes" in await reader.read()
    writer.close()


async def test_a_server_that_cancels_a_request_ends_it_in_the_engine(served: Served):
    gateway = await served.gateway("m")
    replica = await served.replica(step_base_ms=20)
    body = json.dumps(chat(**LONG)).encode()
    sent = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if sent:
            return sent.pop()
        return await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    request = asyncio.create_task(gateway(scope, receive, None))
    await until(lambda: replica.engine.load().running == 1)
    request.cancel()
    await until(lambda: replica.engine.load().running == 0)
    assert request.cancelled()


async def test_of_many_requests_at_once_a_replica_begins_a_few_in_each_turn_of_its_loop(served: Served):
    loop, turn, begun = asyncio.get_running_loop(), 0, list[int]()

    async def app(scope, receive, send):
        begun.append(turn)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def count() -> None:
        nonlocal turn
        turn += 1
        if len(begun) < 40:
            loop.call_soon(count)

    address = (await served.app(app)).address
    gateways = []
    for _ in range(40):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address.unix)
        gateways.append(await asyncio.open_unix_connection(sock=sock))
    request = f"GET /x HTTP/1.1\r\nhost: x\r\nx-penstock-secret: {address.secret}\r\n\r\n".encode()
    for _ in range(2):  # on new connections, then on those that have been used
        begun.clear()
        count()
        for _, writer in gateways:
            writer.write(request)
        assert {(await reader.readline())[:12] for reader, _ in gateways} == {b"HTTP/1.1 204"}
        assert max(Counter(begun).values()) <= 4
        for reader, _ in gateways:
            await reader.readuntil(b"\r\n\r\n")
    for _, writer in gateways:
        writer.close()
