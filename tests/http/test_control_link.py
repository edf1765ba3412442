"""Control's listener and the links of its followers, over real sockets: who hangs stops nobody else."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from interleaving import DISTURBANCES, Start, disturbed, ended, failing
from ray.exceptions import ActorUnavailableError
from served import NODE
from tests.waiting import until

from penstock.errors import BadRequest, ModelNotFound, Unavailable
from penstock.serve.control import followers as presence
from penstock.serve.control import link
from penstock.serve.control.deployment import LLMControl
from penstock.serve.control.link import ControlLink
from penstock.serve.control.operations import Shift
from penstock.serve.control.state import (
    DesiredState,
    Done,
    GatewayStatus,
    ReplicaStatus,
    Routes,
    RouteStatus,
    SharingGroup,
    Update,
    Weights,
)
from penstock.serve.http.private_listener import PrivateListener
from penstock.transport import headers, pool
from penstock.transport.address import Address
from penstock.transport.connection import ReplicaConnection

pytestmark = pytest.mark.parity("S25")

GROUP = SharingGroup("g", max_awake=1, min_awake_s=0.0)


class Handle:
    """A Serve handle to a control whose address is known."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        async def remote(node_id: str) -> dict[str, Any]:
            return metadata

        self.address = SimpleNamespace(remote=remote)


class Replica:
    """A follower that reaches each version at once."""

    def __init__(self, name: str, handle: Any, model: str = "m") -> None:
        self.name, self.model = name, model
        self.link = ControlLink(handle, NODE)
        self.update: Update | None = None
        self.result: Any = object
        self.error, self.fails = "", False
        self.adapters = self.fault = ""
        self.group: SharingGroup | None = GROUP
        self.heard = asyncio.Event()
        self.task = asyncio.create_task(self.link.follow(self.status, Update, self.received))

    def status(self) -> ReplicaStatus:
        if self.fails:
            self.fails = False
            raise RuntimeError("no status")
        desired = self.update.desired if self.update else DesiredState()
        actual = "asleep" if desired.sleep else "paused" if desired.pause else "ready"
        return ReplicaStatus(
            *(self.name, actual, "default", desired.version, desired, self.error),
            group=self.group,
            model=self.model,
            adapters=self.adapters,
            adapters_fault=self.fault,
        )

    def received(self, update: Update) -> None:
        self.update = update
        for command in update.commands:
            self.link.say(Done(command.id, self.name, {"result": self.result}))
        self.link.report()
        self.heard.set()

    async def until(self, true: Callable[[Update], bool]) -> None:
        async with asyncio.timeout(20):
            while self.update is None or not true(self.update):
                self.heard.clear()
                await self.heard.wait()


async def deaf(control: LLMControl, status: ReplicaStatus | GatewayStatus) -> ReplicaConnection:
    """A link of a follower that reports once and then, as a stopped process, neither reads nor reports."""
    address = Address.from_metadata(await control.address(NODE))
    connection = await pool.connect(address, NODE, lambda _: None)
    own = headers.own(address.secret, "", "r")
    connection.request(headers.to_replica("POST", link.PATH.encode(), [], own, None))
    line = link._encode(status) + b"\n"
    connection.write(b"%x\r\n%b\r\n" % (len(line), line))
    assert (await connection.head()).status == 200
    connection._pause()
    return connection


async def until_cut_off(connection: ReplicaConnection) -> None:
    """Reads what was under way; then control has ended it."""
    connection.resume()
    with suppress(ConnectionError):
        while await connection.read():
            pass


@pytest.fixture
async def control(tmp_path: Path) -> AsyncIterator[LLMControl]:
    control = object.__new__(LLMControl)
    await control.open(tmp_path / "state.sqlite", "app", NODE, "127.0.0.1")
    yield control
    await control.close()


@pytest.fixture(params=[NODE, "another node"])
async def handle(control: LLMControl, request: pytest.FixtureRequest) -> Handle:
    """To a control whose followers are on its node, or on another one."""
    found = await control.address(request.param)
    return Handle({**found, "unix": found["unix"] if request.param == NODE else None})


async def test_a_plan_while_serve_restarts_says_so(
    control: LLMControl, handle: Handle, monkeypatch: pytest.MonkeyPatch
):
    async def restarting(*_: object) -> None:
        raise ActorUnavailableError("it restarts", None)

    monkeypatch.setattr(control._fleet, "_planned", restarting)
    fleet = {"llm_configs": [{"model_loading_config": {"model_id": "m"}, "llm_engine": "sim"}]}
    control._fleet.record({}, fleet, "penstock serve")
    with pytest.raises(Unavailable, match="Ray Serve does not answer; try again in a moment"):
        await ControlLink(handle, NODE).ask("fleet/plan", {"fleet": fleet}, 10.0)


