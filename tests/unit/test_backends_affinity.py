"""Requests that begin alike go to one replica while it has room; and how a first replica comes."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest

from penstock.data.backends import replica_set, serve_lookup
from penstock.data.backends.replica_set import GroupAffinity, ReplicaSet
from penstock.errors import EngineStartFailed

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
