"""A consistent-hash ring: every replica has several points, and a key belongs to the next point.

Every gateway builds the same ring from the same members, so they agree without communicating. When one of n
replicas joins or leaves, about 1/n of the keys move. Source: Karger and others, Consistent hashing and random
trees, 1997.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from penstock.serve.fleet.replica import Replica

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
