"""All replicas of all models that this gateway knows, and which of them gets the next request.

Serve adds and removes members, links report their load, the gateway counts what it has sent. A pick reads
only this: no I/O, no remote call, the same few microseconds among two replicas or a thousand.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.serve.fleet.candidates import Candidates
from penstock.serve.fleet.replica import Lease, Replica, Tried
from penstock.transport.address import Address
from penstock.transport.link import AdapterReport, Hello, LoadReport

_NO_LIMIT = sys.maxsize
_ONLINE_SLOTS = 8  # one of so many slots of a replica is not for batch


@dataclass(slots=True)
class _ModelReplicas:
    """One model's replicas: those that may be picked are `ready`; those of them with room, `candidates`, and
    with room for batch, `for_batch`.
    """

    limit: int = _NO_LIMIT
    leases: int = 0
    members: dict[str, Replica] = field(default_factory=dict[str, Replica])
    ready: dict[Replica, None] = field(default_factory=dict["Replica", None])
    candidates: Candidates = field(default_factory=Candidates)
    for_batch: Candidates = field(default_factory=Candidates)
    max_model_len: int | None = None


def _ignore(_: Replica) -> None:
    return None


class Table:
    """Belongs to one event loop; call every method there."""

    def __init__(self, node_id: str) -> None:
        """node_id: the node of this gateway; replicas on it are reached by Unix socket."""
        self.node_id = node_id
        self.wanted: dict[str, int] = {}
        """Replicas that Serve should run, by model, where control knows."""
        self._models: defaultdict[str, _ModelReplicas] = defaultdict(_ModelReplicas)
        self._joined = self._left = self._reported = _ignore

    def watch(
        self,
        joined: Callable[[Replica], None],
        left: Callable[[Replica], None],
        reported: Callable[[Replica], None],
    ) -> None:
        """Sets callbacks for members that join and leave; calls `joined` for the present ones.

        reported: called for each report, and for a replica that is lost or has left.
        """
        self._joined, self._left, self._reported = joined, left, reported
        for model in self._models.values():
            for replica in model.members.values():
                joined(replica)

    # -- from Serve

    def set_members(self, model_id: str, members: Mapping[str, Address]) -> None:
        """All replicas of `model_id` that Serve runs, by id. A new one is not picked before its hello."""
        model = self._models[model_id]
        for replica_id in [known for known in model.members if known not in members]:
            replica = model.members.pop(replica_id)
            self._set_state(replica, "gone")
            model.candidates.holders.forget(replica)
            self._left(replica)
            self._reported(replica)
        for replica_id, address in members.items():
            if replica_id not in model.members:
                replica = model.members[replica_id] = Replica(model_id, address)
                self._joined(replica)
        model.candidates.members = tuple(model.members.values())

    # -- from links

    def hello(self, replica: Replica, hello: Hello) -> None:
        """The link is up, for the first time or again."""
        replica.hellos += 1
        replica.kv_tokens = hello.kv_tokens
        model = self._models[replica.model_id]
        model.max_model_len = hello.max_model_len
        model.candidates.holders.hello(replica)

    def report(self, replica: Replica, report: LoadReport) -> None:
        """The replica's state and load."""
        replica.reported = report.running + report.waiting
        replica.in_flight_then = replica.in_flight
        replica.elsewhere = report.elsewhere
        replica.waiting_tokens = report.waiting_tokens
        replica.sent_tokens = 0
        replica.batch_limit = report.batch_limit
        replica.batch = report.batch_running + report.batch_waiting
        replica.batch_requeued = report.batch_requeued
        replica.serves = report.serves
        replica.reports += 1
        self._set_state(replica, report.state)
        self._reported(replica)

    def adapters(self, replica: Replica, adapters: AdapterReport) -> None:
        """All adapters that the replica has loaded."""
        self._models[replica.model_id].candidates.holders.report(replica, adapters.loaded)

    def lost(self, replica: Replica) -> None:
        """Its link ended or timed out: it is not picked before the next hello. One that drains has ended
        then, and stays what it was.
        """
        if replica.state != "draining":
            self._set_state(replica, "lost")
        self._reported(replica)

    # -- from the gateway

    def limit(self, model_id: str, requests: int, adapter_slots: int = 0) -> None:
        """Sets how many open requests one replica may have, from all gateways, and how many adapters."""
        model = self._models[model_id]
        model.limit = requests
        model.candidates.adapter_slots = adapter_slots
        for replica in model.members.values():
            self._settle(model, replica)

    def acquire(self, replica: Replica, tokens: int = 0, adapter: str = "", batch: bool = False) -> Lease:
        """Takes a slot for a request that is sent there. tokens: of its prompt, roughly. batch: its class."""
        model = self._models[replica.model_id]
        model.leases += 1
        replica.in_flight += 1
        replica.sent_tokens += tokens
        replica.batch += batch
        self._settle(model, replica)
        if adapter:
            model.candidates.holders.add_use(replica, adapter)
        return Lease(replica, tokens, replica.reports, adapter, batch)

    def release(self, lease: Lease) -> None:
        """The request has ended."""
        replica = lease.replica
        replica.in_flight -= 1
        if lease.report == replica.reports:
            replica.sent_tokens -= lease.tokens
        replica.batch = max(0, replica.batch - lease.batch)
        model = self._models[replica.model_id]
        model.leases -= 1
        self._settle(model, replica)
        if lease.adapter:
            model.candidates.holders.end_use(replica, lease.adapter)

    def _set_state(self, replica: Replica, state: str) -> None:
        if replica.state == "gone":
            return
        model = self._models[replica.model_id]
        replica.state = state
        if state == "ready":
            model.ready[replica] = None
        else:
            model.ready.pop(replica, None)
        self._settle(model, replica)

    def _settle(self, model: _ModelReplicas, replica: Replica) -> None:
        """Updates the candidates after a change of one replica."""
        candidates, ready = model.candidates, replica.state == "ready"
        busy, elsewhere = (replica.busy, replica.elsewhere) if ready else (0, 0)
        candidates.busy += busy - replica.counted[0]
        candidates.elsewhere += elsewhere - replica.counted[1]
        replica.counted = busy, elsewhere
        candidates.ready = len(model.ready)
        taken, limit = replica.in_flight + replica.elsewhere, model.limit
        candidates.put(replica, ready and taken < limit)
        most = max(1, limit - max(1, limit // _ONLINE_SLOTS))
        model.for_batch.put(replica, ready and taken < most and replica.takes_batch)

    # -- for the gateway

    def candidates(self, model_id: str, tried: Tried | None = None, *, batch: bool = False) -> Candidates:
        """Replicas that may take a request that `tried` ones have failed. A live view: do not keep it.

        batch: a batch request, for which some of their slots are not free: they are for online ones.
        """
        model = self._models[model_id]
        found = model.for_batch.like(model.candidates) if batch else model.candidates
        return found.without(tried) if tried else found

    def ready(self, model_id: str) -> Sequence[Replica]:
        """Replicas that may be picked if they have room."""
        return list(self._models[model_id].ready)

    def leases(self, model_id: str) -> int:
        """Open requests at the model's replicas, also at those that have left and finish what they have."""
        return self._models[model_id].leases

    def members(self, model_id: str) -> Sequence[Replica]:
        """Replicas in Serve's list, in any state."""
        return list(self._models[model_id].members.values())

    def find(self, replica_id: str) -> Replica | None:
        """The member of any model with this id."""
        members = (model.members.get(replica_id) for model in self._models.values())
        return next((replica for replica in members if replica is not None), None)

    def max_model_len(self, model_id: str) -> int | None:
        """The context window in tokens, as a replica reported it; None before the first hello."""
        return self._models[model_id].max_model_len

    def __iter__(self) -> Iterator[Replica]:
        for model in self._models.values():
            yield from model.members.values()
