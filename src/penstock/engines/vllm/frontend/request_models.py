"""Parses JSON into the request models of vLLM's endpoints, and names the field at fault.

Some of vLLM's validators look into values before their types are checked, and what they raise becomes a 500.
For each wrong item of a list pydantic reports why it fits no member of the union: with thousands of items,
that takes minutes. Importing this file imports vLLM.

Work-around for vLLM 0.32. Remove when it answers wrong values with 400, and wrong lists at once.
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
"""Errors that are no crash of a validator."""


def models(form: Any) -> Iterator[type[BaseModel]]:
    """The models that a request of this type may have."""
    if isinstance(form, type) and issubclass(form, BaseModel):
        yield form
    for part in typing.get_args(form):
        yield from models(part)


def fail_at_first_item() -> None:
    """Makes validation of a list stop at its first wrong item. Call it before vLLM's app is built.

    Nested models are changed as well: a model's validator is built from theirs once they are complete. Those
    of the openai package are complete from their first use on.
    """
    waiting = [model for form in _FORMS for model in models(form)]
    changed, seen = set[Any](), set[int]()
    while waiting:
        model: Any = waiting.pop()
        if model in changed:
            continue
        changed.add(model)
        if not model.__pydantic_complete__:
            model.model_rebuild()
        schema: Any = model.__pydantic_core_schema__
        for part in _parts(schema, seen):
            kind = part.get("type")
            if kind in ("list", "set", "tuple"):
                part["fail_fast"] = True
            elif kind in ("model", "dataclass"):
                waiting.append(part["cls"])
        model.__pydantic_validator__ = SchemaValidator(schema, _use_prebuilt=False)


def _parts(schema: Any, seen: set[int]) -> Iterator[dict[str, Any]]:
    """The mappings in a core schema that were not visited yet."""
    if id(schema) in seen or not isinstance(schema, dict | list | tuple):
        return
    seen.add(id(schema))
    if isinstance(schema, dict):
        yield cast("dict[str, Any]", schema)
        inner: Any = schema.values()
    else:
        inner = schema
    for part in inner:
        yield from _parts(part, seen)


def of(endpoint: Callable[..., Any]) -> TypeAdapter[Any]:
    """The parser from JSON to the endpoint's request."""
    return TypeAdapter(typing.get_type_hints(endpoint, include_extras=True)["request"])


def blame(endpoint: Callable[..., Any], body: bytes) -> None:
    """Call it for a request that failed. Raises: BadRequest naming the field, if validation fails, too."""
    try:
        form, fields = of(endpoint), from_json(body)
    except (KeyError, ValueError):  # it has no model, or the body is not JSON
        return
    if not isinstance(fields, dict) or _outcome(form, fields) != "failed":
        return
    fields = cast("dict[str, Any]", fields)
    without = {
        name: _outcome(form, {other: value for other, value in fields.items() if other != name})
        for name in fields
    }
    # A missing field hides whatever else is wrong with the rest.
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
    except Exception:  # a validator crashed on an unchecked value
        return "failed"
    return "read"
