"""The simulator answers in the form that vLLM's schema has for a request, or refuses it with a sentence."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Literal

import httpx
import pytest
from pydantic import BaseModel, Field
from served import Served, chat, until

pytestmark = pytest.mark.parity("X16")


async def simulated(served: Served, **options) -> Served:
    await served.gateway("m")
    await served.replica(**options)
    return served


async def test_clients_that_ask_for_base64_read_the_same_vectors(served: Served):
    client = (await simulated(served)).openai()
    packed = await client.embeddings.create(model="m", input="Hello there")  # base64 unless told otherwise
    plain = await client.embeddings.create(model="m", input="Hello there", encoding_format="float")
    assert len(plain.data[0].embedding) == 64
    assert packed.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-7)


async def test_token_ids_are_embedded_like_their_text(served: Served):
    async with (await simulated(served)).http() as http:
        ids = [
            (await http.post("/tokenize", json={"prompt": text})).json()["tokens"]
            for text in ("one two", "x")
        ]
    answers = [
        await served.openai().embeddings.create(model="m", input=given, encoding_format="float")
        for given in (["one two", "x"], ids, ids[0])
    ]
    texts, lists, one = ([item.embedding for item in answer.data] for answer in answers)
    assert texts == lists
    assert one == texts[:1]
    assert answers[0].usage == answers[1].usage


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": "x", "dimensions": 8}, "dimensions"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "bytes"}, "encoding_format"),
        ("/v1/embeddings", {"input": ["x", 1]}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "logprobs": True},
            "logprobs",
        ),
        ("/v1/completions", {"prompt": "x", "logprobs": 0}, "logprobs"),
        ("/v1/completions", {"prompt": "x", "echo": True}, "echo"),
        ("/v1/completions", {"prompt": ["x", 1]}, "prompt"),
        (
            "/v1/completions",
            {"prompt": "x", "response_format": {"type": "structural_tag"}},
            "response_format",
        ),
        (
            "/v1/completions",
            {"prompt": "x", "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
        ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ("/v1/responses", {"input": "x", "background": True}, "background"),
        ("/v1/responses", {"input": "x", "conversation": "conv_1"}, "conversation"),
        ("/v1/responses", {"input": "x", "include": ["message.output_text.logprobs"]}, "include"),
        ("/v1/responses", {"input": "x", "include": 5, "tools": [{"type": "web_search"}]}, "tools"),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ("/v1/responses", {"input": [{"id": "msg_1"}]}, "input"),
        ("/v1/responses", {"input": [{"type": "computer_call"}]}, "input"),
        ("/v1/responses", {"input": []}, "input"),
        ("/v1/responses", {"input": "x", "tool_choice": {"type": "custom", "name": "a"}}, "tool_choice"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}, "max_tokens"),
        ("/v1/messages", {"messages": [], "max_tokens": 9}, "messages"),
        ("/v1/messages", {"mcp_servers": [{"type": "url"}], "messages": [], "max_tokens": 9}, "mcp_servers"),
        (
            "/v1/messages",
            {
                "messages": [{"role": "user", "content": "x"}],
                "max_tokens": 9,
                "tool_choice": {"type": "tool"},
            },
            "tool_choice",
        ),
    ],
)
async def test_what_is_not_simulated_is_refused(served: Served, path: str, body: dict, param: str):
    async with (await simulated(served)).http() as http:
        answer = await http.post(path, json={"model": "m", **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


NEEDED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "/v1/embeddings": {"input": "hi"},
    "/v1/score": {"text_1": "hi", "text_2": "ho"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": []},
}


async def test_a_field_that_is_null_is_not_set(served: Served):
    """Typed clients in Go, Java and C# write null for each field that they know and leave alone."""
    await served.gateway("m")
    app = (await served.replica()).engine.app()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://sim") as http:
        described = (await http.get("/openapi.json")).json()
    async with served.http() as http:
        for path, needed in NEEDED.items():
            body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            form = described["components"]["schemas"][body["$ref"].rpartition("/")[2]]
            answer = await http.post(path, json=dict.fromkeys(form["properties"]) | needed)
            assert answer.status_code == 200, answer.text


