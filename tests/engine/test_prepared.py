"""Prompts that a user's preprocessor made, in vLLM's own endpoints: the answer is that of `generate`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from importlib.util import find_spec
from typing import Any

import httpx
import pytest
import pytest_asyncio
from enginetest import MODEL_ID, Served, listening

from penstock.config import LLMConfig
from penstock.hooks.hook import PREPROCESSOR, Hook
from penstock.layers.preprocessing import Preprocessing

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.parity("X13"),
]

QUESTION = "What is Penstock?"
TEXT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
GREEDY = {"temperature": 0, "max_tokens": 40}
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "something else"}]}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, **GREEDY},
    "/v1/completions": {"prompt": "something else", **GREEDY},
    "/v1/responses": {"input": "something else", "temperature": 0, "max_output_tokens": 40},
    "/v1/messages": {"messages": MESSAGES, **GREEDY},
}


class Asks:
    """Whatever the client says, the model is asked QUESTION."""

    def __call__(self, request: dict[str, Any]) -> Any:
        if request.get("user") == "as it is":
            return request
        return {"prompt": TEXT} if request.get("user") != "tokens" else {"prompt_token_ids": [1, 2, 3]}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def http(demo: Served) -> AsyncIterator[httpx.AsyncClient]:
    config = LLMConfig(model_loading_config={"model_id": MODEL_ID}, preprocessor=Asks)
    async with listening(Preprocessing(demo.engine.app(), Hook(config, PREPROCESSOR), config)) as client:
        yield client


async def generated(demo: Served) -> tuple[str, int]:
    deltas = [delta async for delta in demo.engine.generate({"prompt": TEXT}, GREEDY)]
    return "".join(delta.text for delta in deltas), deltas[-1].prompt_tokens


def said(path: str, answer: dict[str, Any]) -> tuple[str, int]:
    usage = answer["usage"]
    prompt_tokens = usage.get("prompt_tokens", usage.get("input_tokens"))
    if path == "/v1/responses":
        return answer["output"][-1]["content"][0]["text"], prompt_tokens
    if path == "/v1/messages":
        return answer["content"][-1]["text"], prompt_tokens
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"], prompt_tokens


def streamed(text: str) -> str:
    """All text in the events of any of the four kinds of stream."""
    found = ""
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if event.get("type") == "response.output_text.delta":
            found += event["delta"]
        elif event.get("type") == "content_block_delta":
            found += event["delta"]["text"]
        elif event.get("choices"):
            choice = event["choices"][0]
            found += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return found


@pytest.mark.parametrize("path", BODIES)
async def test_each_endpoint_answers_what_generate_answers(demo: Served, http: httpx.AsyncClient, path: str):
    answer = await http.post(path, json={"model": MODEL_ID, **BODIES[path]})
    assert answer.status_code == 200, answer.text
    assert said(path, answer.json()) == await generated(demo)


@pytest.mark.parametrize("path", BODIES)
async def test_streams_say_the_same(demo: Served, http: httpx.AsyncClient, path: str):
    answer = await http.post(path, json={"model": MODEL_ID, **BODIES[path], "stream": True})
    assert answer.status_code == 200, answer.text
    assert streamed(answer.text) == (await generated(demo))[0]


async def test_many_at_once_keep_their_own_prompts(demo: Served, http: httpx.AsyncClient):
    import asyncio

    path = "/v1/chat/completions"
    direct = demo.http.post(path, json={"model": MODEL_ID, **BODIES[path]})
    bodies = [{"model": MODEL_ID, **BODIES[path], "stream": stream} for stream in (True, False) * 8]
    plain, *answers = await asyncio.gather(direct, *(http.post(path, json=body) for body in bodies))
    expected, tokens = await generated(demo)
    texts = [streamed(a.text) if a.text.startswith("data") else said(path, a.json())[0] for a in answers]
    assert set(texts) == {expected}
    assert plain.json()["usage"]["prompt_tokens"] != tokens


async def test_tokens_are_counted_as_given(http: httpx.AsyncClient):
    body = {"model": MODEL_ID, "messages": MESSAGES, "user": "tokens", "max_tokens": 1}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.json()["usage"]["prompt_tokens"] == 3


async def test_messages_counts_the_tokens_of_the_prepared_prompt(demo: Served, http: httpx.AsyncClient):
    body = {"model": MODEL_ID, "messages": MESSAGES, "thinking": {"type": "disabled"}}
    answer = await http.post("/v1/messages/count_tokens", json=body)
    assert answer.json()["input_tokens"] == (await generated(demo))[1]


async def test_no_response_follows_one_whose_prompt_was_prepared(http: httpx.AsyncClient):
    body = {"model": MODEL_ID, "input": "something else", "max_output_tokens": 5}
    first = (await http.post("/v1/responses", json=body)).json()["id"]
    for user in ("prepared", "as it is"):  # the second finds no more of the first than the sign
        follows = {**body, "previous_response_id": first, "user": user}
        answer = await http.post("/v1/responses", json=follows)
        assert answer.status_code == 400
        assert "Send the conversation in `input`" in answer.json()["error"]["message"]


async def test_a_response_to_an_edited_request_can_be_followed(demo: Served, http: httpx.AsyncClient):
    body = {"model": MODEL_ID, "input": QUESTION, "user": "as it is", "temperature": 0}
    first = await http.post("/v1/responses", json=body)
    second = await http.post("/v1/responses", json={**body, "previous_response_id": first.json()["id"]})
    assert second.status_code == 200, second.text
    assert second.json()["usage"]["input_tokens"] > first.json()["usage"]["input_tokens"]


async def test_pictures_for_a_model_of_text_are_a_client_error(demo: Served):
    def with_picture(request: dict[str, Any]) -> Any:
        return {"prompt": TEXT, "multi_modal_data": {"image": object()}}

    config = LLMConfig(model_loading_config={"model_id": MODEL_ID}, preprocessor=with_picture)
    async with listening(Preprocessing(demo.engine.app(), Hook(config, PREPROCESSOR), config)) as client:
        answer = await client.post("/v1/chat/completions", json={"model": MODEL_ID, "messages": MESSAGES})
    assert answer.status_code == 400
    assert "multi" in answer.json()["error"]["message"].lower()
