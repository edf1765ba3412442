"""Requests have one form for every engine: null is unset, items are alike, what is not done is refused."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import BadRequest
from penstock.openai.requests import prepared, refuse_not_done

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ONE, TWO = {"type": "output_text", "text": "one"}, {"type": "output_text", "text": " two"}
TURN = {"type": "message", "role": "assistant"}
NO = {"type": "refusal", "refusal": " no"}
USER = [{"role": "user", "content": "x"}]


def item(given: Any) -> Any:
    """The item as engines read it."""
    return prepared(RESPONSES, {"input": [given]})["input"][0]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, "/v1/completions", "/v1/embeddings", MESSAGES, "/pooling"])
def test_null_is_unset_on_every_endpoint(path: str):
    assert prepared(path, {"model": "m", "tools": None, "n": None, "encoding_format": None}) == {"model": "m"}


def test_null_is_unset_within_messages_items_and_tools():
    turn = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "index": None}]}
    assert prepared(CHAT, {"messages": [turn]}) == {
        "messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]
    }
    assert item(TURN | {"id": None, "content": [ONE | {"annotations": None}]}) == TURN | {"content": [ONE]}


@pytest.mark.parametrize(
    "request_",
    [
        {
            "tools": [
                {"function": {"name": "f", "parameters": {"properties": {"a": {"enum": [None], "x": None}}}}}
            ]
        },
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": {"a": None}}}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {"a": None}}]}]},
        {"response_format": {"json_schema": {"schema": {"default": None}}}},
        {"metadata": {"a": None}, "chat_template_kwargs": {"a": None}, "vllm_xargs": {"a": None}},
    ],
)
def test_null_is_a_value_in_schemas_arguments_and_what_is_the_clients_own(request_: dict[str, Any]):
    assert prepared(CHAT, request_) == request_


def test_a_request_in_that_form_is_not_copied():
    for request in (
        {"model": "m", "prompt": "x"},
        {"input": [{"type": "message", **USER[0]}, TURN | {"content": [ONE]}]},
    ):
        assert prepared(RESPONSES, request, nulls=False) is request


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([ONE, TWO], "one two"),
        ([ONE, NO], "one no"),
        ([NO], " no"),
        ([], ""),
        ([{"type": "text", "text": "a"}], "a"),
    ],
)
def test_the_parts_of_an_assistants_turn_are_one(content: Any, text: str):
    whole = [{"type": "output_text", "text": text, "annotations": []}]
    assert item({"role": "assistant", "content": content}) == TURN | {"content": whole}


def test_the_parts_of_a_reasoning_item_are_one():
    parts = [{"type": "summary_text", "text": "a"}, {"type": "summary_text", "text": "b"}]
    assert item({"type": "reasoning", "summary": parts})["summary"] == [
        {"type": "summary_text", "text": "a\nb"}
    ]
    assert item({"type": "reasoning", "summary": []}) == {"type": "reasoning", "summary": []}


@pytest.mark.parametrize(
    "content", ["x", [5], [{"type": []}], [ONE, {"type": "input_image"}], [{"type": "text"}, ONE]]
)
def test_what_is_not_all_text_is_left_to_the_engine(content: Any):
    assert item({"role": "assistant", "content": content}) == TURN | {"content": content}


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (CHAT, "functions", [{"name": "f"}]),
        (CHAT, "function_call", {"name": "f"}),
        (CHAT, "web_search_options", {"search_context_size": "low"}),
        (CHAT, "modalities", ["text", "audio"]),
        (RESPONSES, "conversation", "conv_1"),
        (RESPONSES, "context_management", [{"type": "compaction"}]),
        (RESPONSES, "prompt", {"id": "pmpt_1"}),
        (RESPONSES, "tools", [{"type": "function", "name": "f"}, {"type": "web_search"}]),
        (RESPONSES, "tool_choice", {"type": "file_search"}),
        (RESPONSES + "/input_tokens", "tools", [{"type": "mcp", "server_label": "a"}]),
        (MESSAGES, "mcp_servers", [{"name": "a"}]),
        (CHAT, "messages", [{"role": "function", "name": "f", "content": "x"}]),
        (CHAT, "messages", [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]),
    ],
)
def test_what_is_not_done_is_refused_by_its_name(path: str, field: str, value: Any):
    with pytest.raises(BadRequest) as refused:
        refuse_not_done(path, {"model": "m", field: value})
    assert refused.value.facts["param"] == field
    assert f"`{field}`" in str(refused.value)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            CHAT,
            {
                "functions": [],
                "modalities": ["text"],
                "function_call": "none",
                "messages": USER,
                "store": True,
            },
        ),
        (
            CHAT,
            {
                "messages": [{"role": "assistant", "function_call": None}, 5],
                "metadata": {},
                "verbosity": "low",
            },
        ),
        (RESPONSES, {"tools": [{"type": "custom", "name": "a"}, {"type": 5}, 5], "tool_choice": "auto"}),
        (RESPONSES, {"tool_choice": {"type": "function", "name": "f"}, "include": [], "max_tool_calls": 3}),
        (MESSAGES, {"context_management": {"edits": []}, "functions": 5}),
    ],
)
def test_hints_and_what_asks_for_nothing_pass(path: str, fields: dict[str, Any]):
    refuse_not_done(path, fields)


def test_an_engine_that_runs_tools_is_sent_them():
    refuse_not_done(RESPONSES, {"tools": [{"type": "code_interpreter"}]}, hosted_tools=True)
