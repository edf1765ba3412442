"""The line between the members of a gang, over real sockets: what one says, and that one has gone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from interleaving import DISTURBANCES, Start, disturbed, ended, failing

from penstock.errors import EngineStartFailed
from penstock.serve.replica import gang
from penstock.serve.replica.gang import GangLink

LIMIT_S = 20
pytestmark = pytest.mark.parity("S24")


@pytest_asyncio.fixture
async def lines():
    """Of three members."""
    lines = [GangLink(rank, 3, "127.0.0.1") for rank in range(3)]
    first = await lines[0].listen()
    for line in lines[1:]:
        await line.connect(*first)
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
    _, writer = await asyncio.open_connection(*first[:2])
    writer.write(f"1 {first[2]}\n".encode() + said)
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
    reader, writer = await asyncio.open_connection(*first[:2])
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
    await stranger.connect(*first[:2], "guessed")
    async with asyncio.timeout(LIMIT_S):
        await stranger.broken.wait()
        other = GangLink(1, 2, "127.0.0.1")
        await other.connect(*first)
        await line.complete.wait()
    other.close()
    line.close()


class Actors:
    """Ray's, in this process: the one actor of a name, whose methods take a while to be called."""

    def __init__(self) -> None:
        self._made: Any = None
        self.kill = bool

    def remote(self, **_: Any) -> Any:
        return lambda kind: SimpleNamespace(
            options=lambda **_: SimpleNamespace(remote=lambda: self._of(kind))
        )

    def _of(self, kind: type[Any]) -> Any:
        self._made = made = self._made or kind()

        async def called(method: Any, *arguments: Any) -> Any:
            await asyncio.sleep(0.1)
            return await method(*arguments)

        methods = {name: getattr(made, name) for name in ("open", "find")}
        return SimpleNamespace(
            **{name: SimpleNamespace(remote=partial(called, each)) for name, each in methods.items()}
        )


def test_a_gang_ends_as_a_whole_wherever_one_of_its_members_ends(monkeypatch: pytest.MonkeyPatch):
    async def members(start: Start) -> None:
        monkeypatch.setattr(gang, "ray", Actors())
        loop = asyncio.get_running_loop()

        async def member(line: GangLink) -> None:
            """A replica, until its engine has ended, or `broken` ends its process."""
            line.meeting = asyncio.create_task(gang._meet(line, "g", "m"))

            async def engine() -> None:
                heard = await line.gang.share(None if line.gang.rank else {"port": 1})
                assert heard == {"port": 1}
                await asyncio.sleep(5)
                await line.leave(loop.time() + 30)

            works = [asyncio.create_task(engine()), asyncio.create_task(line.broken.wait())]
            try:
                await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
                if works[0].done():
                    await works[0]
            finally:  # the process ends
                line.close()
                for work in (*works, line.meeting):
                    work.cancel()
                await asyncio.gather(*works, line.meeting, return_exceptions=True)

        lines = [GangLink(rank, 3, "127.0.0.1") for rank in range(3)]
        tasks = [start(member(line)) for line in lines]
        _, open_ = await asyncio.wait(tasks, timeout=gang._JOIN_S + 1000)
        assert not open_
        for task in tasks:
            ended(EngineStartFailed)(task)
        await asyncio.sleep(1)

    lost = failing(ConnectionResetError("gone"), "readline", "connect")
    also = ("engine", "_meet", "_receive")
    assert disturbed(members, (*DISTURBANCES, lost), also) >= 15
