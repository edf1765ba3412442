"""Request bodies in the gateway's memory: bounded over all requests, and let go when the answer begins."""

import asyncio
import json
from typing import Any

import pytest
from served import Served, chat, until

from penstock.errors import Overloaded
from penstock.serve.gateway import body
from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.http import limits

pytestmark = pytest.mark.parity("X9")

SSE = [(b"content-type", b"text/event-stream")]


def gated(gate: asyncio.Event, *, first: bytes = b""):
    """A replica that streams `first` at once and ends when the gate opens."""

    async def app(scope, receive, send):
        while (await receive())["more_body"]:
            pass
        await send({"type": "http.response.start", "status": 200, "headers": SSE})
        if first:
            await send({"type": "http.response.body", "body": first, "more_body": True})
        await gate.wait()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    return app


async def test_a_body_without_room_is_turned_away_until_another_is_answered(served: Served):
    gateway = await served.gateway("m", max_bodies_bytes=1000)
    gate = asyncio.Event()
    await served.app(gated(gate))
    async with served.http() as http:
        first = asyncio.create_task(http.post("/v1/chat/completions", json=chat("x" * 600)))
        await until(lambda: gateway._bodies.used)
        refused = await http.post("/v1/chat/completions", json=chat("x" * 600))
        small = asyncio.create_task(http.post("/v1/chat/completions", json=chat("x")))
        gate.set()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert "max_bodies_bytes" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        assert (await first).status_code == (await small).status_code == 200
        assert (await http.post("/v1/chat/completions", json=chat("x" * 600))).status_code == 200
    assert gateway._bodies.used == 0


async def echo(scope, receive, send):
    content = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": content})


async def test_a_byte_order_mark_is_dropped_and_utf_16_named(served: Served):
    await served.gateway("m")
    await served.app(echo)
    text = json.dumps(chat("x"))
    headers = {"content-type": "application/json"}
    async with served.http() as http:
        answer = await http.post("/v1/chat/completions", content=text.encode("utf-8-sig"), headers=headers)
        assert answer.json()["messages"] == chat("x")["messages"]
        answer = await http.post("/v1/chat/completions", content=text.encode("utf-16"), headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "The request body is UTF-16; send it as UTF-8."


async def test_an_empty_name_of_the_model_is_that_of_the_default(served: Served):
    await served.gateway("m")
    await served.app(echo)
    async with served.http() as http:
        for name, given in (("", "m"), (None, None), ("m", "m")):
            answer = await http.post("/v1/chat/completions", json={**chat("x"), "model": name})
            assert answer.json()["model"] == given


async def test_a_body_is_let_go_when_its_answer_begins(served: Served):
    await served.gateway("m", max_bodies_bytes=1000)
    gate = asyncio.Event()
    await served.app(gated(gate, first=b"data: 1\n\n"))
    async with served.http() as http:
        request = {"json": chat("x" * 600)}
        async with http.stream("POST", "/v1/chat/completions", **request) as first:
            assert await anext(first.aiter_raw())
            async with http.stream("POST", "/v1/chat/completions", **request) as second:
                assert second.status_code == 200
                gate.set()


async def upload(served: Served, content: bytes, length: int) -> asyncio.StreamWriter:
    """A body whose end does not come."""
    _, writer = await asyncio.open_connection("127.0.0.1", served.port.number)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % length)
    writer.write(content)
    return writer


async def test_a_body_counts_as_it_comes_and_until_the_client_goes(served: Served):
    gateway = await served.gateway("m", max_bodies_bytes=1000)
    await served.replica()
    silent = [await upload(served, b"", 900) for _ in range(3)]
    writer = await upload(served, b"x" * 500, 900)
    await until(lambda: gateway._bodies.used == 500)
    async with served.http() as http:
        assert (await http.post("/v1/chat/completions", json=chat("x" * 600))).status_code == 429
        assert (await http.post("/v1/chat/completions", json=chat("x" * 100))).status_code == 200
        writer.transport.abort()
        await until(lambda: gateway._bodies.used == 0)
        assert (await http.post("/v1/chat/completions", json=chat("x" * 600))).status_code == 200
    for writer in silent:
        writer.close()


async def test_a_body_that_makes_no_progress_gives_its_room_to_others(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(body, "_SLOW_S", 0.0)
    gateway = await served.gateway("m", max_bodies_bytes=1000)
    await served.replica()
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port.number)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n"
    writer.write(head + b"x" * 800)
    await until(lambda: gateway._bodies.used == 800)
    async with served.http() as http:
        assert (await http.post("/v1/chat/completions", json=chat("x" * 600))).status_code == 200
    assert b" 429 " in await reader.readline()
    await until(lambda: gateway._bodies.used == 0)
    assert not gateway._bodies.coming
    writer.close()


async def test_a_body_must_come_in_time(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "HEAD_S", 0.5)
    monkeypatch.setattr(limits, "BODY_PROGRESS_BYTES", 100)
    gateway = await served.gateway("m")
    await served.replica()
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port.number)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n")
    (protocol,) = await connected(served)
    for _ in range(3):
        since = protocol.since = protocol.since - 0.01
        writer.write(b"x" * 100)
        await until(lambda: protocol.since > since)  # noqa: B023
    writer.write(b"x" * 99)
    assert b" 408 " in await reader.readline()
    await until(lambda: gateway._bodies.used == 0)
    assert gateway.connections.counts == {"timeout": 1}
    writer.close()


