"""A consistent-hash ring: every replica has several points, and a key belongs to the next point.

Every gateway builds the same ring from the same members, so they agree without communicating. When one of n
replicas joins or leaves, about 1/n of the keys move. Source: Karger and others, Consistent hashing and random
trees, 1997. On it, `AdapterRing` says where a request for an adapter may go.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

from penstock.serve.fleet.candidates import Candidates
from penstock.serve.fleet.replica import Replica
from penstock.serve.routing.load_bounds import share, some
from penstock.serve.routing.policy import Pick

LOAD_TOKENS = 4096
"""What loading an adapter costs, in tokens of waiting work; docs/inside/routing.md has figures."""

_WEIGHED = 8  # of those that have it
_LOOKED_AT = 16  # along the ring

_POINTS = 64  # each: with fewer, some replicas own twice the share of others
_SPACE = 2**64
_unpack = struct.Struct("<8Q").unpack


def hash_of(key: str) -> int:
    """A hash that is the same in every process, unlike Python's own; spread over the whole ring."""
    return int.from_bytes(hashlib.blake2b(key.encode(errors="replace"), digest_size=8).digest(), "little")


class Ring:
    """Follows the members passed to it."""

    def __init__(self) -> None:
        self._members: tuple[Replica, ...] = ()
        self._points: list[int] = []
        self._owners: dict[int, Replica] = {}

    def follow(self, members: tuple[Replica, ...]) -> None:
        """Adds and removes members. Does nothing when given the same tuple as last time."""
        if members is self._members:
            return
        come, gone = set(members).difference(self._members), set(self._members).difference(members)
        self._members = members
        for replica in gone:
            for point in _points(replica.id):
                del self._owners[point]
                del self._points[bisect_left(self._points, point)]
        for replica in come:
            self._owners.update(dict.fromkeys(_points(replica.id), replica))
        self._points = sorted(self._points + [point for replica in come for point in _points(replica.id)])

    def after(self, key: int, most: int) -> Iterator[Replica]:
        """Up to `most` different replicas, starting with the key's own."""
        start, seen = bisect_right(self._points, key % _SPACE), set[Replica]()
        most = min(most, len(self._members))
        for i in range(len(self._points)):
            replica = self._owners[self._points[(start + i) % len(self._points)]]
            if replica not in seen:
                yield replica
                seen.add(replica)
                if len(seen) >= most:
                    return


def _points(replica_id: str) -> list[int]:
    points: list[int] = []
    for i in range(_POINTS // 8):
        points += _unpack(hashlib.blake2b(f"{replica_id} {i}".encode()).digest())
    return points


class AdapterRing:
    """Where a request for an adapter may go, and what loading the adapter there costs: for one model.

    Known are the adapters that replicas report, and those of requests sent to them. An adapter that no
    replica has goes to its position on the ring, which is the same in all gateways, so that it is loaded
    once. It spreads along the ring to another replica when the work of those that have it outweighs a load.
    """

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
