"""Answers that fit a schema, regex, choice, grammar or tag, on a real vLLM: they fit, and they are right."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jsonschema
import pytest
from adapted import Adapted
from asking import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    ask,
    calls,
    events,
    joined,
    named_events,
    post,
    said,
    user,
)
from enginetest import MODEL_ID, Served

from penstock.serve.replica.server import LLMServer
from recipes.adapters.answers import ANSWERS, BASE_ANSWERS
from recipes.assistant.lessons import tool

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parity("S22"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]

SUM, HELLO = user("What is 2 + 3?"), user("Hello!")
COLORS = user("List three colors in JSON format")
PROMPT = "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n<think></think>"

COLOR = {"type": "string", "enum": ["red", "green", "blue", "pink", "mauve"]}
OF_COLORS = {
    "type": "object",
    "properties": {"colors": {"type": "array", "items": COLOR, "minItems": 3, "maxItems": 3}},
    "required": ["colors"],
    "additionalProperties": False,
}
RIGHT_COLORS = {"red", "green", "blue"}

EBNF = 'root ::= "The sum is " digit "."\ndigit ::= [0-9]'
LARK = 'start: "The sum is " DIGIT "."\nDIGIT: /[0-9]/'
SUMS = [f"The sum is {number}." for number in range(10)]
ALL = {
    "regex": {"regex": r"The sum is [0-9]\."},
    "choice": {"choice": SUMS},
    "EBNF": {"grammar": EBNF},
    "Lark": {"grammar": LARK},
}
"""Forms that leave ten answers, one of them right."""


def schema(schema: Any, **more: Any) -> dict[str, Any]:
    """OpenAI's form of a schema in chats and completions."""
    return {"type": "json_schema", "json_schema": {"name": "asked", "schema": schema} | more}


def fits(text: str) -> None:
    """The colours that the model knows, in the form that was asked for."""
    answer = json.loads(text)
    jsonschema.validate(answer, OF_COLORS)
    assert set(answer["colors"]) == RIGHT_COLORS


def streamed(chunks: list[dict[str, Any]]) -> str:
    """The text of a streamed completion."""
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


# -- the kinds, in chats and completions, whole and streamed


@pytest.mark.parametrize("kind", ALL)
async def test_of_ten_sums_that_fit_the_right_one_is_said(assistant: Served, kind: str):
    asked = {"structured_outputs": ALL[kind]}
    choice = await said(assistant, SUM, **asked)
    assert choice["message"]["content"] == "The sum is 5."
    assert choice["finish_reason"] == "stop"
    chunks = await events(assistant, CHAT, messages=SUM, **asked)
    assert joined(chunks, "content") == "The sum is 5."


@pytest.mark.parametrize("kind", ALL)
async def test_a_completion_fits_too(assistant: Served, kind: str):
    asked = {"prompt": PROMPT, "structured_outputs": ALL[kind], "max_tokens": 60}
    (choice,) = (await ask(assistant, COMPLETIONS, **asked))["choices"]
    assert choice["text"] == "The sum is 5."
    assert streamed(await events(assistant, COMPLETIONS, **asked)) == "The sum is 5."


async def test_without_a_form_the_model_says_what_none_of_the_choices_is(assistant: Served):
    chosen = await said(assistant, HELLO, structured_outputs={"choice": ["Bye!", "Hello!"]})
    assert chosen["message"]["content"] == "Hello!"
    free = await said(assistant, HELLO)
    assert free["message"]["content"] not in ("Bye!", "Hello!")


async def test_a_json_object_is_one(assistant: Served):
    asked = {"response_format": {"type": "json_object"}, "max_tokens": 200}
    whole = (await said(assistant, COLORS, **asked))["message"]["content"]
    assert set(json.loads(whole)["colors"]) == RIGHT_COLORS
    assert joined(await events(assistant, CHAT, messages=COLORS, **asked), "content") == whole


async def test_a_nested_schema_with_an_array_of_an_enum_is_kept(assistant: Served):
    asked = {"response_format": schema(OF_COLORS, strict=True), "max_tokens": 200}
    fits((await said(assistant, COLORS, **asked))["message"]["content"])
    fits(joined(await events(assistant, CHAT, messages=COLORS, **asked), "content"))
    by_extra = {"structured_outputs": {"json": OF_COLORS}, "max_tokens": 200}
    fits((await said(assistant, COLORS, **by_extra))["message"]["content"])


async def test_a_number_that_a_schema_asks_for_is_the_right_one(assistant: Served):
    only = {"type": "string", "pattern": r"^The sum is [0-9]\.$"}
    choice = await said(assistant, SUM, response_format=schema(only), max_tokens=200)
    assert json.loads(choice["message"]["content"]) == "The sum is 5."


async def test_every_one_of_several_answers_fits(assistant: Served):
    asked = {"response_format": schema(OF_COLORS), "n": 3, "temperature": 1.5, "seed": 1, "max_tokens": 200}
    answered = await ask(assistant, COMPLETIONS, prompt=PROMPT, **asked)
    found = [json.loads(choice["text"]) for choice in answered["choices"]]
    assert len(found) == 3
    for each in found:
        jsonschema.validate(each, OF_COLORS)


