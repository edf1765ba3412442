"""HTTPS on the own port: clients that check the certificate, new files, and the limits of connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from certificates import Pair, write_pair
from served import Served, chat, until

from penstock.cli.client.service import Service
from penstock.errors import ConfigError, Unavailable
from penstock.serve.http import limits, listener
from penstock.serve.http.server import serve_on
from penstock.serve.http.tls import Certificate

pytestmark = pytest.mark.parity("X21")


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return write_pair(tmp_path)


def trusting(pair: Pair) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(pair.cert))


async def connect(served: Served, pair: Pair) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    assert served.port is not None
    return await asyncio.open_connection("127.0.0.1", served.port.number, ssl=trusting(pair))


async def shown_serial(served: Served) -> int:
    """Of the certificate that a new connection is shown."""
    assert served.port is not None
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", served.port.number, ssl=context)
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    from cryptography import x509

    return x509.load_der_x509_certificate(found).serial_number


async def test_openais_client_asks_over_https_and_checks_the_certificate(served: Served, pair: Pair):
    await served.gateway("m", api_key="key", tls=pair.config)
    await served.replica(reply="one two three")
    async with httpx.AsyncClient(verify=trusting(pair)) as http:
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="key", http_client=http)
        answer = await client.chat.completions.create(**chat())
        stream = await client.chat.completions.create(**chat(stream=True))
        pieces = [event.choices[0].delta.content or "" async for event in stream if event.choices]
        assert answer.choices[0].message.content == "".join(pieces) == "one two three"
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await http.get(f"{served.url}/health")


async def test_our_commands_say_whose_certificate_they_do_not_accept(
    served: Served, pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    await served.gateway("m", tls=pair.config)
    with pytest.raises(Unavailable, match=r"is not accepted: self.signed certificate.* SSL_CERT_FILE"):
        await asyncio.to_thread(Service(served.url).json, "GET", "/v1/models")
    monkeypatch.setenv("SSL_CERT_FILE", str(pair.cert))
    assert (await asyncio.to_thread(Service(served.url).json, "GET", "/v1/models"))["object"] == "list"


async def test_a_large_body_and_a_large_answer_arrive_whole(served: Served, pair: Pair):
    async def echo(scope, receive, send):
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    await served.gateway("m", tls=pair.config)
    await served.app(echo)
    body = chat("x" * 5_000_000)
    async with httpx.AsyncClient(verify=trusting(pair), timeout=60) as http:
        answer = await http.post(f"{served.url}/v1/chat/completions", json=body)
    assert answer.json() == body | {"service_tier": "default"}  # which every answer says


async def test_new_files_are_shown_to_new_connections_while_open_ones_go_on(
    served: Served, pair: Pair, tmp_path: Path
):
    await served.gateway("m", tls=pair.config)
    await served.replica(reply="yes")
    reader, writer = await connect(served, pair)
    new, old_serial = write_pair(tmp_path, "new"), pair.serial
    pair.cert.write_bytes(new.cert.read_bytes())  # for a moment the pair does not fit
    served.port._config.certificate.refresh()
    assert await shown_serial(served) == old_serial
    new.key.replace(pair.key)
    served.port._config.certificate.refresh()  # the port does so every second
    assert await shown_serial(served) == new.serial
    writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")


async def test_a_connection_counts_before_its_handshake(served: Served, pair: Pair):
    gateway = await served.gateway("m", tls=pair.config, max_connections_per_address=3)
    silent = [await asyncio.open_connection("127.0.0.1", served.port.number) for _ in range(5)]
    await until(lambda: gateway.connections.counts["too_many_connections"] == 2)
    assert await silent[0][0].read() == await silent[1][0].read() == b""
    for _, writer in silent:
        writer.close()
    await until(lambda: gateway.connections.open == 0)


async def test_a_silent_handshake_ends_in_time(served: Served, pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "HEAD_S", 0.2)
    gateway = await served.gateway("m", tls=pair.config)
    reader, _ = await asyncio.open_connection("127.0.0.1", served.port.number)
    assert await asyncio.wait_for(reader.read(), 20) == b""
    assert gateway.connections.counts["timeout"] == 1
    await until(lambda: gateway.connections.open == 0)


async def test_a_head_that_does_not_end_is_cut_in_time(
    served: Served, pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    gateway = await served.gateway("m", tls=pair.config)
    reader, writer = await connect(served, pair)
    monkeypatch.setattr(limits, "HEAD_S", 0.2)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n")
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(reader.readexactly(1), 20)
    assert gateway.connections.counts["timeout"] == 1


async def test_plain_http_is_hung_up_on_and_counted(served: Served, pair: Pair):
    gateway = await served.gateway("m", tls=pair.config)
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port.number)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert not (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP")
    assert gateway.connections.counts["tls"] == 1
    async with httpx.AsyncClient(verify=trusting(pair)) as http:
        text = (await http.get(f"{served.url}/metrics")).text
    assert 'penstock_connections_closed_total{reason="tls"} 1.0' in text


async def test_who_goes_on_sending_after_a_refusal_reads_it_and_is_cut(
    served: Served, pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(limits, "DISCARDED_BYTES", 2**20)
    gateway = await served.gateway("m", api_key="key", tls=pair.config)
    reader, writer = await connect(served, pair)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 30000000\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 401 ")
    assert b"connection: close" in head.lower()
    while gateway.connections.open:
        writer.write(bytes(100_000))
        await asyncio.sleep(0)
    await until(lambda: gateway.connections.open == 0)
    assert gateway.connections.counts["discarded"] == 1


async def test_the_port_closes_at_once_though_idle_clients_do_not_answer(served: Served, pair: Pair):
    """As those do that are not asynchronous: they look at an idle connection when they use it again."""
    await served.gateway("m", tls=pair.config)
    assert served.port is not None
    reader, writer = await connect(served, pair)
    transport: Any = writer.transport
    writer.write(b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
    assert b" 200 " in await reader.readline()
    transport.pause_reading()
    async with asyncio.timeout(20):
        await served.port.close(grace_s=3600)
    transport.resume_reading()
    assert (await reader.read()).endswith(b"success")  # all of the answer, and then its end


async def test_a_slow_client_gets_the_end_of_its_answer_from_a_port_that_closes(served: Served, pair: Pair):
    async def large(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 4_000_000})

    port = await serve_on(large, "127.0.0.1", 0, certificate=Certificate(str(pair.cert), str(pair.key)))
    reader, writer = await asyncio.open_connection("127.0.0.1", port.number, ssl=trusting(pair), limit=1024)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert b" 200 " in await reader.readline()
    closing = asyncio.create_task(port.close(grace_s=60))
    await asyncio.sleep(0.5)
    assert not closing.done()
    assert (await reader.read()).count(b"x") == 4_000_000
    await closing


async def test_the_port_closes_with_handshakes_under_way(served: Served, pair: Pair):
    await served.gateway("m", tls=pair.config)
    reader, _ = await asyncio.open_connection("127.0.0.1", served.port.number)
    await until(lambda: served._gateway.connections.open)
    await served.port.close(grace_s=0.2)
    assert await reader.read() == b""
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", served.port.number)


def test_a_pair_that_cannot_be_used_is_one_sentence(pair: Pair, tmp_path: Path):
    other = write_pair(tmp_path, "other")
    locked = write_pair(tmp_path, "locked", passphrase=b"secret")
    for cert, key, says in (
        (tmp_path / "none.crt", pair.key, "none.crt' cannot be read: No such file"),
        (pair.cert, tmp_path, "cannot be read: Is a directory"),
        (pair.cert, other.key, "does not belong to the certificate"),
        (locked.cert, locked.key, "asks for a passphrase"),
        (pair.key, pair.key, "holds no certificate in PEM form"),
        (pair.cert, pair.cert, "holds no private key in PEM form"),
    ):
        with pytest.raises(ConfigError, match=says) as caught:
            Certificate(str(cert), str(key))
        assert "\n" not in str(caught.value)


def test_a_pair_that_is_replaced_as_it_is_read_changes_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """What the port does every second must not end by it."""
    certificate = Certificate(*pair.config.values())
    before = certificate.context

    def gone(*_: object) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", gone)
    pair.key.touch()
    certificate.refresh()
    assert certificate.context is before
    assert "No such file or directory" in caplog.text


async def hello(served: Served) -> socket.socket:
    """A connection whose client sends its first message, and nothing more."""
    out, context = ssl.MemoryBIO(), ssl.create_default_context()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out, server_hostname="localhost").do_handshake()
    sock = socket.create_connection(("127.0.0.1", served.port.number))
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(sock, out.read())
    return sock


async def test_of_too_many_handshakes_the_one_that_takes_longest_is_cut(
    served: Served, pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(limits, "HANDSHAKES_PER_ADDRESS", 2)
    monkeypatch.setattr(listener, "_LONG_S", 0.0)
    gateway = await served.gateway("m", tls=pair.config)
    loop, counts = asyncio.get_running_loop(), gateway.connections.counts
    half_open = [await hello(served) for _ in range(2)]
    for sock in half_open:
        assert await loop.sock_recv(sock, 65536)  # the certificate
    silent = [await asyncio.open_connection("127.0.0.1", served.port.number) for _ in range(9)]
    reader, writer = await connect(served, pair)  # no handshake is under way for those that are silent
    writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    assert await loop.sock_recv(half_open[0], 65536) == b""
    assert counts == {"too_many_connections": 1}
    for sock in half_open:
        sock.close()
    for _, writer in silent:
        writer.close()
    await until(lambda: gateway.connections.open == 0)


async def test_a_handshake_waits_for_those_before_it(
    served: Served, pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(limits, "HANDSHAKES_PER_ADDRESS", 1)
    monkeypatch.setattr(listener, "_LONG_S", 60.0)
    gateway = await served.gateway("m", tls=pair.config)
    before = await hello(served)
    assert await asyncio.get_running_loop().sock_recv(before, 65536)  # the certificate
    connecting = [asyncio.create_task(connect(served, pair)) for _ in range(5)]
    await until(lambda: gateway.connections.open == 6)
    before.close()
    writers = [writer for _, writer in await asyncio.gather(*connecting)]
    assert set(gateway.connections.counts) <= {"tls"}  # of the one that left
    for writer in writers:
        writer.close()


async def test_a_first_message_may_come_in_parts(served: Served, pair: Pair):
    await served.gateway("m", tls=pair.config)
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port.number)
    out, into = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting(pair).wrap_bio(into, out, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    for byte in out.read():
        writer.write(bytes([byte]))
        await writer.drain()
    into.write(await reader.read(65536))
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    assert client.getpeercert()
    writer.close()
