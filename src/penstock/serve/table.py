"""All replicas of all models that this gateway knows, and which of them gets the next request.

Serve adds and removes members, links say what each of them feels, the gateway counts what it has sent. A pick
reads only what is here: no I/O, no remote call, the same few microseconds among two replicas or a thousand.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.serve.address import Address
from penstock.serve.link import Hello, Report


@dataclass(eq=False, slots=True)
class Replica:
    """What this gateway knows about one replica. Units: requests.

    in_flight: ours, exact. elsewhere: of other gateways, as last reported. reported: running and waiting in
    the engine, as last reported, whoever sent them; in_flight_then: ours at that time.
    """

    model_id: str
    address: Address
    state: str = "unknown"
    in_flight: int = 0
    elsewhere: int = 0
    reported: int = 0
    in_flight_then: int = 0
    hellos: int = 0

    @property
    def id(self) -> str:
        return self.address.replica_id

    @property
    def ongoing(self) -> int:
        """Open requests of all gateways."""
        return self.in_flight + self.elsewhere

    @property
    def busy(self) -> int:
        """Requests in it now: the last report, corrected by what we have started and finished since."""
        return max(self.ongoing, self.reported + self.in_flight - self.in_flight_then)


class Tried:
    """Replicas that failed one request. A replica may be tried again once it has said hello anew."""

    __slots__ = ("_hellos",)

    def __init__(self) -> None:
        self._hellos: dict[Replica, int] = {}

    def add(self, replica: Replica) -> None:
        self._hellos[replica] = replica.hellos

    def __contains__(self, replica: object) -> bool:
        return isinstance(replica, Replica) and self._hellos.get(replica) == replica.hellos

    def __len__(self) -> int:
        return len(self._hellos)


@dataclass(slots=True)
class _Fleet:
    """One model's replicas; `ready` holds those that may be picked."""

    members: dict[str, Replica] = field(default_factory=dict[str, Replica])
    ready: list[Replica] = field(default_factory=list[Replica])
    max_model_len: int | None = None


def _nobody(_: Replica) -> None:
    return None


class Table:
    """Lives on one event loop; every method is to be called there."""

    def __init__(self, node_id: str) -> None:
        """node_id: the node of this gateway; replicas on it are reached by Unix socket."""
        self.node_id = node_id
        self._fleets: dict[str, _Fleet] = {}
        self._joined = self._left = self._spoke = _nobody

    def watch(
        self,
        joined: Callable[[Replica], None],
        left: Callable[[Replica], None],
        spoke: Callable[[Replica], None],
    ) -> None:
        """Tells of members that come and go, and of each report; members known so far have `joined` now."""
        self._joined, self._left, self._spoke = joined, left, spoke
        for fleet in self._fleets.values():
            for replica in fleet.members.values():
                joined(replica)

    # -- what Serve says

    def set_members(self, model_id: str, members: Mapping[str, Address]) -> None:
        """All replicas of `model_id` that Serve runs, by replica id. A new one is picked after its hello."""
        fleet = self._fleets.setdefault(model_id, _Fleet())
        for replica_id in [known for known in fleet.members if known not in members]:
            replica = fleet.members.pop(replica_id)
            self._set_state(replica, "gone")
            self._left(replica)
        for replica_id, address in members.items():
            if replica_id not in fleet.members:
                replica = fleet.members[replica_id] = Replica(model_id, address)
                self._joined(replica)

    # -- what links say

    def hello(self, replica: Replica, hello: Hello) -> None:
        """The link is up: first news of a replica, or news again after its link was lost."""
        replica.hellos += 1
        self._fleets[replica.model_id].max_model_len = hello.max_model_len

    def report(self, replica: Replica, report: Report) -> None:
        """A change or a beat."""
        replica.reported = report.running + report.waiting
        replica.in_flight_then = replica.in_flight
        replica.elsewhere = report.elsewhere
        self._set_state(replica, report.state)
        self._spoke(replica)

    def lost(self, replica: Replica) -> None:
        """Its link ended or fell silent: not picked until the next hello."""
        self._set_state(replica, "lost")

    def _set_state(self, replica: Replica, state: str) -> None:
        if replica.state == "gone":
            return
        fleet = self._fleets[replica.model_id]
        was_ready, replica.state = replica.state == "ready", state
        if state == "ready" and not was_ready:
            fleet.ready.append(replica)
        elif was_ready and state != "ready":
            fleet.ready.remove(replica)

    # -- what the gateway asks

    def pick(self, model_id: str, limit: int, tried: Tried | Sequence[Replica] = ()) -> Replica | None:
        """The less busy of two at random; of all, when neither will do. None when none will.

        limit: open requests that one replica may have, over all gateways.
        Source: Mitzenmacher, The power of two choices in randomized load balancing, 2001.
        """
        ready = self.ready(model_id)
        if not ready:
            return None
        first = int(random.random() * len(ready))
        second = (first + 1 + int(random.random() * (len(ready) - 1))) % len(ready)
        fit = _fitting((ready[first], ready[second]), limit, tried) or _fitting(ready, limit, tried)
        return min(fit, key=lambda replica: replica.busy, default=None)

    def ready(self, model_id: str) -> Sequence[Replica]:
        """Replicas that may be picked."""
        fleet = self._fleets.get(model_id)
        return fleet.ready if fleet else ()

    def members(self, model_id: str) -> Sequence[Replica]:
        """Replicas in Serve's list, whatever their state."""
        fleet = self._fleets.get(model_id)
        return list(fleet.members.values()) if fleet else ()

    def max_model_len(self, model_id: str) -> int | None:
        """The context window that a replica told; None before the first hello. Units: tokens."""
        fleet = self._fleets.get(model_id)
        return fleet.max_model_len if fleet else None

    def __iter__(self) -> Iterator[Replica]:
        for fleet in self._fleets.values():
            yield from fleet.members.values()


def _fitting(replicas: Sequence[Replica], limit: int, tried: Tried | Sequence[Replica]) -> list[Replica]:
    return [replica for replica in replicas if replica.ongoing < limit and replica not in tried]
