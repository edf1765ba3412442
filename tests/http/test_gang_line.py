"""The line between the members of a gang, over real sockets: what one says, and that one has gone."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
import pytest_asyncio

from penstock.serve.replica import gang
from penstock.serve.replica.gang import GangLink, LeaderAddress

LIMIT_S = 20
pytestmark = pytest.mark.parity("S24")


@pytest_asyncio.fixture
async def lines():
    """Of three members."""
    lines = [GangLink(rank, 3, "127.0.0.1") for rank in range(3)]
    first = await lines[0].listen()
    for line in lines[1:]:
        await line.connect(first)
    async with asyncio.timeout(LIMIT_S):
        await lines[0].complete.wait()
    yield lines
    for line in lines:
        line.close()


async def test_what_the_first_says_all_hear_in_its_order(lines: list[GangLink]):
    async with asyncio.timeout(LIMIT_S):
        for said in ({"port": 1}, {"port": 2}):
            heard = await asyncio.gather(
                *(line.gang.share(None if line.gang.rank else said) for line in lines)
            )
            assert heard == [said] * 3


@pytest.mark.parametrize("gone", [0, 1, 2])
async def test_all_learn_that_one_has_gone(lines: list[GangLink], gone: int):
    lines[gone].close()
    async with asyncio.timeout(LIMIT_S):
        if gone:  # whoever hears of it ends, and so do the others
            await lines[0].broken.wait()
            lines[0].close()
        for line in lines:
            if line.gang.rank != gone:
                await line.broken.wait()


async def test_nobody_leaves_before_all_want_to(lines: list[GangLink]):
    deadline = time.monotonic() + LIMIT_S
    early = [asyncio.create_task(line.leave(deadline)) for line in lines[:2]]
    assert not (await asyncio.wait(early, timeout=0.2))[0]
    await lines[2].leave(deadline)
    assert await asyncio.gather(*early) == [None, None]
    assert time.monotonic() < deadline


async def test_nobody_waits_for_one_that_stays_beyond_the_deadline(lines: list[GangLink]):
    await asyncio.wait_for(lines[1].leave(time.monotonic()), LIMIT_S)


@pytest.mark.parametrize("said", [b"no JSON\n", b"x" * 100_000])
async def test_a_member_that_says_nonsense_breaks_the_line(said: bytes):
    line = GangLink(0, 2, "127.0.0.1")
    first = await line.listen()
    _, writer = await asyncio.open_connection(first.host, first.port)
    writer.write(f"1 {first.secret}\n".encode() + said)
    async with asyncio.timeout(LIMIT_S):
        await line.broken.wait()
    writer.close()
    line.close()


@pytest.mark.parametrize("said", [b"", b"x" * 100_000])
async def test_one_who_does_not_show_the_secret_in_time_is_sent_away(
    said: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gang, "_SECRET_S", 0.05)
    line = GangLink(0, 2, "127.0.0.1")
    first = await line.listen()
    reader, writer = await asyncio.open_connection(first.host, first.port)
    writer.write(said)
    async with asyncio.timeout(LIMIT_S):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    writer.close()
    line.close()


async def test_a_stranger_is_sent_away_and_breaks_nothing():
    line = GangLink(0, 2, "127.0.0.1")
    first = await line.listen()
    stranger = GangLink(1, 2, "127.0.0.1")
    await stranger.connect(LeaderAddress(first.host, first.port, "guessed"))
    async with asyncio.timeout(LIMIT_S):
        await stranger.broken.wait()
        other = GangLink(1, 2, "127.0.0.1")
        await other.connect(first)
        await line.complete.wait()
    other.close()
    line.close()
