"""How a model's requests are spread over its replicas: names and options.

The policies themselves are in `serve/routing`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from penstock.config.messages.problems import unknown
from penstock.config.schema.processing import IMPORT_PATH
from penstock.config.schema.strict import StrictModel, matching, setting

POLICIES = (
    "prefix_affinity",
    "session_affinity",
    "adapter_affinity",
    "least_loaded",
    "power_of_two",
    "round_robin",
)

DEFAULT_POLICY = "prefix_affinity"
"""Engines keep what they have computed; with nothing to share it spreads as evenly as `power_of_two`."""

SERVE_ROUTER = "serve_router"
"""Stands for a class of Ray Serve's kind: `deployment_config.request_router_config` names it."""

SESSION_HEADER = "x-session-id"

_TOKEN = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$"


class RoutingConfig(StrictModel):
    """How requests find their replica."""

    session_header: Annotated[str, *matching(_TOKEN, "a header's name")] = setting(
        SESSION_HEADER,
        "Request header that names the session, for `session_affinity`. Without it, "
        "`prompt_cache_key` or `user` of the body.",
    )


def checked_policy(name: str) -> str:
    """Raises: ValueError for what is neither a policy's name nor a class's path."""
    if name not in POLICIES and not IMPORT_PATH.fullmatch(name):
        raise ValueError(f"{unknown('policy', name, POLICIES)} An own class is named `my_module:MyPolicy`.")
    return name


Policy = Annotated[str, AfterValidator(checked_policy)]
