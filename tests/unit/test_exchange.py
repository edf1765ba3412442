"""What layers share: a request's work ends before whoever asked for it goes on."""

import asyncio

import pytest

from penstock.asgi import ClientGone, while_connected


async def test_work_for_a_client_that_left_has_ended_when_that_is_told():
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # as a generator that unwinds
            ended.set()

    async def receive() -> dict[str, object]:
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGone):
        await while_connected(receive, work())
    assert ended.is_set()
