"""What a replica says of itself on its link, and what its silence means."""

import asyncio
import os
import signal
import time

import pytest
from served import NODE, Replica, Served, chat, until

from penstock.engine import Load
from penstock.serve.http.server import Port
from penstock.transport import link
from penstock.transport.connection import ReplicaConnection
from penstock.transport.pool import connect


class Said(asyncio.Queue[link.Hello | link.LoadReport]):
    task: asyncio.Task[None]
    """It listens, and is kept alive by this."""


async def words(replica: Replica, gateway_id: str = "g") -> Said:
    said = Said()
    connection: ReplicaConnection = await connect(replica.address, NODE, lambda _: None)
    listening = link.listen(connection, replica.address.secret, gateway_id, said.put_nowait)
    said.task = asyncio.create_task(listening)
    return said


async def test_hello_comes_first_and_says_who_speaks(served: Served):
    said = await words(await served.replica("org/m", max_model_len=99))
    hello = await said.get()
    assert isinstance(hello, link.Hello)
    assert (hello.model_id, hello.max_model_len, hello.pid) == ("org/m", 99, os.getpid())
    assert isinstance(await said.get(), link.LoadReport)


async def test_beats_come_without_any_change(served: Served):
    said = await words(await served.replica())
    await said.get()
    assert await said.get() == await said.get() == await said.get()


async def test_load_is_reported_when_it_changes(served: Served):
    load = Load()

    async def app(scope, receive, send):
        await asyncio.Event().wait()

    await served.gateway("m")
    await served.app(app, load=lambda: load)
    load = Load(running=3, waiting=4)
    await until(lambda: served.table.ready("m")[0].reported == 7)


async def test_prompts_that_the_engine_does_not_have_yet_count_as_waiting_tokens(served: Served):
    load, begin = Load(), asyncio.Event()

    async def app(scope, receive, send):
        """Reads nothing yet, as before a template or an image; then streams without an end."""
        await begin.wait()
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
        await asyncio.Event().wait()

    await served.gateway("m")
    await served.app(app, load=lambda: load)
    [replica] = served.table.ready("m")
    async with served.http() as http:
        requests = [asyncio.create_task(http.post("/v1/chat/completions", json=chat())) for _ in range(3)]
        await until(lambda: replica.waiting_tokens == 3 * 8)  # 8 is its context window
        load = Load(running=2)
        await until(lambda: replica.waiting_tokens == 8)
        load = Load(running=3)
        await until(lambda: replica.waiting_tokens == 0)
        load = Load()  # the engine is done, and clients still read
        begin.set()
        await until(lambda: replica.reported == replica.waiting_tokens == 0)
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)


async def test_a_silent_replica_is_not_picked_until_it_speaks_again(served: Served, monkeypatch):
    monkeypatch.setattr(link, "SILENCE_S", 1.5)
    await served.gateway("m")
    replica = await served.process()
    os.kill(replica.process.pid, signal.SIGSTOP)
    await until(lambda: not served.table.ready("m"))
    os.kill(replica.process.pid, signal.SIGCONT)
    await until(lambda: served.table.ready("m"))


async def test_who_was_stopped_itself_has_heard_no_silence(served: Served, monkeypatch):
    monkeypatch.setattr(link, "SILENCE_S", 1.5)
    said = await words(await served.process(join=False))
    await said.get()
    time.sleep(2 * link.SILENCE_S)  # noqa: ASYNC251 - as SIGSTOP does
    heard = said.qsize()
    await until(lambda: said.qsize() > heard + 3)
    assert not said.task.done()


async def test_a_draining_replica_finishes_its_stream_and_gets_nothing_new(served: Served):
    await served.gateway("m")
    leaving = await served.replica(step_base_ms=20)
    async with (
        served.http() as http,
        http.stream(
            "POST", "/v1/chat/completions", json=chat(stream=True, max_tokens=40, ignore_eos=True)
        ) as answer,
    ):
        pieces = answer.aiter_text()
        text = await anext(pieces)
        draining = asyncio.create_task(leaving.listener.drain(20))
        await until(lambda: not served.table.ready("m"))
        await served.replica(reply="the other one")
        other = await http.post("/v1/chat/completions", json=chat())
        text += "".join([piece async for piece in pieces])
    assert other.json()["choices"][0]["message"]["content"] == "the other one"
    assert text.endswith("data: [DONE]\n\n")
    assert await draining == 0


async def test_draining_cuts_what_is_left_after_its_limit_and_counts_it(served: Served):
    await served.gateway("m")
    leaving = await served.replica(version="", step_base_ms=50)
    async with (
        served.http() as http,
        http.stream("POST", "/v1/chat/completions", json=chat(stream=True, ignore_eos=True)) as answer,
    ):
        pieces = answer.aiter_text()
        await anext(pieces)
        assert await leaving.listener.drain(0.6) == 1
        rest = "".join([piece async for piece in pieces])
    assert "[DONE]" not in rest
    assert '"code":"engine_dead"' in rest


async def test_a_dead_engine_is_not_waited_for(served: Served):
    replica = await served.replica(step_base_ms=50)
    replica.engine.die("killed")
    await asyncio.wait_for(replica.listener.drain(60), 10)


async def test_the_network_port_is_reserved_but_opened_only_when_a_gateway_asks(served: Served):
    asked = []

    async def unreachable(model_id: str) -> None:
        asked.append(model_id)
        await remote.listener.sockets.listen_on_network()

    remote = await served.replica(node_id="another-node", reply="from afar", join=False)
    await served.gateway("m", unreachable=unreachable)
    served.add("m", remote.address)
    await served.until_ready("m", remote.address)
    async with served.http() as http:
        answer = await http.post("/v1/chat/completions", json=chat())
    assert answer.json()["choices"][0]["message"]["content"] == "from afar"
    assert asked == ["m"]


async def test_a_listener_that_could_not_open_its_network_port_can_be_asked_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    replica = await served.replica(join=False)

    def failing(*_: object, **__: object) -> None:
        raise OSError("for once")

    with monkeypatch.context() as patch:
        patch.setattr(Port, "__init__", failing)
        with pytest.raises(OSError, match="for once"):
            await replica.listener.sockets.listen_on_network()
    await replica.listener.sockets.listen_on_network()
    await asyncio.open_connection(replica.address.host, replica.address.port)


async def test_a_replica_that_hangs_does_not_hold_up_the_links_to_others(served: Served):
    """On another node each must be asked to listen on the network, all by one question."""

    async def unreachable(model_id: str) -> None:
        await remote.listener.sockets.listen_on_network()
        await asyncio.Event().wait()  # another one of them does not answer

    remote = await served.replica(node_id="another-node", join=False)
    await served.gateway("m", unreachable=unreachable)
    served.add("m", remote.address)
    await served.until_ready("m", remote.address)


async def test_the_secret_is_not_shown(served: Served):
    address = (await served.replica()).address
    assert address.secret
    assert address.secret not in repr(address)
    assert type(address).from_metadata(address.to_metadata() | {"more": 1}) == address


async def test_closing_the_listener_ends_the_link_at_once(served: Served):
    await served.gateway("m")
    replica = await served.replica()
    closing = asyncio.create_task(replica.listener.close())
    await until(lambda: not served.table.ready("m"))
    await closing
