"""What a request that forces a tool call becomes before a child that is vLLM's server. Nothing is started."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from penstock.engines.process import forced_tools

pytestmark = pytest.mark.parity("S11")

SCHEMA = {
    "type": "object",
    "properties": {"days": {"type": "array", "items": {"$ref": "#/$defs/day"}}},
    "$defs": {"day": {"anyOf": [{"enum": ["today"]}, {"type": "null"}]}},
}
PATTERN = {"type": "object", "properties": {"days": {"type": "array", "uniqueItems": True}}}


def sent(**body: Any) -> dict[str, Any]:
    before = copy.deepcopy(body)
    found = forced_tools.strict(body)
    assert body == before
    return found


@pytest.mark.parametrize(
    ("choice", "tool"),
    [
        ("required", {"type": "function", "function": {"name": "a", "parameters": SCHEMA}}),
        (
            {"type": "function", "function": {"name": "a"}},
            {"type": "function", "function": {"name": "a", "parameters": SCHEMA}},
        ),
        ({"type": "function", "name": "a"}, {"type": "function", "name": "a", "parameters": SCHEMA}),
        ({"type": "any"}, {"name": "a", "input_schema": SCHEMA}),
    ],
    ids=["chat", "chat, named", "responses", "messages"],
)
def test_a_tool_of_a_forced_call_is_strict(choice: Any, tool: dict[str, Any]):
    (found,) = sent(tools=[tool], tool_choice=choice)["tools"]
    function = found.pop("function", found)
    assert function.pop("strict") is True
    assert function == tool.get("function", tool)


def test_a_function_without_parameters_takes_none():
    (found,) = sent(tools=[{"type": "function", "function": {"name": "a"}}], tool_choice="required")["tools"]
    assert found["function"]["parameters"] == {"type": "object", "properties": {}}
    assert found["function"]["strict"] is True


@pytest.mark.parametrize("function", [{"name": "a", "parameters": PATTERN}, {"name": "a", "strict": False}])
def test_what_vllm_may_refuse_and_what_the_client_says_stay(function: dict[str, Any]):
    (found,) = sent(tools=[{"type": "function", "function": function}], tool_choice="required")["tools"]
    assert found["function"].get("strict") == function.get("strict")


@pytest.mark.parametrize(
    "body",
    [
        {"tool_choice": "auto", "tools": [{"type": "function", "function": {"name": "a"}}]},
        {"tool_choice": {"type": "auto"}, "tools": [{"name": "a", "input_schema": {}}]},
        {"messages": []},
    ],
)
def test_other_requests_are_not_copied(body: dict[str, Any]):
    assert forced_tools.strict(body) is body


@pytest.mark.parametrize("tools", [7, [7], [{"type": "function", "function": 7}], [{"type": "web_search"}]])
def test_what_is_no_function_is_the_childs_to_report(tools: Any):
    assert sent(tools=tools, tool_choice="required")["tools"] == tools
