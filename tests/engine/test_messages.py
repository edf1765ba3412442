"""Anthropic's Messages on a real vLLM, asked by Anthropic's client and by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.util import find_spec
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from asking import CITIES, MESSAGES, ask, named_events, post, user
from enginetest import MODEL_ID, Served

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parity("X8"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]

SUM, PARIS = user("What is 2 + 3?"), user("What is the weather in Paris?")
WEATHER = {
    "name": "get_weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
COMMON = {"model": MODEL_ID, "max_tokens": 100, "extra_body": {"temperature": 0}}


@pytest_asyncio.fixture(loop_scope="session")
async def client(assistant: Served) -> AsyncIterator[anthropic.AsyncAnthropic]:
    url = str(assistant.http.base_url)
    async with anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0) as client:
        yield client


def prompt_tokens(message: anthropic.types.Message) -> int:
    """Anthropic counts apart what the cache had, and what it has now."""
    usage = message.usage
    cached = (usage.cache_read_input_tokens, usage.cache_creation_input_tokens)
    return usage.input_tokens + sum(tokens or 0 for tokens in cached)


async def test_thoughts_are_a_block_before_the_text(client: anthropic.AsyncAnthropic):
    message = await client.messages.create(**COMMON, messages=SUM)
    thinking, said = message.content
    assert thinking.type == "thinking"
    assert thinking.thinking == "2 plus 3 makes 5."
    assert said.text == "The sum is 5."
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens > 5


async def test_a_stream_joins_to_the_same(client: Any):
    async with client.messages.stream(**COMMON, messages=SUM) as stream:
        final = await stream.get_final_message()
    whole = await client.messages.create(**COMMON, messages=SUM)
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert final.content[0].thinking == whole.content[0].thinking
    assert final.content[1].text == whole.content[1].text == "The sum is 5."
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == whole.usage.output_tokens


async def test_events_come_in_anthropics_order(assistant: Served):
    named = await named_events(assistant, MESSAGES, messages=SUM, max_tokens=100)
    names = [name for name, _ in named if name != "ping"]
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    blocks = [name for name in names if name in ("content_block_start", "content_block_stop")]
    assert blocks == ["content_block_start", "content_block_stop"] * 2


async def test_a_tools_result_is_said_in_the_next_turn(client: anthropic.AsyncAnthropic):
    first = await client.messages.create(**COMMON, messages=PARIS, tools=[WEATHER])
    assert first.stop_reason == "tool_use"
    call = first.content[-1]
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
    called = {"type": "tool_use", "id": call.id, "name": call.name, "input": call.input}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "foggy"}
    turns = [*PARIS, {"role": "assistant", "content": [called]}, {"role": "user", "content": [result]}]
    second = await client.messages.create(**COMMON, messages=turns, tools=[WEATHER])
    assert second.content[-1].text == "It is foggy in Paris."
    assert second.stop_reason == "end_turn"


async def test_a_streamed_call_has_its_arguments(client: Any):
    async with client.messages.stream(**COMMON, messages=PARIS, tools=[WEATHER]) as stream:
        final = await stream.get_final_message()
    assert final.stop_reason == "tool_use"
    assert (final.content[-1].name, final.content[-1].input) == ("get_weather", {"city": "Paris"})


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
async def test_a_tool_that_must_be_called_is(client: anthropic.AsyncAnthropic, choice: Any):
    weather = {**WEATHER, "input_schema": CITIES}
    asked = {**COMMON, "max_tokens": 1000}  # where no call answers the question, it makes many
    message = await client.messages.create(**asked, messages=SUM, tools=[weather], tool_choice=choice)
    assert message.stop_reason == "tool_use"
    assert message.content[-1].name == "get_weather"
    assert message.content[-1].input["city"] in ("Paris", "Rome")


async def test_a_system_prompt_is_read(client: anthropic.AsyncAnthropic):
    plain = await client.messages.create(**COMMON, messages=SUM)
    for system in ("You add.", [{"type": "text", "text": "You add."}]):
        message = await client.messages.create(**COMMON, messages=SUM, system=system)
        assert message.content[-1].text == "The sum is 5."
        assert prompt_tokens(message) > prompt_tokens(plain)


async def test_why_it_stopped_is_told(client: anthropic.AsyncAnthropic):
    short = await client.messages.create(**COMMON | {"max_tokens": 3}, messages=SUM)
    assert short.stop_reason == "max_tokens"
    assert short.usage.output_tokens == 3
    stopped = await client.messages.create(**COMMON, messages=SUM, stop_sequences=["sum"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "sum")
    assert stopped.content[-1].text.strip() == "The"


async def test_tokens_are_counted_as_they_are_asked(client: anthropic.AsyncAnthropic):
    asked: dict[str, Any] = {"messages": PARIS, "tools": [WEATHER], "system": "You help."}
    counted = await client.messages.count_tokens(model=MODEL_ID, **asked)
    message = await client.messages.create(**COMMON, **asked)
    assert counted.input_tokens == prompt_tokens(message)


@pytest.mark.parity("X8", "S16")
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"temperature": -1}, "temperature"),
        ({"tool_choice": {"type": "tool", "name": "none"}, "tools": [WEATHER]}, "none"),
    ],
)
async def test_a_bad_request_is_anthropics_invalid_request(assistant: Served, wrong: Any, says: str):
    answer = await post(assistant, MESSAGES, **{"messages": SUM, "max_tokens": 20} | wrong)
    assert answer.status_code == 400, answer.text
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert says in body["error"]["message"]


async def test_a_message_after_an_error_is_answered(assistant: Served):
    await post(assistant, MESSAGES, messages=SUM, max_tokens=0)
    message = await ask(assistant, MESSAGES, messages=SUM, max_tokens=100)
    assert message["content"][-1]["text"] == "The sum is 5."
