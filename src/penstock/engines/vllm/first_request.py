"""The request that an engine answers before it counts as ready, through its application like all others."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from penstock.asgi import ASGIApp
from penstock.asgi_client import call
from penstock.engines.foreign import said

log = logging.getLogger(__name__)

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


async def is_answered(app: ASGIApp, model_id: str, paths: set[str]) -> bool:
    """Whether one of these requests was answered; a model that refuses all of them may take others.

    app: the engine's, with these paths. Raises: RuntimeError if a request failed, but for `/pooling`, which
    may need what only a plugin's users know.
    """
    for path in [path for path in _ASKED if path in paths]:
        response = await call(app, path, msgspec.json.encode({"model": model_id, **_ASKED[path]}))
        async with aclosing(response.body):
            body = await response.read()
        if response.status == 200:
            return True
        message, _ = said(body)
        if response.status == 500 and path != "/pooling":
            raise RuntimeError(f"its first request to {path} failed, see the log")
        level = logging.WARNING if response.status == 500 else logging.INFO
        log.log(level, "%s: %s refused the first request: %s", model_id, path, message)
    return False
