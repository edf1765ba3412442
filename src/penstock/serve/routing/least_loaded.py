"""The replica with the least queued work in tokens: for prompts of very different length.

Loading an adapter counts as work.
"""

from __future__ import annotations

from operator import attrgetter

from penstock.serve.fleet.candidates import Candidates
from penstock.serve.routing.adapter_affinity import AdapterRing
from penstock.serve.routing.load_bounds import neighbours
from penstock.serve.routing.policy import Pick, RoutingRequest

_LOOKED_AT = 32
"""Of more replicas, this many from a random position on: nearly as even, and several gateways do not all
choose the same replica until its next report.
"""

_load = attrgetter("load_tokens")


class LeastLoaded:
    """Weighs waiting prompt tokens and open requests, as reported and as sent since. Ties are random."""

    def __init__(self) -> None:
        self._adapters = AdapterRing()

    def pick(self, asked: RoutingRequest, candidates: Candidates, now: float) -> Pick | None:
        if not candidates:
            return None
        if asked.adapter and (pick := self._adapters.pick(asked.adapter, candidates)):
            return pick
        return Pick(min(neighbours(candidates, _LOOKED_AT), key=_load))