async def test_nulls_within_a_field_are_not_set(served: Served):
    async with (await simulated(served)).http() as http:
        said = {"role": "user", "content": [{"type": "text", "text": None}], "name": None, "tool_calls": None}
        tools = [{"type": "function", "function": {"name": "now", "parameters": None, "strict": None}}]
        body = {"messages": [said], "tools": tools, "stream_options": {"include_usage": None}}
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200


async def test_one_model_is_served_under_the_empty_name(served: Served):
    async with (await simulated(served)).http() as http:
        for path, needed in NEEDED.items():
            assert (await http.post(path, json={"model": "", **needed})).status_code == 200


async def test_several_prompts_are_answered_in_their_order(served: Served):
    client = (await simulated(served)).openai()
    asked = {"model": "m", "prompt": ["one two", "x"], "n": 2, "max_tokens": 4}
    whole = await client.completions.create(**asked)
    assert [choice.text for choice in whole.choices] == ["one two", "one two", "x", "x"]
    parts = [await client.completions.create(**asked | {"prompt": one, "n": 2}) for one in asked["prompt"]]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(whole.usage, count) == sum(getattr(part.usage, count) for part in parts)
    texts = ["", "", "", ""]
    async for chunk in await client.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


async def test_embeddings_take_their_time_and_are_seen_as_load(served: Served):
    await served.gateway("m")
    engine = (await served.replica(step_base_ms=20, max_num_seqs=1)).engine
    asked = asyncio.create_task(served.openai().embeddings.create(model="m", input=["a"] * 20))
    await until(lambda: engine.load().running == 1 and engine.load().waiting > 1)
    assert len((await asked).data) == 20
    assert engine.load().running == 0
    assert engine.counts().made_tokens == 0


class Node(BaseModel):
    """A tree in which each field is required, as strict schemas have it."""

    name: Literal["root", "leaf"]
    made: datetime
    size: float = Field(gt=0)
    corner: tuple[int, int]
    parent: Node | None
    children: list[Node]


async def test_an_answer_fits_the_schema_that_is_asked_for(served: Served):
    client = (await simulated(served)).openai()
    parsed = await client.chat.completions.parse(**chat(response_format=Node))
    assert parsed.choices[0].message.parsed.name == "root"
    schema = {"structured_outputs": {"json": Node.model_json_schema()}}
    whole = await client.chat.completions.create(**chat(extra_body=schema))
    assert Node.model_validate_json(whole.choices[0].message.content).parent is None
    stream = await client.completions.create(
        model="m", prompt="x", max_tokens=99, extra_body=schema, stream=True
    )
    text = "".join([chunk.choices[0].text async for chunk in stream])
    assert text == whole.choices[0].message.content


@pytest.mark.parametrize(
    ("reply", "form", "said"),
    [
        (None, {"response_format": {"type": "json_object"}}, "{}"),
        ('{"a": 1}', {"response_format": {"type": "json_object"}}, '{"a": 1}'),
        ("no", {"response_format": {"type": "text"}}, "no"),
        ("no", {"structured_outputs": {"choice": ["yes", "no"]}}, "no"),
        ("perhaps", {"structured_outputs": {"choice": ["yes", "no"]}}, "yes"),
        ("x", {"structured_outputs": {"json": '{"type": "array", "minItems": 1}'}}, "[{}]"),
    ],
)
async def test_a_reply_is_given_where_it_has_the_form(served: Served, reply: str, form: dict, said: str):
    client = (await simulated(served, reply=reply)).openai()
    answer = await client.chat.completions.create(**chat(extra_body=form))
    assert answer.choices[0].message.content == said
