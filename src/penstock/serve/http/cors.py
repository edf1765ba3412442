"""Lets pages of configured origins call the gateway from a browser: preflights, and headers of each answer.

Stands before everything else in the gateway, so a preflight needs no key: browsers send none with it.
Replicas see no origin. Without an API key other pages are refused: a browser sends what they ask for to
addresses that only its user can reach, and so does a page whose name was bound to such an address.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware

from penstock.asgi import ASGIApp
from penstock.config.schema.gateway import CorsConfig, GatewayConfig
from penstock.errors import Forbidden

_METHODS = ("GET", "HEAD", "POST", "DELETE")
_EXPOSED = (
    *("x-request-id", "x-penstock-model", "x-penstock-continued"),
    *("server-timing", "retry-after", "www-authenticate"),
    *(
        f"x-ratelimit-{one}-{what}"
        for one in ("limit", "remaining", "reset")
        for what in ("requests", "tokens")
    ),
)
_LOCAL = (".localhost", ".internal")  # nobody can register names below them. RFC 6761, 6.3
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


class PageFilter:
    """Refuses what pages of other origins send to a gateway without an API key."""

    def __init__(self, config: GatewayConfig) -> None:
        """Names are checked where the gateway listens on the loopback interface: elsewhere, clients use names
        that it does not know.
        """
        origins = config.cors.origins if config.cors else []
        self._all = "*" in origins
        self._origins = frozenset(origins)
        address = _address(config.host)
        is_loopback = address.is_loopback if address else config.host == "localhost"
        known = {config.host, socket.gethostname(), *(urlsplit(origin).hostname or "" for origin in origins)}
        own_port = config.port is not None and is_loopback
        self._hosts = frozenset(name.lower() for name in known) if own_port else None

    def check(self, fields: Mapping[bytes, bytes]) -> None:
        """Raises: Forbidden."""
        if self._all:
            return
        host, origin = fields.get(b"host", b"").decode("latin-1").lower(), fields.get(b"origin")
        named = origin.decode("latin-1").lower() if origin is not None else ""
        if origin is not None and named not in self._origins and named.partition("://")[2] != host:
            raise Forbidden(
                f"Pages of the origin {named[:200]!r} may not use this server. Name it in 'cors' of the "
                "gateway, or set an API key."
            )
        if self._hosts is not None and host and not self._knows(host):
            raise Forbidden(
                f"This server listens for clients on its own machine and has no API key, so the host name "
                f"{host[:200]!r} is refused: a web page may have bound it to this address. Use 127.0.0.1 or "
                "localhost, name 'http://HOST' in 'cors' of the gateway, or set an API key."
            )

    def _knows(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        known = name == "localhost" or name.endswith(_LOCAL) or name in (self._hosts or ())
        return known or _address(name) is not None


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
