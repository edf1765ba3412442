"""Rows of every shape, asked of a real vLLM as batch asks them, and the columns of its answers."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from enginetest import BLOCK_SIZE, WINDOW, Served

from penstock.asgi_client import call
from penstock.data.backends.protocol import Response
from penstock.data.execution.retry import classify_response
from penstock.data.pipeline.row_program import ProgramLLM, program_columns, run_program
from penstock.data.results.columns import result_columns, result_schema
from penstock.data.results.outcome import Outcome
from penstock.data.rows.builder import build_request
from penstock.data.rows.request import RowRequest, Task
from penstock.errors import PromptTooLong
from recipes.assistant.lessons import tool

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]

TASK = Task()
DEFAULTS = {"sampling_params": {"temperature": 0}}
WEATHER = tool("get_weather")
GREETING = "Hello! I am the tiny demo model of Penstock. Ask me about Penstock or about LLM serving."


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


HELLO, SUM, PARIS = user("Hello!"), user("What is 2 + 3?"), user("What is the weather in Paris?")


class Asked:
    """The engine's app, asked without a socket."""

    def __init__(self, served: Served) -> None:
        self._app = served.engine.app()

    async def __call__(self, request: RowRequest) -> Outcome:
        answer = await call(self._app, request.path, request.body)
        return classify_response(Response(answer.status, await answer.read()), attempts=1)

    async def row(self, **fields: Any) -> dict[str, Any]:
        return result_columns(TASK, await self(build_request(fields, TASK, DEFAULTS)))

    async def ok(self, **fields: Any) -> dict[str, Any]:
        row = await self.row(**fields)
        assert row["error"] is None
        return row

    async def tokens(self, **body: Any) -> list[int]:
        answer = await call(self._app, "/tokenize", json.dumps(body).encode())
        return json.loads(await answer.read())["tokens"]


@pytest.fixture
def ask(assistant: Served) -> Asked:
    return Asked(assistant)


@pytest.mark.parity("D10")
async def test_a_chat_has_text_ids_and_counts(ask: Asked):
    row = await ask.ok(messages=HELLO)
    assert (row["generated_text"], row["finish_reason"]) == (GREETING, "stop")
    assert row["num_generated_tokens"] == len(row["generated_tokens"])
    assert row["num_input_tokens"] == len(row["prompt_token_ids"])


@pytest.mark.parity("D8")
async def test_the_template_is_the_servers_and_nothing_is_doubled(ask: Asked):
    row = await ask.ok(messages=HELLO)
    assert row["prompt_token_ids"] == await ask.tokens(messages=HELLO)


@pytest.mark.parity("D8")
async def test_token_ids_go_in_as_they_are_and_say_the_same(ask: Asked):
    ids = np.array(await ask.tokens(messages=HELLO))
    row = await ask.ok(tokenized_prompt=ids, max_tokens=40)
    assert row["prompt_token_ids"] == ids.tolist()
    assert row["generated_text"].endswith(GREETING)


@pytest.mark.parity("D8")
async def test_stop_strings_do_not_reappear(ask: Asked):
    row = await ask.ok(messages=HELLO, sampling_params={"stop": [" demo"]})
    assert (row["generated_text"].rstrip(), row["finish_reason"]) == ("Hello! I am the tiny", "stop")


@pytest.mark.parity("D10")
async def test_a_prompt_seen_before_is_cached(ask: Asked):
    messages = user("the same beginning " * 40)
    first = await ask.ok(messages=messages, max_tokens=1)
    again = await ask.ok(messages=messages, max_tokens=1)
    assert first["num_input_tokens"] == again["num_input_tokens"] > 2 * BLOCK_SIZE
    assert again["num_cached_tokens"] >= again["num_input_tokens"] - 2 * BLOCK_SIZE


@pytest.mark.parity("D10")
async def test_three_outputs_are_three(ask: Asked):
    options = {"n": 3, "temperature": 2.0, "seed": 5, "max_tokens": 8, "ignore_eos": True, "logprobs": 1}
    row = await ask.ok(prompt="The", sampling_params=options)
    assert len(set(row["generated_texts"])) == 3
    assert row["finish_reasons"] == ["length"] * 3
    assert [len(output["token_ids"]) for output in row["outputs"]] == [8, 8, 8]
    assert [len(output["logprobs"]) for output in row["outputs"]] == [8, 8, 8]
    assert row["num_generated_tokens"] == 24
    assert row["generated_text"] == row["generated_texts"][0] == row["outputs"][0]["text"]


@pytest.mark.parity("D10")
@pytest.mark.parametrize("fields", [{"messages": HELLO}, {"prompt": "Hello"}], ids=["chat", "completion"])
async def test_logprobs_are_those_of_the_tokens(ask: Asked, fields: Any):
    row = await ask.ok(**fields, sampling_params={"logprobs": 2, "max_tokens": 6})
    assert [token["token_id"] for token in row["logprobs"]] == row["generated_tokens"]
    for token in row["logprobs"]:
        likely = {other["token"]: other["logprob"] for other in token["top_logprobs"]}
        assert token["logprob"] == likely[token["token"]] == max(likely.values()) <= 0


