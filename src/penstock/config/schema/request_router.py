"""Serve's `request_router_config`: a class that picks replicas, of Serve's kind or standing for our policy.

Nothing is imported here: a class is known by its import path until the model is bound.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, model_validator

from penstock.config.messages.location import Location
from penstock.config.schema.strict import StrictModel, optional, setting

_OURS = "penstock.serve.request_router"
"""Classes of this module stand for a policy of the gateway."""

_SERVES_OWN = "PowerOfTwoChoicesRequestRouter"
"""In each of Serve's `RequestRouterConfig` objects, also where the user named none."""


class PrefixRouterOptions(StrictModel):
    """`request_router_kwargs` of `penstock.serve.request_router.PrefixCacheAffinityRouter`."""

    imbalanced_threshold: float | None = optional(
        "Requests by which the cache's replica may be busier than another one; without it, any number.",
        ge=0,
        allow_inf_nan=True,
    )
    match_rate_threshold: float = setting(
        0.0, "Share of the prompt below which a cached prefix does not count.", ge=0, le=1
    )
    do_eviction: bool = setting(False, "Whether `eviction_threshold_chars` limits what is remembered.")
    eviction_threshold_chars: int = setting(
        400_000, "Characters of prompts to remember, of each replica.", gt=0
    )
    eviction_target_chars: int | None = optional(
        "Characters that are left when more than `eviction_threshold_chars` were remembered; "
        "without it, that threshold.",
        gt=0,
    )
    eviction_interval_secs: int | None = optional(
        "Seconds from one such cut to the next; without it, as soon as there is too much.", gt=0
    )

    @model_validator(mode="after")
    def _cuts(self) -> Self:
        target, threshold = self.eviction_target_chars, self.eviction_threshold_chars
        if target is not None and target > threshold:
            raise ValueError(
                f"eviction_target_chars, {target}, is more than eviction_threshold_chars, {threshold}; a "
                "cut leaves at most as much as it begins at."
            )
        return self


def router_class(given: Any) -> Any:
    """The class, or its path, in Serve's `RequestRouterConfig` or the dict of one; None for Serve's own."""
    router = _fields(given).get("request_router_class", _SERVES_OWN)
    return None if _path(router).endswith(_SERVES_OWN) else router


def router_name(given: Any) -> str | None:
    """The name of that class."""
    router = router_class(given)
    return None if router is None else re.split("[.:]", _path(router))[-1]


def is_ours(router: Any) -> bool:
    """Whether a router class stands for a policy of the gateway; else it is one of Ray Serve's kind."""
    return re.split("[.:]", _path(router))[:-1] == _OURS.split(".")


def prefix_options(given: Any) -> dict[str, Any]:
    """Those options of our PrefixCacheAffinityRouter, as arguments of the policy `prefix_affinity`, that are
    not the usual ones.
    """
    options = PrefixRouterOptions(**_fields(given).get("request_router_kwargs", {}))
    return options.model_dump(exclude_defaults=True)


def _path(router: Any) -> str:
    return f"{router.__module__}.{router.__name__}" if isinstance(router, type) else str(router)


def _fields(given: Any) -> Mapping[str, Any]:
    return given.model_dump(exclude_unset=True) if isinstance(given, BaseModel) else given or {}


def _known_router(router: object) -> object:
    if router is not None and not isinstance(router, type) and "." not in str(router):
        raise ValueError(
            "must be a class or an import path: a subclass of ray.serve.request_router.RequestRouter, or "
            f"'{_OURS}.PrefixCacheAffinityRouter'. A policy of the gateway goes into `routing_policy`."
        )
    if router is not None and is_ours(router) and not _path(router).endswith("PrefixCacheAffinityRouter"):
        raise ValueError(f"{_OURS} has PrefixCacheAffinityRouter only; other policies are `routing_policy`.")
    return router


class RequestRouterOptions(StrictModel):
    """Serve's `RequestRouterConfig`."""

    request_router_class: Annotated[Any, BeforeValidator(_known_router)] = optional(
        "A class of Ray Serve's kind, or its import path: it picks the replica of each request, "
        f"by a call. `{_OURS}.PrefixCacheAffinityRouter` stands for `routing_policy: prefix_affinity`."
    )
    request_router_kwargs: dict[str, Any] = setting({}, "Arguments of that class.")
    request_routing_stats_period_s: float | None = optional(
        "How often replicas tell which adapters they have, for calls by handle.", gt=0
    )
    request_routing_stats_timeout_s: float | None = optional("Limit of that.", gt=0)
    initial_backoff_s: float | None = optional("First wait before a call by handle is tried again.", gt=0)
    backoff_multiplier: float | None = optional("Growth of that wait.", gt=0)
    max_backoff_s: float | None = optional("The longest such wait.", gt=0)

    @model_validator(mode="after")
    def _arguments_of_something(self) -> Self:
        router = router_class({"request_router_class": self.request_router_class})
        if self.request_router_kwargs and self.request_router_class is None:
            raise ValueError("request_router_kwargs have no effect without a request_router_class.")
        if router is not None and is_ours(router):
            PrefixRouterOptions.parse(self.request_router_kwargs, Location("request_router_kwargs"))
        return self


def router_options(given: Any) -> dict[str, Any]:
    """The options in Serve's `RequestRouterConfig`, or in the dict of one, that hold here, too.

    Raises: ConfigError.
    """
    fields = _fields(given)
    RequestRouterOptions.parse(fields, Location("request_router_config"))
    return {name: value for name, value in fields.items() if name != "request_router_class"}
