"""Streams that another engine has begun, on a real vLLM: whatever is asked and wherever it is cut, the same comes.

A stream is asked for once, and recorded; then the same request goes on from some of its groups of tokens.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import pytest_asyncio
from asking import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, user
from continuing import Stream, continued, stream, told
from enginetest import MODEL_ID, Served, serve, until, vllm_config
from seeing import RED_CIRCLE, shown
from tests.models import model

from penstock.layers.generation import Generation
from recipes.assistant.lessons import tool

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]

CUTS = 9
"""Of each kind of request, besides those before the last group and after it."""

LETTERS = {"enum": ["é", "b", "🙂", "日本"]}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": LETTERS, "maxItems": 5},
        "n": {"type": "integer"},
    },
    "required": ["name", "tags", "n"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "look"}}

SUM, PARIS, TWO = (
    {"messages": user(text)}
    for text in ("What is 2 + 3?", "What is the weather in Paris?", "What is the weather in Rome and Oslo?")
)
TEXT = {"prompt": "Penstock is", "ignore_eos": True, "max_tokens": 40}
GREEDY, HOT = {"temperature": 0}, {"temperature": 1.0}
USAGE = {"stream_options": {"include_usage": True}}
PENALTIES = {"frequency_penalty": 1.5, "presence_penalty": 1.0}

Kind = tuple[str, dict[str, Any]]

PLAIN: dict[str, Kind] = {
    "greedy completion": (COMPLETIONS, TEXT | GREEDY | USAGE),
    "greedy chat": (CHAT, SUM | GREEDY | USAGE),
    "seeded": (COMPLETIONS, TEXT | HOT | {"seed": 7}),
    "seeded, top-p and top-k": (CHAT, SUM | {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 11}),
    "penalties": (COMPLETIONS, TEXT | GREEDY | PENALTIES | {"repetition_penalty": 1.2}),
    "penalties, seeded": (COMPLETIONS, TEXT | HOT | PENALTIES | {"seed": 3}),
    "two stop strings": (COMPLETIONS, TEXT | HOT | {"seed": 5, "min_tokens": 20, "stop": ["th", "e s"]}),
    "held back for a stop string": (COMPLETIONS, TEXT | GREEDY | {"stop": ["en d", "e e", "s a"]}),
    "stop string that is sent": (
        CHAT,
        SUM | HOT | {"seed": 8, "stop": ["."], "include_stop_str_in_output": True, "ignore_eos": True},
    ),
    "stop token": (COMPLETIONS, TEXT | HOT | {"seed": 6, "stop_token_ids": list(range(300, 340))}),
    "bad words": (COMPLETIONS, TEXT | GREEDY | {"bad_words": ["the", " engine"]}),
    "logit bias": (COMPLETIONS, TEXT | HOT | {"seed": 4, "logit_bias": {"300": 5, "301": -100}}),
    "parts of characters": (COMPLETIONS, TEXT | {"temperature": 2.0, "seed": 21}),
    "schema": (CHAT, SUM | HOT | {"seed": 9, "max_tokens": 120, "response_format": FORM}),
    "regex": (
        COMPLETIONS,
        {"prompt": "a", "max_tokens": 60, "seed": 2}
        | HOT
        | {"structured_outputs": {"regex": "([a-z]{3}-[0-9]{2} ){4}end"}},
    ),
    "two choices": (CHAT, SUM | HOT | USAGE | {"n": 2, "seed": 12, "max_tokens": 30}),
    "two choices, one ends early": (
        COMPLETIONS,
        TEXT | HOT | {"n": 2, "seed": 14, "stop": ["er"], "stop_token_ids": list(range(300, 360))},
    ),
    "echo": (COMPLETIONS, TEXT | GREEDY | {"echo": True}),
    "token ids": (CHAT, SUM | GREEDY | {"return_token_ids": True}),
}
"""Requests to a model whose streams take the fast path, and some that cannot."""

PARSED: dict[str, Kind] = {
    "reasoning": (CHAT, SUM | GREEDY | USAGE),
    "stop string in the answer": (CHAT, SUM | GREEDY | {"stop": ["is 5", "zzz"]}),
    "tool": (CHAT, PARIS | GREEDY | {"tools": [tool("get_weather"), tool("get_time")]}),
    "two tools": (CHAT, TWO | GREEDY | USAGE | {"tools": [tool("get_weather")]}),
    "required tool": (
        CHAT,
        SUM | HOT | {"seed": 13, "max_tokens": 160, "tools": [LOOK], "tool_choice": "required"},
    ),
    "named tool": (CHAT, SUM | GREEDY | {"max_tokens": 160, "tools": [LOOK], "tool_choice": NAMED}),
    "schema after reasoning": (CHAT, SUM | HOT | {"seed": 9, "max_tokens": 160, "response_format": FORM}),
    "two choices": (CHAT, SUM | HOT | {"n": 2, "seed": 12, "max_tokens": 40}),
    "response": (RESPONSES, {"input": "What is 2 + 3?"} | GREEDY),
    "response with a tool": (
        RESPONSES,
        {
            "input": "What is the weather in Paris?",
            "tools": [{"type": "function"} | tool("get_weather")["function"]],
        }
        | GREEDY,
    ),
    "message": (MESSAGES, SUM | GREEDY | {"max_tokens": 40}),
    "message with a tool": (
        MESSAGES,
        PARIS
        | GREEDY
        | {
            "max_tokens": 60,
            "tools": [
                {"name": "get_weather", "input_schema": tool("get_weather")["function"]["parameters"]},
            ],
        },
    ),
    "generate": (
        GENERATE,
        {"prompt": "Penstock is", "sampling_params": HOT | {"seed": 5, "max_tokens": 30, "ignore_eos": True}},
    ),
}
"""Requests to a model that thinks and calls tools."""


async def differences(app: Any, kind: Kind, cuts: int, draw: random.Random, **how: Any) -> list[str]:
    """How answers that go on from random groups differ from the whole one."""
    path, body = kind
    whole = await stream(app, path, body, slow=how.get("slow"), short=how.get("short", True))
    assert whole.groups, "it was not recorded"
    last = len(whole.groups)
    places = {last, last - 1} | set(draw.sample(range(1, last + 1), min(cuts, last)))
    return [
        f"after {groups} of {last} groups: {fault[:700]}"
        for groups in sorted(places - {0})
        for fault in await continued(app, path, body, whole, groups, **how)
    ]


@pytest.mark.parametrize("name", PLAIN)
async def test_a_plain_stream_goes_on_as_it_began(demo: Served, name: str):
    assert await differences(demo.engine.app(), PLAIN[name], CUTS, random.Random(1)) == []


@pytest.mark.parametrize("name", PARSED)
async def test_a_parsed_stream_goes_on_as_it_began(assistant: Served, name: str):
    app = Generation(assistant.engine.app(), assistant.engine)
    assert await differences(app, PARSED[name], CUTS, random.Random(2)) == []
