"""Calls that a request forces, as the clients of users ask for them and parse them. The model makes no sense.

So what comes back is an object that fits its schema because it is enforced, not because the model is able.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import anthropic
import openai
import pytest
import pytest_asyncio
from asking import CHAT, ask, calls, user
from enginetest import MODEL_ID, Served, serve, vllm_config
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.parity("S11")]

QUESTION = "What is Penstock?"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
}


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Oslo"]
    celsius: bool


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def caller() -> AsyncIterator[Served]:
    """An engine of its own, with a parser of tools: beside one, streams of the shared engine are not fast."""
    tools = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    async with serve(vllm_config(max_num_seqs=4, kv_cache_memory_bytes=1 << 26, **tools)) as served:
        yield served


@pytest.fixture(scope="module")
def langchain(caller: Served) -> ChatOpenAI:
    url = f"{caller.http.base_url}/v1/"
    return ChatOpenAI(model=MODEL_ID, base_url=url, api_key="any", max_retries=0, temperature=0)


async def test_langchain_parses_what_any_tool_is_called_with(langchain: ChatOpenAI):
    said = await langchain.bind_tools([Weather], tool_choice="any").ainvoke(QUESTION)
    assert said.tool_calls
    for call in said.tool_calls:
        assert call["name"] == "Weather"
        Weather(**call["args"])


async def test_langchain_gets_the_object_that_it_asks_for(langchain: ChatOpenAI):
    found = await langchain.with_structured_output(Weather, method="function_calling").ainvoke(QUESTION)
    assert isinstance(found, Weather)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
async def test_anthropics_client_gets_an_object(caller: Served, choice: Any):
    client: Any = anthropic.AsyncAnthropic(base_url=str(caller.http.base_url), api_key="any", max_retries=0)
    asked: Any = {
        "model": MODEL_ID,
        "max_tokens": 300,
        "messages": user(QUESTION),
        "tools": [{"name": "get_weather", "input_schema": SCHEMA}],
        "tool_choice": choice,
    }
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    for message in (whole, streamed):
        assert message.stop_reason == "tool_use"
        assert message.content[-1].input["city"] in ("Rome", "Oslo")


async def test_openais_client_gets_an_object_from_responses(caller: Served):
    client = openai.AsyncOpenAI(base_url=f"{caller.http.base_url}/v1/", api_key="any", max_retries=0)
    response = await client.responses.create(
        model=MODEL_ID,
        input=QUESTION,
        tools=[{"type": "function", "name": "get_weather", "parameters": SCHEMA}],  # no `strict`
        tool_choice={"type": "function", "name": "get_weather"},
        max_output_tokens=300,
    )
    made = [json.loads(item.arguments) for item in response.output if item.type == "function_call"]
    assert made
    assert all(arguments["city"] in ("Rome", "Oslo") for arguments in made)


UNENFORCED = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 3}}}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"parameters": {"type": "object", "properties": {}}},
        {"parameters": SCHEMA, "strict": False},
        {"parameters": UNENFORCED},
    ],
    ids=["no parameters", "none needed", "not strict", "not enforceable"],
)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
async def test_arguments_are_an_object_whatever_the_schema(caller: Served, more: Any, choice: Any):
    tools = [{"type": "function", "function": {"name": "now", **more}}]
    whole = await ask(
        caller, CHAT, messages=user(QUESTION), tools=tools, tool_choice=choice, max_completion_tokens=400
    )
    (name, arguments), *_ = calls(whole["choices"][0])
    assert name == "now"
    assert isinstance(arguments, dict)