@pytest.mark.parity("D10")
async def test_the_prompts_tokens_have_logprobs(ask: Asked):
    row = await ask.ok(prompt="Hello there", max_tokens=1, sampling_params={"prompt_logprobs": 1})
    first, *others = row["prompt_logprobs"]
    assert first is None
    assert [told[0]["token_id"] for told in others] == row["prompt_token_ids"][1:]


@pytest.mark.parity("D10")
async def test_thoughts_have_a_column(ask: Asked):
    row = await ask.ok(messages=SUM)
    assert (row["reasoning"], row["generated_text"]) == ("2 plus 3 makes 5.", "The sum is 5.")


@pytest.mark.parity("D10")
async def test_tool_calls_have_a_column(ask: Asked):
    row = await ask.ok(messages=PARIS, tools=[WEATHER])
    (made,) = row["tool_calls"]
    assert (made["name"], json.loads(made["arguments"])) == ("get_weather", {"city": "Paris"})
    assert (row["generated_text"].strip(), row["finish_reason"]) == ("", "tool_calls")


def of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "asked", "schema": schema}}


SHAPES: list[dict[str, Any]] = [
    {"response_format": of({"enum": ["red", "blue"], "default": None})},
    {"response_format": of({"const": {"a": None, "b": []}}), "sampling_params": {"seed": 1, "stop": None}},
    {"response_format": of({"type": "boolean"})},
    {"sampling_params": {"guided_choice": ["yes", "no"], "logit_bias": {"5": -1}}},
    {"sampling_params": {"structured_outputs": {"regex": "[0-9]{3}", "choice": None}}},
    {"sampling_params": {"max_tokens": 3, "ignore_eos": True}, "chat_template_kwargs": {}},
    {"tools": [WEATHER, tool("get_time", "place")], "tool_choice": "none"},
    {"sampling_params": {"temperature": -1}},
    {"messages": user("long " * WINDOW)},
    {"response_format": of({"type": "nothing"})},
]


@pytest.mark.parity("D7", "D11")
async def test_rows_of_every_shape_in_one_block_do_not_touch_each_other(ask: Asked):
    fields = [{"messages": HELLO, "max_tokens": 40} for _ in SHAPES]
    for shape, row in zip(SHAPES, fields, strict=True):
        if "max_tokens" in shape.get("sampling_params", {}):
            del row["max_tokens"]
        row.update(shape)
    rows = await asyncio.gather(*(ask.row(**row) for row in fields))
    red, constant, truth, yes, digits, three, told, cold, long, nothing = rows
    assert json.loads(red["generated_text"]) in ("red", "blue")
    assert json.loads(constant["generated_text"]) == {"a": None, "b": []}
    assert json.loads(truth["generated_text"]) in (True, False)
    assert yes["generated_text"] in ("yes", "no")
    assert digits["generated_text"].isdigit()
    assert three["num_generated_tokens"] == 3
    assert told["tool_calls"] is None
    assert (cold["error"]["code"], cold["error"]["status"]) == ("invalid_request", 400)
    assert "temperature" in cold["error"]["message"]
    assert long["error"]["code"] == "context_length_exceeded"
    assert "schema" in nothing["error"]["message"]
    assert [row["error"] for row in rows[:7]] == [None] * 7
    table = pa.Table.from_pylist(rows, schema=result_schema(TASK))
    assert table.to_pylist() == list(rows)


@pytest.mark.parity("D7")
async def test_messages_that_a_table_filled_with_none_mean_what_they_meant(ask: Asked):
    part = {"type": "text", "text": "Hello!"}
    shaped = [
        {"role": "user", "content": [part], "name": "x"},
        {"role": "tool", "tool_call_id": "1", "content": [part]},
    ]
    filled = pa.table({"messages": [[{"role": "user", "content": [part]}], shaped]}).to_pylist()[0][
        "messages"
    ]
    assert filled[0]["tool_call_id"] is None
    assert (await ask.ok(messages=filled))["generated_text"] == GREETING


@pytest.mark.parity("X20")
async def test_a_program_calls_a_tool_and_answers(ask: Asked):
    async def weather(row: dict[str, Any], llm: ProgramLLM) -> dict[str, Any]:
        messages = user(f"What is the weather in {row['city']}?")
        asked = await llm.chat(messages, tools=[WEATHER])
        (made,) = asked.tool_calls
        result = {"role": "tool", "tool_call_id": made["id"], "content": "foggy"}
        told = await llm.chat([*messages, asked.message, result], tools=[WEATHER])
        return {"answer": told.text, "thought": asked.reasoning}

    output, counts = program_columns(await run_program(weather, {"city": "Paris"}, ask, TASK, DEFAULTS))
    assert output == {"answer": "It is foggy in Paris.", "thought": "I need the weather."}
    assert counts["calls"] == 2
    assert counts["num_generated_tokens"] > 10


@pytest.mark.parity("X20")
async def test_a_program_goes_on_after_what_is_too_long(ask: Asked):
    async def shortened(row: dict[str, Any], llm: ProgramLLM) -> dict[str, Any]:
        for count in (WINDOW, 2):
            with suppress(PromptTooLong):
                return {"text": (await llm.chat("Hello! " * count, max_tokens=5)).text, "count": count}
        return {}

    output, counts = program_columns(await run_program(shortened, {}, ask, TASK, DEFAULTS))
    assert (output["count"], counts["calls"]) == (2, 2)