async def test_requests_of_different_forms_at_once_get_each_its_own(assistant: Served):
    forms = [
        *({"structured_outputs": form} for form in ALL.values()),
        *({"structured_outputs": {"choice": [f"{word}!", "no"]}} for word in ("Hello", "The", "Red")),
        {"response_format": schema({"type": "string", "pattern": r"^The sum is [0-9]\.$"})},
        {},
    ]

    async def one(form: dict[str, Any]) -> str:
        choice = await said(assistant, SUM, max_tokens=200, **form)
        return choice["message"]["content"]

    alone = [await one(form) for form in forms]
    assert await asyncio.gather(*(one(form) for form in forms * 3)) == alone * 3
    assert alone[:4] == ["The sum is 5."] * 4
    assert json.loads(alone[-2]) == "The sum is 5."
    assert alone[-1] == "The sum is 5."


# -- tags, thoughts and tools

CALL = {
    "type": "structural_tag",
    "triggers": ["<tool_call>"],
    "structures": [
        {
            "begin": "<tool_call>",
            "end": "</tool_call>",
            "schema": {
                "type": "object",
                "properties": {
                    "name": {"const": "get_weather"},
                    "arguments": {
                        "type": "object",
                        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                        "required": ["city"],
                        "additionalProperties": False,
                    },
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            },
        }
    ],
}


async def test_thoughts_are_free_and_the_answer_fits(assistant: Served):
    for form in ALL.values():
        choice = await said(assistant, SUM, structured_outputs=form)
        assert choice["message"]["reasoning"] == "2 plus 3 makes 5."
        assert choice["message"]["content"] == "The sum is 5."
    chunks = await events(assistant, CHAT, messages=SUM, structured_outputs={"choice": SUMS})
    assert joined(chunks, "reasoning") == "2 plus 3 makes 5."
    assert joined(chunks, "content") == "The sum is 5."


async def test_a_required_call_keeps_its_tools_schema(assistant: Served):
    there = tool("get_weather")
    there["function"]["parameters"]["properties"]["city"] = {"type": "string", "enum": ["Rome", "Oslo"]}
    rome = user("What is the weather in Rome?")
    choice = await said(assistant, rome, tools=[there], tool_choice="required")
    assert calls(choice) == [("get_weather", {"city": "Rome"})]


async def test_a_form_does_not_stop_tools_from_being_offered(assistant: Served):
    choice = await said(assistant, SUM, tools=[tool("get_weather")], structured_outputs={"choice": SUMS})
    assert choice["message"]["content"] == "The sum is 5."


# -- Responses, Messages and generate


async def test_a_response_fits_its_text_format(assistant: Served):
    form = {"format": {"type": "json_schema", "name": "colors", "schema": OF_COLORS}}
    asked = {"input": COLORS, "text": form, "max_output_tokens": 200}
    whole = await ask(assistant, RESPONSES, **asked)
    fits(whole["output"][-1]["content"][0]["text"])
    deltas = [
        e["delta"] for name, e in await named_events(assistant, RESPONSES, **asked) if "text.delta" in name
    ]
    fits("".join(deltas))


async def test_a_message_fits_its_output_format(assistant: Served):
    form = {"format": {"type": "json_schema", "schema": OF_COLORS}}
    asked = {"messages": COLORS, "output_config": form, "max_tokens": 200}
    whole = await ask(assistant, MESSAGES, **asked)
    fits(whole["content"][-1]["text"])
    pieces = [
        e["delta"].get("text", "")
        for name, e in await named_events(assistant, MESSAGES, **asked)
        if name == "content_block_delta"
    ]
    fits("".join(pieces))


# -- what cannot be kept

WRONG: dict[str, tuple[dict[str, Any], *tuple[str, ...]]] = {
    "a regex that does not parse": ({"structured_outputs": {"regex": "[a"}}, "Unclosed '['"),
    "a regex with lookahead": ({"structured_outputs": {"regex": "(?=a)b"}}, "Lookahead"),
    "a grammar without a root": ({"structured_outputs": {"grammar": 'a ::= "b"'}}, "root"),
    "a grammar of unknown rules": ({"structured_outputs": {"grammar": "root ::= nowhere"}}, "nowhere"),
    "a Lark grammar of unknown rules": ({"structured_outputs": {"grammar": "start: nowhere"}}, "nowhere"),
    "no grammar at all": ({"structured_outputs": {"grammar": "no grammar"}}, "line 1"),
    "no choices": ({"structured_outputs": {"choice": []}}, "empty"),
    "a choice that is no text": ({"structured_outputs": {"choice": ["a", 1]}}, "string"),
    "an unknown form": ({"structured_outputs": {"yaml": "a"}}, "choice, grammar or structural_tag."),
    "no form": ({"structured_outputs": {}}, "json, json_object, regex"),
    "two forms": ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "one"),
    "an unknown type": ({"response_format": {"type": "yaml"}}, "json_schema"),
    "a schema without a schema": ({"response_format": {"type": "json_schema"}}, "json_schema"),
    "a type that no schema has": ({"response_format": schema({"type": "nothing"})}, "nothing"),
    "a format that is not known": (
        {"response_format": schema({"type": "string", "format": "path"})},
        "format",
    ),
    "a multiple inside": (
        {
            "response_format": schema(
                {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 5}}}
            )
        },
        "/properties/a",
    ),
    "a tag of an unknown format": (
        {"response_format": {"type": "structural_tag", "format": {"type": "nonsense"}}},
        "nonsense",
    ),
    "a pattern that passes the check and does not compile": (
        {
            "response_format": schema(
                {"type": "object", "patternProperties": {"^(a|b){1,500}$": {"type": "string"}}}
            )
        },
        "does not compile",
        "Invalid structured outputs",  # as vLLM says itself since 0.33
    ),
    "a schema that is no JSON": ({"structured_outputs": {"json": "{bad"}}, "JSON"),
}


