"""The endpoints that a model has in vLLM's application: errors about missing ones, and a first request.

vLLM mounts only the routes of a model's task; others look like unknown paths. Before an engine counts as
ready, it answers a request through its application like all others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from penstock.asgi import ASGIApp
from penstock.asgi_client import call
from penstock.engines.edge import Absent
from penstock.engines.foreign import said
from penstock.errors import EndpointNotSupported, Error
from penstock.openai.paths import ENGINE_PATHS

log = logging.getLogger(__name__)

_OF_TASKS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v2/embed",
    "/classify",
    "/score",
    "/rerank",
    "/pooling",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
)
"""Endpoints worth naming in such an error."""

_TEXT = "Hello"
_ASKED: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": _TEXT}], "max_tokens": 1},
    "/v1/completions": {"prompt": _TEXT, "max_tokens": 1},
    "/v1/embeddings": {"input": _TEXT},
    "/classify": {"input": _TEXT},
    "/rerank": {"query": _TEXT, "documents": [_TEXT]},
    "/pooling": {"input": _TEXT},
}
"""Requests in the order in which they are tried; a model has some of these endpoints."""


def absence(model_id: str, routes: Iterable[Any]) -> Absent:
    """A function from a path to the error that this model lacks it, or to None when it has it."""
    paths = {route.path for route in routes}
    answered = [path for path in _OF_TASKS if path in paths]

    def absent(path: str) -> Error | None:
        if path in paths or path not in ENGINE_PATHS:
            return None
        return EndpointNotSupported(
            f"Model '{model_id}' does not answer {path}; it answers {', '.join(answered)}.", param="model"
        )

    return absent


async def is_answered(app: ASGIApp, model_id: str, paths: set[str]) -> bool:
    """Whether one of these requests was answered; a model that refuses all of them may take others.

    app: the engine's, with these paths. Raises: RuntimeError if a request failed, but for `/pooling`, which
    may need what only a plugin's users know.
    """
    for path in [path for path in _ASKED if path in paths]:
        response = await call(app, path, msgspec.json.encode({"model": model_id, **_ASKED[path]}))
        async with aclosing(response):
            body = await response.read()
        if response.status == 200:
            return True
        message, _ = said(body)
        if response.status == 500 and path != "/pooling":
            raise RuntimeError(f"its first request to {path} failed, see the log")
        level = logging.WARNING if response.status == 500 else logging.INFO
        log.log(level, "%s: %s refused the first request: %s", model_id, path, message)
    return False
