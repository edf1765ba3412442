"""What one address may hold of the gateway's port before it has shown a key: little, and not for long."""

import asyncio
import itertools
import json
import re
import socket

import pytest
from served import Served, chat, until

from penstock.serve.http import limits
from penstock.serve.http.server import serve_on

KEY = "the-key"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
AUTHORIZED = POST + b"authorization: Bearer the-key\r\ncontent-type: application/json\r\n"
ASKED = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
REQUEST = AUTHORIZED + b"content-length: %d\r\n\r\n" % len(ASKED) + ASKED


def gated(gate: asyncio.Event):
    """A replica that answers when the gate opens."""

    async def app(scope, receive, send):
        while (await receive())["more_body"]:
            pass
        await gate.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})

    return app


class Client:
    """A raw connection to the gateway's port."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, served: Served) -> "Client":
        assert served.port is not None
        return cls(*await asyncio.open_connection("127.0.0.1", served.port.number))

    async def answers(self) -> list[int]:
        """The statuses of all that comes until the end."""
        try:
            text = await asyncio.wait_for(self.reader.read(), 20)
        except ConnectionError:
            return []
        return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", text)]


def protocols(served: Served) -> list:
    assert served.port is not None
    return list(served.port._state.connections)


async def locked(served: Served, **config) -> Served:
    await served.gateway("m", api_key=KEY, **config)
    return served


async def test_who_goes_on_sending_after_the_answer_is_cut(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "DISCARDED_BYTES", 2**20)
    client = await Client.connect(await locked(served))
    client.writer.write(POST + b"transfer-encoding: chunked\r\n\r\n0\r\n")
    connections = served._gateway.connections
    await until(lambda: connections.open)
    while connections.open:
        assert all(len(protocol.headers or ()) <= limits.FIELDS for protocol in protocols(served))
        client.writer.write(b"a: b\r\n" * 1000)
        await asyncio.sleep(0)
    assert connections.counts["discarded"] == 1


async def test_the_largest_head_of_a_client_reaches_its_replica(served: Served):
    await served.gateway("m")
    await served.replica()
    body, path = json.dumps(chat()).encode(), b"/v1/chat/completions"
    fields = {b"host": b"x", b"content-type": b"application/json", b"content-length": b"%d" % len(body)}
    fields |= {b"connection": b"close"} | {b"x-%d" % n: b"y" for n in range(limits.FIELDS - 5)}
    left = limits.HEAD_BYTES - len(path) - sum(len(name) + len(value) for name, value in fields.items())
    fields[b"x"] = b"y" * (left - 1)
    assert len(fields) == limits.FIELDS
    client = await Client.connect(served)
    lines = [b"POST %b HTTP/1.1" % path, *(b"%b: %b" % field for field in fields.items())]
    client.writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
    assert await client.answers() == [200]


async def test_fields_of_a_trailer_are_no_headers():
    seen = {}

    async def app(scope, receive, send):
        while (await receive())["more_body"]:
            pass
        seen.update(scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    port = await serve_on(app, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port.number)
    writer.write(
        POST + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n0\r\nauthorization: Bearer k\r\n\r\n"
    )
    assert (await reader.read()).startswith(b"HTTP/1.1 200")
    assert b"authorization" not in seen
    assert seen[b"host"] == b"x"
    writer.close()
    await port.close(grace_s=0.1)


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"GET / HTTP/1.1\r\nhost: x\r\n", b"a: b\r\n" * 10),
        (b"GET / HTTP/1.1\r\nhost: x\r\na: ", b"b" * 5000),
        (b"GET /", b"b" * 5000),
        (AUTHORIZED + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * 10),
        (AUTHORIZED + b"transfer-encoding: chunked\r\n\r\n0\r\na: ", b"b" * 5000),
        (AUTHORIZED + b"transfer-encoding: chunked\r\n\r\n5;a=", b"b" * 5000),
    ],
    ids=["fields", "value", "path", "trailer-fields", "trailer-value", "chunk-extension"],
)
async def test_a_head_or_trailer_without_end_is_400(
    served: Served, begin: bytes, piece: bytes, caplog: pytest.LogCaptureFixture
):
    client = await Client.connect(await locked(served))
    client.writer.write(begin)
    while not any(protocol._deaf for protocol in protocols(served)):
        client.writer.write(piece)
        await client.writer.drain()
        await asyncio.sleep(0)
    client.writer.write_eof()
    assert await client.answers() == [400]
    await until(lambda: not protocols(served))
    assert "Exception" not in caplog.text


async def test_many_small_fields_in_one_write_are_400(served: Served):
    client = await Client.connect(await locked(served))
    client.writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a:b\r\n" * 40_000)
    assert await client.answers() == [400]


async def test_requests_sent_ahead_are_answered_up_to_the_limit(served: Served):
    client = await Client.connect(await locked(served))
    client.writer.write(b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n" * 10_000)
    answers = await client.answers()
    assert set(answers) == {401}
    assert len(answers) == limits.PIPELINED + 1


async def test_large_heads_sent_ahead_are_answered_each(served: Served):
    client = await Client.connect(await locked(served))
    head = b"GET /x HTTP/1.1\r\nhost: x\r\na: " + b"b" * 30_000 + b"\r\n\r\n"
    client.writer.write(head * 5 + b"GET /x HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert await client.answers() == [401] * 6


async def test_a_client_that_is_refused_while_it_sends_reads_why(served: Served):
    client = await Client.connect(await locked(served))
    client.writer.write(POST + b"content-length: 30000000\r\n\r\n")
    client.writer.write(bytes(30_000_000))
    await client.writer.drain()
    assert (await client.reader.read()).count(b"connection: close") == 1
    client.writer.close()
    await until(lambda: not protocols(served))


async def test_an_idle_connection_keeps_nothing_of_its_last_request(served: Served):
    await locked(served)
    client = await Client.connect(served)
    client.writer.write(b"GET /x HTTP/1.1\r\nhost: x\r\na: " + b"b" * 50_000 + b"\r\n\r\n")
    assert b" 401 " in await client.reader.readline()
    (protocol,) = protocols(served)
    await until(lambda: not protocol.headers)
    assert not protocol.scope
    assert not protocol.cycle.body
    assert protocol._peer.head_bytes == 0
    client.writer.write(REQUEST)  # it is still good for a request
    await until(lambda: protocol._accepted)
    assert not protocol._peer.waiting
    client.writer.close()
    await until(lambda: not served._gateway.connections.open)


async def test_many_that_come_at_once_are_read_in_turns_and_all_answered(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(limits, "REQUESTS_AT_ONCE", 2)
    await locked(served, max_connections_per_address=30)
    clients = [await Client.connect(served) for _ in range(30)]
    for client in clients:
        client.writer.write(
            b"GET /x HTTP/1.1\r\nhost: x\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        )
    assert [await client.answers() for client in clients] == [[401, 503]] * 30
    await until(lambda: not served._gateway.connections.open)
    assert served._gateway.connections.waiting == 0


async def test_of_too_many_connections_the_one_that_waited_longest_is_closed(served: Served):
    await locked(served, max_connections_per_address=3)
    await served.app(gated(gate := asyncio.Event()))
    working = await Client.connect(served)
    working.writer.write(REQUEST)
    connections = served._gateway.connections
    await until(lambda: connections.open and not connections.waiting)
    idle = [await Client.connect(served) for _ in range(3)]
    await until(lambda: connections.waiting == 3)
    more = await Client.connect(served)
    assert await idle[0].answers() == []
    await until(lambda: connections.waiting == 3)
    more.writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert b" 200 " in await more.reader.readline()
    assert connections.counts["too_many_connections"] == 1
    assert connections.open == 4
    gate.set()
    assert b" 200 " in await working.reader.readline()


async def test_heads_of_one_address_share_a_bound(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "HEADS_PER_ADDRESS_BYTES", 200_000)
    await locked(served)
    clients = [await Client.connect(served) for _ in range(8)]
    for client in clients:
        client.writer.write(b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * 50_000)
    connections = served._gateway.connections
    await until(lambda: connections.open < 8)
    assert connections.counts["too_many_heads"] >= 1
    (peer,) = connections._peers.values()
    assert peer.head_bytes <= 200_000
    for client in clients:
        client.writer.close()
    await until(lambda: not connections.open)
    assert (connections.waiting, connections._peers) == (0, {})


CHUNKED = b"transfer-encoding: chunked\r\n\r\n"


def chunks(content: bytes) -> bytes:
    """Of one byte each."""
    return b"".join(b"1\r\n%c\r\n" % byte for byte in content) + b"0\r\n\r\n"


async def test_chunks_are_not_parsed_before_the_key_is_seen(served: Served):
    client = await Client.connect(await locked(served))
    client.writer.write(POST + CHUNKED + chunks(bytes(20_000)))
    assert b" 401 " in await client.reader.readline()
    (protocol,) = protocols(served)
    assert limits.CHUNKS_BEFORE_ACCEPTED <= protocol._pieces < 300
    client.writer.write_eof()
    await until(lambda: not protocols(served))


async def test_chunks_that_waited_for_the_key_arrive_whole(served: Served):
    await locked(served)
    await served.replica(reply="yes")
    client = await Client.connect(served)
    for request in (ASKED, ASKED + b" " * 5000, ASKED):
        client.writer.write(AUTHORIZED + CHUNKED + chunks(request))
    client.writer.write(REQUEST.replace(b"host: x", b"host: x\r\nconnection: close"))
    assert await client.answers() == [200] * 4


async def test_many_small_chunks_are_parsed_over_several_turns(served: Served):
    await locked(served)
    await served.replica(reply="yes")
    client = await Client.connect(served)
    client.writer.write(AUTHORIZED + CHUNKED)
    await until(lambda: protocols(served) and protocols(served)[0]._accepted)
    (protocol,), loop, seen = protocols(served), asyncio.get_running_loop(), [0]

    def look() -> None:
        seen.append(protocol._pieces)
        loop.call_soon(look)

    look()
    client.writer.write(chunks(ASKED + b" " * 15_000))
    assert b" 200 " in await client.reader.readline()
    in_turns = [after - before for before, after in itertools.pairwise(seen)]
    assert sum(piece for piece in in_turns if piece > 0) > 15_000
    assert max(in_turns) <= limits.WORK_AT_ONCE + 16 * 1024 // 6
    client.writer.close()


async def test_a_body_of_too_many_small_chunks_is_400(served: Served):
    await locked(served)
    await served.replica(reply="yes")
    client, other = await Client.connect(served), await Client.connect(served)
    client.writer.write(AUTHORIZED + CHUNKED + chunks(ASKED + b" " * 20_000))
    assert await client.answers() == [400]
    assert served._gateway.connections.counts["chunks"] == 1
    content = ASKED + b" " * 2_000_000
    larger = b"".join(b"40\r\n%b\r\n" % content[at : at + 64] for at in range(0, len(content) - 64, 64))
    rest = content[len(content) - len(content) % 64 :] or content[-64:]
    other.writer.write(AUTHORIZED + CHUNKED + larger + b"%x\r\n%b\r\n0\r\n\r\n" % (len(rest), rest))
    assert b" 200 " in await other.reader.readline()
    other.writer.close()


@pytest.mark.parametrize(
    "begin",
    [
        b"",
        b"GET / HT",
        b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET",
        POST + b"content-length: 9\r\n\r\n",
    ],
    ids=["silent", "half-head", "half-second-head", "refused-and-open"],
)
async def test_what_does_not_come_in_time_is_not_waited_for(
    served: Served, begin: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(limits, "HEAD_S", 0.5)
    client = await Client.connect(await locked(served))
    client.writer.write(begin)
    await until(lambda: served._gateway.connections.open)
    await until(lambda: not served._gateway.connections.open)
    assert served._gateway.connections.counts["timeout"] == 1


async def test_a_long_request_and_one_sent_ahead_outlast_the_time_for_heads(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(limits, "HEAD_S", 0.2)
    await locked(served)
    await served.app(gated(gate := asyncio.Event()))
    client, silent = await Client.connect(served), await Client.connect(served)
    client.writer.write(REQUEST + REQUEST.replace(b"host: x", b"host: x\r\nconnection: close"))
    assert await silent.answers() == []  # so the time is over
    gate.set()
    assert await client.answers() == [200] * 2


async def test_an_empty_line_after_an_answer_does_not_keep_the_connection(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(limits, "HEAD_S", 0.5)
    client = await Client.connect(await locked(served))
    client.writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    await client.reader.readuntil(b"}")
    client.writer.write(b"\r\n")
    await until(lambda: not served._gateway.connections.open)


async def test_who_does_not_read_refusals_is_cut(served: Served):
    await locked(served)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", served.port.number))
    sock.setblocking(False)
    connections, state = served._gateway.connections, served.port._state
    await until(lambda: connections.open)
    sent = 0
    while connections.open:
        await asyncio.get_running_loop().sock_sendall(
            sock, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * limits.PIPELINED
        )
        sent += limits.PIPELINED
        await until(lambda: not connections.open or state.total_requests >= sent)  # noqa: B023
    assert connections.counts == {"not_reading": 1}
    sock.close()


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    "framing", [b"content-length: %d\r\n\r\n%b", b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"]
)
async def test_a_request_that_offers_an_upgrade_keeps_its_body(
    served: Served, framing: bytes, together: bool
):
    """As Java's HttpClient sends its first one."""
    await locked(served)
    await served.replica()
    client = await Client.connect(served)
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"
    head, _, body = (AUTHORIZED + offer + framing % (len(ASKED), ASKED)).partition(b"\r\n\r\n")
    client.writer.write(head + b"\r\n\r\n" + (body if together else b""))
    if not together:
        await until(lambda: protocols(served) and protocols(served)[0].cycle)
        client.writer.write(body)
    client.writer.write(REQUEST.replace(b"host: x", b"host: x\r\nconnection: close"))
    assert await client.answers() == [200] * 2


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (b"", 400),
        (b"host: x\r\nhost: y\r\n", 400),
        (b"host: x\r\ntransfer-encoding: gzip, chunked\r\n", 501),
        (b"host: x\r\ntransfer-encoding: Chunked\r\n", 401),
    ],
)
async def test_heads_that_http_forbids_are_refused(served: Served, fields: bytes, status: int):
    client = await Client.connect(await locked(served))
    client.writer.write(b"POST /v1/embeddings HTTP/1.1\r\n" + fields + b"connection: close\r\n\r\n0\r\n\r\n")
    assert await client.answers() == [status]


async def test_http_1_0_needs_no_host(served: Served):
    client = await Client.connect(await locked(served))
    client.writer.write(b"GET /livez HTTP/1.0\r\n\r\n")
    assert await client.answers() == [200]


async def test_metrics_count_connections(served: Served):
    await locked(served)
    idle = await Client.connect(served)
    bad = await Client.connect(served)
    bad.writer.write(b"\x16\x03\x01 no HTTP at all\r\n\r\n")
    assert await bad.answers() == [400]
    bad.writer.close()
    async with served.http(headers={"authorization": f"Bearer {KEY}"}) as http:
        text = (await http.get("/metrics")).text
        assert (
            await http.post("/v1/chat/completions", json=chat(""), headers={"authorization": ""})
        ).status_code == 401
    assert 'penstock_connections_closed_total{reason="invalid"} 1.0' in text
    assert 'penstock_connections{state="waiting"} 1.0' in text
    assert 'penstock_connections{state="active"} 1.0' in text
    idle.writer.close()
