"""The replica that a router class of Ray Serve's kind has picked: asked before, known here by its id."""

from __future__ import annotations

from penstock.serve.fleet.candidates import Candidates
from penstock.serve.routing.policy import Pick, RoutingRequest
from penstock.serve.routing.power_of_two import PowerOfTwo


class ServeRouter:
    """A replica that is full, gone, or has failed this request is replaced by the less busy of two."""

    reads = ("session",)

    def __init__(self) -> None:
        self._else = PowerOfTwo()

    def pick(self, asked: RoutingRequest, candidates: Candidates, now: float) -> Pick | None:
        for replica in candidates.members:
            if replica.id == asked.chosen and replica in candidates:
                return Pick(replica, "router")
        return self._else.pick(asked, candidates, now)
