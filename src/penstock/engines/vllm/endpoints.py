"""The endpoints that a model has in vLLM's application, for errors about missing ones.

vLLM mounts only the routes of a model's task; others look like unknown paths.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.engines.edge import Absent
from penstock.errors import EndpointNotSupported, Error

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

_VARIANTS = (
    "/v1/generate",
    "/v1/score",
    "/v1/rerank",
    "/v2/rerank",
    "/v1/messages/count_tokens",
    "/v1/chat/completions/batch",
    "/generative_scoring",
)
"""Less known names and relatives of these."""


def absence(model_id: str, routes: Iterable[Any]) -> Absent:
    """A function from a path to the error that this model lacks it, or to None when it has it."""
    paths = {route.path for route in routes}
    answered = [path for path in _OF_TASKS if path in paths]

    def absent(path: str) -> Error | None:
        if path in paths or path not in (*_OF_TASKS, *_VARIANTS):
            return None
        return EndpointNotSupported(
            f"Model '{model_id}' does not answer {path}; it answers {', '.join(answered)}.", param="model"
        )

    return absent
