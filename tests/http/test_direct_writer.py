"""The direct writer: the same bytes as through ASGI alone, none lost to a slow client, none held."""

import asyncio
import contextlib
import hashlib
from types import SimpleNamespace

import pytest
from served import Served, chat

from penstock.serve.http.direct_writer import EXTENSION, DirectWriter
from penstock.serve.http.server import serve_on
from penstock.transport.connection import ReplicaConnection

SSE = [(b"content-type", b"text/event-stream")]


def without_writer(app):
    async def inner(scope, receive, send):
        assert scope["extensions"].pop(EXTENSION)
        await app(scope, receive, send)

    return inner


async def raw(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


def body(answer: bytes) -> bytes:
    """Of a chunked answer, with its framing taken off; it must be complete."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    pieces = []
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        pieces.append(rest[:length])
        assert rest[length : length + 2] == b"\r\n"
        rest = rest[length + 2 :]
        if not length:
            assert rest == b""
            return b"".join(pieces)


def fields(answer: bytes) -> list[bytes]:
    changing = (b"x-request-id", b"server-timing", b"date")
    lines = answer.partition(b"\r\n\r\n")[0].split(b"\r\n")
    return [line for line in lines if not line.lower().startswith(changing)]


@pytest.mark.parametrize(
    "pieces",
    [
        [b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"],
        [b"da", b"ta: 1\n", b"\ndata: 2\n\nda", b"ta: [DONE]", b"\n\n"],
        [b"data: 1\n\n" * 500, b"data: " + b"x" * 300_000, b"\n\n"],
        [b"data: without an end"],
        [],
    ],
    ids=["whole", "torn", "large", "unfinished", "empty"],
)
async def test_a_stream_is_the_same_with_and_without_the_direct_writer(served: Served, pieces: list[bytes]):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": SSE})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0.001)  # so that pieces travel by themselves; the bytes do not depend on it
        await send({"type": "http.response.body", "body": b""})

    gateway = await served.gateway("m")
    await served.app(app)
    plain = await serve_on(without_writer(gateway), "127.0.0.1", 0)
    ask = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
    direct, through_asgi = await raw(served.port.number, ask), await raw(plain.number, ask)
    await plain.close(grace_s=0.1)
    assert body(direct) == body(through_asgi) == b"".join(pieces)
    assert fields(direct) == fields(through_asgi)


@pytest.mark.parametrize("direct", [True, False])
async def test_http_1_0_gets_a_stream_without_chunks(served: Served, direct: bool):
    """It does not know them: RFC 9112, 6.1."""
    pieces = [b"data: 1\n\n", b"data: " + b"2" * 100_000 + b"\n\n", b"data: [DONE]\n\n"]

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": SSE})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0.001)
        await send({"type": "http.response.body", "body": b""})

    gateway = await served.gateway("m")
    await served.app(app)
    port = await serve_on(gateway if direct else without_writer(gateway), "127.0.0.1", 0)
    answer = await raw(port.number, b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: 0\r\n\r\n")
    await port.close(grace_s=0.1)
    head, _, content = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert content == b"".join(pieces)


@pytest.mark.parametrize("direct", [True, False])
async def test_a_client_that_stops_reading_and_goes_on_loses_nothing(served: Served, direct: bool):
    sent, blocked = hashlib.sha256(), asyncio.Event()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": SSE})
        for i in range(400):
            event = b"data: %d %s\n\n" % (i, b"x" * 65_536)
            sent.update(event)
            message = {"type": "http.response.body", "body": event, "more_body": True}
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if blocked.is_set() else 0.5):
                    await send(message)
                continue
            blocked.set()
            await send(message)
        await send({"type": "http.response.body", "body": b""})

    gateway = await served.gateway("m")
    await served.app(app)
    port = await serve_on(gateway if direct else without_writer(gateway), "127.0.0.1", 0)
    got = hashlib.sha256()
    async with (
        served.http() as http,
        http.stream(
            "POST", f"http://127.0.0.1:{port.number}/v1/chat/completions", json=chat(stream=True)
        ) as answer,
    ):
        await blocked.wait()
        async for piece in answer.aiter_raw():
            got.update(piece)
    await port.close(grace_s=0.1)
    assert got.digest() == sent.digest()


async def test_a_head_whose_body_is_not_there_yet_leaves_by_itself():
    gate = asyncio.Event()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await gate.wait()
        await send({"type": "http.response.body", "body": b"ok"})

    port = await serve_on(app, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port.number)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 2)
    for _ in range(2):  # the second request waits behind the first
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        assert head.startswith(b"HTTP/1.1 200 OK")
        gate.set()
        assert await reader.readexactly(2) == b"ok"
    writer.close()
    await port.close(grace_s=0.1)


async def test_a_client_that_waits_for_100_continue_gets_it_and_its_answer(served: Served):
    await served.gateway("m")
    await served.replica()
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port.number)
    content = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n"
    )
    writer.write(head % len(content))
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(content)
    assert (await reader.readuntil(b"\r\n")) == b"HTTP/1.1 200 OK\r\n"
    writer.close()


class Closing:
    """A transport whose end is known and not yet told. uvloop's raises where asyncio's is silent."""

    def is_closing(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        raise RuntimeError("the handler is closed")

    writelines = write


async def test_nothing_is_written_to_a_client_whose_connection_closes():
    cycle, loop = SimpleNamespace(transport=Closing()), asyncio.get_running_loop()
    writer = DirectWriter(cycle, cycle.transport, loop, lambda in_time: None, lambda: None)
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    writer._head = b"HTTP/1.1 200 OK\r\n\r\n"  # it came before the end
    writer.write(b"hello")
    writer._flush()


async def test_nothing_is_written_to_a_replica_whose_connection_closes():
    connection = ReplicaConnection(lambda lost: None)
    connection.connection_made(Closing())
    connection.finished = True
    assert not connection.reusable
    connection.write(b"stop 1\n")
