"""The forms of vLLM's endpoints: what turns JSON into their requests, and which field one fails on.

Validators of vLLM's own look into values before their types are checked, and what they then raise comes out
as a 500. Of each wrong item of a list they tell why it is of none of the forms that it may have: of thousands
that takes minutes. Importing this file imports vLLM.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal, cast

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import SchemaValidator, from_json
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest, ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.pooling.classify.protocol import ClassificationRequest
from vllm.entrypoints.pooling.embed.protocol import CohereEmbedRequest, EmbeddingRequest
from vllm.entrypoints.pooling.pooling.protocol import PoolingRequest
from vllm.entrypoints.pooling.scoring.protocol import ScoringRequest
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeRequest
from vllm.exceptions import VLLMClientError

from penstock.errors import BadRequest

_FORMS: tuple[Any, ...] = (
    *(
        AnthropicCountTokensRequest,
        AnthropicMessagesRequest,
        BatchChatCompletionRequest,
        ChatCompletionRequest,
    ),
    *(ClassificationRequest, CohereEmbedRequest, CompletionRequest, DetokenizeRequest, EmbeddingRequest),
    *(PoolingRequest, ResponsesRequest, ScoringRequest, TokenizeRequest),
)
_REFUSALS = (ValidationError, VLLMClientError, NotImplementedError)
"""What is no fault of the form."""


def models(form: Any) -> Iterator[type[BaseModel]]:
    """The models that a request of this form may be of."""
    if isinstance(form, type) and issubclass(form, BaseModel):
        yield form
    for part in typing.get_args(form):
        yield from models(part)


def fail_at_first_item() -> None:
    """From now on a list in a request fails at its first wrong item. Call it before vLLM's app is built."""
    for model in {model for form in _FORMS for model in models(form)}:
        schema: Any = model.__pydantic_core_schema__
        _hasten(schema, set())
        model.__pydantic_validator__ = SchemaValidator(schema)


def _hasten(part: Any, seen: set[int]) -> None:
    if id(part) in seen or not isinstance(part, dict | list | tuple):
        return
    seen.add(id(part))
    if isinstance(part, dict):
        part = cast("dict[str, Any]", part)
        if part.get("type") in ("list", "set", "tuple"):
            part["fail_fast"] = True
    for inner in part.values() if isinstance(part, dict) else part:
        _hasten(inner, seen)


def of(endpoint: Callable[..., Any]) -> TypeAdapter[Any]:
    """What turns JSON into the endpoint's request."""
    return TypeAdapter(typing.get_type_hints(endpoint, include_extras=True)["request"])


def blame(endpoint: Callable[..., Any], body: bytes) -> None:
    """For a request that failed. Raises: BadRequest that names the field, where its form fails on it, too."""
    try:
        form, fields = of(endpoint), from_json(body)
    except (KeyError, ValueError):  # it has no form, or the body is no JSON
        return
    if not isinstance(fields, dict) or _outcome(form, fields) != "failed":
        return
    fields = cast("dict[str, Any]", fields)
    without = {
        name: _outcome(form, {other: value for other, value in fields.items() if other != name})
        for name in fields
    }
    # Without a field that must be there the form refuses the rest, whatever is wrong with it.
    suspects = [name for name, outcome in without.items() if outcome == "read"]
    missed = [name for name, outcome in without.items() if outcome == "refused"]
    suspects += sorted(missed, key=lambda name: not isinstance(fields[name], dict | list))
    where = suspects[0] if suspects else "The request"
    facts = {"param": where} if suspects else {}
    raise BadRequest(f"{where}: a value in it is not of the type that this endpoint takes.", **facts)


def _outcome(form: TypeAdapter[Any], fields: Any) -> Literal["read", "refused", "failed"]:
    try:
        request = form.validate_python(fields)
        if isinstance(request, AnthropicMessagesRequest | AnthropicCountTokensRequest):
            AnthropicServingMessages.to_chat_completion_request(request)
    except _REFUSALS:
        return "refused"
    except Exception:  # whatever comes of a value that was not looked at
        return "failed"
    return "read"
