"""POST endpoints of engines, for the gateway's routes and for batch files; a model has those of its task."""

from __future__ import annotations

METHODS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "embeddings": "/v1/embeddings",
    "score": "/v1/score",
    "rerank": "/v1/rerank",
    "classify": "/classify",
    "pooling": "/pooling",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}
"""By the names of methods in Python that ask them."""

UPLOADS = {"transcriptions": "/v1/audio/transcriptions", "translations": "/v1/audio/translations"}
"""The same for those that take a form with a file."""

BATCH_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/generate",
    "/v1/embeddings",
    "/v2/embed",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/classify",
    "/pooling",
    "/tokenize",
    "/detokenize",
)
"""Endpoints of docs/reference/endpoints.md with JSON requests and responses."""

ENGINE_PATHS = (
    *BATCH_PATHS,
    "/v1/chat/completions/batch",
    "/v1/chat/completions/render",
    "/v1/chat/completions/derender",
    "/v1/completions/render",
    "/v1/completions/derender",
    "/v1/responses/render",
    "/v1/responses/input_tokens",
    "/v1/messages/render",
    "/v1/messages/count_tokens",
    "/v1/systemone",
    *UPLOADS.values(),
    "/cohere/v2/chat",
    "/inference/v1/generate",
    "/generative_scoring",
)
"""All of them."""
