"""Requests and responses of the handle API.

Requests declare the usual fields and allow all others: the engine decides. Responses of OpenAI's endpoints
are the official client's types.
"""

from __future__ import annotations

from typing import Annotated, Any

from openai.types import Completion, CreateEmbeddingResponse, Embedding
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from openai.types.shared import ErrorObject
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from penstock.serve.replica.handles import multipart

ChatCompletionResponse = ChatCompletion
ChatCompletionStreamResponse = ChatCompletionChunk
CompletionResponse = Completion
CompletionStreamResponse = Completion
ResponsesResponse = Response
ErrorInfo = ErrorObject


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())


class RawRequestInfo(_Open):
    """The headers of an HTTP request that became a call by handle."""

    headers: dict[str, str] = {}


class _Request(_Open):
    """`model` may be left out: a replica serves one."""

    model: str | None = None


class ChatCompletionRequest(_Request):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    stream: bool = False


class CompletionRequest(_Request):
    """Body of /v1/completions. Prompt: text, token ids, or a list of either."""

    prompt: str | list[int] | list[str] | list[list[int]]
    stream: bool = False


class ResponsesRequest(_Request):
    """Body of /v1/responses. input: text, or a list of items."""

    input: str | list[dict[str, Any]]
    stream: bool = False


class MessagesRequest(_Request):
    """Body of /v1/messages, as Anthropic's clients send it."""

    messages: list[dict[str, Any]]
    max_tokens: int
    stream: bool = False


class EmbeddingRequest(_Request):
    """Body of /v1/embeddings. input: text, token ids, or a list of either."""

    input: str | list[int] | list[str] | list[list[int]]


class ScoreRequest(_Request):
    """Body of /v1/score (`text_1`/`text_2`, or `queries`/`documents`: the engine decides)."""


class RerankRequest(_Request):
    """Body of /v1/rerank. top_n: of the documents, best first; all unless given."""

    query: str | dict[str, Any]
    documents: list[str | dict[str, Any]]


class ClassificationRequest(_Request):
    """Body of /classify: `input` as for embeddings."""

    input: str | list[int] | list[str] | list[list[int]]


class PoolingRequest(_Request):
    """Body of /pooling: `input` as for embeddings, or whatever the model's own processor takes as `data`."""


class TokenizeRequest(_Request):
    """Body of /tokenize: `prompt`, or `messages` for the chat form."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


class DetokenizeRequest(_Request):
    """Body of /detokenize."""

    tokens: list[int]


class EmbeddingData(Embedding):
    """One vector; a text where the request asks for base64."""

    embedding: list[float] | str  # pyright: ignore[reportIncompatibleVariableOverride]


class EmbeddingResponse(CreateEmbeddingResponse):
    """The official client's, before that decodes base64."""

    data: list[EmbeddingData]  # pyright: ignore[reportIncompatibleVariableOverride]


class TranscriptionRequest(_Request):
    """Form of /v1/audio/transcriptions and /v1/audio/translations.

    file: bytes or a file, which is read at once, so that the request can travel to a replica.
    """

    file: Annotated[tuple[str, bytes], BeforeValidator(multipart.content)]
    language: str | None = None
    response_format: str = "json"
    stream: bool = False


class ScoreResponse(_Open):
    """One score per pair, in the order of the request."""

    data: list[dict[str, Any]]


class RerankResponse(_Open):
    """`index` (of the request), `document` and `relevance_score` of each document, best first."""

    results: list[dict[str, Any]]


class ClassificationResponse(_Open):
    """`label` and `probs` of each input, in the order of the request."""

    data: list[dict[str, Any]]


class PoolingResponse(_Open):
    """What the model's pooler gives for each input: `data`, a vector, or one for each token."""

    data: list[dict[str, Any]]


class MessagesResponse(_Open):
    """What Anthropic's clients call a `Message`."""

    role: str
    content: list[dict[str, Any]]
    stop_reason: str | None = None


class TokenizeResponse(_Open):
    """Token ids of the text, and the model's context window in tokens."""

    tokens: list[int]
    count: int
    max_model_len: int | None = None


class DetokenizeResponse(_Open):
    """The text of the token ids."""

    prompt: str


class TranscriptionResponse(_Open):
    """What was said. The other fields are `verbose_json`'s. Units: seconds."""

    text: str
    language: str | None = None
    duration: float | None = None
    segments: list[dict[str, Any]] | None = None


class TranscriptionStreamResponse(_Open):
    """One event of a streamed transcription: its pieces of text."""

    choices: list[dict[str, Any]] = []


class ErrorResponse(_Open):
    """OpenAI's error envelope."""

    error: ErrorInfo

    @classmethod
    def of(cls, status: int, body: bytes) -> ErrorResponse:
        """The error of a response. One in an engine's own format becomes the message."""
        try:
            return cls.model_validate_json(body)
        except ValidationError:
            kind = "server_error" if status >= 500 else "invalid_request_error"
            message = body.decode(errors="replace") or f"The engine answered {status}."
            return cls(error=ErrorInfo(message=message, type=kind, code=f"status_{status}"))


RESPONSES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionResponse,
    "/v1/completions": CompletionResponse,
    "/v1/responses": ResponsesResponse,
    "/v1/messages": MessagesResponse,
    "/v1/embeddings": EmbeddingResponse,
    "/v1/score": ScoreResponse,
    "/v1/rerank": RerankResponse,
    "/classify": ClassificationResponse,
    "/pooling": PoolingResponse,
    "/v1/audio/transcriptions": TranscriptionResponse,
    "/v1/audio/translations": TranscriptionResponse,
    "/tokenize": TokenizeResponse,
    "/detokenize": DetokenizeResponse,
}
"""By path; not for errors and streams."""
