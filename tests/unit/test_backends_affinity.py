"""Requests that begin alike go to one replica while it has room; and how a first replica comes."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import RayServeException

from penstock.data.backends import replica_set, serve_lookup
from penstock.data.backends.replica_set import GroupAffinity, ReplicaSet
from penstock.data.rows.request import RowRequest
from penstock.errors import ConfigError, EngineStartFailed, Unavailable

pytestmark = pytest.mark.parity("X18")


@dataclass
class Replica:
    id: str
    slots: int
    busy: int = 0

    def available_slots(self) -> int:
        return self.slots - self.busy


def sent(affinity: GroupAffinity, replicas: list[Replica], group: int) -> str:
    chosen = cast(Replica, affinity.choose(replicas, group))
    chosen.busy += 1
    return chosen.id


def test_each_group_stays_on_one_replica():
    affinity, replicas = GroupAffinity(), [Replica("a", 16), Replica("b", 16)]
    places = {group: {sent(affinity, replicas, group) for _ in range(4)} for group in range(1, 9)}
    assert all(len(place) == 1 for place in places.values())
    assert [replica.busy for replica in replicas] == [16, 16]


def test_a_group_moves_on_when_its_replica_is_full_or_gone():
    affinity, replicas = GroupAffinity(), [Replica("a", 2), Replica("b", 1)]
    assert [sent(affinity, replicas, 1) for _ in range(3)] == ["a", "a", "b"]
    replicas[1].busy = 0
    assert sent(affinity, replicas[1:], 1) == "b"


def test_requests_without_a_group_are_spread():
    affinity, replicas = GroupAffinity(), [Replica("a", 4), Replica("b", 4)]
    assert [sent(affinity, replicas, 0) for _ in range(4)] == ["a", "b", "a", "b"]


async def test_the_call_that_was_to_start_a_replica_ends_with_its_start(
    patched, monkeypatch: pytest.MonkeyPatch
):
    calls = SimpleNamespace(remote=lambda node: SimpleNamespace(cancel=lambda: given_up.append(node)))
    given_up: list[str] = []

    class Broken:
        handle = SimpleNamespace(options=lambda method_name: calls)

        async def check(self) -> None:
            raise EngineStartFailed("No memory.")

    patched(serve_lookup, "node_id", lambda: "here")
    monkeypatch.setattr(replica_set, "_CHECK_S", 0.01)
    replicas = ReplicaSet("app")
    with pytest.raises(EngineStartFailed):
        await replicas._start_replica(cast(serve_lookup.FoundDeployment, Broken()))
    assert given_up == ["here"]


async def test_a_row_that_waits_while_serves_controller_is_away_is_tried_again(patched):
    """A row would fail by any other error: its replicas may be there again in a second."""

    def away() -> None:
        raise RayActorError

    patched(serve_lookup.serve, "status", away)
    deployment = serve_lookup.FoundDeployment("app", "x", cast(Any, None))
    with pytest.raises(Unavailable, match="Ray Serve does not answer now"):
        await deployment.check()


async def test_replicas_that_come_when_a_start_is_given_up_are_not_connected_to(patched):
    """Ray waits for them by `asyncio.wait_for`, which in Python 3.11 may swallow a cancellation."""
    starting: list[asyncio.Task[None]] = []

    class Late:
        def __init__(self) -> None:
            self.handle = self

        def broadcast(self, method: str, node: str) -> Late:
            return self

        async def results_async(self, **_: object) -> list[dict[str, str]]:
            starting[0].cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
            return [{"replica_id": "r"}]

    patched(serve_lookup, "node_id", lambda: "here")
    patched(serve_lookup, "find_deployment", lambda app, name: Late())
    replicas = ReplicaSet("app")
    starting.append(asyncio.create_task(replicas.start()))
    with pytest.raises(asyncio.CancelledError):
        await starting[0]
    await replicas.stop()


async def test_rows_end_when_another_kind_of_deployment_takes_the_place_of_theirs(
    patched, monkeypatch: pytest.MonkeyPatch
):
    class Replaced:
        """Its replicas are a model's when they are first asked, and then others without this method."""

        asked = 0

        def __init__(self) -> None:
            self.handle = self

        def __str__(self) -> str:
            return "Deployment 'x'"

        def options(self, method_name: str) -> Replaced:
            return self

        def remote(self, node: str) -> SimpleNamespace:
            return SimpleNamespace(cancel=lambda: None)

        def broadcast(self, method: str, node: str) -> Replaced:
            self.asked += 1
            return self

        async def results_async(self, **_: object) -> list[RayTaskError]:
            cause = RayServeException("The method 'listener_address' does not exist.")
            return [RayTaskError("listener_address", "", cause)] if self.asked > 1 else []

        async def check(self) -> None:
            pass

    patched(serve_lookup, "node_id", lambda: "here")
    patched(serve_lookup, "find_deployment", lambda app, name: Replaced())
    for name in ("_RETRY_S", "_GAP_S", "_CHECK_S"):
        monkeypatch.setattr(replica_set, name, 0.01)
    replicas = ReplicaSet("app")
    starting = asyncio.create_task(replicas.start())
    row = RowRequest(path="/v1/completions", body=b"{}")
    for work in (starting, replicas.send(row), replicas.send(row)):
        with pytest.raises(ConfigError, match="'x' is not one of Penstock's"):
            await asyncio.wait_for(work, 5)
    await replicas.stop()
