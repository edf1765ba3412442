"""Routing policies by name, and users' classes by import path."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

from penstock.config import LLMConfig
from penstock.config.schema.routing import POLICIES, SERVE_ROUTER
from penstock.errors import ConfigError
from penstock.serve.fleet.candidates import Candidates
from penstock.serve.fleet.membership import imported_router
from penstock.serve.fleet.replica import Replica
from penstock.serve.routing import simple
from penstock.serve.routing.policy import Learns, Pick, Policy, RoutingRequest
from penstock.serve.routing.prefix_affinity import PrefixAffinity

log = logging.getLogger(__name__)

BY_NAME: Mapping[str, Callable[..., Policy]] = {
    "prefix_affinity": PrefixAffinity,
    "session_affinity": simple.SessionAffinity,
    "adapter_affinity": lambda: simple.AdaptersFirst(simple.PowerOfTwo()),
    "least_loaded": lambda: simple.AdaptersFirst(simple.LeastLoaded()),
    "power_of_two": simple.PowerOfTwo,
    "round_robin": simple.RoundRobin,
    SERVE_ROUTER: simple.ServeRouter,
}


def policy(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """A new policy; each model has its own instance.

    name: one of `BY_NAME`, with its options, or `module:Class`.
    Raises: ConfigError when the class cannot be imported, made without arguments, or has no `pick`.
    """
    if name in BY_NAME:
        return BY_NAME[name](**(options or {}))
    try:
        made: Any = resolve_name(name)()
    except Exception as error:  # importing and making are the user's own code
        raise _unfit(name, f"cannot be made: {type(error).__name__}: {error}") from error
    if not callable(getattr(made, "pick", None)):
        raise _unfit(name, "has no method `pick(asked, candidates, now)`")
    return UserPolicy(made)


def problems(configs: Sequence[LLMConfig]) -> list[str]:
    """A sentence, with its location, for every policy and router class that cannot be loaded here."""
    found: list[str] = []
    for config in configs:
        try:
            policy(config.routing_policy)
        except ConfigError as error:
            found.append((config.location / "routing_policy").says(str(error)))
        try:
            imported_router(config.serve_router)
        except ConfigError as error:
            where = config.location / "deployment_config" / "request_router_config"
            found.append((where / "request_router_class").says(str(error)))
    return found


def _unfit(name: str, why: str) -> ConfigError:
    allowed = ", ".join(POLICIES)
    return ConfigError(
        f"{name!r} {why}. Allowed are {allowed}, and `my_module:MyPolicy`, "
        "a class that is made without arguments and can be imported where the gateway runs."
    )


class UserPolicy:
    """Runs a user's policy within its contract: whatever it does, requests are served within their limits.

    Falls back to the less busy of two replicas when the user's class fails. Such picks are counted as
    'fault', and logged once for each kind of failure.
    """

    def __init__(self, policy: Policy) -> None:
        self.reads: tuple[str, ...] = tuple(getattr(policy, "reads", ()))
        self._policy = policy
        self._learns = policy if isinstance(policy, Learns) else None
        self._logged: set[str] = set()

    def pick(self, asked: RoutingRequest, candidates: Candidates, now: float) -> Pick | None:
        if not candidates:
            return None
        try:
            pick = self._policy.pick(asked, candidates, now)
            if pick is None:
                return None
            if not (isinstance(pick.why, str) and isinstance(pick.saved_tokens, int)):  # pyright: ignore[reportUnnecessaryIsInstance]
                self._log_once("gave a pick whose `why` is not a string or `saved_tokens` not an integer")
            elif pick.replica in candidates:
                return pick
            else:
                self._log_once("gave a replica that is not among the candidates")
        except Exception as error:  # foreign code: a request must not fail by it
            self._log_once(f"failed with {type(error).__name__}", error)
        other = simple.power_of_two.pick(asked, candidates, now)
        return other and other._replace(why="fault")

    def sent(self, asked: RoutingRequest, replica: Replica, now: float) -> None:
        if self._learns is None:
            return
        try:
            self._learns.sent(asked, replica, now)
        except Exception as error:
            self._log_once(f"failed in `sent` with {type(error).__name__}", error)

    def _log_once(self, what: str, error: Exception | None = None) -> None:
        if what not in self._logged:
            self._logged.add(what)
            log.error("The routing policy %s %s.", type(self._policy).__name__, what, exc_info=error)
