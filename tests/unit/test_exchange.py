"""What layers share: a request's work ends before whoever asked for it goes on."""

import asyncio
from collections.abc import Callable

import pytest

from penstock import asgi
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


async def test_who_cancels_the_task_is_obeyed_although_the_client_goes_at_the_same_time():
    leave: list[Callable[[], None]] = []

    def on_disconnect(gone: Callable[[], None]) -> Callable[[], object]:
        leave.append(gone)
        return lambda: None

    task = asyncio.create_task(while_connected(asgi.stay, asyncio.Event().wait(), on_disconnect))
    await asyncio.sleep(0)
    leave[0]()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
