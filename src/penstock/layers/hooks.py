"""How a replica calls the user's hooks, and what they learn of a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from penstock.asgi import Scope
from penstock.hooks import Context

if TYPE_CHECKING:
    from penstock.config import LLMConfig

HookCall = Callable[[Any, Context], Awaitable[Any]]
"""A hook, wherever it runs."""

_KEY = "penstock.context"


def context_of(scope: Scope, config: LLMConfig) -> Context:
    """The context of a request, shared by all layers."""
    if _KEY not in scope:
        fields = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        scope[_KEY] = Context(config, scope["path"], fields.get("x-request-id", ""), fields)
    return scope[_KEY]
