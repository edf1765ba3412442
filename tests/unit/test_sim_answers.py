"""The simulator's answers, whole and in events, have the forms of vLLM's own models, and no field beside."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesResponse, AnthropicStreamEvent
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.completion.protocol import CompletionResponse, CompletionStreamResponse
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.entrypoints.pooling.embed.protocol import EmbeddingResponse
from vllm.entrypoints.pooling.scoring.protocol import ScoreResponse
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeResponse, TokenizeResponse

from penstock.config import LLMConfig
from penstock.engines.sim.engine import SimEngine

pytestmark = pytest.mark.parity("X16")

SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
TURNS = [{"role": "user", "content": "one two"}]
WEATHER = {"name": "weather", "parameters": SCHEMA}
CHATS, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
USAGE = {"stream_options": {"include_usage": True}}
FORMS: dict[str, tuple[Any, Any]] = {
    CHATS: (ChatCompletionResponse, ChatCompletionStreamResponse),
    COMPLETIONS: (CompletionResponse, CompletionStreamResponse),
    RESPONSES: (ResponsesResponse, ResponseStreamEvent),
    MESSAGES: (AnthropicMessagesResponse, AnthropicStreamEvent),
}
"""Of a whole answer, and of an event."""

GENERATING: list[tuple[str, dict[str, Any]]] = [
    (CHATS, {"messages": TURNS, "n": 2, **USAGE}),
    (
        CHATS,
        {"messages": TURNS, "tools": [{"type": "function", "function": WEATHER}], "tool_choice": "required"},
    ),
    (COMPLETIONS, {"prompt": ["one two", "three"], "max_tokens": 1, **USAGE}),
    (RESPONSES, {"input": "one two", "instructions": "Repeat.", "metadata": {"a": "b"}, "user": "me"}),
    (RESPONSES, {"input": "one two", "max_output_tokens": 1, "temperature": 0.5}),
    (RESPONSES, {"input": "x", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}),
    (
        RESPONSES,
        {"input": "x", "tools": [{"type": "function", "strict": True, **WEATHER}], "tool_choice": "required"},
    ),
    (MESSAGES, {"messages": TURNS, "max_tokens": 9}),
    (MESSAGES, {"messages": TURNS, "max_tokens": 9, "stop_sequences": ["two"]}),
    (
        MESSAGES,
        {
            "messages": TURNS,
            "max_tokens": 99,
            "tools": [{"name": "weather", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
        },
    ),
]
OTHERS: list[tuple[str, dict[str, Any], Any]] = [
    ("/v1/embeddings", {"input": ["one", "two"]}, EmbeddingResponse),
    ("/v1/score", {"text_1": "one", "text_2": "two"}, ScoreResponse),
    ("/tokenize", {"prompt": "one"}, TokenizeResponse),
    ("/detokenize", {"tokens": []}, DetokenizeResponse),
]


@pytest_asyncio.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    options = {"step_base_ms": 0.0, "enable_prompt_tokens_details": True}
    engine = SimEngine(
        LLMConfig(model_loading_config={"model_id": "m"}, llm_engine="sim", engine_kwargs=options)
    )
    await engine.start()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(engine.app()), base_url="http://sim"
    ) as client:
        yield client
    await engine.stop()


def extra(value: Any) -> list[str]:
    """Fields that the models in `value` do not have."""
    if isinstance(value, list):
        return [name for one in value for name in extra(one)]
    if not isinstance(value, BaseModel):
        return []
    return [*(value.model_extra or ()), *(name for _, one in value for name in extra(one))]


def has_form(value: Any, form: Any) -> None:
    found: Any = TypeAdapter(form).validate_python(value)
    assert extra(found) == []
    assert found.model_dump(mode="json", exclude_unset=True, by_alias=True) == value


async def ask(http: httpx.AsyncClient, path: str, **body: Any) -> httpx.Response:
    answer = await http.post(path, json={"model": "m"} | body)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize(("path", "body"), GENERATING)
async def test_an_answer_has_the_form_of_vllms(http: httpx.AsyncClient, path: str, body: dict[str, Any]):
    whole, event = FORMS[path]
    has_form((await ask(http, path, **{**body, "stream_options": None})).json(), whole)
    streamed = await ask(http, path, stream=True, **body)
    for text in streamed.text.replace("data: [DONE]\n\n", "").removesuffix("\n\n").split("\n\n"):
        name, _, data = text.rpartition("data: ")
        said = json.loads(data)
        assert name == (f"event: {said['type']}\n" if path in (RESPONSES, MESSAGES) else "")
        if said.get("type") == "response.function_call_arguments.done":
            assert said.pop("name") == "weather"  # vLLM sends it beside OpenAI's fields
        has_form(said["response"], whole) if "response" in said else has_form(said, event)


@pytest.mark.parametrize(("path", "body", "form"), OTHERS)
async def test_other_answers_have_the_form_of_vllms(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], form: Any
):
    has_form((await ask(http, path, **body)).json(), form)