async def test_a_replica_that_never_reads_stops_nobody_and_is_cut_off(
    control: LLMControl, handle: Handle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(link, "GONE_S", 2.0)
    well = Replica("well", handle)
    await well.until(lambda _: True)
    stopped = await deaf(control, ReplicaStatus("deaf", "ready", "default", 0, DesiredState(), model="m"))
    for n in range(200):  # 1.6 MB of updates: more than sockets hold
        weights = Weights("/" + "x" * 8000, f"v{n}")
        control._desired.set("m", DesiredState(replica="deaf", weights=weights))
        done = await control.perform("pause" if n % 2 else "resume", "m", "well", 20.0)
        assert done["replicas"]["well"] == {"result": "paused" if n % 2 else "ready"}
    asked = await ControlLink(handle, NODE).ask("status", {}, 10.0)
    assert asked["m"]["replicas"]["well"]["reached"]
    cut = asyncio.create_task(until_cut_off(stopped))
    while not cut.done():  # so that the other one is not silent
        await control.perform("pause", "m", "well", 20.0)
        await control.perform("resume", "m", "well", 20.0)
    await cut
    monkeypatch.setattr(presence, "GONE_S", 0.0)
    assert list(control._followers.living("m")) == ["well"]
    assert not [record for record in caplog.records if record.name.startswith("penstock")]
    well.task.cancel()


async def test_a_gateway_that_never_reads_stops_nobody_and_is_cut_off(
    control: LLMControl, handle: Handle, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(link, "GONE_S", 2.0)
    stopped = await deaf(control, GatewayStatus("deaf", {"m": RouteStatus("")}))
    heard: asyncio.Queue[Routes] = asyncio.Queue()
    status = GatewayStatus("hears", {"m": RouteStatus("")})
    hearing = ControlLink(handle, NODE).follow(lambda: status, Routes, heard.put_nowait)
    task = asyncio.create_task(hearing)
    await heard.get()
    for n in range(200):
        control._desired.change("m", "", "shift", Shift(f"{n}-{'x' * 8000}"))
        while not (await heard.get()).applications["m"].startswith(f"{n}-"):
            pass
    await until_cut_off(stopped)
    task.cancel()


async def test_calls_come_back_as_what_control_returns_or_raises(control: LLMControl, handle: Handle):
    replica, asking = Replica("a", handle), ControlLink(handle, NODE)
    await replica.until(lambda _: True)
    done = await asking.ask("perform", {"operation": "reset_prefix_cache"}, 10.0)
    assert done == {"model": "m", "ok": True, "replicas": {"a": {"result": "<class 'object'>"}}}
    with pytest.raises(ModelNotFound, match="there are m"):
        await asking.ask("perform", {"operation": "pause", "model": "x"}, 10.0)
    with pytest.raises(BadRequest, match="no replica 'x'") as refused:
        await asking.ask("perform", {"operation": "pause", "replica": "x"}, 10.0)
    assert refused.value.facts["param"] == "replica"
    replica.task.cancel()


async def test_what_utf_8_cannot_hold_comes_without_it(control: LLMControl, handle: Handle):
    replica, asking = Replica("a", handle), ControlLink(handle, NODE)
    replica.result, replica.error = {1: "/a\udc80", "b": b"x"}, "no file '\udc80'"
    await replica.until(lambda _: True)
    done = await asking.ask("perform", {"operation": "reset_prefix_cache"}, 10.0)
    assert done["replicas"] == {"a": {"result": {"1": "/a?", "b": "eA=="}}}
    assert (await asking.ask("status", {}, 10.0))["m"]["replicas"]["a"]["error"] == "no file '?'"
    itself = list[Any]()
    itself.append(itself)
    with pytest.raises(RecursionError):
        replica.link.say(Done(1, "a", {"result": itself}))
    replica.task.cancel()


async def test_a_report_that_cannot_be_made_is_logged_and_ends_the_link(
    control: LLMControl, handle: Handle, monkeypatch, patched, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(link, "_AGAIN_S", 0.01)
    replica = Replica("a", handle)
    await replica.until(lambda _: True)
    say = replica.link.say

    def say_and_fail(done: Done) -> None:
        say(done)
        replica.fails = True

    patched(replica.link, "say", say_and_fail)
    assert (await control.perform("reset_prefix_cache", timeout_s=20.0))["ok"]
    assert "The link to control has failed" in caplog.text
    replica.task.cancel()


async def test_an_outcome_that_was_said_as_the_link_died_arrives_by_the_next_one(
    control: LLMControl, handle: Handle, monkeypatch, patched
):
    monkeypatch.setattr(link, "_AGAIN_S", 0.01)
    replica = Replica("a", handle)
    await replica.until(lambda _: True)
    say = replica.link.say

    def cut_and_say(done: Done) -> None:
        for port in control._listener._ports:
            for connection in list(port._state.connections):
                connection.transport.abort()
        say(done)

    patched(replica.link, "say", cut_and_say)
    assert (await control.perform("reset_prefix_cache", timeout_s=20.0))["ok"]
    assert (await control.perform("reset_prefix_cache", timeout_s=20.0))["ok"]
    replica.task.cancel()


async def test_a_command_that_was_sent_as_the_link_died_comes_by_the_next_one(
    control: LLMControl, handle: Handle, monkeypatch, patched
):
    monkeypatch.setattr(link, "_AGAIN_S", 0.01)
    replica = Replica("a", handle)
    await replica.until(lambda _: True)
    encode, lost = link._encode, list[Update]()

    def encode_and_cut(message: Any) -> bytes:
        if isinstance(message, Update) and message.commands and not lost:
            lost.append(message)
            for port in control._listener._ports:
                for connection in list(port._state.connections):
                    connection.transport.abort()
        return encode(message)

    patched(link, "_encode", encode_and_cut)
    assert (await control.perform("reset_prefix_cache", timeout_s=20.0))["ok"]
    assert lost
    assert not control._followers._models["m"]["a"].commands
    replica.task.cancel()


async def test_the_next_answer_is_controls_own(control: LLMControl, handle: Handle):
    right, asking = handle.address.remote, ControlLink(handle, NODE)
    stranger = await PrivateListener.open(control._serve, "other", NODE, "127.0.0.1")
    found = {**await stranger.address(NODE), "secret": "control's"}

    async def before(node_id: str) -> dict[str, Any]:
        return found

    handle.address.remote = before
    with pytest.raises(Unavailable, match="Only Penstock itself"):
        await asking.ask("status", {}, 10.0)
    handle.address.remote = right
    assert await asking.ask("status", {"model": None}, 10.0) == {}
    await stranger.close(0.0)


async def test_a_stopped_control_that_still_accepts_is_asked_for_anew(
    control: LLMControl, handle: Handle, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(link, "_AGAIN_S", 0.01)
    monkeypatch.setattr(link, "GONE_S", 1.0)
    right = handle.address.remote
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        found = {**await control.address("another"), "unix": None, "port": stopped.getsockname()[1]}

        async def before(node_id: str) -> dict[str, Any]:
            handle.address.remote = right
            return found

        handle.address.remote = before
        replica = Replica("a", handle)
        await replica.until(lambda _: True)
    replica.task.cancel()


async def test_a_control_that_is_away_is_followed_again_and_warned_of(
    control: LLMControl, handle: Handle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(link, "_AGAIN_S", 0.01)
    monkeypatch.setattr(link, "_FIND_S", 0.05)
    monkeypatch.setattr(link, "_WARN_S", 0.2)
    monkeypatch.setattr(link, "GONE_S", 2.0)
    there = await control.address(NODE)
    answer = handle.address.remote

    async def away(node_id: str) -> dict[str, Any]:
        raise RuntimeError("control is restarted")

    handle.address.remote = away
    replica = Replica("a", handle)
    await until(lambda: caplog.records)
    assert "control is restarted" in caplog.text
    with pytest.raises(Unavailable, match="Control does not answer"):
        await ControlLink(handle, NODE).ask("status", {}, 1.0)
    handle.address.remote = answer
    await replica.until(lambda _: True)
    assert list(control._followers.living("m")) == ["a"]
    assert there
    replica.task.cancel()


@pytest.mark.parity("X14")
async def test_replicas_are_told_of_adapters_until_they_have_them(control: LLMControl, handle: Handle):
    replica, adapters = Replica("a", handle), control._followers.adapters
    await replica.until(lambda _: True)
    await control.reconfigure({"m": {"pinned": ["legal"]}, "not here": {}})
    await replica.until(lambda update: update.adapters is not None)
    assert replica.update is not None
    assert replica.update.adapters is not None
    assert replica.update.adapters.fields == {"pinned": ["legal"]}
    assert adapters() == (["m"], [])
    replica.adapters, replica.fault = replica.update.adapters.id, "no such folder"
    replica.link.report()
    await until(
        lambda: adapters() == ([], ["a replica of 'm' keeps its adapters, and tries again: no such folder"])
    )
    assert (await control.status())["m"]["replicas"]["a"]["error"] == "no such folder"
    assert replica.update.adapters is not None
    replica.fault = ""
    replica.link.report()
    await replica.until(lambda update: update.adapters is None)
    assert adapters() == ([], [])
    replica.task.cancel()
    await until(lambda: not control._followers._models["m"]["a"].has_link)
    await control.reconfigure({"m": {}})
    assert adapters() == ([], [])


async def test_a_gateway_wakes_a_model(control: LLMControl, handle: Handle):
    first, second = Replica("a", handle, "one"), Replica("b", handle, "two")
    await first.until(lambda _: True)
    await second.until(lambda _: True)
    await control.perform("sleep", "two")
    await ControlLink(handle, NODE).ask("wake", {"model": "two", "idle_s": {"one": 5.0}}, 10.0)
    status = await control.status()
    assert [one["desired"]["state"] for one in (status["one"], status["two"])] == ["asleep", "ready"]
    for one in (first, second):
        one.task.cancel()


async def test_a_model_that_leaves_its_group_is_woken_and_takes_no_place_there(
    control: LLMControl, handle: Handle
):
    first, second = Replica("a", handle, "one"), Replica("b", handle, "two")
    await first.until(lambda _: True)
    await second.until(lambda _: True)
    await control.perform("sleep", "two")
    await second.until(lambda update: bool(update.desired.sleep))
    second.group = None
    second.link.report()
    await second.until(lambda update: not update.desired.sleep)
    assert control._time_sharing._awake("g") == ["one"]
    for one in (first, second):
        one.task.cancel()


async def test_a_model_that_serve_has_no_longer_is_forgotten_and_begins_anew_when_it_comes_back(
    control: LLMControl, handle: Handle, monkeypatch: pytest.MonkeyPatch
):
    replica = Replica("a", handle)
    await replica.until(lambda _: True)
    await control.perform("sleep", "m")
    control._forget({"LLMServer:other"})
    assert list(await control.status()) == ["m"]  # while one follows
    replica.task.cancel()
    monkeypatch.setattr(presence, "GONE_S", 0.0)
    await until(lambda: not control._followers.living("m"))
    control._hear(GatewayStatus("gateway", {"m": RouteStatus("")}))
    control._forget({"LLMServer:other"})  # it has a deployment of another name
    control._hear(GatewayStatus("gateway", {}))
    control._forget({"LLMServer:m"})
    assert list(await control.status()) == ["m"]
    assert control._desired.get("m").sleep
    control._forget({"LLMServer:other"})
    assert control._followers.models() == []
    assert control._time_sharing._awake("g") == []
    assert control._desired.get("m") == DesiredState()


async def test_when_control_ends_so_do_its_links(
    control: LLMControl, handle: Handle, caplog: pytest.LogCaptureFixture
):
    replica = Replica("a", handle)
    await replica.until(lambda _: True)
    await control.close()
    assert not [record for record in caplog.records if record.name.startswith("penstock")]
    replica.task.cancel()


async def test_what_is_asked_while_control_ends_may_be_asked_again(control: LLMControl, handle: Handle):
    asked = asyncio.create_task(ControlLink(handle, NODE).ask("status", {}, 10.0))  # waits for a follower
    await until(lambda: bool(control._listener._ports[-1]._state.tasks))
    await control.close()
    with pytest.raises(Unavailable, match="Control restarts"):
        await asked


def test_control_and_its_links_hold_nothing_wherever_a_call_ends(tmp_path: Path):
    files = itertools.count()

    async def calls(start: Start) -> None:
        control = object.__new__(LLMControl)
        await control.open(tmp_path / f"{next(files)}.sqlite", "app", NODE, "127.0.0.1")
        handle = Handle(await control.address(NODE))

        async def follow() -> list[Replica]:
            return [Replica("a", handle, "one"), Replica("b", handle, "two")]

        replicas = await start(follow())
        await asyncio.sleep(10)
        asking = ControlLink(handle, NODE)
        tasks = [
            start(asking.ask("wake", {"model": "two", "idle_s": {"one": 5.0}}, 30.0)),
            start(control.perform("reset_prefix_cache", "one")),
            start(control.perform("pause", "two", timeout_s=20.0)),
            start(asking.ask("status", {}, 30.0)),
        ]
        _, open_ = await asyncio.wait(tasks, timeout=10_000)
        assert not open_
        assert sum(isinstance(ended(Unavailable)(task), dict | None) for task in tasks) >= 3
        await asyncio.sleep(60)
        assert control._followers._outcomes == {}
        assert not any(lock.locked() for lock in control._time_sharing._switching.values())
        assert (await control.perform("resume", "two", timeout_s=5.0))["ok"]
        assert (await asking.ask("status", {}, 5.0))["two"]["replicas"]["b"]["reached"]
        await control.close()
        for replica in replicas:
            replica.task.cancel()
        await asyncio.wait([replica.task for replica in replicas])

    lost = failing(ConnectionResetError("gone"), "connect", "head", "read")
    assert disturbed(calls, (*DISTURBANCES, lost), also=("follow",)) >= 12
