"""The less busy of two random replicas: even load without state, from slightly old reports."""

from __future__ import annotations

from penstock.serve.fleet.candidates import Candidates
from penstock.serve.routing.load_bounds import two
from penstock.serve.routing.policy import Pick, RoutingRequest


class PowerOfTwo:
    """Source: Mitzenmacher, The power of two choices in randomized load balancing, 2001."""

    def pick(self, asked: RoutingRequest, candidates: Candidates, now: float) -> Pick | None:
        if not candidates:
            return None
        first, second = two(candidates)
        return Pick(second if second.busy < first.busy else first)
