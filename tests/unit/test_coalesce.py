"""Streams behind Serve's own HTTP."""

import asyncio

import pytest

from penstock.serve.http.serve_proxy import Coalesced

pytestmark = pytest.mark.parity("S32")


async def answered(pieces: list[bytes]) -> list[dict]:
    """The messages that reach Serve when an app sends `pieces` without a pause."""
    sent: list[dict] = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"end"})

    async def send(message):
        sent.append(message)

    await Coalesced(app)({"type": "http"}, None, send)
    return sent


async def test_pieces_of_one_moment_leave_together_after_the_first_two():
    sent = await answered([b"role", b"one", b"two", b"three"])
    assert [message.get("body") for message in sent] == [None, b"role", b"one", b"twothree", b"end"]
    assert [message.get("more_body", False) for message in sent] == [False, True, True, True, False]


async def test_an_answer_in_one_piece_passes_as_it_is():
    assert [message.get("body") for message in await answered([])] == [None, b"end"]


async def test_held_pieces_leave_while_the_app_is_silent():
    arrived, silent = asyncio.Event(), asyncio.Event()

    async def app(scope, receive, send):
        for piece in (b"role", b"one", b"two"):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await silent.wait()

    async def send(message):
        if message["body"] == b"two":
            arrived.set()

    running = asyncio.create_task(Coalesced(app)({"type": "http"}, None, send))
    await asyncio.wait_for(arrived.wait(), 5)
    silent.set()
    await running


async def test_a_client_that_is_gone_ends_the_app():
    async def app(scope, receive, send):
        for _ in range(3):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def send(message):
        if message.get("more_body") and message["body"] == b"x" and send.calls >= 2:
            raise ConnectionResetError
        send.calls += 1

    send.calls = 0
    with pytest.raises(ConnectionResetError):
        await Coalesced(app)({"type": "http"}, None, send)


async def test_an_app_learns_with_its_next_piece_that_held_ones_could_not_be_sent():
    failed = asyncio.Event()

    async def app(scope, receive, send):
        for _ in range(3):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await failed.wait()
        await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"y", "more_body": True})
        raise AssertionError("the piece before this one is lost")

    async def send(message):
        send.calls += 1
        if send.calls > 2:
            failed.set()
            raise ConnectionResetError

    send.calls = 0
    with pytest.raises(ConnectionResetError):
        await Coalesced(app)({"type": "http"}, None, send)


async def test_an_end_that_takes_too_long_can_be_another_one():
    """As when the time limit of a request passes while its last piece waits for those before it."""
    got, reads = list[bytes](), asyncio.Event()

    async def app(scope, receive, send):
        for piece in (b"role", b"one", b"two"):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await send({"type": "http.response.body", "body": b"end"})
        reads.set()
        await send({"type": "http.response.body", "body": b"error"})

    async def send(message):
        if message["body"] == b"two":
            await reads.wait()
        got.append(message["body"])

    await asyncio.wait_for(Coalesced(app)({"type": "http"}, None, send), 5)
    assert got == [b"role", b"one", b"two", b"error"]


async def test_the_more_streams_are_open_the_longer_their_pieces_are_held():
    all_open, end = asyncio.Event(), asyncio.Event()
    intervals: list[float] = []

    async def app(scope, receive, send):
        intervals.append(coalesced.interval_s())
        if len(intervals) == 300:
            all_open.set()
        await end.wait()

    coalesced = Coalesced(app)
    asked = [asyncio.create_task(coalesced({"type": "http"}, None, None)) for _ in range(300)]
    await asyncio.wait_for(all_open.wait(), 5)
    end.set()
    await asyncio.gather(*asked)
    assert intervals[:10] == [0.01] * 10
    assert intervals[49] == 0.05
    assert intervals[-1] == 0.1
    assert coalesced.interval_s() == 0.01


async def test_an_app_is_held_back_for_a_client_that_reads_nothing():
    reads, made, got = asyncio.Event(), 0, bytearray()

    async def app(scope, receive, send):
        nonlocal made
        for _ in range(100):
            await send({"type": "http.response.body", "body": bytes(10_000), "more_body": True})
            made += 10_000
        await send({"type": "http.response.body", "body": b""})

    async def send(message):
        if made:
            await reads.wait()
        got.extend(message["body"])

    running = asyncio.create_task(Coalesced(app)({"type": "http"}, None, send))
    before = -1
    while made != before or not made:  # until nothing moves for some turns
        before = made
        for _ in range(20):
            await asyncio.sleep(0)
    assert made <= 2 * 64 * 1024
    reads.set()
    await asyncio.wait_for(running, 5)
    assert len(got) == 1_000_000
