"""The same app behind an outer server with a prefix, as behind Serve, and on a port of its own."""

import asyncio
import json
import logging
import os
import resource
import signal
import socket
from collections import Counter

import httpx
import pytest
from benchmarks.fleet import Gateway, Replica
from served import Served, chat

from penstock import json_logs
from penstock.errors import ConfigError, Unavailable
from penstock.serve.http.serve_proxy import without_request_id
from penstock.serve.http.server import Port, serve_on
from penstock.serve.http.sockets import bind


def mounted(app, prefix: str):
    async def outer(scope, receive, send):
        await app(scope | {"root_path": prefix}, receive, send)

    return outer


@pytest.mark.parametrize("prefix", ["/llm", "/deep/er", "/v1"])
async def test_any_prefix_is_stripped(served: Served, prefix: str):
    gateway = await served.gateway("m")
    await served.replica(reply="yes")
    port = await serve_on(mounted(gateway, prefix), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{port.number}{prefix}"
    async with httpx.AsyncClient(verify=False) as http:
        answer = await http.post(f"{url}/v1/chat/completions", json=chat())
        models = await http.get(f"{url}/v1/models/m")
    await port.close(grace_s=0.1)
    assert answer.json()["choices"][0]["message"]["content"] == "yes"
    assert models.json()["id"] == "m"


@pytest.mark.parity("S17")
async def test_the_requests_id_is_left_to_serve_which_says_it_anyway(served: Served):
    gateway = await served.gateway("m")
    await served.replica(reply="yes")
    port = await serve_on(without_request_id(gateway), "127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port.number}", verify=False) as http:
        mine = await http.post("/v1/chat/completions", json=chat(), headers={"x-request-id": "mine"})
        refused = await http.post("/v1/chat/completions", json=chat(model="nobody"))
    await port.close(grace_s=0.1)
    assert mine.json()["choices"][0]["message"]["content"] == "yes"
    assert refused.status_code == 404
    assert "x-request-id" not in {*mine.headers, *refused.headers}


async def test_a_server_may_announce_start_and_end(served: Served):
    gateway = await served.gateway("m")
    said = ["lifespan.startup", "lifespan.shutdown"]
    answers = []

    async def receive():
        return {"type": said.pop(0)}

    async def send(message):
        answers.append(message["type"])

    await gateway({"type": "lifespan"}, receive, send)
    assert answers == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def test_a_taken_port_is_an_error_that_names_it():
    port = await serve_on(app, "127.0.0.1", 0)
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port.number}: Address already in use"):
        await serve_on(app, "127.0.0.1", port.number)
    await port.close()


async def test_a_host_of_another_machine_is_an_error_that_names_it():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        await serve_on(app, "192.0.2.1", 0)
    with pytest.raises(ConfigError, match=r"no\.such\.host\.invalid"):
        await serve_on(app, "no.such.host.invalid", 0)


async def test_gateways_of_one_group_share_a_port():
    first = await serve_on(app, "127.0.0.1", 0, group="a")
    second = await serve_on(app, "127.0.0.1", first.number, group="a")
    with pytest.raises(ConfigError, match="Address already in use"):
        bind("127.0.0.1", first.number).close()
    await first.close()
    async with httpx.AsyncClient(verify=False) as http:
        assert (await http.get(f"http://127.0.0.1:{second.number}/")).status_code == 204
    third = await serve_on(app, "127.0.0.1", first.number, group="a")
    await second.close()
    await third.close()
    bind("127.0.0.1", first.number).close()


async def test_gateways_that_start_together_share_a_port(free_port: int):
    ports = await asyncio.gather(*(serve_on(app, "127.0.0.1", free_port, group="a") for _ in range(4)))
    assert [port.number for port in ports] == [free_port] * 4
    await asyncio.gather(*(port.close() for port in ports))


async def test_connections_that_wait_when_a_gateway_leaves_are_answered_by_its_successor():
    first = await serve_on(app, "127.0.0.1", 0, group="a")
    second = await serve_on(app, "127.0.0.1", first.number, group="a")
    waiting = [socket.create_connection(("127.0.0.1", first.number)) for _ in range(16)]
    await first.close()
    for sock in waiting:
        assert b"204 No Content" in await asked(*await asyncio.open_connection(sock=sock))
    await second.close()


async def test_an_update_of_two_gateways_loses_no_connection():
    old = [await serve_on(app, "127.0.0.1", 0, group="a")]
    old += [await serve_on(app, "127.0.0.1", old[0].number, group="a")]
    new = [await serve_on(app, "127.0.0.1", old[0].number, group="a") for _ in old]
    waiting = [socket.create_connection(("127.0.0.1", old[0].number)) for _ in range(16)]
    closing = asyncio.gather(*(port.close(linger_s=10.0) for port in old))
    for sock in waiting:
        assert b"204 No Content" in await asked(*await asyncio.open_connection(sock=sock))
    await closing
    await asyncio.gather(*(port.close() for port in new))


