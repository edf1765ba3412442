"""The paths that clients can reach, and their handlers. Every other path is a 404, except models' own
endpoints.

An engine's app has more paths, which stop, pause, reload or inspect it. They are not public; the gateway's
administration is under `/admin`, if an admin key is configured.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from penstock.errors import MethodNotAllowed, NotFound
from penstock.openai.paths import ENGINE_PATHS

Handler = Literal[
    "engine", "root", "docs", "openapi", "version", "models", "health", "alive", "metrics", "admin", "jobs"
]
"""What answers a path."""


@dataclass(frozen=True, slots=True)
class Route:
    """One path, as named in metrics. public: needs no API key. argument: the id in the path.

    own: an endpoint of some models' server class, see `ServedModel.paths`.
    """

    path: str
    methods: tuple[str, ...]
    handler: Handler
    public: bool = False
    argument: str | None = None
    own: bool = False

    @property
    def allow(self) -> str:
        """Value of the Allow header."""
        heads = ("HEAD",) if "GET" in self.methods else ()
        return ", ".join((*self.methods, *heads, "OPTIONS"))


_GET, _POST = ("GET",), ("POST",)
_FIXED = (
    *(Route(path, _POST, "engine") for path in ENGINE_PATHS),
    Route("/tokenizer_info", _GET, "engine"),
    Route("/v1/models", _GET, "models"),
    Route("/health", _GET, "health", public=True),
    Route("/ping", _GET, "health", public=True),  # what SageMaker asks
    Route("/readyz", _GET, "health", public=True),
    Route("/livez", _GET, "alive", public=True),
    Route("/-/healthz", _GET, "alive", public=True),  # what KubeRay asks on every node
    Route("/version", _GET, "version"),
    Route("/metrics", _GET, "metrics"),
    Route("/", _GET, "root", public=True),
    Route("/docs", _GET, "docs", public=True),
    Route("/openapi.json", _GET, "openapi"),
    Route("/v1/files", ("GET", "POST"), "jobs"),
    Route("/v1/batches", ("GET", "POST"), "jobs"),
)
_ROUTES = {route.path: route for route in _FIXED}
_WITH_ID = (
    Route("/v1/responses/{id}", ("GET", "DELETE"), "engine"),
    Route("/v1/responses/{id}/cancel", _POST, "engine"),
    Route("/v1/responses/{id}/input_items", _GET, "engine"),
    Route("/v1/files/{id}", ("GET", "DELETE"), "jobs"),
    Route("/v1/files/{id}/content", _GET, "jobs"),
    Route("/v1/batches/{id}", _GET, "jobs"),
    Route("/v1/batches/{id}/cancel", _POST, "jobs"),
)
_ONE_MODEL = Route("/v1/models/{id}", _GET, "models")
_ADMIN = Route("/admin/{operation}", _POST, "admin")
_PATTERNS = (
    *((re.compile(route.path.replace("{id}", "([A-Za-z0-9_-]{1,128})")), route) for route in _WITH_ID),
    (re.compile("/v1/models/(.+)", re.DOTALL), _ONE_MODEL),
    (re.compile("/admin/(status|usage|fleet/history|fleet/audit)"), replace(_ADMIN, methods=_GET)),
    (re.compile("/admin/(fleet)"), replace(_ADMIN, methods=("GET", "PUT"))),
    (re.compile("/admin/(.*)", re.DOTALL), _ADMIN),
    (re.compile("/v1/(organization/[a-z_/]+)"), Route("/v1/organization/{what}", _GET, "admin")),
)

ALL = (*_FIXED, *_WITH_ID, _ONE_MODEL)
"""Every path but those of administration and of models' server classes."""

RESERVED = frozenset(route.path for route in _FIXED if route.handler != "engine")
"""Paths that the gateway always answers itself."""


def own(paths: Iterable[str]) -> dict[str, Route]:
    """Routes of models' own POST endpoints."""
    return {path: Route(path, _POST, "engine", own=path not in _ROUTES) for path in paths}


def find(path: str, added: Mapping[str, Route] | None = None) -> Route:
    """The route of a decoded path. added: routes of models' own endpoints. Raises: NotFound."""
    route = _ROUTES.get(path) or (added or {}).get(path)
    if route is not None:
        return route
    for pattern, route in _PATTERNS:
        if match := pattern.fullmatch(path):
            return replace(route, argument=match[1])
    raise unknown(path)


def unknown(path: str) -> NotFound:
    """The error for an unknown path."""
    return NotFound(f"There is no path '{path[:200]}' here; the models served are listed under /v1/models.")


def check_method(route: Route, method: str) -> None:
    """Raises: MethodNotAllowed, which lists the allowed methods."""
    if method not in route.methods and not (method == "HEAD" and "GET" in route.methods):
        raise MethodNotAllowed(
            f"The method {method[:20]} is not allowed here; allowed are {route.allow}.", allow=route.allow
        )


def below(root_path: str, path: str) -> str:
    """`path` without the prefix under which an outer server mounts us.

    Source: ASGI's HTTP scope, where `path` includes `root_path`; some servers leave it out, which is fine.
    """
    root = root_path.rstrip("/")
    if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
        return path[len(root) :] or "/"
    return path
