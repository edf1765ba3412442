"""A request that vLLM's own form fails on is the client's fault, and the field at fault is named."""

from __future__ import annotations

from typing import Annotated, Any

import httpx
import pytest
from fastapi import Body, FastAPI, Request
from openai.types.responses import ResponseInputFile, ResponseOutputMessage
from openai.types.responses.response_reasoning_item import ResponseReasoningItem
from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json
from vllm.entrypoints.anthropic.api_router import create_messages
from vllm.entrypoints.openai.chat_completion.api_router import create_chat_completion
from vllm.entrypoints.openai.completion.api_router import create_completion
from vllm.entrypoints.openai.responses.api_router import create_responses
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.pooling.embed.api_router import create_embedding
from vllm.entrypoints.serve.tokenize.api_router import tokenize as create_tokenize

from penstock.engines.vllm.frontend import request_models
from penstock.engines.vllm.frontend.direct_routes import DirectRoutes
from penstock.errors import BadRequest
from penstock.openai import requests

MESSAGES = [{"role": "user", "content": "hi"}]
IMAGE = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": 5}]}


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        (create_chat_completion, {"messages": MESSAGES, "structured_outputs": "x"}, "structured_outputs"),
        (create_completion, {"prompt": "hi", "structured_outputs": "x"}, "structured_outputs"),
        (create_chat_completion, {"messages": 5}, "messages"),
        (create_messages, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages"),
    ],
)
def test_a_field_that_a_form_fails_on_is_named(endpoint: Any, body: dict[str, Any], param: str):
    with pytest.raises(BadRequest, match=param) as refused:
        request_models.blame(endpoint, to_json({"model": "m", "max_tokens": 3} | body))
    assert refused.value.facts["param"] == param


@pytest.mark.parametrize("body", [b"{", b"[]", to_json({"messages": MESSAGES}), to_json({"messages": []})])
def test_a_request_that_its_form_reads_or_refuses_failed_elsewhere(body: bytes):
    request_models.blame(create_chat_completion, body)


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (create_chat_completion, {"messages": [1] * 500}),
        (create_responses, {"input": [1] * 500}),
        (create_responses, {"input": [{"role": "user", "content": [{"type": "x"}] * 500}]}),
        (create_messages, {"messages": [1] * 500}),
        (create_tokenize, {"messages": [1] * 500}),
        (create_embedding, {"messages": [1] * 500}),
    ],
)
def test_a_list_fails_at_its_first_wrong_item(endpoint: Any, body: dict[str, Any]):
    request_models.fail_at_first_item()
    with pytest.raises(ValidationError) as refused:
        request_models.of(endpoint).validate_python({"model": "m", "max_tokens": 3} | body)
    assert refused.value.error_count() < 500


PARTS = [{"type": "output_text", "text": "a", "annotations": None}, {"type": "refusal", "refusal": "b"}]


@pytest.mark.parametrize(
    ("endpoint", "path", "body"),
    [
        (create_responses, "/v1/responses", {"input": [{"role": "assistant", "content": PARTS}]}),
        (create_responses, "/v1/responses", {"input": [{"role": "assistant", "content": []}]}),
        (create_responses, "/v1/responses", {"input": [{"type": "reasoning", "id": None, "summary": []}]}),
        (create_responses, "/v1/responses", {"input": "x", "tools": None, "tool_choice": None}),
        (create_completion, "/v1/completions", {"prompt": "x", "n": None}),
        (create_embedding, "/v1/embeddings", {"input": "x", "encoding_format": None}),
    ],
)
def test_what_clients_of_openai_send_is_read(endpoint: Any, path: str, body: dict[str, Any]):
    request_models.of(endpoint).validate_python(requests.prepared(path, body))


def test_a_null_that_the_answer_repeats_is_the_default():
    asked = requests.prepared("/v1/responses", {"input": "x", "background": None})
    assert ResponsesRequest.model_validate(asked).background is False


def test_models_that_the_openai_client_has_built_fail_there_too():
    for model in (ResponseInputFile, ResponseOutputMessage, ResponseReasoningItem):
        model.model_rebuild()
    request_models.fail_at_first_item()
    content = [{"role": "user", "content": [{"type": "x"}] * 500}]
    forms: tuple[Any, ...] = (ResponsesRequest, Annotated[ResponsesRequest, Body()])
    for form in forms:
        with pytest.raises(ValidationError) as refused:
            TypeAdapter(form).validate_python({"model": "m", "input": content})
        assert refused.value.error_count() < 500


async def test_vllm_is_sent_a_changed_request_with_its_own_length():
    app = FastAPI()

    @app.post("/v1/responses")
    async def echo(sent: Request) -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        return {"body": (await sent.body()).decode(), "length": sent.headers["content-length"]}

    given = '{"input": "x", "tools": null, "temperature": NaN, "seed": 123456789012345678901234567890}'
    sent = '{"input":"x","temperature":NaN,"seed":123456789012345678901234567890}'
    transport = httpx.ASGITransport(DirectRoutes(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
        for text, body in ((given, sent), ('{"input":  "x"}', '{"input":  "x"}')):
            answer = await http.post(
                "/v1/responses", content=text, headers={"content-type": "application/json"}
            )
            assert answer.json() == {"body": body, "length": str(len(body))}
        with pytest.raises(BadRequest, match="`conversation` is not supported"):
            await http.post("/v1/responses", json={"input": "x", "conversation": "conv_1"})
