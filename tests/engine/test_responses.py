"""Responses on a real vLLM: turns, tools, streams, what is kept; asked by hand and by OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from importlib.util import find_spec
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from asking import CITIES, RESPONSES, ask, named_events, post
from enginetest import MODEL_ID, Served, marked

from penstock.openai.response_items import keeper_name, tenant_mark
from penstock.request_context import current_replica
from penstock.serve.gateway import openapi, routes
from penstock.serve.gateway.catalogue import ServedModel

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parity("X8"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]

SUM, PARIS = "What is 2 + 3?", "What is the weather in Paris?"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest_asyncio.fixture(loop_scope="session")
async def client(assistant: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    url = str(assistant.http.base_url.join("/v1"))
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
        yield client


def text(response: dict[str, Any]) -> str:
    """Of the messages in it."""
    messages = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for message in messages for part in message["content"])


def thoughts(response: dict[str, Any]) -> str:
    found = [item for item in response["output"] if item["type"] == "reasoning"]
    return "".join(part["text"] for item in found for part in item["content"])


async def test_thoughts_and_the_answer_are_items_of_their_own(assistant: Served):
    response = await ask(assistant, RESPONSES, input=SUM)
    assert response["status"] == "completed"
    assert thoughts(response) == "2 plus 3 makes 5."
    assert text(response) == "The sum is 5."
    usage = response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    counted = await ask(assistant, "/tokenize", messages=[{"role": "user", "content": SUM}])
    assert usage["input_tokens"] == counted["count"]


async def test_a_stream_tells_the_same_in_order(assistant: Served):
    named = await named_events(assistant, RESPONSES, input=SUM)
    names = [name for name, _ in named]
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names[-1] == "response.completed"
    assert [event["sequence_number"] for _, event in named] == list(range(len(named)))
    assert "".join(e["delta"] for name, e in named if name == "response.output_text.delta") == "The sum is 5."
    assert (
        "".join(e["delta"] for name, e in named if name.startswith("response.reasoning") and "delta" in e)
        == "2 plus 3 makes 5."
    )
    assert text(named[-1][1]["response"]) == "The sum is 5."


async def test_instructions_and_a_conversation_are_read(assistant: Served):
    turns = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": [{"type": "input_text", "text": SUM}]},
    ]
    response = await ask(assistant, RESPONSES, input=turns, instructions="You add.")
    assert text(response) == "The sum is 5."
    alone = await ask(assistant, RESPONSES, input=SUM)
    assert response["usage"]["input_tokens"] > alone["usage"]["input_tokens"]


async def test_a_limit_makes_it_incomplete(assistant: Served):
    response = await ask(assistant, RESPONSES, input=SUM, max_output_tokens=3)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"]["reason"] == "max_output_tokens"
    assert response["usage"]["output_tokens"] == 3


@pytest.mark.parametrize(("asked", "most"), [(SUM, 5), ("Hello!", 12), (PARIS, 36)])
async def test_a_limit_makes_a_stream_incomplete_and_its_replay(client: Any, asked: str, most: int):
    """While the model reasons, answers, and writes the arguments of a call."""
    given = {
        "model": MODEL_ID,
        "input": asked,
        "tools": [WEATHER],
        "temperature": 0,
        "max_output_tokens": most,
    }
    events = [event async for event in await client.responses.create(**given, stream=True)]
    last = events[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")
    assert last.response.incomplete_details.reason == "max_output_tokens"
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.status for item in done if item.status] == [
        *("completed" for item in done[:-1] if item.status),
        "incomplete",
    ]
    assert (await client.responses.retrieve(last.response.id)).output[-1].status == "incomplete"
    begun = [e async for e in await client.responses.create(**given, stream=True, background=True)]
    async with asyncio.timeout(60):
        replay = await client.responses.retrieve(begun[0].response.id, stream=True, starting_after=-9)
        again = [event async for event in replay]
    assert [event.type for event in again] == [event.type for event in begun]
    assert again[-1].type == "response.incomplete"


async def test_a_tools_result_is_said_in_the_next_response(client: openai.AsyncOpenAI):
    first = await client.responses.create(model=MODEL_ID, input=PARIS, tools=[WEATHER], temperature=0)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "foggy"}
    second = await client.responses.create(
        model=MODEL_ID, input=[result], previous_response_id=first.id, tools=[WEATHER], temperature=0
    )
    assert second.output_text == "It is foggy in Paris."
    whole = [{"role": "user", "content": PARIS}, call.model_dump(exclude_none=True), result]
    again = await client.responses.create(
        model=MODEL_ID, input=whole, tools=[WEATHER], temperature=0, store=False
    )
    assert again.output_text == "It is foggy in Paris."


async def test_streamed_calls_join_to_the_tools_arguments(client: Any):
    asked = {"model": MODEL_ID, "input": PARIS, "tools": [WEATHER], "temperature": 0}
    events = [event async for event in await client.responses.create(**asked, stream=True)]
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(pieces)) == {"city": "Paris"}
    result = [item for item in events[-1].response.output if item.type == "function_call"]
    assert result[0].name == "get_weather"
    said = {"type": "function_call_output", "call_id": result[0].call_id, "output": "foggy"}
    second = await client.responses.create(
        **asked | {"input": [said]}, previous_response_id=events[-1].response.id
    )
    assert second.output_text == "It is foggy in Paris."


async def test_a_required_tool_is_called(assistant: Served):
    weather = {**WEATHER, "parameters": CITIES, "strict": True}
    response = await ask(assistant, RESPONSES, input=SUM, tools=[weather], tool_choice="required")
    assert {item["name"] for item in response["output"] if item["type"] == "function_call"} == {"get_weather"}


async def test_what_is_kept_is_found_and_what_is_not_is_404(client: openai.AsyncOpenAI):
    kept = await client.responses.create(model=MODEL_ID, input=SUM, temperature=0)
    assert (await client.responses.retrieve(kept.id)).output_text == "The sum is 5."
    with pytest.raises(openai.BadRequestError, match="can be streamed again"):
        await client.responses.retrieve(kept.id, stream=True)
    unkept = await client.responses.create(model=MODEL_ID, input=SUM, temperature=0, store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(unkept.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model=MODEL_ID, input=SUM, previous_response_id=unkept.id)


async def test_a_deleted_response_is_gone(client: openai.AsyncOpenAI):
    kept = await client.responses.create(model=MODEL_ID, input=SUM, temperature=0)
    await client.responses.delete(kept.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            await call(kept.id)


async def test_one_in_the_background_can_be_deleted_while_it_is_made(client: openai.AsyncOpenAI):
    begun = await client.responses.create(model=MODEL_ID, input=SUM, temperature=0, background=True)
    await client.responses.delete(begun.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(begun.id)


async def test_input_items_are_those_that_the_response_was_made_from(client: Any):
    asked = {"model": MODEL_ID, "tools": [WEATHER], "temperature": 0}
    first = await client.responses.create(**asked, input=PARIS)
    (call,) = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "foggy"}
    second = await client.responses.create(**asked, input=[result], previous_response_id=first.id)
    found = [item async for item in client.responses.input_items.list(second.id, order="asc")]
    assert [item.type for item in found] == [
        "message",
        *(item.type for item in first.output),
        "function_call_output",
    ]
    assert (found[0].role, found[0].content[0].text) == ("user", PARIS)
    assert found[-1].output == "foggy"
    assert len({item.id for item in found}) == len(found)
    newest = await client.responses.input_items.list(second.id, limit=1)
    assert ([item.id for item in newest.data], newest.has_more) == ([found[-1].id], True)
    one_by_one = [item.id async for item in client.responses.input_items.list(second.id, limit=1)]
    assert one_by_one == [item.id for item in reversed(found)]
    for wrong in ({"limit": 0}, {"limit": 101}, {"after": "msg_0"}, {"order": "up"}):
        with pytest.raises(openai.BadRequestError):
            await client.responses.input_items.list(second.id, **wrong)


@pytest.mark.parametrize("stream", [False, True])
async def test_items_are_referred_to_by_their_ids(client: openai.AsyncOpenAI, stream: bool):
    asked = {"model": MODEL_ID, "tools": [WEATHER], "temperature": 0}
    question = {"role": "user", "content": PARIS}
    first = await client.responses.create(**asked, input=[question], stream=stream)
    if stream:
        first = [event async for event in first][-1].response
    (call,) = [item for item in first.output if item.type == "function_call"]
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "foggy"}
    second = {"input": [question, *references, result]}
    counted = await client.responses.input_tokens.count(model=MODEL_ID, tools=[WEATHER], **second)
    answer = await client.responses.create(**asked, **second)
    assert answer.output_text == "It is foggy in Paris."
    assert answer.usage.input_tokens == counted.input_tokens
    listed = [item async for item in client.responses.input_items.list(answer.id, order="asc")]
    assert [item.id for item in listed[1:-1]] == [item.id for item in first.output]
    sent = [{"type": "item_reference", "id": item.id} for item in listed]
    assert (await client.responses.create(**asked, input=sent)).output_text == answer.output_text
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="Send the items themselves"):
        await client.responses.create(**asked, **second)


async def test_items_of_one_tenant_are_not_there_for_another(assistant: Served):
    async def asked_by(tenant: str, **body: Any) -> httpx.Response:
        current_replica.set(keeper_name("0123456789abcdef", tenant and tenant_mark(tenant)))
        transport = httpx.ASGITransport(app=marked(assistant.engine.app()))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
            return await http.post(RESPONSES, json={"model": MODEL_ID, **body})

    for mine, others in (("ann", ("bob", "")), ("", ("ann",))):
        (item, *_) = (await asyncio.create_task(asked_by(mine, input=SUM))).json()["output"]
        for reference in ({"id": item["id"]}, {"type": "item_reference", "id": item["id"]}):
            own = await asyncio.create_task(
                asked_by(mine, input=[reference, {"role": "user", "content": SUM}])
            )
            assert own.status_code == 200, own.text
            for other in others:
                answer = await asyncio.create_task(asked_by(other, input=[reference]))
                assert answer.status_code == 404, answer.text
                assert "not stored here" in answer.json()["error"]["message"]


async def test_assistant_turns_are_read_whole_in_every_form(assistant: Served):
    async def tokens(content: Any, **fields: Any) -> int:
        turns = [{"role": "assistant", "content": content, **fields}, {"role": "user", "content": "x"}]
        return (await ask(assistant, f"{RESPONSES}/input_tokens", input=turns))["input_tokens"]

    one, two = {"type": "output_text", "text": "one"}, {"type": "output_text", "text": " two three four"}
    whole = await tokens("one two three four")
    assert await tokens([one, two]) == whole
    assert await tokens([one, two], type="message", id="m", status="completed") == whole
    assert await tokens([one, {"type": "refusal", "refusal": " two three four"}]) == whole
    assert await tokens([one]) < whole


async def test_tokens_are_counted_as_the_response_would_use_them(client: openai.AsyncOpenAI):
    asked = {"model": MODEL_ID, "input": PARIS, "tools": [WEATHER]}
    first = await client.responses.create(**asked, temperature=0)
    counted = await client.responses.input_tokens.count(**asked)
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", first.usage.input_tokens)
    (call,) = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "foggy"}
    again = asked | {"input": [result], "previous_response_id": first.id}
    second = await client.responses.create(**again, temperature=0)
    assert (await client.responses.input_tokens.count(**again)).input_tokens == second.usage.input_tokens
    with pytest.raises(openai.NotFoundError):
        await client.responses.input_tokens.count(**again | {"previous_response_id": "resp_0"})
    with pytest.raises(openai.NotFoundError):
        await client.responses.input_tokens.count(model="nothing", input=SUM)


@pytest.mark.parity("X23")
async def test_the_gateway_describes_what_vllm_says_of_itself(assistant: Served):
    said = (await assistant.http.get("/openapi.json")).json()
    found = openapi.document(
        [(ServedModel("m", 1), said)],
        routes.ALL,
        root="",
        keyed=False,
        administered=False,
        has_default=True,
    )
    assert {"get", "delete"} == found["paths"]["/v1/responses/{response_id}"].keys()
    assert {RESPONSES, "/v1/responses/input_tokens", "/v1/messages", "/v1/generate"} <= found["paths"].keys()
    assert "/v1/load_lora_adapter" not in found["paths"]
    chat = found["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    name = chat["schema"]["$ref"].removeprefix("#/components/schemas/")
    assert "messages" in found["components"]["schemas"][name]["properties"]
    assert (
        set(re.findall(r"#/components/schemas/([^'\"]+)", str(found)))
        == found["components"]["schemas"].keys()
    )


async def test_one_in_the_background_is_ready_later(client: openai.AsyncOpenAI):
    begun = await client.responses.create(model=MODEL_ID, input=SUM, temperature=0, background=True)
    assert begun.status == "queued"
    found = await client.responses.retrieve(begun.id)
    while found.status in ("queued", "in_progress"):
        found = await client.responses.retrieve(begun.id)
    assert found.output_text == "The sum is 5."
    with pytest.raises(openai.BadRequestError):
        await client.responses.cancel(begun.id)


@pytest.mark.parity("X4")
async def test_a_client_that_lost_the_stream_of_one_in_the_background_gets_the_rest(client: Any):
    asked = {"model": MODEL_ID, "input": SUM, "temperature": 0, "stream": True, "background": True}
    stream = await client.responses.create(**asked)
    events = [await anext(stream) for _ in range(4)]
    await stream.close()
    known, last = events[0].response.id, events[-1].sequence_number
    events += [one async for one in await client.responses.retrieve(known, stream=True, starting_after=last)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output[-1].content[0].text == "The sum is 5."


@pytest.mark.parity("X8", "S16")
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"input": 7}, "input"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"type": "function"}]}, "name"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"conversation": "conv_1"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "fc_1"}]}, "fc_1"),
        ({"previous_response_id": "resp_0"}, "resp_0"),
    ],
)
async def test_a_bad_request_says_what_is_wrong(assistant: Served, wrong: Any, says: str):
    answer = await post(assistant, RESPONSES, **{"input": SUM} | wrong)
    assert answer.status_code in (400, 404), answer.text
    assert says in answer.json()["error"]["message"]
