"""Each in turn, in the order of Serve's list: for requests that are all alike."""

from __future__ import annotations

from penstock.serve.fleet.candidates import Candidates
from penstock.serve.routing.policy import Pick, RoutingRequest

_LOOKED_AT = 64  # members in a row without room; then any with room is taken


class RoundRobin:
    """A replica without room is skipped."""

    def __init__(self) -> None:
        self._turn = 0

    def pick(self, asked: RoutingRequest, candidates: Candidates, now: float) -> Pick | None:
        if not candidates:
            return None
        members = candidates.members
        for _ in range(min(_LOOKED_AT, len(members))):
            self._turn = (self._turn + 1) % len(members)
            if members[self._turn] in candidates:
                return Pick(members[self._turn])
        return Pick(candidates[self._turn % len(candidates)])
