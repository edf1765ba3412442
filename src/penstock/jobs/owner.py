"""Whose files and batches a request is for: the gateway says it, in a header that clients cannot send."""

from __future__ import annotations

from urllib.parse import quote, unquote

import msgspec
from starlette.requests import Request

from penstock.config.schema.tenants import SCOPES, scope_of
from penstock.errors import Forbidden
from penstock.transport import link

DEFAULT = "default"
"""The tenant of what was stored without one."""

_HEADER = link.OWNER.decode()


class Owner(msgspec.Struct, frozen=True):
    """A tenant's key. models: that batches may name; None for all. scopes: of endpoints that they may ask."""

    tenant: str
    key: str
    models: list[str] | None
    scopes: list[str]

    def header(self) -> tuple[bytes, bytes]:
        return link.OWNER, quote(msgspec.json.encode(self)).encode()

    def check_endpoint(self, endpoint: str) -> None:
        """Raises: Forbidden."""
        if (scope := scope_of(endpoint)) not in self.scopes:
            raise Forbidden(f"This key may not use {endpoint}: it lacks the scope '{scope}'.")


def owner_of(request: Request) -> Owner:
    """Without a tenant's key, `default`: also in a service that had tenants before, and has none now."""
    given = request.headers.get(_HEADER)
    return _ANYONE if given is None else msgspec.json.decode(unquote(given), type=Owner)


_ANYONE = Owner(DEFAULT, "", None, list(SCOPES))


def is_for(owner: Owner | None, tenant: str) -> bool:
    """Whether what belongs to `tenant` is there for this client; all is for None, the service itself."""
    return owner is None or owner.tenant == tenant
