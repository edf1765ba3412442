"""Lets pages of configured origins call the gateway from a browser: preflights, and headers of each answer.

Stands before everything else in the gateway, so a preflight needs no key: browsers send none with it.
Replicas see no origin.
"""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware

from penstock.asgi import ASGIApp
from penstock.config.schema.gateway import CorsConfig

_METHODS = ("GET", "HEAD", "POST", "DELETE")
_EXPOSED = ("x-request-id", "x-penstock-model", "server-timing", "retry-after", "www-authenticate")
_PREFLIGHT_S = 600  # for which a browser remembers the answer


def allowing(config: CorsConfig, app: ASGIApp) -> ASGIApp:
    """`app` for pages of these origins, with whatever headers their clients send."""
    return CORSMiddleware(
        app,
        allow_origins=config.origins,
        allow_methods=_METHODS,
        allow_headers=("*",),
        allow_credentials=config.credentials,
        expose_headers=_EXPOSED,
        max_age=_PREFLIGHT_S,
    )
