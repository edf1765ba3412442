"""All rows of a batch job on one connection to a replica, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from served import NODE, Replica, Served, until

from penstock.data.backends.http_client import ConnectFailed, ConnectionLost
from penstock.data.backends.replica import ReplicaClient
from penstock.transport import rows
from penstock.transport.address import Address
from penstock.transport.pool import connect

pytestmark = pytest.mark.parity("D4")

PATH = "/v1/completions"


def body(prompt: str = "hello", **more: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt} | more).encode()


LONG = body(max_tokens=4000, ignore_eos=True)


@asynccontextmanager
async def client(address: Address) -> AsyncIterator[ReplicaClient]:
    made = ReplicaClient(address, NODE, "batch-1", bool)
    try:
        await until(lambda: made.ready)
        yield made
    finally:
        await made.close()


def connections(replica: Replica) -> int:
    """For rows."""
    return len(replica.listener._row_receivers)


async def test_rows_share_one_connection_and_each_gets_its_own_answer(served: Served):
    replica = await served.replica(join=False)
    async with client(replica.address) as asked:
        answers = await asyncio.gather(*(asked.send(PATH, body(f"row {n}"), None) for n in range(200)))
        assert connections(replica) == 1
    texts = [json.loads(answer.body)["choices"][0]["text"] for answer in answers]
    assert texts == [f"row {n}" for n in range(200)]
    await until(lambda: connections(replica) == 0)


async def test_a_row_and_its_answer_may_be_large(served: Served):
    async def echo(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": (await receive())["body"]})

    listener = await served.app(echo)
    given = [b'"%b"' % (b"x" * size) for size in (1, 5_000_000, 2, 300_000)]
    async with client(listener.address) as asked:
        answers = await asyncio.gather(*(asked.send(PATH, one, None) for one in given))
    assert [answer.body for answer in answers] == given


def test_frames_are_the_same_in_pieces_of_any_size():
    sent = [rows.RowCall(1, PATH, b"{}"), rows.RowCancel(1), rows.RowCall(2, PATH, b"x" * 1000, "adapter")]
    data = b"".join(map(rows.framed, sent))
    for size in (1, 3, 700, len(data)):
        received = bytearray()
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        assert [
            frame for piece in pieces for frame in rows.messages(received, piece, rows.decode_frame)
        ] == sent


async def test_a_row_that_is_given_up_leaves_the_engine_and_the_others_go_on(served: Served):
    replica = await served.replica(join=False, step_base_ms=10.0)
    async with client(replica.address) as asked:
        asking = [asyncio.create_task(asked.send(PATH, LONG, None)) for _ in range(3)]
        await until(lambda: replica.engine.load().running == 3)
        asking[1].cancel()
        await until(lambda: replica.engine.load().running == 2)
        assert (await asked.send(PATH, body(), None)).status == 200
        assert connections(replica) == 1
    ends = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(end) for end in ends] == [ConnectionLost, asyncio.CancelledError, ConnectionLost]
    await until(lambda: replica.engine.load().running == 0)


async def test_a_path_keeps_its_query(served: Served):
    seen: list[tuple[str, bytes]] = []

    async def app(scope, receive, send):
        seen.append((scope["path"], scope["query_string"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    listener = await served.app(app)
    async with client(listener.address) as asked:
        await asked.send("/v1/own?x=1", b"{}", None)
    assert seen == [("/v1/own", b"x=1")]


async def test_an_app_that_fails_fails_its_row_alone(served: Served):
    async def app(scope, receive, send):
        if (await receive())["body"] == b"bad":
            raise KeyError("lost")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    listener = await served.app(app)
    async with client(listener.address) as asked:
        bad, good = await asyncio.gather(asked.send(PATH, b"bad", None), asked.send(PATH, b"{}", None))
    assert (bad.status, good.status) == (500, 200)
    assert json.loads(bad.body)["error"]["code"] == "internal_error"


async def test_a_response_without_an_end_is_no_response(served: Served):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"half', "more_body": True})

    listener = await served.app(app)
    async with client(listener.address) as asked:
        answer = await asked.send(PATH, b"{}", None)
    assert (answer.status, answer.headers["x-penstock-retry"]) == (503, "interrupted")


async def test_what_is_no_row_ends_its_connection_alone(served: Served):
    replica = await served.replica(join=False)
    async with client(replica.address) as asked:
        await asked.send(PATH, body(), None)
        other = await connect(replica.address, NODE, lambda _: None)
        await rows.RowSender(other, bool).open(replica.address.secret, "batch-2")
        assert connections(replica) == 2
        other.write(b"8\r\n\x04\0\0\0junk\r\n")
        await until(lambda: connections(replica) == 1)
        assert (await asked.send(PATH, body(), None)).status == 200


async def test_after_a_broken_connection_the_next_row_opens_another(served: Served):
    replica = await served.replica(join=False, step_base_ms=10.0)
    async with client(replica.address) as asked:
        asking = asyncio.create_task(asked.send(PATH, LONG, None))
        await until(lambda: replica.engine.load().running == 1)
        (receiver,) = replica.listener._row_receivers
        receiver.close()
        for task in list(replica.listener.open_requests):
            task.cancel()
        with pytest.raises(ConnectionLost):
            await asking
        assert (await asked.send(PATH, body(), None)).status == 200


async def test_a_row_for_a_connection_that_has_just_ended_was_not_sent(served: Served):
    replica = await served.replica(join=False)
    async with client(replica.address) as asked:
        await asked.send(PATH, body(), None)
        opened = asked._opening
        (receiver,) = replica.listener._row_receivers
        receiver.close()
        await until(lambda: asked._opening is None)
        asked._opening = opened  # as a row finds it that was to be sent at that moment
        with pytest.raises(ConnectFailed):
            await asked.send(PATH, body(), None)
