"""Affinity by session.

Sessions use consistent hashing with bounded loads: no state, the same result in every gateway. A replica
beyond its share passes a session to the next one on the ring, always the same, and gets it back when it has
room.
"""

from __future__ import annotations

from penstock.serve.fleet.candidates import Candidates
from penstock.serve.routing.hash_ring import Ring, hash_of
from penstock.serve.routing.load_bounds import share
from penstock.serve.routing.policy import Pick, RoutingRequest
from penstock.serve.routing.simple import PowerOfTwo

_LOOKED_AT = 16
"""Replicas to try along the ring. At least a third of all are below 1.5 times the mean, so more is rarely
needed.
"""


class SessionAffinity:
    """By the client's name of the conversation or user; without one, the less busy of two."""

    reads = ("session",)

    def __init__(self) -> None:
        self._ring = Ring()
        self._else = PowerOfTwo()

    def pick(self, asked: RoutingRequest, candidates: Candidates, now: float) -> Pick | None:
        if asked.session and len(candidates) > 1:
            self._ring.follow(candidates.members)
            most = share(candidates)
            for replica in self._ring.after(hash_of(asked.session), _LOOKED_AT):
                if replica in candidates and replica.busy + 1 <= most:
                    return Pick(replica, "affinity")
        return self._else.pick(asked, candidates, now)
