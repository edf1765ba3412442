"""Affinity by a key: the conversation's, or the adapter's. The same key goes to the same replica.

Consistent hashing with bounded loads: no memory, the same answer in every gateway. A replica over its share
passes the key on to the next one on the ring, always the same next one, and gets it back when it has room.
"""

from __future__ import annotations

from penstock.serve.candidates import Candidates
from penstock.serve.routing.asked import Asked, Pick
from penstock.serve.routing.balance import share
from penstock.serve.routing.power_of_two import PowerOfTwo
from penstock.serve.routing.ring import Ring, hash_of

_LOOKED_AT = 16
"""Replicas along the ring. A third of all or more are below 1.5 times the mean: further is rarely needed."""


class SessionAffinity:
    """By what the client calls its conversation or its user; without a name, the less busy of two."""

    reads = ("session",)

    def __init__(self) -> None:
        self._keyed = _Keyed()

    def pick(self, asked: Asked, candidates: Candidates, now: float) -> Pick | None:
        return self._keyed.pick(asked.session, asked, candidates, now)


class AdapterAffinity:
    """By adapter, so that each is loaded in few replicas; for the base model, the less busy of two."""

    def __init__(self) -> None:
        self._keyed = _Keyed()

    def pick(self, asked: Asked, candidates: Candidates, now: float) -> Pick | None:
        return self._keyed.pick(asked.adapter, asked, candidates, now)


class _Keyed:
    def __init__(self) -> None:
        self._ring = Ring()
        self._else = PowerOfTwo()

    def pick(self, key: str, asked: Asked, candidates: Candidates, now: float) -> Pick | None:
        if key and len(candidates) > 1:
            self._ring.follow(candidates.members)
            most = share(candidates)
            for replica in self._ring.after(hash_of(key), _LOOKED_AT):
                if replica in candidates and replica.busy + 1 <= most:
                    return Pick(replica, "affinity")
        return self._else.pick(asked, candidates, now)
