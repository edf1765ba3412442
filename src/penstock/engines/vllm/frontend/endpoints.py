"""The endpoints that a model has in vLLM's application, for errors about one that it lacks.

vLLM gives a model the routes of its task and leaves out the others, as if there were no such path at all.
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
"""Less known names and companions of these."""


def absence(model_id: str, routes: Iterable[Any]) -> Absent:
    """Gives for a path the error that it is none of this model's, or None when it is one."""
    paths = {route.path for route in routes}
    answered = [path for path in _OF_TASKS if path in paths]

    def absent(path: str) -> Error | None:
        if path in paths or path not in (*_OF_TASKS, *_VARIANTS):
            return None
        return EndpointNotSupported(
            f"Model '{model_id}' does not answer {path}; it answers {', '.join(answered)}.", param="model"
        )

    return absent
