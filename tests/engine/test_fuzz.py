"""Whatever a client sends is answered or refused, and the engine goes on for everybody else.

Right requests of each endpoint, in which one or two values are odd: of another type, out of range, huge,
nested, or for a field that the endpoint has and the request left out. `make fuzz` runs many more of them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from copy import deepcopy
from typing import Any

import httpx
import pytest
import pytest_asyncio
from enginetest import MODEL_ID, Served, listening
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.http.drawn import RIGHT
from vllm import SamplingParams
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest, ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)

from penstock.layers.generation import Generation

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("under_test", ["sim", "vllm"], indirect=True),
    pytest.mark.parity("X9"),
]

Json = Any

MODELS: dict[str, tuple[type, ...]] = {
    "/v1/chat/completions": (ChatCompletionRequest,),
    "/v1/chat/completions/batch": (BatchChatCompletionRequest,),
    "/v1/completions": (CompletionRequest,),
    "/v1/generate": (),
    "/v1/responses": (ResponsesRequest,),
    "/v1/messages": (AnthropicMessagesRequest,),
    "/v1/messages/count_tokens": (AnthropicCountTokensRequest,),
    "/tokenize": (TokenizeChatRequest, TokenizeCompletionRequest),
    "/detokenize": (DetokenizeRequest,),
}

REQUESTS: dict[str, list[Json]] = {
    path: [
        right | {name: 4 for name in ("max_tokens", "max_output_tokens") if name in right} for right in rights
    ]
    for path, rights in RIGHT.items()
    if path in MODELS
}
REQUESTS["/v1/generate"] = [
    {"prompt": "Hello", "sampling_params": {"max_tokens": 4, "n": 1, "top_k": 3}},
    {"prompt_token_ids": [1, 2], "sampling_params": {"max_tokens": 4, "stop": ["x"]}, "stream": True},
]

ODD = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400),
    *(0.5, -0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "\0", "\ud800", "🙂", "1", "auto", "required", "x" * 10_000),
    *([], [None], [True], [0], [-1], [2**64], ["x"], [[]], [{}], ["x"] * 1000),
    *({}, {"x": None}, {"type": "x"}, {"type": "object"}, {"type": "json_object"}, {"$ref": "#"}),
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}},
    {"type": "structural_tag", "structures": [], "triggers": []},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,x"}},
    {"json": {"type": "string", "pattern": "("}},
    {"regex": "("},
    {"grammar": "root ::="},
    {"choice": []},
    json.loads("[" * 200 + "]" * 200),
]


def places(value: Json, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values inside of `value` are: keys and indices, from the top."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in pairs:
        yield (*above, key)
        yield from places(below, (*above, key))


def fields(path: str) -> list[tuple[Any, ...]]:
    """The fields that `path` has in vLLM."""
    if path == "/v1/generate":
        return [("sampling_params", name) for name in SamplingParams.__struct_fields__ if name[0] != "_"]
    return [(name,) for model in MODELS[path] for name in model.model_fields if name != "model"]


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, Json]:
    path = draw(st.sampled_from(list(REQUESTS)))
    body = deepcopy(draw(st.sampled_from(REQUESTS[path]))) | {"model": MODEL_ID}
    for _ in range(draw(st.sampled_from([1, 1, 2]))):
        *above, key = draw(st.sampled_from([*places(body), *fields(path)]))
        inner, odd = body, deepcopy(draw(st.sampled_from(ODD)))
        try:
            for step in above:
                inner = inner.setdefault(step, {}) if isinstance(inner, dict) else inner[step]
            inner[key] = odd
        except TypeError:  # an odd value stands above
            pass
    return path, body


@pytest_asyncio.fixture(loop_scope="session")
async def http(under_test: Served) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the engine's app as replicas have it."""
    async with listening(Generation(under_test.engine.app(), under_test.engine)) as client:
        yield client


@settings(phases=[Phase.generate])  # an engine that a request broke shrinks nothing
@given(request=requests())
async def test_an_odd_request_is_answered_or_refused_and_others_go_on(http: httpx.AsyncClient, request):
    path, body = request
    answer = await http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert answer.json()["error"]["message"]
    async with asyncio.timeout(30):
        plain = {"model": MODEL_ID, "prompt": "Hello", "max_tokens": 1}
        assert (await http.post("/v1/completions", json=plain)).status_code == 200
