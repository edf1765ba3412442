"""Where a request for an adapter may go, and what loading the adapter there costs.

Known are the adapters that replicas report, and those of requests sent to them. An adapter that no replica
has goes to its position on a hash ring, which is the same in all gateways, so that it is loaded once. It
spreads along the ring to another replica when the work of those that have it outweighs a load.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from penstock.serve.fleet.candidates import Candidates
from penstock.serve.fleet.replica import Replica
from penstock.serve.routing.hash_ring import Ring, hash_of
from penstock.serve.routing.load_bounds import share, some
from penstock.serve.routing.policy import Pick

LOAD_TOKENS = 4096
"""What loading an adapter costs, in tokens of waiting work; docs/inside/routing.md has figures."""

_WEIGHED = 8  # of those that have it
_LOOKED_AT = 16  # along the ring


class AdapterRing:
    """For one model in one gateway. Its only state is the ring."""

    def __init__(self) -> None:
        self._ring = Ring()

    def pick(
        self, adapter: str, candidates: Candidates, saved: Mapping[Replica, int] = MappingProxyType({})
    ) -> Pick | None:
        """The replica with the least work, loading the adapter included; None when none fits.

        saved: tokens of work avoided on a replica that has the adapter.
        """
        if not candidates:
            return None
        holders, best, least = candidates.holders.of(adapter), None, 0
        for replica in (*saved, *some(holders, _WEIGHED)):
            cost = replica.load_tokens - saved.get(replica, 0)
            if (best is None or cost < least) and replica in candidates and replica in holders:
                best, least = replica, cost
        other = self._next(adapter, candidates, holders)
        if other is not None and (best is None or other.load_tokens + LOAD_TOKENS < least):
            return Pick(other, "load")
        return best and Pick(best, "affinity")

    def _next(self, adapter: str, candidates: Candidates, holders: Collection[Replica]) -> Replica | None:
        """The first on the ring without the adapter and within its share; if possible with a free slot."""
        self._ring.follow(candidates.members)
        most, slots, full = share(candidates), candidates.adapter_slots, None
        for replica in self._ring.after(hash_of(adapter), _LOOKED_AT):
            if replica in holders or replica not in candidates or replica.busy + 1 > most:
                continue
            if candidates.holders.count(replica) < slots:
                return replica
            full = full or replica
        return full