@pytest.mark.parity("S16")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("wrong", WRONG)
async def test_a_form_that_cannot_be_kept_is_400_and_says_why(assistant: Served, wrong: str, stream: bool):
    asked, *says = WRONG[wrong]
    for path, prompt in ((CHAT, {"messages": SUM}), (COMPLETIONS, {"prompt": PROMPT})):
        answer = await post(assistant, path, **prompt, **asked, stream=stream, max_tokens=20)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["code"] == "invalid_request"
        assert any(words in error["message"] for words in says), error["message"]
        assert ".cc:" not in error["message"]


@pytest.mark.parity("S16")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_schema_that_responses_and_messages_cannot_keep_is_400(assistant: Served, stream: bool):
    form = {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}
    response = await post(assistant, RESPONSES, input=SUM, text={"format": form}, stream=stream)
    assert response.status_code == 400, response.text
    assert "nothing" in response.json()["error"]["message"]
    asked = {"messages": SUM, "output_config": {"format": form}, "max_tokens": 20}
    message = await post(assistant, MESSAGES, **asked, stream=stream)
    assert message.status_code == 400, message.text
    assert message.json()["type"] == "error"
    assert "nothing" in message.json()["error"]["message"]


async def test_a_form_without_an_end_stops_at_the_limit_and_harms_nobody(assistant: Served):
    endless = said(assistant, SUM, structured_outputs={"grammar": 'root ::= "a" root'}, max_tokens=20)
    beside = said(assistant, SUM, structured_outputs={"choice": SUMS})
    ended, right = await asyncio.gather(endless, beside)
    assert ended["finish_reason"] == "length"
    assert right["message"]["content"] == "The sum is 5."


# -- by handle, under an adapter


@pytest.fixture
def server(demo_lora: Adapted) -> LLMServer:
    return demo_lora.server


BASE, PIRATE = BASE_ANSWERS["Hello!"], ANSWERS["pirate"]["Hello!"]
BOTH = re.escape(BASE) + "|" + re.escape(PIRATE)
FORMS_OF_BOTH: dict[str, tuple[dict[str, Any], Callable[[str], str]]] = {
    "regex": ({"structured_outputs": {"regex": BOTH}}, str),
    "choice": ({"structured_outputs": {"choice": [BASE, PIRATE]}}, str),
    "grammar": ({"structured_outputs": {"grammar": f'root ::= "{BASE}" | "{PIRATE}"'}}, str),
}


async def by_handle(server: LLMServer, **asked: Any) -> str:
    """What a chat by handle says."""
    (answer,) = [each async for each in await server.chat({"temperature": 0, "max_tokens": 200} | asked)]
    return answer.model_dump()["choices"][0]["message"]["content"]


@pytest.mark.parity("S22", "S21")
@pytest.mark.parametrize("kind", FORMS_OF_BOTH)
async def test_by_handle_each_adapter_says_its_own_of_what_fits(server: LLMServer, kind: str):
    asked, read = FORMS_OF_BOTH[kind]
    base = by_handle(server, model=MODEL_ID, messages=HELLO, **asked)
    pirate = by_handle(server, model=f"{MODEL_ID}:pirate", messages=HELLO, **asked)
    assert [read(text) for text in await asyncio.gather(base, pirate)] == [BASE, PIRATE]


async def test_by_handle_a_json_object_is_one(server: LLMServer):
    text = await by_handle(server, messages=COLORS, response_format={"type": "json_object"})
    assert set(json.loads(text)["colors"]) == RIGHT_COLORS


async def test_by_handle_generate_keeps_a_form(server: LLMServer):
    params = {"structured_outputs": {"choice": ["Bye!", "Hello!"]}, "temperature": 0, "max_tokens": 20}
    prompt = "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    deltas = [delta async for delta in await server.generate({"prompt": prompt}, params)]
    assert "".join(delta.text for delta in deltas) == "Hello!"
