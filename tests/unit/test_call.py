"""Asking an ASGI app without a socket."""

import asyncio

import pytest

from penstock.asgi_client import ask, batched, call, events


async def echo(scope, receive, send):
    body = (await receive())["body"]
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"X-Path", scope["path"].encode())]}
    )
    for piece in (body[:3], body[3:]):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def test_answer_has_status_headers_and_body():
    answer = await call(echo, "/v1/x", b"hello")
    assert (answer.status, answer.headers["x-path"], await answer.read()) == (200, "/v1/x", b"hello")


async def test_a_whole_answer_has_status_headers_and_body():
    answer = await ask(echo, "/v1/x", b"hello")
    assert (answer.status, answer.headers["x-path"], answer.body) == (200, "/v1/x", b"hello")


async def test_a_whole_answer_is_made_in_the_callers_task():
    async def tasks(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": asyncio.current_task().get_name().encode()})

    assert (await ask(tasks, "/", b"")).body.decode() == asyncio.current_task().get_name()


async def test_a_caller_that_is_cancelled_ends_the_app_before_it_goes_on():
    ended = asyncio.Event()

    async def waits_for_its_client(scope, receive, send):
        await receive()
        try:
            await receive()
        finally:
            ended.set()

    asking = asyncio.create_task(ask(waits_for_its_client, "/", b""))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert ended.is_set()


async def test_an_app_without_an_answer_is_an_error():
    async def silent(scope, receive, send):
        await receive()

    with pytest.raises(RuntimeError, match="/v1/x ended without an answer"):
        await ask(silent, "/v1/x", b"")


async def test_what_the_app_raises_before_its_first_byte_reaches_the_caller():
    async def broken(scope, receive, send):
        raise KeyError("lost")

    with pytest.raises(KeyError):
        await call(broken, "/", b"")


async def test_closing_the_body_ends_the_app():
    ended = asyncio.Event()

    async def endless(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"data", "more_body": True})
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    answer = await call(endless, "/", b"")
    assert await anext(answer) == b"data"
    await answer.aclose()
    await asyncio.wait_for(ended.wait(), 5)


async def test_a_reader_far_behind_holds_the_app_back():
    sent = 0

    async def eager(scope, receive, send):
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"data", "more_body": True})
            sent += 1

    answer = await call(eager, "/", b"")
    for _ in range(1000):
        await asyncio.sleep(0)
    assert sent <= 65
    await answer.aclose()


async def pieces(*parts: bytes):
    for part in parts:
        yield part


async def test_events_are_whole_however_the_bytes_are_cut():
    got = [batch async for batch in events(pieces(b"data: 1\n", b"\ndata: 2\n\ndata: 3\n\n", b"data"))]
    assert got == [["data: 1\n\n", "data: 2\n\n", "data: 3\n\n"], ["data"]]


async def test_without_an_interval_every_batch_passes_as_it_comes():
    got = [batch async for batch in batched(events(pieces(b"a\n\n", b"b\n\n")), 0)]
    assert got == [["a\n\n"], ["b\n\n"]]


async def test_the_first_batch_is_never_held_back():
    gate = asyncio.Event()

    async def source():
        yield ["first"]
        await gate.wait()
        yield ["second"]

    stream = batched(source(), 60_000)
    assert await asyncio.wait_for(anext(stream), 5) == ["first"]
    gate.set()
    assert [batch async for batch in stream] == [["second"]]


async def test_an_interval_joins_what_comes_within_it():
    async def source():
        for letter in "abcd":
            yield [letter]

    assert [batch async for batch in batched(source(), 60_000)] == [["a"], ["b", "c", "d"]]
