"""Calls that a request forces, from the simulator, as LangChain and OpenAI's client parse them."""

from __future__ import annotations

import json
from typing import Literal

import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from served import Served, chat

pytestmark = pytest.mark.parity("S11", "X16")


class Stop(BaseModel):
    """A stop on the way, and the way on from there."""

    name: str = Field(min_length=1)
    onward: Stop | None = None


class Journey(BaseModel):
    """A journey by train."""

    kind: Literal["single", "return"]
    stops: list[Stop] = Field(min_length=2)
    seats: int = Field(ge=1)
    quiet: bool
    note: str | None = None


NOW = {"type": "function", "function": {"name": "now"}}
HERE = {"type": "function", "function": {"name": "here"}}


async def langchain(served: Served) -> ChatOpenAI:
    await served.gateway("m")
    await served.replica()
    url = f"{served.openai().base_url}"
    return ChatOpenAI(model="m", base_url=url, api_key="any", max_retries=0)


async def test_langchain_gets_the_object_that_it_asks_for(served: Served):
    model = await langchain(served)
    said = await model.bind_tools([Journey], tool_choice="any").ainvoke("Where to?")
    (call,) = said.tool_calls
    assert Journey(**call["args"]).seats == 1
    found = await model.with_structured_output(Journey, method="function_calling").ainvoke("Where to?")
    assert isinstance(found, Journey)
    assert len(found.stops) == 2


async def test_the_named_tool_is_called_and_a_stream_joins_to_the_same(served: Served):
    await served.gateway("m")
    await served.replica()
    asked = chat(tools=[HERE, NOW], tool_choice=NOW)
    whole = await served.openai().chat.completions.create(**asked)
    async with served.openai().chat.completions.stream(**asked) as stream:
        joined = await stream.get_final_completion()
    for answer in (whole, joined):
        assert answer.choices[0].finish_reason == "stop"  # as in vLLM; "tool_calls" where none was named
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("now", {})


async def test_a_reply_that_is_an_object_is_what_a_tool_is_called_with(served: Served):
    await served.gateway("m")
    await served.replica(reply='{"city": "Rome"}')
    answer = await served.openai().chat.completions.create(**chat(tools=[NOW], tool_choice="required"))
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments) == {"city": "Rome"}


async def test_a_tool_that_is_not_there_cannot_be_forced(served: Served):
    await served.gateway("m")
    await served.replica()
    for wrong in ({"tools": [HERE], "tool_choice": NOW}, {"tool_choice": "required"}):
        with pytest.raises(openai.BadRequestError, match="tool"):
            await served.openai().chat.completions.create(**chat(**wrong))


async def test_without_a_forced_call_tools_change_nothing(served: Served):
    await served.gateway("m")
    await served.replica(reply="no")
    for choice in ("auto", "none"):
        answer = await served.openai().chat.completions.create(**chat(tools=[NOW], tool_choice=choice))
        assert answer.choices[0].message.content == "no"
