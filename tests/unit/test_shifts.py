"""Which replicas the move of a model waits for, over a table whose replicas are told by hand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from interleaving import Start, disturbed, failing, held
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError
from tests.waiting import until

from penstock.serve.control.state import Routes, RouteStatus
from penstock.serve.fleet import membership
from penstock.serve.fleet.replica import Replica
from penstock.serve.fleet.table import Table
from penstock.serve.router.router import LLMRouter
from penstock.serve.router.traffic_shift import TrafficShifts
from penstock.transport.address import Address
from penstock.transport.link import Hello, LoadReport

pytestmark = pytest.mark.parity("S24")

HELLO = Hello("m")


class Serve:
    """Control, and Serve's news of members, by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pause_s: float = 0.005) -> None:
        self.table = Table("node")
        self._pause_s = pause_s
        self.seen: dict[str, Any] = {}
        self.wanted: dict[str, str] = {}
        self.told: dict[str, RouteStatus] = {}
        monkeypatch.setattr(
            membership, "follow", lambda model, handle, seen: self.seen.update({handle: seen})
        )
        monkeypatch.setattr(membership, "unfollow", lambda model, handle: self.seen.pop(handle, None))

    async def follow(self, status: Any, kind: Any, received: Any) -> None:
        while True:
            self.told = status().routes
            received(Routes(dict(self.wanted), {"m": 2}))
            await asyncio.sleep(self._pause_s)

    def report(self) -> None:
        pass

    def runs(self, application: str, replica: str) -> None:
        """A replica of the application is there, and ready."""
        self.seen[application]({replica: Address(replica, "node", f"\0{replica}", None, None, "secret")})
        for member in self.table.members("m"):
            self.reports(member)

    def reports(self, member: Replica) -> None:
        self.table.hello(member, HELLO)
        self.table.report(member, LoadReport())

    async def until_followed(self, application: str) -> None:
        await until(lambda: application in self.seen)

    async def until(self, application: str, opened: int) -> None:
        await until(lambda: self.told.get("m") == RouteStatus(application, opened))


async def test_a_move_waits_for_what_the_replicas_before_it_have_open(monkeypatch: pytest.MonkeyPatch):
    there = Serve(monkeypatch)
    shifts = TrafficShifts(there.table, {"m": "own"}, lambda name, application: application, there)
    shifts.start()
    try:
        await there.until_followed("own")
        there.runs("own", "old")
        (old,) = there.table.ready("m")
        before = there.table.acquire(old)
        there.wanted = {"m": "next"}
        await there.until_followed("next")
        there.runs("next", "new")
        await there.until("next", 1)
        (new,) = there.table.ready("m")
        assert new.id == "new"
        there.table.release(before)
        there.table.acquire(new)
        await there.until("next", 0)
        there.wanted = {"m": "third"}  # the one in between may be deleted now
        await there.until_followed("third")
        there.runs("third", "newest")
        await there.until("third", 1)
        assert there.seen.keys() == {"own", "third"}
        assert shifts.handles("m") == ["own", "third"]
    finally:
        shifts.close()


async def test_a_move_that_is_taken_back_leaves_no_replica_of_the_other_application(
    monkeypatch: pytest.MonkeyPatch,
):
    there = Serve(monkeypatch)
    shifts = TrafficShifts(there.table, {"m": "own"}, lambda name, application: application, there)
    shifts.start()
    try:
        await there.until_followed("own")
        there.runs("own", "old")
        there.wanted = {"m": "next"}
        await there.until_followed("next")
        there.seen["next"]({"new": Address("new", "node", "\0new", None, None, "secret")})
        assert {replica.id for replica in there.table.members("m")} == {"old", "new"}
        there.wanted = {}
        await until(lambda: not shifts._shifting)
        assert {replica.id for replica in there.table.members("m")} == {"old"}
        assert [*there.seen] == ["own"]
    finally:
        shifts.close()


async def test_a_new_gateway_sends_a_moved_model_nowhere_but_where_it_was_moved(
    monkeypatch: pytest.MonkeyPatch,
):
    there = Serve(monkeypatch)
    there.wanted = {"m": "next"}
    shifts = TrafficShifts(there.table, {"m": "own"}, lambda name, application: application, there)
    shifts.start()
    try:
        await there.until_followed("own")
        there.runs("own", "old")
        assert not there.table.ready("m")
        there.runs("next", "new")
        await there.until("next", 0)
        assert [replica.id for replica in there.table.ready("m")] == ["new"]
    finally:
        shifts.close()