async def connected(served: Served) -> list:
    protocols: Any = served.port._state.connections
    await until(lambda: protocols and all(protocol._accepted for protocol in protocols))
    return list(protocols)


async def test_a_body_that_no_room_could_hold_is_413(served: Served):
    await served.gateway("m", max_bodies_bytes=1000)
    async with served.http() as http:
        assert (await http.post("/v1/chat/completions", json=chat("x" * 2000))).status_code == 413


@pytest.mark.parity("S13")
async def test_of_many_uploads_those_that_fit_are_answered_and_all_others_told(served: Served):
    gateway = await served.gateway("m", max_bodies_bytes=3_500_000)
    gate = asyncio.Event()
    await served.app(gated(gate))
    async with served.http() as http:
        form = {"data": {"model": "m"}, "files": {"file": ("a.wav", bytes(1_000_000))}}
        uploads = [asyncio.create_task(http.post("/v1/audio/transcriptions", **form)) for _ in range(16)]
        await until(lambda: sum(upload.done() for upload in uploads) == 13)
        assert gateway._bodies.used <= 3_500_000
        gate.set()
        answers = [await upload for upload in uploads]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) == 13
    assert {answer.headers["retry-after"] for answer in refused} == {"1"}
    assert {answer.status_code for answer in answers if answer not in refused} == {200}
    assert gateway._bodies.used == 0


async def test_a_slow_body_that_asks_for_more_than_is_left_gives_up_nothing_twice(
    monkeypatch: pytest.MonkeyPatch,
):
    """It is the slowest itself: what it holds is given back once, when it is dropped."""
    monkeypatch.setattr(body, "_SLOW_S", 0.0)
    budget = body.BodyBudget(1000)
    slow, other = body.RequestBody(budget), body.RequestBody(budget)
    pieces = iter([(b"x" * 400, True), (b"x" * 300, True)])

    async def receive():
        piece, more = next(pieces)
        return {"type": "http.request", "body": piece, "more_body": more}

    budget.take(500, other)
    with pytest.raises(Overloaded):
        await slow.read(receive, None, 1000)
    slow.drop()
    assert budget.used == 500


async def test_large_bodies_that_wait_for_one_model_give_room_to_others(served: Served):
    gateway = await served.gateway("busy", "m", max_bodies_bytes=10_000)
    await served.replica(reply="yes")
    large = chat("x" * 3000) | {"model": "busy"}
    async with served.http() as http:
        waiting = [asyncio.create_task(http.post("/v1/chat/completions", json=large)) for _ in range(3)]
        await until(lambda: gateway._bodies.used > 9000)
        alike = await http.post("/v1/chat/completions", json=large)
        small = await http.post("/v1/chat/completions", json=chat("x" * 1200))
        done, others = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert (alike.status_code, small.status_code) == (429, 200)
        assert [one.result().status_code for one in done] == [429]
        assert len(others) == 2
        replica = await served.replica("busy", reply="yes")
        assert {(await one).status_code for one in others} == {200}
        assert replica
    assert (gateway._bodies.used, gateway._bodies.waiting) == (0, {})


async def test_a_body_that_gave_room_is_not_sent_to_a_fallback(served: Served):
    busy = ServedModel("busy", created=1, fallbacks=("m",), start_s=30)
    gateway = await served.gateway(busy, "m", max_bodies_bytes=10_000)
    await served.replica(reply="yes")
    async with served.http() as http:
        large = chat("x" * 8000) | {"model": "busy"}
        waiting = asyncio.create_task(http.post("/v1/chat/completions", json=large))
        await until(lambda: gateway._bodies.waiting)
        assert (await http.post("/v1/chat/completions", json=chat("x" * 3000))).status_code == 200
        refused = await waiting
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/admin/sleep"])
async def test_a_length_of_thousands_of_digits_is_400(served: Served, path: str):
    await served.gateway("m", admin_key="k", operate=lambda *_: None)
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port.number)
    head = b"POST %b HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\ncontent-length: %b2\r\n\r\n{}"
    writer.write(head % (path.encode(), b"0" * 5000))
    assert b" 400 " in await reader.readline()
    writer.close()


@pytest.mark.parametrize(
    ("given", "path", "seen"),
    [
        (None, "/v1/chat/completions", b"application/json"),
        ("application/x-www-form-urlencoded", "/v1/messages", b"application/json"),  # as curl -d says
        ("Application/JSON; charset=utf-8", "/tokenize", b"Application/JSON; charset=utf-8"),
    ],
)
async def test_an_engine_is_told_that_what_the_gateway_read_is_json(
    served: Served, given: str | None, path: str, seen: bytes
):
    kinds: list[bytes] = []

    async def app(scope, receive, send):
        kinds.extend(value for name, value in scope["headers"] if name == b"content-type")
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})

    await served.gateway("m")
    await served.app(app)
    headers = {} if given is None else {"content-type": given}
    async with served.http() as http:
        assert (await http.post(path, content=b'{"model": "m"}', headers=headers)).status_code == 200
    assert kinds == [seen]
