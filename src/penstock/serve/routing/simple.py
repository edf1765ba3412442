"""Policies that remember no prompts: by load, in turn, by adapter, or as a router of Serve's kind says."""

from __future__ import annotations

from operator import attrgetter

from penstock.serve.fleet.candidates import Candidates
from penstock.serve.routing.adapter_ring import AdapterRing
from penstock.serve.routing.load_bounds import neighbours, two
from penstock.serve.routing.policy import Pick, Policy, RoutingRequest

_NEIGHBOURS = 32
"""Of more replicas, this many from a random position on: nearly as even, and several gateways do not all
choose the same replica until its next report.
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


class LeastLoaded:
    """The least queued work in tokens, as reported and as sent since: for prompts of different length."""

    def pick(self, asked: RoutingRequest, candidates: Candidates, now: float) -> Pick | None:
        return Pick(min(neighbours(candidates, _NEIGHBOURS), key=_load)) if candidates else None


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

    def __init__(self) -> None:
        self._else = PowerOfTwo()

    def pick(self, asked: RoutingRequest, candidates: Candidates, now: float) -> Pick | None:
        for replica in candidates.members:
            if replica.id == asked.chosen and replica in candidates:
                return Pick(replica, "router")
        return self._else.pick(asked, candidates, now)
