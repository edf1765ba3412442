"""Which paths a client may reach: with the API key, a tenant's key, the admin key, or without any.

Without a key in the config, requests of web pages that `cors` does not name are refused.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Mapping

from penstock.config import GatewayConfig
from penstock.config.schema.tenants import scope_of
from penstock.errors import Forbidden, NotFound, Unauthorized, Unavailable
from penstock.serve.gateway import routes
from penstock.serve.gateway.request import ClientRequest
from penstock.serve.gateway.routes import Route
from penstock.serve.http.cors import PageFilter
from penstock.serve.tenancy.keys import KeyTable

_NO_KEYS = "Keys cannot be checked now: the gateway's file of keys cannot be read. Its log says why."
_SCOPED = ("engine", "jobs", "metrics", "admin")
"""What answers routes that not every key may use."""


class Auth:
    """Finds the route of a request that its client may reach."""

    def __init__(
        self,
        config: GatewayConfig,
        paths: Mapping[str, Route],
        *,
        administered: bool,
        has_jobs: bool,
        keys: KeyTable | None = None,
    ) -> None:
        """paths: endpoints of users' server classes. administered: whether `/admin` can do anything.
        has_jobs: whether there are files and batches. keys: of tenants, where there are any.
        """
        self.has_jobs = has_jobs
        self._paths = paths
        self._keys = keys
        self._key = config.api_key.get_secret_value().encode() if config.api_key and keys is None else None
        self._admin_key = config.admin_key.get_secret_value().encode() if config.admin_key else None
        self.keyed = self._key is not None or keys is not None
        self.administered = administered and (self._admin_key is not None or keys is not None)
        self._pages = None if self.keyed else PageFilter(config)

    def route(self, request: ClientRequest) -> Route:
        """The route. Without the key only public ones are found, so that clients cannot tell others apart.

        Raises: Unauthorized, Forbidden, NotFound.
        """
        try:
            route = routes.find(request.path, self._paths)
        except NotFound:
            self._check(request)
            raise
        if route.handler == "admin":
            if not self.administered:
                self._check(request)
                raise routes.unknown(request.path)
            self._check_admin(request, route)
        elif route.public:
            request.has_key = self._has_key(request) or self._has_admin_key(request)
        else:
            self._check(request, route)
            if self._pages is not None:
                self._pages.check(request.fields)
        if route.handler == "jobs" and not self.has_jobs:
            raise routes.unknown(request.path)
        return route

    def _has_key(self, request: ClientRequest) -> bool:
        if self._keys is None:
            return _has(request, self._key)
        if request.grant is None:
            request.grant = self._keys.find(given(request), time.time())
        return request.grant is not None

    def _has_admin_key(self, request: ClientRequest) -> bool:
        return self._admin_key is not None and _has(request, self._admin_key)

    def _check(self, request: ClientRequest, route: Route | None = None) -> None:
        """Raises: Unauthorized; Unavailable while not all keys are known; Forbidden when the key may not use
        the route.
        """
        if not self._has_key(request):
            if request.refusal is not None:
                raise request.refusal
            if self._keys is not None and self._keys.is_partial:
                raise Unavailable(_NO_KEYS)
            raise _unauthorized()
        if route is not None and (grant := request.grant) is not None:
            scope = scope_of(route.path)
            if scope not in grant.scopes and route.handler in _SCOPED:
                raise Forbidden(f"This key may not use {request.path[:200]}: it lacks the scope '{scope}'.")

    def _check_admin(self, request: ClientRequest, route: Route) -> None:
        """Takes the admin key, or a tenant's with that scope."""
        if not self._has_admin_key(request):
            if self._keys is None:
                raise _unauthorized()
            self._check(request, route)


def given(request: ClientRequest) -> bytes:
    """The key that the client has sent."""
    bearer = request.fields.get(b"authorization", b"")
    scheme, _, key = bearer.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else request.fields.get(b"x-api-key", b"")


def _has(request: ClientRequest, wanted: bytes | None) -> bool:
    return wanted is None or hmac.compare_digest(given(request), wanted)


def _unauthorized() -> Unauthorized:
    return Unauthorized(
        "The API key is missing, wrong or expired; send it as 'Authorization: Bearer KEY' or "
        "'x-api-key: KEY'.",
        www_authenticate="Bearer",
    )
