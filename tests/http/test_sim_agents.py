"""Responses and Messages from the simulator, as OpenAI's and Anthropic's own clients read them."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
import pytest
from pydantic import BaseModel
from served import Served

pytestmark = pytest.mark.parity("S11", "X16")

SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
FLAT = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
CLAUDES = {"name": "weather", "input_schema": SCHEMA}


class City(BaseModel):
    name: Literal["Rome", "Oslo"]


async def openais(served: Served, **options) -> Any:  # answers are unions of twenty types
    await served.gateway("m")
    await served.replica(**options)
    return served.openai()


async def anthropics(served: Served, **options) -> Any:
    await openais(served, **options)
    return anthropic.AsyncAnthropic(base_url=served.url, api_key="any", max_retries=0)


async def test_a_response_is_the_same_at_once_and_streamed(served: Served):
    client = await openais(served)
    said = [{"role": "user", "content": [{"type": "input_text", "text": "one two"}]}]
    asked = {
        "model": "m",
        "instructions": "Repeat.",
        "input": [{"role": "assistant", "content": "zero"}, *said],
    }
    whole = await client.responses.create(**asked)
    async with client.responses.stream(**asked) as stream:
        events = [event.type async for event in stream]
        joined = await stream.get_final_response()
    assert whole.output_text == joined.output_text == "one two"
    assert whole.status == joined.status == "completed"
    assert whole.usage == joined.usage
    assert (events[0], events[-1]) == ("response.created", "response.completed")
    assert (
        whole.usage.input_tokens
        > (await client.responses.create(model="m", input="one two")).usage.input_tokens
    )


async def test_a_response_calls_the_forced_function(served: Served):
    client = await openais(served)
    for choice in ("required", {"type": "function", "name": "weather"}):
        asked = {"model": "m", "input": "x", "tools": [FLAT], "tool_choice": choice}
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            joined = await stream.get_final_response()
        for (call,) in (whole.output, joined.output):
            assert (call.type, call.name, call.arguments) == ("function_call", "weather", '{"city":"Rome"}')
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    given = [{"role": "user", "content": "x"}, call.model_dump(exclude_none=True), output]
    assert (await client.responses.create(model="m", input=given, tools=[FLAT])).output_text == "sunny"


async def test_a_response_fits_its_format_and_says_when_it_was_cut(served: Served):
    client = await openais(served)
    assert (await client.responses.parse(model="m", input="x", text_format=City)).output_parsed.name == "Rome"
    cut = await client.responses.create(model="m", input="one two three", max_output_tokens=1)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_a_message_is_the_same_at_once_and_streamed(served: Served):
    client = await anthropics(served)
    turns = [{"role": "user", "content": [{"type": "text", "text": "one two"}]}]
    asked = {"model": "m", "max_tokens": 50, "system": "Repeat.", "messages": turns}
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        joined = await stream.get_final_message()
    assert whole.content[0].text == joined.content[0].text == "one two"
    assert whole.stop_reason == joined.stop_reason == "end_turn"
    assert whole.usage == joined.usage
    assert whole.usage.output_tokens > 1
    cut = await client.messages.create(**asked | {"max_tokens": 1})
    assert cut.stop_reason == "max_tokens"


async def test_a_message_calls_the_forced_tool(served: Served):
    client = await anthropics(served)
    turns = [{"role": "user", "content": "x"}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        asked = {"model": "m", "max_tokens": 50, "messages": turns, "tools": [CLAUDES], "tool_choice": choice}
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            joined = await stream.get_final_message()
        for answer in (whole, joined):
            assert answer.stop_reason == "tool_use"
            assert (answer.content[0].name, answer.content[0].input) == ("weather", {"city": "Rome"})
    result = {"type": "tool_result", "tool_use_id": whole.content[0].id, "content": "sunny"}
    used = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in whole.content]}
    said = await client.messages.create(
        model="m",
        max_tokens=9,
        messages=[*turns, used, {"role": "user", "content": [result]}],
        tools=[CLAUDES],
    )
    assert said.content[0].text == "sunny"


async def test_a_message_that_fails_in_its_stream_says_so_in_anthropics_form(served: Served):
    client = await anthropics(served, fail_after_tokens=2)
    with pytest.raises(anthropic.APIStatusError, match="fail_after_tokens"):
        async with client.messages.stream(
            model="m", max_tokens=50, messages=[{"role": "user", "content": "one two three"}]
        ) as stream:
            await stream.get_final_message()


async def test_a_result_of_a_tool_comes_before_the_rest_of_its_message(served: Served):
    client = await anthropics(served)
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "sunny"}]}
    parts = [{"type": "text", "text": "And tomorrow?"}, result]
    asked = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": parts}]}
    assert (await client.messages.create(**asked)).content[0].text == "And tomorrow?"


async def test_a_message_says_which_stop_sequence_ended_it(served: Served):
    client = await anthropics(served)
    turns = [{"role": "user", "content": "one two three"}]
    asked = {"model": "m", "max_tokens": 50, "messages": turns, "stop_sequences": ["four", "three", "two"]}
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        joined = await stream.get_final_message()
    for answer in (whole, joined):
        assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == (
            "one ",
            "stop_sequence",
            "two",
        )


async def test_a_message_fits_its_format(served: Served):
    client = await anthropics(served)
    turns = [{"role": "user", "content": "x"}]
    parsed = await client.messages.parse(model="m", max_tokens=50, messages=turns, output_format=City)
    assert parsed.parsed_output.name == "Rome"


async def test_a_call_that_is_cut_has_no_input(served: Served):
    client = await anthropics(served)
    asked = {
        "tools": [CLAUDES],
        "tool_choice": {"type": "any"},
        "messages": [{"role": "user", "content": "x"}],
    }
    cut = await client.messages.create(model="m", max_tokens=1, **asked)
    assert (cut.stop_reason, cut.content[0].name, cut.content[0].input) == ("max_tokens", "weather", {})


async def test_usage_says_what_was_in_the_cache(served: Served):
    client = await anthropics(served, enable_prompt_tokens_details=True)
    asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "word " * 50}]}
    billing = "x-anthropic-billing-header: cch={};"
    usages = [
        (
            await client.messages.create(
                **asked, system=[{"type": "text", "text": text} for text in (billing.format(i), "Repeat.")]
            )
        ).usage
        for i in range(2)
    ]
    assert (usages[0].cache_read_input_tokens, usages[1].cache_read_input_tokens > 0) == (0, True)
    assert usages[0].input_tokens == usages[1].input_tokens + usages[1].cache_read_input_tokens
    again = await served.openai().responses.create(model="m", instructions="Repeat.", input="word " * 50)
    assert again.usage.input_tokens_details.cached_tokens == usages[1].cache_read_input_tokens
