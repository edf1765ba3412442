"""Policies that remember nothing of prompts: by load, in turn, by session, by adapter, or as a router of
Serve's kind says.
"""

from __future__ import annotations

from operator import attrgetter

from penstock.serve.fleet.candidates import Candidates
from penstock.serve.routing.hash_ring import AdapterRing, Ring, hash_of
from penstock.serve.routing.load_bounds import neighbours, share, two
from penstock.serve.routing.policy import Pick, Policy, RoutingRequest

_NEIGHBOURS = 32
"""Of more replicas, this many from a random position on: nearly as even, and several gateways do not all
choose the same replica until its next report.
"""

_LOOKED_AT = 16
"""Replicas to try along the ring. At least a third of all are below 1.5 times the mean, so more is rarely
needed.
"""

_MEMBERS_IN_TURN = 64  # without room, one after another; then any with room is taken

_load = attrgetter("load_tokens")


class PowerOfTwo:
    """The less busy of two random replicas: even load without state, from slightly old reports.

    Source: Mitzenmacher, The power of two choices in randomized load balancing, 2001.
    """

    def pick(self, asked: RoutingRequest, candidates: Candidates, now: float) -> Pick | None:
        if not candidates:
            return None
        first, second = two(candidates)
        return Pick(second if second.busy < first.busy else first)


power_of_two = PowerOfTwo()


class LeastLoaded:
    """The least queued work in tokens, as reported and as sent since: for prompts of different length."""

    def pick(self, asked: RoutingRequest, candidates: Candidates, now: float) -> Pick | None:
        return Pick(min(neighbours(candidates, _NEIGHBOURS), key=_load)) if candidates else None


class SessionAffinity:
    """By the client's name of the conversation or user; without one, the less busy of two.

    Consistent hashing with bounded loads: no state, the same result in every gateway. A replica beyond its
    share passes a session to the next one on the ring, always the same, and gets it back when it has room.
    """

    reads = ("session",)

    def __init__(self) -> None:
        self._ring = Ring()

    def pick(self, asked: RoutingRequest, candidates: Candidates, now: float) -> Pick | None:
        if asked.session and len(candidates) > 1:
            self._ring.follow(candidates.members)
            most = share(candidates)
            for replica in self._ring.after(hash_of(asked.session), _LOOKED_AT):
                if replica in candidates and replica.busy + 1 <= most:
                    return Pick(replica, "affinity")
        return power_of_two.pick(asked, candidates, now)


class AdaptersFirst:
    """Where the request's adapter is loaded and least work waits; for the base model, as `base` says."""

    def __init__(self, base: Policy) -> None:
        self._adapters = AdapterRing()
        self._base = base

    def pick(self, asked: RoutingRequest, candidates: Candidates, now: float) -> Pick | None:
        if asked.adapter and (pick := self._adapters.pick(asked.adapter, candidates)):
            return pick
        return self._base.pick(asked, candidates, now)


class RoundRobin:
    """Each in turn that has room, in the order of Serve's list: for requests that are all alike."""

    def __init__(self) -> None:
        self._turn = 0

    def pick(self, asked: RoutingRequest, candidates: Candidates, now: float) -> Pick | None:
        if not candidates:
            return None
        members = candidates.members
        for _ in range(min(_MEMBERS_IN_TURN, len(members))):
            self._turn = (self._turn + 1) % len(members)
            if members[self._turn] in candidates:
                return Pick(members[self._turn])
        return Pick(candidates[self._turn % len(candidates)])


class ServeRouter:
    """The replica that a router class of Ray Serve's kind has picked: asked before, known here by its id.

    The less busy of two replaces a replica that is full, gone, or has failed this request.
    """

    reads = ("session",)

    def pick(self, asked: RoutingRequest, candidates: Candidates, now: float) -> Pick | None:
        for replica in candidates.members:
            if replica.id == asked.chosen and replica in candidates:
                return Pick(replica, "router")
        return power_of_two.pick(asked, candidates, now)