async def test_a_model_that_was_moved_to_what_is_gone_is_answered_at_home(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    tries = []

    def find(name: str, application: str) -> str:
        tries.append(application)
        raise KeyError(application)

    there = Serve(monkeypatch)
    there.wanted = {"m": "next"}
    shifts = TrafficShifts(there.table, {"m": "own"}, find, there)
    shifts.start()
    try:
        await there.until_followed("own")
        there.runs("own", "old")
        assert [replica.id for replica in there.table.ready("m")] == ["old"]
        assert there.table.wanted == {"m": 2}
        await until(lambda: len(tries) >= 5)
        assert caplog.text.count("is not shifted") == 1
    finally:
        shifts.close()


async def test_all_are_known_once_serve_has_named_them_and_each_has_reported(monkeypatch: pytest.MonkeyPatch):
    there = Serve(monkeypatch)
    shifts = TrafficShifts(there.table, {"m": "own"}, lambda name, application: application, there)
    shifts.start()
    try:
        await there.until_followed("own")
        assert not shifts.all_known()
        there.seen["own"]({"late": Address("late", "node", "\0late", None, None, "secret")})
        assert not shifts.all_known()
        there.runs("own", "first")
        assert shifts.all_known()
    finally:
        shifts.close()


@pytest.mark.parametrize("at_first", [True, False], ids=["before the gateway", "after it"])
def test_a_move_ends_and_another_model_is_answered_wherever_it_is_held_or_fails(
    at_first: bool, monkeypatch: pytest.MonkeyPatch
):
    async def moves(start: Start) -> None:
        there = Serve(monkeypatch, pause_s=1.0)
        wanted = {"m": "next"}
        there.wanted = wanted if at_first else {}
        handles = {"m": "own", "other": "others"}
        shifts = TrafficShifts(there.table, handles, lambda name, application: application, there)

        there.table.watch(there.reports, bool, bool)

        async def begin() -> None:
            shifts.start()

        async def until(true: Callable[[], object], limit_s: float) -> None:
            async with asyncio.timeout(limit_s):
                while not true():  # noqa: ASYNC110 - nothing tells of it
                    await asyncio.sleep(1)

        await start(begin())
        try:
            await until(lambda: "others" in there.seen, 2)
            await until(lambda: "own" in there.seen, 60)
            there.runs("own", "old")
            there.wanted = wanted
            await until(lambda: "next" in there.seen, 300)
            there.runs("next", "new")
            await until(lambda: shifts.handle("m") == "next" and not shifts._shifting, 300)
            assert [replica.id for replica in there.table.members("m")] == ["new"]
            there.wanted = {}
            await until(lambda: shifts.handle("m") == "own" and not shifts._shifting, 300)
            assert [replica.id for replica in there.table.members("m")] == ["old"]
        finally:
            shifts.close()
        await asyncio.sleep(1)

    no_application = failing(KeyError("next"), "_reach")
    assert disturbed(moves, (held, no_application), also=("_begin", "_take_over", "_shift")) >= 3


async def test_a_model_that_is_removed_while_it_is_looked_for_is_not_followed(
    monkeypatch: pytest.MonkeyPatch,
):
    def find(name: str, application: str) -> str:
        looked.set()
        removed.wait(20)
        return application

    there, looked, removed = Serve(monkeypatch), threading.Event(), threading.Event()
    there.wanted = {"m": "next"}
    shifts = TrafficShifts(there.table, {"m": "own"}, find, there)
    shifts.start()
    try:
        await until(looked.is_set)
        shifts.follow({})
        removed.set()
        await until(lambda: shifts._begun)
        assert there.seen == {}
    finally:
        shifts.close()


@pytest.mark.parametrize("moves", [True, False], ids=["while it moves", "at home"])
def test_a_model_that_is_removed_and_put_back_is_followed_wherever_it_is_held(
    moves: bool, monkeypatch: pytest.MonkeyPatch
):
    async def changes(start: Start) -> None:
        there = Serve(monkeypatch, pause_s=1.0)
        there.wanted = {"m": "next"} if moves else {}
        shifts = TrafficShifts(there.table, {"m": "own"}, lambda name, application: application, there)
        there.table.watch(there.reports, bool, bool)

        async def begin() -> None:
            shifts.start()

        async def change(**handles: str) -> None:
            shifts.follow(handles)

        async def until(true: Callable[[], object]) -> None:
            async with asyncio.timeout(600):
                while not true():  # noqa: ASYNC110 - nothing tells of it
                    await asyncio.sleep(1)

        try:
            await start(begin())
            await start(change(other="others"))
            assert shifts.handles("m") == []
            await until(lambda: "others" in there.seen)
            there.seen.pop("next", None)
            await start(change(other="others", m="again"))
            await until(lambda: "again" in there.seen)
            there.runs("again", "home")
            if moves:
                await until(lambda: "next" in there.seen)
                there.runs("next", "moved")
            await until(lambda: shifts.handle("m") == ("next" if moves else "again") and not shifts._shifting)
            assert [one.id for one in there.table.members("m")] == ["moved" if moves else "home"]
            await start(change(m="again"))
            assert there.table.members("other") == []
            assert [one.id for one in there.table.members("m")] == ["moved" if moves else "home"]
        finally:
            shifts.close()
        await asyncio.sleep(1)

    no_application = failing(KeyError("next"), "_reach")
    assert disturbed(changes, (held, no_application), also=("_begin", "_take_over", "_shift")) >= 1


async def test_replicas_on_other_nodes_listen_although_the_model_s_own_deployment_has_none():
    """After a move it may scale to zero; Serve then refuses to call all of its replicas."""
    asked = list[str]()

    class Deployment:
        def __init__(self, replicas: int) -> None:
            self.replicas = replicas

        def broadcast(self, method: str) -> Deployment:
            return self

        async def results_async(self) -> None:
            await asyncio.sleep(0)
            if not self.replicas:
                raise DeploymentUnavailableError(DeploymentID("LLMServer:m", "own"))
            asked.append("listen_on_network")

    handles = [Deployment(0), Deployment(2)]
    router: Any = SimpleNamespace(_prefill={}, _shifts=SimpleNamespace(handles=lambda model: handles))
    with pytest.raises(DeploymentUnavailableError):
        await LLMRouter._open_network(router, "m")
    await asyncio.sleep(0)
    assert asked == ["listen_on_network"]
