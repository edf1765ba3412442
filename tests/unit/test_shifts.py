"""Which replicas the move of a model waits for, over a table whose replicas are told by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.door.address import Address
from penstock.door.link import Hello, Report
from penstock.serve import membership
from penstock.serve.desired import Moved
from penstock.serve.shift import Shifts
from penstock.serve.table import Table

pytestmark = pytest.mark.parity("S24")

HELLO = Hello(model_id="m", pid=1, version="0")


class Serve:
    """Control, and Serve's news of members, by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.table = Table("node")
        self.seen: dict[str, Any] = {}
        self.wanted: dict[str, str] = {}
        self.told: Any = {}
        monkeypatch.setattr(
            membership, "follow", lambda model, handle, seen: self.seen.update({handle: seen})
        )

    async def ask(self, gateway: str, told: Any, known: Any) -> dict[str, str]:
        self.told = told
        await asyncio.sleep(0.005)
        return dict(self.wanted)

    def runs(self, application: str, replica: str) -> None:
        """A replica of the application is there, and ready."""
        self.seen[application]({replica: Address(replica, "node", f"\0{replica}", None, None, "secret")})
        for member in self.table.members("m"):
            self.table.hello(member, HELLO)
            self.table.report(member, Report())

    async def until(self, application: str, opened: int) -> None:
        async with asyncio.timeout(10):
            while self.told.get("m") != Moved(application, opened):  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.005)


async def test_a_move_waits_for_what_the_replicas_before_it_have_open(monkeypatch: pytest.MonkeyPatch):
    there = Serve(monkeypatch)
    shifts = Shifts(there.table, {"m": "own"}, lambda name, application: application, there.ask)
    shifts.start()
    try:
        there.runs("own", "old")
        (old,) = there.table.ready("m")
        before = there.table.take(old)
        there.wanted = {"m": "next"}
        async with asyncio.timeout(10):
            while "next" not in there.seen:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.005)
        there.runs("next", "new")
        await there.until("next", 1)
        (new,) = there.table.ready("m")
        assert new.id == "new"
        there.table.give_back(before)
        there.table.take(new)
        await there.until("next", 0)
    finally:
        shifts.close()
