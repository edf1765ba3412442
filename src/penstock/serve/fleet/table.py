"""All replicas of all models that this gateway knows, and which of them gets the next request.

Serve adds and removes members, links say what each of them feels, the gateway counts what it has sent. A pick
reads only what is here: no I/O, no remote call, the same few microseconds among two replicas or a thousand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.serve.fleet.candidates import Candidates
from penstock.serve.fleet.replica import Lease, Replica, Tried
from penstock.transport.address import Address
from penstock.transport.link import Hello, LoadedAdapters, Report

_NO_LIMIT = sys.maxsize


@dataclass(slots=True)
class _ModelReplicas:
    """One model's replicas; `ready` holds those that may be picked, `candidates` those of them with room."""

    limit: int = _NO_LIMIT
    members: dict[str, Replica] = field(default_factory=dict[str, Replica])
    ready: dict[Replica, None] = field(default_factory=dict["Replica", None])
    candidates: Candidates = field(default_factory=Candidates)
    max_model_len: int | None = None


def _nobody(_: Replica) -> None:
    return None


class Table:
    """Lives on one event loop; every method is to be called there."""

    def __init__(self, node_id: str) -> None:
        """node_id: the node of this gateway; replicas on it are reached by Unix socket."""
        self.node_id = node_id
        self._models: dict[str, _ModelReplicas] = {}
        self._joined = self._left = self._spoke = _nobody

    def watch(
        self,
        joined: Callable[[Replica], None],
        left: Callable[[Replica], None],
        spoke: Callable[[Replica], None],
    ) -> None:
        """Tells of members that come and go; members known so far have `joined` now.

        spoke: told of each report, and of a replica that is lost or has left.
        """
        self._joined, self._left, self._spoke = joined, left, spoke
        for model in self._models.values():
            for replica in model.members.values():
                joined(replica)

    # -- what Serve says

    def set_members(self, model_id: str, members: Mapping[str, Address]) -> None:
        """All replicas of `model_id` that Serve runs, by replica id. A new one is picked after its hello."""
        model = self._models.setdefault(model_id, _ModelReplicas())
        for replica_id in [known for known in model.members if known not in members]:
            replica = model.members.pop(replica_id)
            self._set_state(replica, "gone")
            model.candidates.holders.forget(replica)
            self._left(replica)
            self._spoke(replica)
        for replica_id, address in members.items():
            if replica_id not in model.members:
                replica = model.members[replica_id] = Replica(model_id, address)
                self._joined(replica)
        model.candidates.members = tuple(model.members.values())

    # -- what links say

    def hello(self, replica: Replica, hello: Hello) -> None:
        """The link is up: first news of a replica, or news again after its link was lost."""
        replica.hellos += 1
        replica.kv_tokens = hello.kv_tokens
        model = self._models[replica.model_id]
        model.max_model_len = hello.max_model_len
        model.candidates.holders.hello(replica)

    def report(self, replica: Replica, report: Report) -> None:
        """A change or a beat."""
        replica.reported = report.running + report.waiting
        replica.in_flight_then = replica.in_flight
        replica.elsewhere = report.elsewhere
        replica.waiting_tokens = report.waiting_tokens
        replica.sent_tokens = 0
        replica.reports += 1
        self._set_state(replica, report.state)
        self._spoke(replica)

    def adapters(self, replica: Replica, adapters: LoadedAdapters) -> None:
        """Another one is loaded, or gone."""
        self._models[replica.model_id].candidates.holders.report(replica, adapters.loaded)

    def lost(self, replica: Replica) -> None:
        """Its link ended or fell silent: not picked until the next hello."""
        self._set_state(replica, "lost")
        self._spoke(replica)

    # -- what the gateway does

    def limit(self, model_id: str, requests: int, adapter_slots: int = 0) -> None:
        """Open requests that one replica may have, over all gateways, and adapters that it may hold."""
        model = self._models.setdefault(model_id, _ModelReplicas())
        model.limit = requests
        model.candidates.adapter_slots = adapter_slots
        for replica in model.members.values():
            self._settle(model, replica)

    def acquire(self, replica: Replica, tokens: int = 0, adapter: str = "") -> Lease:
        """Counts a request that is sent there. tokens: of its prompt, about."""
        model = self._models[replica.model_id]
        replica.in_flight += 1
        replica.sent_tokens += tokens
        self._settle(model, replica)
        if adapter:
            model.candidates.holders.ask(replica, adapter)
        return Lease(replica, tokens, replica.reports, adapter)

    def release(self, lease: Lease) -> None:
        """The request has ended there."""
        replica = lease.replica
        replica.in_flight -= 1
        if lease.report == replica.reports:
            replica.sent_tokens -= lease.tokens
        model = self._models[replica.model_id]
        self._settle(model, replica)
        if lease.adapter:
            model.candidates.holders.answered(replica, lease.adapter)

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
        """Brings the candidates up to date with one replica."""
        candidates, ready = model.candidates, replica.state == "ready"
        busy, elsewhere = (replica.busy, replica.elsewhere) if ready else (0, 0)
        candidates.busy += busy - replica.counted[0]
        candidates.elsewhere += elsewhere - replica.counted[1]
        replica.counted = busy, elsewhere
        candidates.ready = len(model.ready)
        if ready and replica.in_flight + replica.elsewhere < model.limit:
            candidates.add(replica)
        else:
            candidates.discard(replica)

    # -- what the gateway asks

    def candidates(self, model_id: str, tried: Tried | None = None) -> Candidates:
        """Replicas that may take a request which `tried` ones have failed. To be read at once, not kept."""
        candidates = self._models.setdefault(model_id, _ModelReplicas()).candidates
        return candidates.without(tried) if tried else candidates

    def ready(self, model_id: str) -> Sequence[Replica]:
        """Replicas that may be picked when they have room."""
        model = self._models.get(model_id)
        return list(model.ready) if model else ()

    def any_ready(self, model_id: str) -> bool:
        """Whether there are such replicas."""
        model = self._models.get(model_id)
        return model is not None and bool(model.ready)

    def members(self, model_id: str) -> Sequence[Replica]:
        """Replicas in Serve's list, whatever their state."""
        model = self._models.get(model_id)
        return list(model.members.values()) if model else ()

    def find(self, replica_id: str) -> Replica | None:
        """The member of any model with this id."""
        members = (model.members.get(replica_id) for model in self._models.values())
        return next((replica for replica in members if replica is not None), None)

    def max_model_len(self, model_id: str) -> int | None:
        """The context window that a replica told; None before the first hello. Units: tokens."""
        model = self._models.get(model_id)
        return model.max_model_len if model else None

    def __iter__(self) -> Iterator[Replica]:
        for model in self._models.values():
            yield from model.members.values()