async def test_a_burst_of_connections_is_shared_evenly():
    answered: Counter[str] = Counter()

    def named(name: str):
        async def counted(scope, receive, send):
            answered[name] += 1
            await app(scope, receive, send)

        return counted

    first = await serve_on(named("first"), "127.0.0.1", 0, group="a")
    second = await serve_on(named("second"), "127.0.0.1", first.number, group="a")
    waiting = [socket.create_connection(("127.0.0.1", first.number)) for _ in range(16)]
    for sock in waiting:
        await asked(*await asyncio.open_connection(sock=sock))
    assert answered.total() == 16
    assert min(answered["first"], answered["second"]) > 4
    await asyncio.gather(first.close(), second.close())


async def test_a_kept_connection_has_one_more_answer_while_its_port_closes():
    port = await serve_on(app, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port.number)
    assert b"connection: close" not in await asked(reader, writer)
    closing = asyncio.create_task(port.close(linger_s=10.0))
    await asyncio.sleep(0)  # it has stopped listening
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port.number)
    assert b"connection: close" in await asked(reader, writer)
    assert await reader.read() == b""
    await closing


async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """The head of the answer."""
    writer.write(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
    return await reader.readuntil(b"\r\n\r\n")


async def test_a_port_is_not_shared_with_strangers():
    ours = await serve_on(app, "127.0.0.1", 0, group="a")
    with pytest.raises(ConfigError, match="Stop the program that uses it"):
        await serve_on(app, "127.0.0.1", ours.number, group="b")
    await ours.close()
    careless = socket.socket()
    careless.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    careless.bind(("127.0.0.1", 0))
    careless.listen()
    with pytest.raises(ConfigError, match="Stop the program that uses it"):
        await serve_on(app, "127.0.0.1", careless.getsockname()[1], group="a")
    careless.close()


async def test_a_gateway_that_fails_takes_no_connection_from_others():
    async def all_are_answered() -> bool:
        for _ in range(20):
            async with httpx.AsyncClient(verify=False) as http:
                if (await http.get(f"http://127.0.0.1:{first.port}/health")).status_code != 200:
                    return False
        return True

    with (
        Replica("sim") as replica,
        Gateway(replica, share_port=True) as first,
        Gateway(replica, port=first.port, share_port=True) as second,
    ):
        soft, hard = resource.prlimit(first.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(first.pid, resource.RLIMIT_NOFILE, (0, hard))
        assert await all_are_answered()
        resource.prlimit(first.pid, resource.RLIMIT_NOFILE, (soft, hard))
        os.kill(first.pid, signal.SIGSTOP)
        assert await all_are_answered()
        with Gateway(replica, port=first.port, share_port=True):
            second.stop()  # kill -9
            assert await all_are_answered()


async def test_a_closed_port_says_so():
    port = Port(app, bind("127.0.0.1", 0))
    port.check()
    await port.close()
    with pytest.raises(Unavailable):
        port.check()
    bind("127.0.0.1", port.number).close()


async def test_ipv6_works_where_the_machine_has_it():
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        port = await serve_on(app, "::1", 0)
    except ConfigError:
        pytest.skip("no IPv6 loopback here")
    async with httpx.AsyncClient(verify=False) as http:
        assert (await http.get(f"http://[::1]:{port.number}/")).status_code == 204
    await port.close()


async def test_failures_are_logged_as_json_with_the_request_id(
    served: Served, capsys: pytest.CaptureFixture[str]
):
    logger = logging.getLogger("penstock")
    level = logger.level
    await served.gateway("m", log_format="json", wait_for_replica_s=0.05)
    try:
        async with served.http(headers={"x-request-id": "find-me"}) as http:
            await http.post("/v1/chat/completions", json=chat())
            await http.get("/v1/models")
    finally:
        for one in (logger, logging.getLogger()):
            for handler in [h for h in one.handlers if isinstance(h, json_logs.CommandHandler)]:
                one.removeHandler(handler)
        logging.captureWarnings(False)
        logger.propagate = True
        logger.setLevel(level)
    [line] = [json.loads(line) for line in capsys.readouterr().err.splitlines() if "find-me" in line]
    assert (line["request_id"], line["status"], line["model"]) == ("find-me", "503", "m")
    assert (line["level"], line["path"], line["code"]) == ("WARNING", "/v1/chat/completions", "unavailable")
