"""Requests and answers of the handle methods, under the names that users know.

Requests carry whatever the engine understands: they name the usual fields and let all others pass, so that
the engine alone decides. Answers of OpenAI's own endpoints are the official client's types.
"""

from __future__ import annotations

from typing import Any

from openai.types import Completion as CompletionResponse
from openai.types import CreateEmbeddingResponse as EmbeddingResponse
from openai.types.chat import ChatCompletion as ChatCompletionResponse
from pydantic import BaseModel, ConfigDict

__all__ = [
    "ANSWERS",
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "CompletionRequest",
    "CompletionResponse",
    "DetokenizeRequest",
    "DetokenizeResponse",
    "EmbeddingRequest",
    "EmbeddingResponse",
    "ErrorInfo",
    "ErrorResponse",
    "RawRequestInfo",
    "ScoreRequest",
    "ScoreResponse",
    "TokenizeRequest",
    "TokenizeResponse",
]


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())


class RawRequestInfo(_Open):
    """What is worth keeping of an HTTP request that became a handle call: its headers."""

    headers: dict[str, str] = {}


class Request(_Open):
    """Fields that every request has. `model` may be left out: a replica serves one."""

    model: str | None = None


class ChatCompletionRequest(Request):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    stream: bool = False


class CompletionRequest(Request):
    """Body of /v1/completions. Prompt: text, token ids, or a list of either."""

    prompt: str | list[int] | list[str] | list[list[int]]
    stream: bool = False


class EmbeddingRequest(Request):
    """Body of /v1/embeddings."""

    input: str | list[int] | list[str] | list[list[int]]


class ScoreRequest(Request):
    """Body of /v1/score (`text_1`/`text_2`, or `queries`/`documents`: the engine decides)."""


class TokenizeRequest(Request):
    """Body of /tokenize: `prompt`, or `messages` for the chat form."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


class DetokenizeRequest(Request):
    """Body of /detokenize."""

    tokens: list[int]


class ScoreResponse(_Open):
    """One score per pair, in the order of the request."""

    data: list[dict[str, Any]]


class TokenizeResponse(_Open):
    """Token ids of the text, and the model's context window in tokens."""

    tokens: list[int]
    count: int
    max_model_len: int | None = None


class DetokenizeResponse(_Open):
    """The text of the token ids."""

    prompt: str


class ErrorInfo(_Open):
    """The inside of OpenAI's error envelope. `code` is a string, always."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(_Open):
    """OpenAI's error envelope."""

    error: ErrorInfo


ANSWERS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionResponse,
    "/v1/completions": CompletionResponse,
    "/v1/embeddings": EmbeddingResponse,
    "/v1/score": ScoreResponse,
    "/tokenize": TokenizeResponse,
    "/detokenize": DetokenizeResponse,
}
"""What each path answers, errors and streams aside."""
