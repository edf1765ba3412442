"""Which paths a client may reach: with the API key, with the admin key, or without any.

Without an API key, requests of web pages that `cors` does not name are refused.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from penstock.config import GatewayConfig
from penstock.errors import NotFound, Unauthorized
from penstock.serve.gateway import routes
from penstock.serve.gateway.request import ClientRequest
from penstock.serve.gateway.routes import Route
from penstock.serve.http.cors import PageFilter


class Auth:
    """Finds the route of a request that its client may reach."""

    def __init__(
        self, config: GatewayConfig, paths: Mapping[str, Route], *, administered: bool, has_jobs: bool
    ) -> None:
        """paths: endpoints of users' server classes. administered: whether `/admin` can do anything.
        has_jobs: whether there are files and batches.
        """
        self.has_jobs = has_jobs
        self._paths = paths
        self.key = config.api_key.get_secret_value().encode() if config.api_key else None
        admin_key = config.admin_key.get_secret_value().encode() if config.admin_key else None
        self.admin_key = admin_key if administered else None
        self._pages = None if self.key else PageFilter(config)

    def route(self, request: ClientRequest) -> Route:
        """The route. Without the key only public ones are found, so that clients cannot tell others apart.

        Raises: Unauthorized, Forbidden, NotFound.
        """
        try:
            route = routes.find(request.path, self._paths)
        except NotFound:
            _check(request, self.key)
            raise
        if route.handler == "admin":
            if self.admin_key is None:
                _check(request, self.key)
                raise routes.unknown(request.path)
            _check(request, self.admin_key)
        elif route.public:
            request.has_key = _has(request, self.key)
        else:
            _check(request, self.key)
            if self._pages is not None:
                self._pages.check(request.fields)
        if route.handler == "jobs" and not self.has_jobs:
            raise routes.unknown(request.path)
        return route


def _has(request: ClientRequest, wanted: bytes | None) -> bool:
    if wanted is None:
        return True
    bearer = request.fields.get(b"authorization", b"")
    scheme, _, key = bearer.partition(b" ")
    given = key.strip() if scheme.lower() == b"bearer" else request.fields.get(b"x-api-key", b"")
    return hmac.compare_digest(given, wanted)


def _check(request: ClientRequest, wanted: bytes | None) -> None:
    if not _has(request, wanted):
        raise Unauthorized(
            "The API key is missing or wrong; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
            www_authenticate="Bearer",
        )
