"""Runs a user's policy within its contract: whatever it does, requests are served within their limits."""

from __future__ import annotations

import logging

from penstock.serve.fleet.candidates import Candidates
from penstock.serve.fleet.replica import Replica
from penstock.serve.routing.policy import Learns, Pick, Policy, RoutingRequest
from penstock.serve.routing.simple import PowerOfTwo

log = logging.getLogger(__name__)


class UserPolicy:
    """Falls back to the less busy of two replicas when the user's class fails.

    Such picks are counted as 'fault', and logged once for each kind of failure.
    """

    def __init__(self, policy: Policy) -> None:
        self.reads: tuple[str, ...] = tuple(getattr(policy, "reads", ()))
        self._policy = policy
        self._learns = policy if isinstance(policy, Learns) else None
        self._else = PowerOfTwo()
        self._logged: set[str] = set()

    def pick(self, asked: RoutingRequest, candidates: Candidates, now: float) -> Pick | None:
        if not candidates:
            return None
        try:
            pick = self._policy.pick(asked, candidates, now)
            if pick is None:
                return None
            if not (isinstance(pick.why, str) and isinstance(pick.saved_tokens, int)):  # pyright: ignore[reportUnnecessaryIsInstance]
                self._log_once(
                    "gave a pick whose `why` is not a string or `saved_tokens` not an integer", None
                )
            elif pick.replica in candidates:
                return pick
            else:
                self._log_once("gave a replica that is not among the candidates", None)
        except Exception as error:  # foreign code: a request must not fail by it
            self._log_once(f"failed with {type(error).__name__}", error)
        other = self._else.pick(asked, candidates, now)
        return other and other._replace(why="fault")

    def sent(self, asked: RoutingRequest, replica: Replica, now: float) -> None:
        if self._learns is None:
            return
        try:
            self._learns.sent(asked, replica, now)
        except Exception as error:
            self._log_once(f"failed in `sent` with {type(error).__name__}", error)

    def _log_once(self, what: str, error: Exception | None) -> None:
        if what not in self._logged:
            self._logged.add(what)
            log.error("The routing policy %s %s.", type(self._policy).__name__, what, exc_info=error)
