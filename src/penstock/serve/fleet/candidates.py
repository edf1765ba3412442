"""The replicas of one model that may take a request now: updated by the table, read by policies.

Membership, room and sums are updated at each change, so that a pick among a thousand replicas, full or not,
costs as much as a pick among two.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.serve.fleet.adapter_index import AdapterIndex
from penstock.serve.fleet.indexed_set import IndexedSet
from penstock.serve.fleet.replica import Replica


class Candidates(IndexedSet[Replica]):
    """Ready replicas with room, in no order; `in` takes constant time.

    members: every replica of the model in Serve's order, ready or not; a new tuple after each change.
    ready: the number of ready ones, including full ones; busy: the requests in all of these; elsewhere: those
    of them from other gateways. holders: which members have which adapter; adapter_slots: how many adapters
    one of them can load.
    """

    __slots__ = ("adapter_slots", "busy", "elsewhere", "holders", "members", "ready")

    def __init__(self, replicas: Iterable[Replica] = ()) -> None:
        super().__init__(replicas)
        self.members: tuple[Replica, ...] = ()
        self.ready = self.busy = self.elsewhere = self.adapter_slots = 0
        self.holders = AdapterIndex()

    def without(self, tried: Iterable[Replica]) -> Candidates:
        """A copy without these."""
        out = set(tried)
        return Candidates(replica for replica in self if replica not in out).like(self)

    def like(self, other: Candidates) -> Candidates:
        """Itself, with what `other` knows of the model beside its replicas."""
        self.members, self.ready, self.busy = other.members, other.ready, other.busy
        self.elsewhere, self.holders, self.adapter_slots = other.elsewhere, other.holders, other.adapter_slots
        return self
