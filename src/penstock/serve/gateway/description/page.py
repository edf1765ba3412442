"""`/docs`: a page over `/openapi.json` that asks no other host for anything.

It holds no facts of the service, so it needs no key: the description that it loads does.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from penstock.transport.connection import Headers

HEADERS: Headers = [
    (b"content-type", b"text/html; charset=utf-8"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
]


@cache
def html() -> bytes:
    """The whole page."""
    return (files("penstock.serve.gateway.description") / "page.html").read_bytes()
